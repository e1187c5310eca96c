"""The options that logits processors carry out, read off the objects themselves: stock's own, or the caller's.

A caller may give transformers' processors as objects, besides or in place of those of the config. What counts is the
list that stock's loop would apply: if its processors are those that stock makes of *some* config, in an order that
makes no difference to stock's, that config says what the engine has to do.
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
    """Can the options of a processor of this very class be read off it?"""
    return kind in _READ


def is_warper(processor: Any) -> bool:
    """Does stock apply a processor of this very class behind those that its caller gives?"""
    return _RANK.get(type(processor), -1) >= _RANK[TemperatureLogitsWarper]


def is_mask(processor: Any) -> bool:
    """May the processor change places with others that write -inf?"""
    return _order(processor) == MASK


def config_of(config: GenerationConfig, given: Iterable[Any], width: int, eos: tuple[int, ...],
              max_length: int) -> GenerationConfig:
    """`config` with the options that `given` processors (all `is_known`) carry out in place of its own.

    Args:
        width: tokens of the padded prompts.
        eos: the tokens that end rows.
        max_length: with the prompt, where all rows end.
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
    """Of a config's two minimum lengths, which both count where a processor stands for each, the longer output."""
    return max(config.min_new_tokens or 0, (config.min_length or 0) - width, 0)


def in_stocks_order(given: Iterable[Any]) -> list[Any] | None:
    """The processors in the order of stock's own; None where that order could make other scores."""
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
