"""The settings that transformers' own processors and criteria carry out when they reach `_sample`."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import logits_process as processors
from transformers.generation import stopping_criteria as criteria

from hf_paged.errors import Reason
from hf_paged.integration.given_options import config_of, in_stocks_order, is_known
from hf_paged.options.patched_options import patched_code
from hf_paged.options.settings import token_id_tuple

NO_LENGTH = Reason("no MaxLengthCriteria bounds the output", remedy="Give `max_new_tokens` or `max_length`.")
_GIVE_OPTION = ("Processors and criteria of your own run in lockstep. If an option says the same (`stop_strings`, "
                "`bad_words_ids`, `sequence_bias`), give the option.")
_NO_OPTION_SAYS = ("Processors or criteria of transformers were given as objects that no option says: two of a kind, "
                   "in another order than stock's, or with values that no config sets. Give the options, or one object "
                   "of a kind.")


class CallEndedError(Exception):
    """An exception that ends a `generate` whose caller does not wait for it any more."""


class EndOfCall(criteria.StoppingCriteria):
    """A criterion that changes no result and ends the call by an exception, within a step, once an event is set.

    The paged engine checks the event between steps; in lockstep and in stock this is a criterion like any other.
    """

    def __init__(self, over: threading.Event) -> None:
        self._over = over

    def check(self) -> None:
        """Raise CallEndedError once the event is set."""
        if self._over.is_set():
            raise CallEndedError

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.check()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


class Stops(NamedTuple):
    """The conditions that end rows: tokens, a length (padded prompt included), stop strings, a `time.time`."""

    eos: tuple[int, ...]
    max_length: int
    strings: criteria.StopStringCriteria | None
    deadline: float | None

    @property
    def are_watched(self) -> bool:
        """Whether rows may end for a reason that the scheduler does not check."""
        return self.strings is not None or self.deadline is not None


def settled_config(model: Any, config: GenerationConfig, given: Any, stops: Stops, input_ids: torch.Tensor,
                   model_kwargs: dict[str, Any], num_logits: int) -> GenerationConfig | Reason:
    """Return a config with native options only, of which stock would make the processors `given`; or why there is none.
    """
    for processor in given:
        if type(processor).__module__ != processors.__name__ or not is_known(type(processor)):
            return Reason(f"logits processor {type(processor).__name__} is not carried out by the paged engine",
                          remedy=_GIVE_OPTION)
    if (reason := patched_code([type(given), *map(type, given)])) is not None:
        return reason
    settled = config_of(config, given, input_ids.shape[1], stops.eos, stops.max_length)
    if not given:
        return settled
    expected = model._get_logits_processor(
        generation_config=settled, input_ids_seq_length=input_ids.shape[1], logits_processor=LogitsProcessorList(),
        device=input_ids.device, model_kwargs=model_kwargs,
    )
    ordered = in_stocks_order(given)
    if ordered is None or [type(p) for p in ordered] != [type(p) for p in expected]:
        found = ", ".join(type(p).__name__ for p in given)
        return Reason("the logits processors ({}) are not those that stock makes of a generation config", found,
                      remedy=_NO_OPTION_SAYS)
    for processor, made in zip(ordered, expected, strict=True):
        if getattr(processor, "prepared_bias_variables", False):  # an earlier call made it prepare these attributes
            bias = processor.length_1_bias
            made._prepare_bias_variables(torch.zeros(1, num_logits, dtype=bias.dtype, device=bias.device))
        if not _means(vars(processor), vars(made)):
            return Reason(f"a {type(processor).__name__} of the caller's own", remedy=_NO_OPTION_SAYS)
    return settled


def _means(given: dict[str, Any], made: dict[str, Any]) -> bool:
    """Return whether a processor with these attributes does the same as the one that stock made."""
    # No config sets these two: the code where stock makes the processor was patched, or the caller set them.
    if given.get("filter_value", -torch.inf) != -torch.inf or given.get("min_tokens_to_keep", 1) != 1:
        return False
    if given.get("prompt_ignore_length", ...) is None:  # the processor counts padding, which the engine supports
        made = made | {"prompt_ignore_length": None}
    return _same(given, made)


def stops_of(given: Any) -> Stops | Reason:
    """Return the conditions under which the criteria end rows, or why the engine cannot carry them out."""
    given = [criterion for criterion in given if type(criterion) is not EndOfCall]
    by_kind: dict[type, list[Any]] = {kind: [] for kind in _CRITERIA}
    for criterion in given:
        if type(criterion) not in by_kind:
            return Reason(f"stopping criterion {type(criterion).__name__} is not carried out by the paged engine",
                          remedy=_GIVE_OPTION)
        by_kind[type(criterion)].append(criterion)
    if (reason := patched_code([criteria.StoppingCriteriaList, *map(type, given)])) is not None:
        return reason
    lengths, clocks, strings, eos = (by_kind[kind] for kind in _CRITERIA)
    if len(strings) > 1:
        return Reason("{} StopStringCriteria in one call", len(strings), remedy=_NO_OPTION_SAYS)
    if not lengths:
        return NO_LENGTH
    for criterion, value in [*((c, c.max_length) for c in lengths), *((c, c.max_time) for c in clocks),
                             *((c, c.initial_timestamp) for c in clocks)]:
        if not isinstance(value, int if criterion in lengths else (int, float)) or isinstance(value, bool):
            return Reason(f"a {type(criterion).__name__} of the caller's own", remedy=_NO_OPTION_SAYS)
    tokens = [token_id_tuple(criterion.eos_token_id) for criterion in eos]
    return Stops(
        tokens[0] if len(tokens) == 1 else tuple(dict.fromkeys(token for ids in tokens for token in ids)),
        min(criterion.max_length for criterion in lengths), strings[0] if strings else None,
        min((clock.initial_timestamp + clock.max_time for clock in clocks), default=None),
    )


_CRITERIA = (criteria.MaxLengthCriteria, criteria.MaxTimeCriteria, criteria.StopStringCriteria,
             criteria.EosTokenCriteria)


def _same(a: Any, b: Any) -> bool:
    """Return whether attributes of processors (numbers, tensors, lists or dicts of them) are equal."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a.to(b.device), b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return type(a) is type(b) and a == b
