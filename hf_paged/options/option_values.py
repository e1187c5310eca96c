"""Values of single options, checked by transformers' own processors and as the engine keeps them.

The functions that `Option.edits` names take a value and its `Context` and return fields of `Edits`; those that
`Option.draws` names take the option's name and its value and return the checked number. The caller of the first puts
the option's name and value in front of what they raise.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from transformers.generation import logits_process as stock

FLOAT32 = torch.finfo(torch.float32)


class Context(NamedTuple):
    """The context in which values are checked: the EOS ids of the config, and the number of logits of a token."""

    eos: tuple[int, ...]
    vocab_size: int


def number(name: str, value: Any) -> float:
    """Return the value as a float; raises TypeError for a value of another type."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected a number, got {type(value).__name__}")
    return float(value)


def share(name: str, value: Any) -> float:
    """A number in [0, 1]."""
    found = number(name, value)
    if not 0.0 <= found <= 1.0:
        raise ValueError(f"{name}={found!r}: expected a number in [0, 1]")
    return found


def temperature(name: str, value: Any) -> float:
    """A number above 0."""
    found = number(name, value)
    if not FLOAT32.tiny <= found <= FLOAT32.max:
        raise ValueError(f"{name}={found!r}: expected a float32 number above 0 (do_sample=False for greedy)")
    return found


def top_k(name: str, value: Any) -> int:
    """An integer of at least 0, which `settings_from_config` knows to be an integer."""
    if value < 0:
        raise ValueError(f"{name}={value!r}: expected None or an integer of at least 0 (0: off)")
    return value


def ids(value: Any) -> tuple[int, ...]:
    """Return an id, or a list or tensor of ids, as a tuple."""
    found = torch.as_tensor(value, dtype=None, device="cpu")  # the values' own dtype, which is looked at
    if found.is_floating_point() or found.dtype == torch.bool:
        raise TypeError("expected token ids")
    return tuple(found.flatten().tolist())


def as_list(value: Any) -> Any:
    """Return the ids of a tensor as a list, and any other value unchanged."""
    return value.tolist() if isinstance(value, torch.Tensor) else value


def sequence_bias(value: Any, context: Context) -> dict[str, Any]:
    """Return biases of sequences, rounded to torch's default dtype, as in the tensor of stock's processor."""
    found = stock.SequenceBiasLogitsProcessor(sequence_bias=value).sequence_bias
    bias = tuple((tuple(map(int, tokens)), _as_default(number)) for tokens, number in found.items())
    _check_sequences(value, [tokens for tokens, _ in bias], context)
    return {"sequence_bias": bias}


def bad_words(value: Any, context: Context) -> dict[str, Any]:
    """Return sequences that may not be completed, without single EOS tokens, which stock drops."""
    found = stock.NoBadWordsLogitsProcessor(value, _tensor(context.eos) if context.eos else None).sequence_bias
    sequences = tuple(tuple(map(int, tokens)) for tokens in found)
    _check_sequences(value, sequences, context)
    return {"bad_words_ids": sequences}


def repetition_penalty(value: Any, context: Context) -> dict[str, Any]:
    """A factor."""
    return {"repetition_penalty": stock.RepetitionPenaltyLogitsProcessor(value).penalty}


def ngram_size(value: Any, context: Context) -> dict[str, Any]:
    """A number of tokens; True makes a processor in stock that raises when it is called."""
    if isinstance(value, bool):
        raise TypeError("expected an integer")
    return {"no_repeat_ngram_size": stock.NoRepeatNGramLogitsProcessor(value).ngram_size}


def forced_bos(value: Any, context: Context) -> dict[str, Any]:
    """The first token's id."""
    found = ids(value)[0]
    _check_range([found], context)
    return {"forced_bos_token_id": found}


def forced_eos(value: Any, context: Context) -> dict[str, Any]:
    """The last token's ids."""
    found = ids(value)
    _check_range(found, context)
    return {"forced_eos_token_ids": found}


def length_penalty(value: Any, context: Context) -> dict[str, Any]:
    """The number of new tokens behind which EOS is favoured, and the base of the power by which it is."""
    if not context.eos:
        raise ValueError("expected an eos_token_id with it")
    made = stock.ExponentialDecayLengthPenalty(value, _tensor(context.eos), 0)
    return {"decay_start": int(made.regulation_start), "decay_factor": float(made.regulation_factor)}


def typical_p(value: Any, context: Context) -> dict[str, Any]:
    """A mass of probability."""
    return {"typical_p": float(stock.TypicalLogitsWarper(mass=value).mass)}


def epsilon_cutoff(value: Any, context: Context) -> dict[str, Any]:
    """A probability."""
    return {"epsilon_cutoff": float(stock.EpsilonLogitsWarper(epsilon=value).epsilon)}


def eta_cutoff(value: Any, context: Context) -> dict[str, Any]:
    """A probability."""
    return {"eta_cutoff": float(stock.EtaLogitsWarper(epsilon=value).epsilon)}


def _check_sequences(value: Any, sequences: Iterable[tuple[int, ...]], context: Context) -> None:
    if _holds_bool(value):
        raise ValueError("holds True or False, expected token ids")
    if not all(sequences):
        raise ValueError("holds an empty sequence, expected token ids")
    _check_range((token for sequence in sequences for token in sequence), context)


def _check_range(tokens: Iterable[int], context: Context) -> None:
    if (wrong := next((token for token in tokens if not 0 <= token < context.vocab_size), None)) is not None:
        raise ValueError(f"holds {wrong}, expected token ids in [0, {context.vocab_size})")


def _holds_bool(value: Any) -> bool:
    """Whether a bool stands among ids: Python takes it for 0 or 1, stock's indexing does not."""
    if isinstance(value, dict):
        value = [*value]
    return isinstance(value, bool) or (isinstance(value, (list, tuple)) and any(map(_holds_bool, value)))


def _as_default(bias: float) -> float:
    return float(torch.tensor(bias, dtype=torch.get_default_dtype(), device="cpu"))


def _tensor(tokens: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device="cpu")
