"""The forms in which prompts may come, as lists of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

ACCEPTED = "a str, a list of str, token ids, a list of lists of token ids, a chat or a list of chats"


def as_prompt_list(prompts: Any, tokenizer: Any) -> list[Sequence[int]]:
    """Token ids per prompt; their values are checked by the engine.

    Raises:
        TypeError: another form, or forms mixed; the message says what was found and what is accepted.
        ValueError: no prompts, or text without a tokenizer.
    """
    if isinstance(prompts, str) or _is_chat(prompts) or _is_token_ids(prompts):
        prompts = [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(f"prompts={prompts!r:.80}: expected {ACCEPTED}, got {type(prompts).__name__}")
    if not prompts:
        return []
    if all(isinstance(p, str) for p in prompts):
        return [_require(tokenizer, "text prompts")(p)["input_ids"] for p in prompts]
    if all(_is_chat(p) for p in prompts):
        tokenizer = _require(tokenizer, "chats")
        return [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            for chat in prompts
        ]
    if all(isinstance(p, (list, tuple, np.ndarray)) and not _is_chat(p) for p in prompts):
        return [p.tolist() if isinstance(p, np.ndarray) else p for p in prompts]
    kinds = sorted({type(p).__name__ for p in prompts})
    raise TypeError(f"prompts: a list of {', '.join(kinds)}; expected {ACCEPTED}")


def _is_chat(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(t, (int, np.integer)) for t in value)


def _require(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise ValueError(f"tokenizer=None: {what} need a tokenizer; give one, or pass token ids")
    return tokenizer
