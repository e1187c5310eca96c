"""Options read off logits processor objects, which stock made or the caller gave.

A caller may give transformers' processors as objects, besides or in place of options of the config. The list that
stock's loop would apply decides: if stock would make these processors of *some* config, in an order that gives the same
scores, the engine carries that config out.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as processors
from transformers.generation.logits_process import SequenceBiasLogitsProcessor, TemperatureLogitsWarper

from hf_paged.errors import Reason
from hf_paged.integration.recognise.criteria import GIVE_OPTION, NO_OPTION_SAYS, Stops
from hf_paged.options.table import MASK, OPTIONS, SCALE, Option, patched_code

_READ: dict[type, Option] = {
    option.made: option for option in OPTIONS.values() if option.made is not None and option.of_processor is not None
}
_RANK = {kind: rank for rank, kind in enumerate(_READ)}  # the table has stock's order
_OFF = {option.name: option.off for option in _READ.values()}
_UNREAD = ("stop_strings", "max_time", *(option.name for option in OPTIONS.values() if option.shapes_result))


def is_warper(processor: Any) -> bool:
    """Return whether stock applies a processor of exactly this class behind processors of the caller."""
    return _RANK.get(type(processor), -1) >= _RANK[TemperatureLogitsWarper]


def is_mask(processor: Any) -> bool:
    """Return whether the processor only writes -inf, so that it commutes with others that do."""
    return _order(processor) == MASK


def in_stocks_order(given: Iterable[Any]) -> list[Any] | None:
    """Return the processors in stock's order; None if that order may give other scores."""
    given = list(given)
    for first, second in itertools.combinations(given, 2):
        if _RANK[type(first)] > _RANK[type(second)] and not _commute(first, second):
            return None
    return sorted(given, key=lambda processor: _RANK[type(processor)])


def _commute(first: Any, second: Any) -> bool:
    for mask, other in ((first, second), (second, first)):
        if is_mask(mask):
            return _order(other) in (MASK, SCALE) or (
                type(other) is SequenceBiasLogitsProcessor and all(map(math.isfinite, other.sequence_bias.values()))
            )
    return False


def _order(processor: Any) -> str | None:
    option = _READ.get(type(processor))
    return None if option is None else option.order


def settled_config(model: Any, config: GenerationConfig, given: Any, stops: Stops, input_ids: torch.Tensor,
                   model_kwargs: dict[str, Any], num_logits: int) -> GenerationConfig | Reason:
    """Return a config with native options only, of which stock would make the processors `given`; or why there is none.
    """
    for processor in given:
        if type(processor).__module__ != processors.__name__ or type(processor) not in _READ:
            return Reason(f"logits processor {type(processor).__name__} is not carried out by the paged engine",
                          remedy=GIVE_OPTION)
    if (reason := patched_code([type(given), *map(type, given)])) is not None:
        return reason
    settled, width, eos = copy.copy(config), input_ids.shape[1], stops.eos
    fields = vars(settled)
    fields |= _OFF
    for processor in given:
        option = _READ[type(processor)]
        assert option.of_processor is not None
        fields[option.name] = option.of_processor(processor, width)
    fields |= dict.fromkeys(_UNREAD)
    fields |= {"eos_token_id": list(eos) or None, "max_length": stops.max_length,
               "max_new_tokens": stops.max_length - width}
    fields["_eos_token_tensor"] = torch.tensor(eos, device="cpu", dtype=torch.int64) if eos else None
    if not given:
        return settled
    expected = model._get_logits_processor(
        generation_config=settled, input_ids_seq_length=width, logits_processor=LogitsProcessorList(),
        device=input_ids.device, model_kwargs=model_kwargs,
    )
    ordered = in_stocks_order(given)
    if ordered is None or [type(p) for p in ordered] != [type(p) for p in expected]:
        found = ", ".join(type(p).__name__ for p in given)
        return Reason("the logits processors ({}) are not those that stock makes of a generation config", found,
                      remedy=NO_OPTION_SAYS)
    for processor, made in zip(ordered, expected, strict=True):
        if getattr(processor, "prepared_bias_variables", False):  # an earlier call made it prepare these attributes
            bias = processor.length_1_bias
            made._prepare_bias_variables(torch.zeros(1, num_logits, dtype=bias.dtype, device=bias.device))
        if not _means(vars(processor), vars(made)):
            return Reason(f"a {type(processor).__name__} of the caller's own", remedy=NO_OPTION_SAYS)
    return settled


def _means(given: dict[str, Any], made: dict[str, Any]) -> bool:
    """Return whether a processor with these attributes does the same as the one that stock made."""
    # No config sets these two: the code where stock makes the processor was patched, or the caller set them.
    if given.get("filter_value", -torch.inf) != -torch.inf or given.get("min_tokens_to_keep", 1) != 1:
        return False
    if given.get("prompt_ignore_length", ...) is None:  # the processor counts padding, which the engine supports
        made = made | {"prompt_ignore_length": None}
    return _same(given, made)


def _same(a: Any, b: Any) -> bool:
    """Return whether attributes of processors (numbers, tensors, lists or dicts of them) are equal."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a.to(b.device), b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b
