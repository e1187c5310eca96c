"""Checks of what callers hand in: each error names the argument, the value and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig


def token_ids(prompt_token_ids: Any, vocab_size: int) -> list[int]:
    """A prompt (sequence or 1-D tensor or array of ids) as a list of ints in [0, vocab_size), at least one.

    Raises:
        TypeError: no sequence of integers.
        ValueError: empty, or an id outside the vocabulary.
    """
    if isinstance(prompt_token_ids, (torch.Tensor, np.ndarray)):
        prompt_token_ids = prompt_token_ids.tolist()
    if isinstance(prompt_token_ids, (str, bytes)) or not isinstance(prompt_token_ids, Sequence):
        kind = type(prompt_token_ids).__name__
        raise TypeError(f"prompt_token_ids={prompt_token_ids!r:.80}: expected token ids, got {kind}")
    if not prompt_token_ids:
        raise ValueError("prompt_token_ids=[]: expected at least one token id")
    ids = np.array(prompt_token_ids)
    in_range = ids.ndim == 1 and ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < vocab_size
    if in_range and not any(isinstance(token, (bool, np.bool_)) for token in prompt_token_ids):
        return ids.tolist()
    for token in prompt_token_ids:  # find what to name
        if not isinstance(token, (int, np.integer)) or isinstance(token, bool):
            raise TypeError(f"prompt_token_ids holds {token!r}: expected integers")
        if not 0 <= token < vocab_size:
            raise ValueError(f"prompt_token_ids holds {token}: expected ids in [0, {vocab_size})")
    raise TypeError(f"prompt_token_ids={prompt_token_ids!r:.80}: expected a flat sequence of integers")


def base_seed(seed: int | None, default: int | None) -> int:
    """`seed`, else `default`, else one drawn from torch's default generator; in [0, 2**63)."""
    if seed is None:
        seed = default
    if seed is None:
        seed = int(torch.randint(0, 2**63 - 1, (), device="cpu"))
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed={seed!r}: expected None or an integer in [0, 2**63)")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: expected None or an integer in [0, 2**63)")
    return seed


def merge_config(model: Any, config: GenerationConfig | None, kwargs: dict[str, Any]) -> GenerationConfig:
    """`kwargs` over `config` over `model.generation_config` over stock's defaults, as stock generate merges.

    Raises:
        TypeError: `config` is no GenerationConfig.
        ValueError: a keyword that is no field of one, or a value that its validation refuses.
    """
    if config is not None and not isinstance(config, GenerationConfig):
        raise TypeError(f"generation_config={config!r:.80}: expected a GenerationConfig or None")
    try:
        merged, unused = model._prepare_generation_config(config, **kwargs)
    except TypeError as error:  # transformers compares before it checks types
        raise TypeError(f"generation settings {kwargs!r}: expected a GenerationConfig's types ({error})") from error
    if unused:
        raise ValueError(f"generate_kwargs {sorted(unused)}: expected fields of a GenerationConfig")
    lengths = (kwargs.get("max_length"), config and config.max_length, model.generation_config.max_length)
    if merged.max_new_tokens is None and not any(length is not None for length in lengths):
        merged.max_new_tokens = merged.max_length  # stock: the default length counts new tokens
    return merged
