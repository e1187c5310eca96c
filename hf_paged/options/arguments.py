"""Checks of arguments, whose errors name the argument, the value and what is accepted, and warnings, once each."""

from __future__ import annotations

import hashlib
import operator
import re
import sys
import warnings
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from hf_paged.config import require_int
from hf_paged.options.table import NATIVE, OPTIONS
from hf_paged.vllm_names import SAMPLING

MOST_COPIES = 1 << 20
_SAMPLING = tuple(option for option in OPTIONS.values() if option.only_sampling and option.path == NATIVE)
# Values that give no warning: greedy search by another name, and transformers' default.
_QUIET = {"temperature": 0.0, "top_k": 50}
_LENGTHS = ("max_new_tokens", "max_length")
# Packages whose frames lie between a user's line and a warning: callers of generate, and their decorators.
_BETWEEN = ("hf_paged", "transformers", "torch", "accelerate", "peft", "trl", "contextlib")


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


def num_copies(num_return_sequences: Any) -> int:
    """Return the number of requests of a prompt; raises ValueError unless None or an integer in [1, `MOST_COPIES`]."""
    require_int("num_return_sequences", num_return_sequences, 1, optional=True)
    if num_return_sequences is not None and num_return_sequences > MOST_COPIES:
        raise ValueError(f"num_return_sequences={num_return_sequences!r}: expected at most {MOST_COPIES}")
    return 1 if num_return_sequences is None else num_return_sequences


class ArgumentWarnings:
    """The warnings that one `PagedGenerator` has given."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def look(self, merged: GenerationConfig, config: GenerationConfig | None, keywords: dict[str, Any],
             of_model: GenerationConfig) -> None:
        """Warn of settings of the call (`config`, `keywords`), not of the model's own; ``merged`` has all of them."""
        if "do_sample" not in self._given and not merged.do_sample and (
                unused := unused_sampling(config, keywords, of_model)):
            self._give("do_sample", f"{', '.join(unused)} without do_sample=True: the most likely token is taken at "
                                    "every step, and this changes nothing; pass do_sample=True to sample")
        lengths = [getattr(source, name, None) for source in (config, of_model) for name in _LENGTHS]
        if "length" not in self._given and all(one is None for one in (*lengths, *map(keywords.get, _LENGTHS))):
            self._give("length", f"no length was given, so each completion has at most {merged.max_new_tokens} new "
                                 "tokens (transformers' default); pass max_new_tokens= for another number")

    def look_at_length(self, prompt_length: int, max_new_tokens: int, max_model_len: int,
                       config: GenerationConfig | None, keywords: dict[str, Any]) -> None:
        """Warn of a length of the call that goes beyond the longest sequence."""
        if prompt_length + max_new_tokens <= max_model_len or "room" in self._given:
            return
        if any(value is not None for name in _LENGTHS for value in (keywords.get(name), getattr(config, name, None))):
            self._give("room", f"max_new_tokens={max_new_tokens} after a prompt of {prompt_length} tokens: expected at "
                               f"most {max_model_len - prompt_length}, since max_model_len={max_model_len} tokens hold "
                               "prompt and output. A completion that gets there ends with finish_reason='length'; "
                               "lower max_new_tokens or raise max_model_len")

    def _give(self, kind: str, text: str) -> None:
        self._given.add(kind)
        warnings.warn(f"hf_paged: {text}", UserWarning, stacklevel=level_of_caller())


def unused_sampling(config: GenerationConfig | None, keywords: dict[str, Any], of_model: GenerationConfig) -> list[str]:
    """Return settings of the call, as "name=value", that would change sampling, but that greedy search ignores."""
    unused = []
    for option in _SAMPLING:
        name = option.name
        value = keywords.get(name)
        if name not in keywords:
            value = getattr(config, name, None)
            value = None if value == getattr(of_model, name, None) else value  # equal to the model's: not the caller's
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if option.makes(value) and value not in (*option.neutral, _QUIET.get(name)):
            unused.append(f"{name}={value!r:.40}")
    return unused


def level_of_caller() -> int:
    """Return the `stacklevel` with which a warning of the calling function points at the user's own line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    return level
