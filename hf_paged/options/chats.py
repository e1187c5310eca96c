"""Chats as prompts: what one is, what is wrong with its messages, and contents that are given in parts."""

from __future__ import annotations

import html
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

_OF_PROMPTS = ("prompt", "prompt_token_ids")
_ROLES = ("system", "developer", "user", "assistant")  # whose contents are text; a tool's may be data
_OTHERS = "other roles"
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA = ("image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio", "file")
_EXPECTED = "expected text parts, {'type': 'text', 'text': str}"


def is_chat(value: Any) -> bool:
    """Return whether a value is meant as one chat: a list of dicts with at least one message and no other prompt."""
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(one, dict) for one in value):
        return False
    return any(map(is_message, value)) and not any(name in one for one in value for name in _OF_PROMPTS)


def is_message(value: Any) -> bool:
    """Return whether a value is meant as a message of a chat."""
    return isinstance(value, dict) and ("role" in value or "content" in value)


def readable_chat(chat: Any, tokenizer: Any, keywords: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a chat with contents in the form that its template reads.

    Parts stay as they are given wherever the template renders them and does not write down the list itself. Where it
    raises or does, text parts are joined by spaces, as transformers' server joins them, in as few roles as suffice.

    Args:
        chat: as `is_chat` knows it.
        keywords: of `apply_chat_template`.

    Raises:
        ValueError, TypeError: a message without a role, or a part that is no text; names the message.
    """
    for number, message in enumerate(chat):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{number}]={message!r:.80}: expected a role, as in "
                             "{'role': 'user', 'content': 'text'}")
    _check_media(chat)
    given = {_group(message) for message in chat if _parts(message) is not None}
    if not given:
        return list(chat)
    groups = [group for group in (*_ROLES, _OTHERS) if group in given]
    fault: Exception | None = None
    wrong: Exception | None = None
    for joined in itertools.chain.from_iterable(itertools.combinations(groups, n) for n in range(len(groups) + 1)):
        try:
            found = [_joined(message, f"messages[{number}]['content']") if _group(message) in joined else message
                     for number, message in enumerate(chat)]
        except (ValueError, TypeError) as error:
            wrong = wrong or error
            continue
        try:
            _check_rendered(found, tokenizer, keywords)
            return found
        except Exception as error:
            fault = fault or error
    if wrong is not None:
        raise type(wrong)(f"{wrong}; with the parts as given, the chat template fails: {fault}") from fault
    return found  # with all joined: applying the template says what is wrong


def _group(message: Mapping[str, Any]) -> str:
    role: str = message["role"]
    return role if role in _ROLES else _OTHERS


def _parts(message: Mapping[str, Any]) -> list[Any] | None:
    content = message.get("content")
    return list(content) if isinstance(content, (list, tuple)) else None


def _check_media(chat: Any) -> None:
    """Raise ValueError for images, videos, sounds and files, which a template may drop or write as placeholders."""
    for number, message in enumerate(chat):
        for place, part in enumerate(_parts(message) or () if message["role"] in _ROLES else ()):
            if isinstance(part, Mapping) and (
                    media := [word for word in _MEDIA if word == part.get("type") or part.get(word) is not None]):
                raise ValueError(f"messages[{number}]['content'][{place}]: a part of type {media[0]!r}, {_EXPECTED}: a "
                                 "model generates from text alone here")


def _check_rendered(chat: list[dict[str, Any]], tokenizer: Any, keywords: Mapping[str, Any]) -> None:
    """Raise what a template raises about a chat, and ValueError where it writes a list of parts, not their texts."""
    rendered = _rendered(chat, tokenizer, keywords)
    for number, message in enumerate(chat):
        parts = _parts(message) if message["role"] in _ROLES else None
        if parts is None or not (written := {form for form in _forms(parts) if form in rendered}):
            continue
        # The template's own words, and other messages, may hold the same characters.
        try:
            without = _rendered([*chat[:number], {**message, "content": ""}, *chat[number + 1:]], tokenizer, keywords)
        except Exception:
            without = ""
        if any(rendered.count(form) > without.count(form) for form in written):
            raise ValueError(f"it writes the list that messages[{number}]['content'] is")


def _rendered(chat: list[dict[str, Any]], tokenizer: Any, keywords: Mapping[str, Any]) -> str:
    return _plain(tokenizer.apply_chat_template(chat, **keywords, tokenize=False))


def _forms(parts: list[Any]) -> set[str]:
    """Return texts that a template may write for a list in place of text: Python's repr or JSON, keys sorted or not."""
    made = {_plain(repr(parts))}
    for is_sorted, is_ascii in itertools.product((False, True), repeat=2):
        try:
            text = json.dumps(parts, sort_keys=is_sorted, ensure_ascii=is_ascii)
            made |= {_plain(text), _plain(repr(json.loads(text)))}
        except (TypeError, ValueError):  # no JSON
            continue
    return made


def _plain(text: str) -> str:
    """Return a text without the characters that filters of a template change: case, spaces, quotes and escapes."""
    return re.sub(r"[\s\"'\\]", "", html.unescape(text)).casefold()


def _joined(message: dict[str, Any], name: str) -> dict[str, Any]:
    parts = _parts(message)
    if parts is None:
        return message
    return {**message, "content": " ".join(_text(part, f"{name}[{number}]") for number, part in enumerate(parts))}


def _text(part: Any, name: str) -> str:
    if not isinstance(part, dict):
        raise TypeError(f"{name}={part!r:.80}: {_EXPECTED}")
    if part.get("type") not in _TEXT_PARTS:
        raise ValueError(f"{name}: a part of type {part.get('type')!r:.80}, {_EXPECTED}")
    if not isinstance(part.get("text"), str):
        raise TypeError(f"{name}={part!r:.80}: {_EXPECTED}")
    return str(part["text"])
