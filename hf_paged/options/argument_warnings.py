"""Warnings about arguments that probably do not have the effect that the caller expects; each is given once."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from transformers import GenerationConfig

from hf_paged.options.table import NATIVE, OPTIONS

_SAMPLING = tuple(option for option in OPTIONS.values() if option.only_sampling and option.path == NATIVE)
# Values that give no warning: greedy search by another name, and transformers' default.
_QUIET = {"temperature": 0.0, "top_k": 50}
_LENGTHS = ("max_new_tokens", "max_length")


class ArgumentWarnings:
    """The warnings that one `PagedGenerator` has given."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def look(self, merged: GenerationConfig, config: GenerationConfig | None, keywords: dict[str, Any],
             of_model: GenerationConfig) -> None:
        """Warn of settings of the call (`config`, `keywords`), not of the model's own.

        Args:
            merged: the merged config of all settings.
        """
        if "do_sample" not in self._given and not merged.do_sample:
            unused = unused_sampling(config, keywords, of_model)
            if unused:
                self._give("do_sample", f"{', '.join(unused)} without do_sample=True: the most likely token is taken "
                                        "at every step, and this changes nothing; pass do_sample=True to sample")
        if "length" not in self._given and takes_default_length(config, keywords, of_model):
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


def takes_default_length(config: GenerationConfig | None, keywords: dict[str, Any], of_model: GenerationConfig) -> bool:
    """Return whether neither the call nor the model sets a length of completions."""
    given = [getattr(source, name, None) for source in (config, of_model) for name in _LENGTHS]
    return not any(value is not None for value in (*given, *map(keywords.get, _LENGTHS)))


# Packages whose frames lie between a user's line and a warning: callers of generate, and their decorators.
_BETWEEN = ("hf_paged", "transformers", "torch", "accelerate", "peft", "trl", "contextlib")


def level_of_caller() -> int:
    """Return the `stacklevel` with which a warning of the calling function points at the user's own line."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _BETWEEN:
        frame, level = frame.f_back, level + 1
    return level
