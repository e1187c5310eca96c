"""Conversion of prompts of all accepted forms into token ids."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_paged.options.chats import is_chat, is_message, readable_chat
from hf_paged.outputs import Completion

ACCEPTED = (
    "a str, token ids, a chat (a list of messages with a role), {'prompt': str} or {'prompt_token_ids': token ids}, a "
    "Completion to go on from, or a list of such prompts"
)
_TEXT, _IDS = "prompt", "prompt_token_ids"


def prompt_list(prompts: Any) -> list[Any]:
    """Return a list of the single prompts, each still in its own form.

    Raises:
        TypeError: neither a prompt nor a list.
    """
    if isinstance(prompts, (str, dict, Completion)) or is_chat(prompts) or _is_token_ids(prompts):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise TypeError(f"prompts={prompts!r:.80}: expected {ACCEPTED}, got {type(prompts).__name__}")
    return list(prompts)


def prompt_ids(prompt: Any, tokenizer: Any, template: dict[str, Any]) -> Sequence[int]:
    """Return the token ids of one prompt; their values are checked by the engine.

    Args:
        prompt: of one of the forms that `ACCEPTED` names.
        tokenizer: needed for text and chats.
        template: keywords of ``tokenizer.apply_chat_template`` for a chat.

    Raises:
        TypeError: another form; the message says what was found and what is accepted.
        ValueError: text or a chat without a tokenizer.
        Exception: whatever a chat template raises about a chat.
    """
    if isinstance(prompt, dict):
        prompt = _inside(prompt)
    if isinstance(prompt, str):
        prompt = _require(tokenizer, "text prompts")(prompt)["input_ids"]
    elif is_chat(prompt):
        tokenizer = _require(tokenizer, "chats")
        chat = readable_chat(prompt, tokenizer, template)
        prompt = tokenizer.apply_chat_template(chat, **template, tokenize=True, return_dict=True)["input_ids"]
    elif isinstance(prompt, np.ndarray):
        prompt = prompt.tolist()
    elif not isinstance(prompt, (list, tuple)):
        raise TypeError(f"{prompt!r:.80}: expected {ACCEPTED}, got {type(prompt).__name__}")
    ids: Sequence[int] = prompt
    return ids


def is_without_template(prompt: Any) -> bool:
    """Return whether a value is a prompt to which no chat template is applied; False if it is no prompt."""
    if isinstance(prompt, dict):
        return not is_message(prompt)
    return isinstance(prompt, (str, np.ndarray, Completion)) or (_is_token_ids(prompt) and not is_chat(prompt))


def check_tokenizer(tokenizer: Any) -> None:
    """Raise TypeError for the name of a tokenizer, which other libraries take in place of the object."""
    if isinstance(tokenizer, (str, os.PathLike)):
        raise TypeError(f"tokenizer={tokenizer!r:.200}: expected None or a tokenizer, such as "
                        f"AutoTokenizer.from_pretrained({tokenizer!r:.200})")


def _inside(prompt: dict[str, Any]) -> Any:
    """What a dict around one prompt holds, as vLLM takes them: ids where there are both; None counts as left out."""
    if is_message(prompt):
        raise TypeError(f"{prompt!r:.80}: this is one message; expected a chat, which is a list of messages")
    given = {name for name, value in prompt.items() if value is not None}
    if not given or not given <= {_TEXT, _IDS}:
        raise TypeError(f"a dict with {sorted(map(str, given))}: expected {_TEXT!r} (a str) or {_IDS!r} (token ids), "
                        "and all else as arguments of the call")
    inside, kinds = (prompt[_IDS], (list, tuple, np.ndarray)) if _IDS in given else (prompt[_TEXT], (str,))
    if not isinstance(inside, kinds) or is_chat(inside):
        name = _IDS if _IDS in given else _TEXT
        raise TypeError(f"{name}={inside!r:.80} in a dict: expected {'token ids' if name == _IDS else 'a str'}, got "
                        f"{type(inside).__name__}")
    return inside


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(t, (int, np.integer)) for t in value)


def _require(tokenizer: Any, what: str) -> Any:
    if tokenizer is None:
        raise ValueError(f"tokenizer=None: {what} need a tokenizer; give one, or pass token ids")
    return tokenizer
