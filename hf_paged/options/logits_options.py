"""The options of a `GenerationConfig` that edit the logits, checked by transformers' own processors, as `Edits`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import logits_process as stock

from hf_paged.sampling.edits import NEUTRAL, Edits

# Each with the test by which stock decides whether it makes a processor for the value.
GREEDY_TOO: dict[str, Callable[[Any], bool]] = {
    "sequence_bias": lambda value: value is not None,
    "repetition_penalty": lambda value: value is not None and value != 1.0,
    "no_repeat_ngram_size": lambda value: value is not None and value > 0,
    "bad_words_ids": lambda value: value is not None,
    "forced_bos_token_id": lambda value: value is not None,
    "forced_eos_token_id": lambda value: value is not None,
    "remove_invalid_values": lambda value: value is True,
    "exponential_decay_length_penalty": lambda value: value is not None,
    "suppress_tokens": lambda value: value is not None,
    "begin_suppress_tokens": lambda value: value is not None,
    "renormalize_logits": lambda value: value is True,
}
SAMPLING_ONLY: dict[str, Callable[[Any], bool]] = {
    "typical_p": lambda value: value is not None and value < 1.0,
    "epsilon_cutoff": lambda value: value is not None and 0.0 < value < 1.0,
    "eta_cutoff": lambda value: value is not None and 0.0 < value < 1.0,
}


def edits_from_config(config: GenerationConfig, eos: tuple[int, ...], vocab_size: int) -> Edits:
    """What `config` asks to be done to the logits of one request.

    Args:
        config: fully merged.
        eos: its EOS ids.
        vocab_size: ids must lie below it; as many as the logits of a token.

    Raises:
        ValueError, TypeError: naming the option, its value, and what transformers' processor says of it.
    """
    options = {**GREEDY_TOO, **SAMPLING_ONLY} if config.do_sample else GREEDY_TOO
    active = {name: value for name, is_active in options.items()
              if _is_active(name, value := getattr(config, name, None), is_active)}
    if not active:
        return NEUTRAL
    fields: dict[str, Any] = {}
    for name, value in active.items():
        try:
            fields |= _READERS[name](value, eos)
        except Exception as error:  # whatever a value of any form makes transformers raise
            raise ValueError(f"{name}={value!r:.200}: {error}") from error
    edits = Edits(**fields)
    for name, sequences in (("sequence_bias", [ids for ids, _ in edits.sequence_bias]),
                            ("bad_words_ids", edits.bad_words_ids)):
        if name in active and _holds_bool(active[name]):
            raise ValueError(f"{name}={active[name]!r:.200}: holds True or False, expected token ids")
        if not all(sequences):
            raise ValueError(f"{name}={active[name]!r:.200}: holds an empty sequence, expected token ids")
    for name, ids in (
        ("sequence_bias", _flat(edits.sequence_bias)),
        ("bad_words_ids", (token for sequence in edits.bad_words_ids for token in sequence)),
        ("forced_eos_token_id", edits.forced_eos_token_ids),
        ("forced_bos_token_id", () if edits.forced_bos_token_id is None else (edits.forced_bos_token_id,)),
    ):
        if (wrong := next((token for token in ids if not 0 <= token < vocab_size), None)) is not None:
            raise ValueError(f"{name}={active[name]!r:.200}: holds {wrong}, expected token ids in [0, {vocab_size})")
    if edits.decay_start is not None and not all(0 <= token < vocab_size for token in eos):
        raise ValueError(f"eos_token_id={list(eos)!r:.200}: expected token ids in [0, {vocab_size}) with "
                         "exponential_decay_length_penalty, which scores them")
    return edits


def _is_active(name: str, value: Any, is_active: Callable[[Any], bool]) -> bool:
    try:
        return is_active(value)
    except TypeError as error:  # of a comparison
        raise TypeError(f"{name}={value!r:.200}: expected None or a number, got {type(value).__name__}") from error


def decay_overflows(edits: Edits, max_new_tokens: int) -> bool:
    """Does stock's length penalty, a power in Python's floats, overflow before the last new token?"""
    if edits.decay_start is None:
        return False
    try:
        return not math.isfinite(edits.decay_factor ** max(0, max_new_tokens - edits.decay_start))
    except (OverflowError, ZeroDivisionError):
        return True


def _holds_bool(value: Any) -> bool:
    """Python takes them for 0 and 1, stock's indexing does not."""
    if isinstance(value, dict):
        value = [*value]
    return isinstance(value, bool) or (isinstance(value, (list, tuple)) and any(map(_holds_bool, value)))


