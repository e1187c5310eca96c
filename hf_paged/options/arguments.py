"""Checks of what callers hand in: each error names the argument, the value and what is accepted."""

from __future__ import annotations

import copy
import hashlib
import operator
import re
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin

from hf_paged.config import require_int
from hf_paged.guards.originals import MERGING
from hf_paged.vllm_names import SAMPLING

PLAIN = frozenset((int, float, bool, str, type(None)))  # types whose repr tells any two values apart


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
    """What `token_ids` makes of every prompt, looked at in one go; None: ask `token_ids` about each."""
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
    """`seed`, else `default`, else one drawn from torch's default generator; in [0, 2**63)."""
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
    """A value in a message: a tensor by its kind, so that equal reasons read alike and no data is shown."""
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {str(value.dtype).removeprefix('torch.')}"
    return f"{value!r:.60}" if isinstance(value, (bool, int, float, str)) else f"a {type(value).__name__}"


def check_is_config(config: Any) -> None:
    """Raise TypeError for what is neither a GenerationConfig nor None."""
    if config is not None and not isinstance(config, GenerationConfig):
        remedy = f"; {SAMPLING['sampling_params']}" if type(config).__name__ == "SamplingParams" else ""  # of vLLM
        raise TypeError(f"generation_config={config!r:.80}: expected a GenerationConfig or None{remedy}")


def merge_config(model: Any, config: GenerationConfig | None, kwargs: dict[str, Any]) -> GenerationConfig:
    """`kwargs` over `config` over `model.generation_config` over stock's defaults, as stock generate merges.

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
        except ValueError:  # says itself what is wrong
            continue
        except Exception as found:
            documented = re.search(rf"^\s*{name} \(`(.+?)`,", GenerationConfig.__doc__ or "", re.MULTILINE)
            kind = documented[1].replace("`", "") if documented else "what GenerationConfig documents"
            return f"{name}={value!r:.200}: expected None or {kind}, got {type(value).__name__} ({found})"
    return f"generation settings {given!r:.200}: expected a GenerationConfig's types ({error})"


def _merges_as_stock(model: Any) -> bool:
    merging = getattr(model._prepare_generation_config, "__func__", None)
    return merging is GenerationMixin._prepare_generation_config and MERGING.patched() is None


class ConfigMerger:
    """`merge_config` for the configs of one call: those that differ in nothing but ``max_new_tokens`` merge once.

    Stock compares ``max_new_tokens`` with 0 and otherwise hands it through, so a positive one may be put into the
    result of another; configs that differ in nothing have one result. Where any of the code that says so is not
    transformers' own, every config is merged by itself.
    """

    def __init__(self, model: Any, kwargs: dict[str, Any], recent: RecentMerges) -> None:
        self._model = model
        self._kwargs = kwargs
        self._recent = recent
        self._by_id: dict[int, tuple[GenerationConfig | None, GenerationConfig]] = {}
        self._alike: dict[tuple, dict[int, GenerationConfig]] = {}  # by all fields but max_new_tokens, then by that
        self._first: dict[int, GenerationConfig] = {}  # by id of a result that was made of another one, that
        self._may_share = _merges_as_stock(model) and GenerationConfig.__setattr__ is object.__setattr__

    def __call__(self, config: GenerationConfig | None) -> GenerationConfig:
        """Raises what `merge_config` raises. The result is to be read only: others may hold values of it."""
        if id(config) not in self._by_id:
            self._by_id[id(config)] = config, self._merge(config)  # held, so that no other object gets its id
        return self._by_id[id(config)][1]

    def _merge(self, config: GenerationConfig | None) -> GenerationConfig:
        key = self._others(config) if self._may_share else None
        if key is None:
            return self._recent(self._model, config, self._kwargs)
        assert config is not None
        count = 0 if "max_new_tokens" in self._kwargs else config.max_new_tokens
        if key not in self._alike:
            self._alike[key] = {count: self._recent(self._model, config, self._kwargs)}
        alike = self._alike[key]
        if count not in alike:
            first = next(iter(alike.values()))
            alike[count] = merged = copy.copy(first)
            merged.max_new_tokens = count
            self._first[id(merged)] = first
        return alike[count]

    def first_like(self, merged: GenerationConfig) -> GenerationConfig:
        """The first of the results that says the same as this one but for a positive ``max_new_tokens``."""
        return self._first.get(id(merged), merged)

    @staticmethod
    def _others(config: GenerationConfig | None) -> tuple | None:
        """All that `config` says besides a positive ``max_new_tokens``, or None where it says something else, too."""
        others, count = _contents(config, but="max_new_tokens"), getattr(config, "max_new_tokens", None)
        if others is None or type(count) is not int or count < 1:
            return None
        return tuple(vars(config)), others


class RecentMerges:
    """`merge_config` for the configs of calls that come one by one: equal ones merge once.

    A config and the model's own are compared by what they say; where that cannot be told from their fields, or any of
    the code that merges is not transformers' own, each is merged anew.
    """

    _MOST = 8

    def __init__(self) -> None:
        self._recent: dict[tuple, GenerationConfig] = {}

    def __call__(self, model: Any, config: GenerationConfig | None, kwargs: dict[str, Any]) -> GenerationConfig:
        """Raises what `merge_config` raises. The result is to be read only: later calls get it again."""
        of_model = model.generation_config
        contents = "" if config is None else _contents(config), _contents(of_model), _texts(kwargs)
        if None in contents or not _merges_as_stock(model):
            return merge_config(model, config, kwargs)
        key = contents, () if config is None else tuple(vars(config)), tuple(vars(of_model))  # also fields with None
        if (merged := self._recent.get(key)) is None:
            merged = merge_config(model, config, copy.deepcopy(kwargs))  # a list may get other items later
            if len(self._recent) >= self._MOST:
                self._recent.clear()
            self._recent[key] = merged
        return merged


def _contents(config: Any, but: str = "") -> str | None:
    """What a config says, `but` for one field; None where it is of another class, or its values' texts do not tell."""
    if type(config) is not GenerationConfig:
        return None
    return _texts({name: value for name, value in vars(config).items() if value is not None and name != but})


def _texts(values: dict[str, Any]) -> str | None:
    """What these values are, or None where their texts do not tell."""
    return repr(values) if all(map(_is_plain, values.values())) else None


def _is_plain(value: Any) -> bool:
    return type(value) in PLAIN or (type(value) is list and all(type(item) in PLAIN for item in value))


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
    """How many requests a prompt becomes; ValueError for what is neither None nor an integer in [1, `MOST_COPIES`]."""
    require_int("num_return_sequences", num_return_sequences, 1, optional=True)
    if num_return_sequences is not None and num_return_sequences > MOST_COPIES:
        raise ValueError(f"num_return_sequences={num_return_sequences!r}: expected at most {MOST_COPIES}")
    return 1 if num_return_sequences is None else num_return_sequences
