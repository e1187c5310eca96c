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
from transformers import GenerationConfig
from transformers.generation.logits_process import SequenceBiasLogitsProcessor, TemperatureLogitsWarper

from hf_paged.options.table import MASK, OPTIONS, SCALE, Option

_READ: dict[type, Option] = {
    option.made: option for option in OPTIONS.values() if option.made is not None and option.of_processor is not None
}
_RANK = {kind: rank for rank, kind in enumerate(_READ)}  # the table has stock's order
_OFF = {option.name: option.off for option in _READ.values()}
_UNREAD = ("stop_strings", "max_time", *(option.name for option in OPTIONS.values() if option.shapes_result))


def is_known(kind: type) -> bool:
    """Return whether the option of a processor of exactly this class can be read off the object."""
    return kind in _READ


def is_warper(processor: Any) -> bool:
    """Return whether stock applies a processor of exactly this class behind processors of the caller."""
    return _RANK.get(type(processor), -1) >= _RANK[TemperatureLogitsWarper]


def is_mask(processor: Any) -> bool:
    """Return whether the processor only writes -inf, so that it commutes with others that do."""
    return _order(processor) == MASK


def config_of(config: GenerationConfig, given: Iterable[Any], width: int, eos: tuple[int, ...],
              max_length: int) -> GenerationConfig:
    """Return `config` with the options of the `given` processors (all `is_known`) in place of its own.

    Args:
        width: number of tokens of the padded prompts.
        eos: the tokens that end rows.
        max_length: the length at which all rows end, the padded prompt included.
    """
    read = copy.copy(config)
    fields = vars(read)
    fields |= _OFF
    for processor in given:
        option = _READ[type(processor)]
        assert option.of_processor is not None
        fields[option.name] = option.of_processor(processor, width)
    fields |= dict.fromkeys(_UNREAD)
    fields |= {"eos_token_id": list(eos) or None, "max_length": max_length, "max_new_tokens": max_length - width}
    fields["_eos_token_tensor"] = torch.tensor(eos, device="cpu", dtype=torch.int64) if eos else None
    return read


def min_new_tokens(config: GenerationConfig, width: int) -> int:
    """Return the larger of a config's two minimum lengths, in new tokens; stock applies both."""
    return max(config.min_new_tokens or 0, (config.min_length or 0) - width, 0)


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
