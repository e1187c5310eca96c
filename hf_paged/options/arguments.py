"""Checks of callers' arguments: each error names the argument, the value and what is accepted."""

from __future__ import annotations

import hashlib
import operator
import re
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from hf_paged.config import require_int
from hf_paged.vllm_names import SAMPLING


def token_ids(prompt_token_ids: Any, vocab_size: int, name: str = "prompt_token_ids") -> list[int]:
    """A prompt (sequence or 1-D tensor or array of ids) as a list of ints in [0, vocab_size), at least one.

    Errors call it `name`.

    Raises:
        TypeError: no sequence of integers.
        ValueError: empty, or an id outside the vocabulary.
    """
    if isinstance(prompt_token_ids, (torch.Tensor, np.ndarray)):
        prompt_token_ids = prompt_token_ids.tolist()
    if isinstance(prompt_token_ids, (str, bytes)) or not isinstance(prompt_token_ids, Sequence):
        kind = type(prompt_token_ids).__name__
        raise TypeError(f"{name}={prompt_token_ids!r:.80}: expected token ids, got {kind}")
    if not prompt_token_ids:
        raise ValueError(f"{name}=[]: expected at least one token id")
    ids = np.array(prompt_token_ids)
    in_range = ids.ndim == 1 and ids.dtype.kind in "iu" and ids.min() >= 0 and ids.max() < vocab_size
    if in_range and set(map(type, prompt_token_ids)).isdisjoint((bool, np.bool_)):
        return ids.tolist()
    for token in prompt_token_ids:  # find what to name
        if not isinstance(token, (int, np.integer)) or isinstance(token, bool):
            raise TypeError(f"{name} holds {token!r}: expected integers")
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} holds {token}: expected ids in [0, {vocab_size})")
    raise TypeError(f"{name}={prompt_token_ids!r:.80}: expected a flat sequence of integers")


def token_id_lists(prompts: Sequence[Any], vocab_size: int) -> list[list[int]] | None:
    """Return `token_ids` of all prompts, checked together; None if each prompt has to be checked by `token_ids`."""
    if not prompts or not all(type(prompt) in (list, tuple) and prompt for prompt in prompts):
        return None
    if not all(operator.countOf(map(type, prompt), int) == len(prompt) for prompt in prompts):
        return None
    try:
        columns = [array("I", prompt) for prompt in prompts]  # of all that takes numbers the fastest; none is negative
    except OverflowError:
        return None
    in_range = all(int(np.frombuffer(column, np.uintc).max()) < vocab_size for column in columns)
    return list(map(list, prompts)) if in_range else None


def base_seed(seed: int | None, default: int | None) -> int:
    """Return `seed`, else `default`, else a seed drawn from torch's default generator; in [0, 2**63)."""
    if seed is None:
        seed = default
    if seed is None:
        seed = int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu"))
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed={seed!r}: expected None or an integer in [0, 2**63)")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: expected None or an integer in [0, 2**63)")
    return seed


def described(value: Any) -> str:
    """Return the text of a value in a message: of a tensor its kind, so that equal reasons are equal texts."""
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')}"
    return f"{value!r:.60}" if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def check_is_config(config: Any) -> None:
    """Raise TypeError for a value that is neither a GenerationConfig nor None."""
    if config is not None and not isinstance(config, GenerationConfig):
        remedy = f"; {SAMPLING['sampling_params']}" if type(config).__name__ == "SamplingParams" else ""  # of vLLM
        raise TypeError(f"generation_config={config!r:.80}: expected a GenerationConfig or None{remedy}")


def merge_config(model: Any, config: GenerationConfig | None, kwargs: dict[str, Any]) -> GenerationConfig:
    """Merge `kwargs` over `config` over `model.generation_config` over stock's defaults, as stock generate does.

    Raises:
        TypeError: `config` is no GenerationConfig.
        ValueError: a keyword that is no field of one, or a value that its validation refuses.
    """
    check_is_config(config)
    try:
        merged, unused = model._prepare_generation_config(config, **kwargs)
    except ValueError:
        raise
    except Exception as error:  # transformers compares and calls before it checks types
        raise TypeError(_wrong_setting({**(vars(config) if config else {}), **kwargs}, error)) from error
    if unused:
        raise ValueError(f"generate_kwargs {sorted(unused)}: expected fields of a GenerationConfig")
    lengths = (kwargs.get("max_length"), config and config.max_length, model.generation_config.max_length)
    if merged.max_new_tokens is None and not any(length is not None for length in lengths):
        merged.max_new_tokens = merged.max_length  # stock: the default length counts new tokens
    return merged


def _wrong_setting(given: dict[str, Any], error: Exception) -> str:
    """The message about settings that transformers fails over: about the first of which it fails by itself."""
    for name, value in given.items():
        try:
            GenerationConfig(**{name: value}).validate()
        except ValueError:  # its own message is clear
            continue
        except Exception as found:
            documented = re.search(rf"^\s*{name} \(`(.+?)`,", GenerationConfig.__doc__ or "", re.MULTILINE)
            kind = documented[1].replace("`", "") if documented else "what GenerationConfig documents"
            return f"{name}={value!r:.200}: expected None or {kind}, got {type(value).__name__} ({found})"
    return f"generation settings {given!r:.200}: expected a GenerationConfig's types ({error})"


def salt_digest(cache_salt: Any) -> bytes:
    """What tells the prefix cache whose blocks are whose: 32 bytes that are the salt's alone, none for None.

    Raises:
        TypeError, ValueError: it is neither None nor a non-empty str; the message does not repeat it.
    """
    if cache_salt is None:
        return b""
    if not isinstance(cache_salt, str):
        raise TypeError(f"cache_salt of type {type(cache_salt).__name__}: expected None or a non-empty str")
    if not cache_salt:
        raise ValueError("cache_salt='': expected None or a non-empty str")
    return hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()


MOST_COPIES = 1 << 20


def num_copies(num_return_sequences: Any) -> int:
    """Return the number of requests of a prompt; raises ValueError unless None or an integer in [1, `MOST_COPIES`]."""
    require_int("num_return_sequences", num_return_sequences, 1, optional=True)
    if num_return_sequences is not None and num_return_sequences > MOST_COPIES:
        raise ValueError(f"num_return_sequences={num_return_sequences!r}: expected at most {MOST_COPIES}")
    return 1 if num_return_sequences is None else num_return_sequences
