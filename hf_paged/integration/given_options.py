"""The options that logits processors carry out, read off the objects themselves: stock's own, or the caller's.

A caller may give transformers' processors as objects, besides or in place of those of the config. What counts is the
list that stock's loop would apply: if its processors are those that stock makes of *some* config, in an order that
makes no difference to stock's, that config says what the engine has to do.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as processors

from hf_paged.options.logits_options import GREEDY_TOO, SAMPLING_ONLY
from hf_paged.options.patched_options import MADE_FOR, MADE_FOR_SAMPLING
from hf_paged.options.settings import OF_THE_RESULT


def _plain(value: Any) -> Any:
    """Ids as a list."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


# By class: the options that make stock build such a processor, given the tokens in front of the first new one.
_READ: dict[type, Callable[[Any, int], dict[str, Any]]] = {
    processors.SequenceBiasLogitsProcessor: lambda p, _: {"sequence_bias": dict(p.sequence_bias)},
    processors.RepetitionPenaltyLogitsProcessor: lambda p, _: {"repetition_penalty": p.penalty},
    processors.NoRepeatNGramLogitsProcessor: lambda p, _: {"no_repeat_ngram_size": p.ngram_size},
    processors.NoBadWordsLogitsProcessor: lambda p, _: {"bad_words_ids": p.bad_word_ids},
    processors.MinLengthLogitsProcessor: lambda p, _: {"min_length": p.min_length},
    processors.MinNewTokensLengthLogitsProcessor: lambda p, _: {"min_new_tokens": p.min_new_tokens},
    processors.ForcedBOSTokenLogitsProcessor: lambda p, _: {"forced_bos_token_id": p.bos_token_id},
    processors.ForcedEOSTokenLogitsProcessor: lambda p, _: {"forced_eos_token_id": _plain(p.eos_token_id)},
    processors.InfNanRemoveLogitsProcessor: lambda p, _: {"remove_invalid_values": True},
    processors.ExponentialDecayLengthPenalty: lambda p, width: {
        "exponential_decay_length_penalty": (p.regulation_start - width, p.regulation_factor)
    },
    processors.SuppressTokensLogitsProcessor: lambda p, _: {"suppress_tokens": _plain(p.suppress_tokens)},
    processors.SuppressTokensAtBeginLogitsProcessor: lambda p, _: {
        "begin_suppress_tokens": _plain(p.begin_suppress_tokens)
    },
    processors.TemperatureLogitsWarper: lambda p, _: {"temperature": p.temperature},
    processors.TopKLogitsWarper: lambda p, _: {"top_k": p.top_k},
    processors.TopPLogitsWarper: lambda p, _: {"top_p": p.top_p},
    processors.MinPLogitsWarper: lambda p, _: {"min_p": p.min_p},
    processors.TypicalLogitsWarper: lambda p, _: {"typical_p": p.mass},
    processors.EpsilonLogitsWarper: lambda p, _: {"epsilon_cutoff": p.epsilon},
    processors.EtaLogitsWarper: lambda p, _: {"eta_cutoff": float(p.epsilon)},
    processors.LogitNormalization: lambda p, _: {"renormalize_logits": True},
}
# Every option of which stock makes a processor, switched off. Order: that in which stock applies them.
_OFF: dict[str, Any] = dict.fromkeys(
    (*GREEDY_TOO, *SAMPLING_ONLY, *(name for name, kind in (MADE_FOR | MADE_FOR_SAMPLING).items() if kind in _READ))
) | {"top_k": 0, "renormalize_logits": False, "remove_invalid_values": False}
_RANK = {kind: rank for rank, kind in enumerate(_READ)}
# They write -inf, whatever the score was, to tokens that do not depend on scores: in any order the same comes out.
_MASKS = frozenset((
    processors.NoRepeatNGramLogitsProcessor, processors.NoBadWordsLogitsProcessor, processors.MinLengthLogitsProcessor,
    processors.MinNewTokensLengthLogitsProcessor, processors.SuppressTokensLogitsProcessor,
    processors.SuppressTokensAtBeginLogitsProcessor,
))
# These leave -inf where it is, and look at each score alone.
_SCALES = frozenset((processors.RepetitionPenaltyLogitsProcessor, processors.TemperatureLogitsWarper))


def is_known(kind: type) -> bool:
    """Can the options of a processor of this very class be read off it?"""
    return kind in _READ


def is_warper(processor: Any) -> bool:
    """Does stock apply a processor of this very class behind those that its caller gives?"""
    return _RANK.get(type(processor), -1) >= _RANK[processors.TemperatureLogitsWarper]


def is_mask(processor: Any) -> bool:
    """May the processor change places with others that write -inf?"""
    return type(processor) in _MASKS


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
        fields |= _READ[type(processor)](processor, width)
    fields |= dict.fromkeys(("stop_strings", "max_time", *OF_THE_RESULT))
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
        if type(mask) in _MASKS:
            kind = type(other)
            return kind in _MASKS or kind in _SCALES or (
                kind is processors.SequenceBiasLogitsProcessor
                and all(map(math.isfinite, other.sequence_bias.values()))
            )
    return False
