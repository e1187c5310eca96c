"""The options of a `GenerationConfig` that edit the logits of one request, as `Edits`."""

from __future__ import annotations

import math
from typing import Any

from transformers import GenerationConfig

from hf_paged.options.option_values import Context
from hf_paged.options.table import EDITS, Option
from hf_paged.sampling.edit_reference import NEUTRAL, Edits


def edits_from_config(config: GenerationConfig, eos: tuple[int, ...], vocab_size: int) -> Edits:
    """Return the edits of one request's logits for the options of `config`.

    Args:
        config: fully merged.
        eos: its EOS ids.
        vocab_size: ids must lie below it; as many as the logits of a token.

    Raises:
        ValueError, TypeError: naming the option, its value, and what transformers' processor says of it.
    """
    context, draws, fields = Context(eos, vocab_size), config.do_sample, dict[str, Any]()
    for option in EDITS:
        value = getattr(config, option.name, None)
        if value is None or (option.only_sampling and not draws) or not _is_active(option, value):
            continue
        assert option.edits is not None
        try:
            fields |= option.edits(value, context)
        except Exception as error:  # a value of a wrong type may make transformers raise any exception
            raise ValueError(f"{option.name}={value!r:.200}: {error}") from error
    if not fields:
        return NEUTRAL
    edits = Edits(**fields)
    if edits.decay_start is not None and not all(0 <= token < vocab_size for token in eos):
        raise ValueError(f"eos_token_id={list(eos)!r:.200}: expected token ids in [0, {vocab_size}) with "
                         "exponential_decay_length_penalty, which scores them")
    return edits


def decay_overflows(edits: Edits, max_new_tokens: int) -> bool:
    """Return whether stock's length penalty, a power in Python's floats, overflows before the last new token."""
    if edits.decay_start is None:
        return False
    try:
        return not math.isfinite(edits.decay_factor ** max(0, max_new_tokens - edits.decay_start))
    except (OverflowError, ZeroDivisionError):
        return True


def _is_active(option: Option, value: Any) -> bool:
    try:
        return option.makes(value)
    except TypeError as error:  # of a comparison
        kind = type(value).__name__
        raise TypeError(f"{option.name}={value!r:.200}: expected None or a number, got {kind}") from error
