"""Caches of what requests ask for: equal configs are merged once, and settings that prompts share are read once.

Stock compares ``max_new_tokens`` with 0 and otherwise hands it through, so that configs which differ in nothing but a
positive one share a merge. Merges are kept from call to call under what the configs and the keywords say, as a text, so
that a changed config is a new one; settings within a call only, since classes may be patched between calls.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from transformers import GenerationConfig, GenerationMixin

from hf_paged.guards.original_classes import MERGING
from hf_paged.options.arguments import merge_config
from hf_paged.options.request_spec import RequestSpec
from hf_paged.options.settings import reads_prompt_length, request_spec

_MOST = 8  # merges that are kept
_PLAIN = frozenset((int, float, bool, str, type(None)))  # types whose repr tells any two values apart


class Merge(NamedTuple):
    """A merged config, which is to be read only, and the one that it shares all but ``max_new_tokens`` with."""

    config: GenerationConfig
    first: GenerationConfig


class MergeCache:
    """A cache of `merge_config` for the calls of one model.

    Where a text does not tell what a config says, or the code that merges is not transformers' own, each call merges
    anew.
    """

    def __init__(self) -> None:
        self._known: dict[tuple, GenerationConfig] = {}

    def __call__(self, model: Any, config: GenerationConfig | None, kwargs: dict[str, Any],
                 call_key: tuple | None) -> Merge:
        """Raises what `merge_config` raises. ``call_key``: of the model and the keywords, as things stand."""
        count = getattr(config, "max_new_tokens", None)
        is_shared = type(count) is int and count >= 1
        text = "" if config is None else _contents(config, "max_new_tokens" if is_shared else "")
        if call_key is None or text is None:
            merged = merge_config(model, config, kwargs)
            return Merge(merged, merged)
        key = call_key, is_shared, text, () if config is None else tuple(vars(config))  # also fields with None
        if (first := self._known.get(key)) is None:
            first = merge_config(model, config, copy.deepcopy(kwargs))  # a list may get other items later
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = first
        if not is_shared or "max_new_tokens" in kwargs or first.max_new_tokens == count:
            return Merge(first, first)
        merged = copy.copy(first)
        merged.max_new_tokens = count
        return Merge(merged, first)


class SpecReader:
    """The merged configs of one call's prompts, and the specifications of requests without their prompts.

    ``kwargs`` are the call's keywords that are settings; ``vocab_size`` is the number of logits of a token.
    """

    def __init__(self, model: Any, kwargs: dict[str, Any], cache: MergeCache, vocab_size: int) -> None:
        self._model, self._kwargs, self._cache, self._vocab_size = model, kwargs, cache, vocab_size
        self._call_key = call_key(model, kwargs)
        # By ids of objects, which stand beside what is read of them so that no others get these ids.
        self._merges: dict[int, tuple[GenerationConfig | None, Merge]] = {}
        self._specs: dict[tuple, tuple[RequestSpec, Merge, dict[str, Any]]] = {}

    def merged(self, config: GenerationConfig | None) -> GenerationConfig:
        """Return the merged config of a prompt; raises as `merge_config`."""
        return self._merge(config).config

    def spec(self, config: GenerationConfig | None, prompt_length: int, options: dict[str, Any]) -> RequestSpec:
        """Return the specification of a request without its prompt; raises as `merge_config` and `request_spec`."""
        merge = self._merge(config)
        merged = merge.config
        # A length penalty is checked for the number of new tokens, too.
        shared = merge.first if merged.exponential_decay_length_penalty is None else merged
        key = id(shared), prompt_length if reads_prompt_length(merged) else None, id(options)
        if key not in self._specs:
            self._specs[key] = request_spec(merged, prompt_length, self._vocab_size, options), merge, options
        spec, of, _ = self._specs[key]
        if merged.max_new_tokens == of.config.max_new_tokens:
            return spec
        return spec.but(max_new_tokens=merged.max_new_tokens)

    def _merge(self, config: GenerationConfig | None) -> Merge:
        if id(config) not in self._merges:
            self._merges[id(config)] = config, self._cache(self._model, config, self._kwargs, self._call_key)
        return self._merges[id(config)][1]


def call_key(model: Any, kwargs: dict[str, Any]) -> tuple | None:
    """Return a cache key of a model's config and a call's keywords; None if configs cannot be cached."""
    merging = getattr(model._prepare_generation_config, "__func__", None)
    if merging is not GenerationMixin._prepare_generation_config or MERGING.patched() is not None:
        return None
    if GenerationConfig.__setattr__ is not object.__setattr__:  # laying a length over a copy would run another's code
        return None
    texts = _contents(model.generation_config), _text(kwargs)
    return None if None in texts else (*texts, tuple(vars(model.generation_config)))


def _contents(config: Any, but: str = "") -> str | None:
    """Return the text of a config's fields as a cache key; None for a config of another class."""
    if type(config) is not GenerationConfig:
        return None
    return _text({name: value for name, value in vars(config).items() if value is not None and name != but})


def _text(values: dict[str, Any]) -> str | None:
    return repr(values) if all(map(_is_plain, values.values())) else None


def _is_plain(value: Any) -> bool:
    """Return whether the value's text differs from that of any other value."""
    return type(value) in _PLAIN or (type(value) in (list, tuple) and all(map(_is_plain, value)))