def _flat(bias: tuple[tuple[tuple[int, ...], float], ...]) -> Iterable[int]:
    return (token for sequence, _ in bias for token in sequence)


def _ids(value: Any) -> tuple[int, ...]:
    """An id, or a list or tensor of ids."""
    ids = torch.as_tensor(value, dtype=None, device="cpu")  # the values' own dtype, which is looked at
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError("expected token ids")
    return tuple(ids.flatten().tolist())


def _sequence_bias(value: Any, eos: tuple[int, ...]) -> dict[str, Any]:
    found = stock.SequenceBiasLogitsProcessor(sequence_bias=value).sequence_bias
    return {"sequence_bias": tuple((tuple(map(int, ids)), _as_default(bias)) for ids, bias in found.items())}


def _as_default(number: float) -> float:
    """As stock's processor makes a tensor of it, which rounds to torch's default dtype."""
    return float(torch.tensor(number, dtype=torch.get_default_dtype(), device="cpu"))


def _tensor(ids: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int64, device="cpu")


def _bad_words(value: Any, eos: tuple[int, ...]) -> dict[str, Any]:
    found = stock.NoBadWordsLogitsProcessor(value, _tensor(eos) if eos else None).sequence_bias
    return {"bad_words_ids": tuple(tuple(map(int, ids)) for ids in found)}


def _decay(value: Any, eos: tuple[int, ...]) -> dict[str, Any]:
    if not eos:
        raise ValueError("expected an eos_token_id with it")
    made = stock.ExponentialDecayLengthPenalty(value, _tensor(eos), 0)
    return {"decay_start": int(made.regulation_start), "decay_factor": float(made.regulation_factor)}


def _ngram_size(value: Any, eos: tuple[int, ...]) -> dict[str, Any]:
    if isinstance(value, bool):  # stock's processor is made, and raises when it is called
        raise TypeError("expected an integer")
    return {"no_repeat_ngram_size": stock.NoRepeatNGramLogitsProcessor(value).ngram_size}


_READERS: dict[str, Callable[[Any, tuple[int, ...]], dict[str, Any]]] = {
    "sequence_bias": _sequence_bias,
    "repetition_penalty": lambda v, _: {"repetition_penalty": stock.RepetitionPenaltyLogitsProcessor(v).penalty},
    "no_repeat_ngram_size": _ngram_size,
    "bad_words_ids": _bad_words,
    "forced_bos_token_id": lambda value, _: {"forced_bos_token_id": _ids(value)[0]},
    "forced_eos_token_id": lambda value, _: {"forced_eos_token_ids": _ids(value)},
    "remove_invalid_values": lambda value, _: {"remove_invalid_values": True},
    "exponential_decay_length_penalty": _decay,
    "suppress_tokens": lambda value, _: {"suppress_tokens": _ids(list(value))},
    "begin_suppress_tokens": lambda value, _: {"begin_suppress_tokens": _ids(list(value))},
    "typical_p": lambda value, _: {"typical_p": float(stock.TypicalLogitsWarper(mass=value).mass)},
    "epsilon_cutoff": lambda value, _: {"epsilon_cutoff": float(stock.EpsilonLogitsWarper(epsilon=value).epsilon)},
    "eta_cutoff": lambda value, _: {"eta_cutoff": float(stock.EtaLogitsWarper(epsilon=value).epsilon)},
    "renormalize_logits": lambda value, _: {"renormalize_logits": True},
}
