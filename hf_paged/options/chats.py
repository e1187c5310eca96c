"""Chats as prompts: what one is, what is wrong with its messages, and contents that are given in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_paged.options.chat_templates import reads_parts, template_source

_OF_PROMPTS = ("prompt", "prompt_token_ids")
_TEXT_PARTS = ("text", "input_text", "output_text")
_MEDIA = ("image", "image_url", "input_image", "video", "video_url", "audio", "audio_url", "input_audio", "file")
_EXPECTED = "expected text parts, {'type': 'text', 'text': str}"


def is_chat(value: Any) -> bool:
    """Is this meant as one chat: a list of dicts, of which at least one is a message and none another prompt?"""
    if not isinstance(value, (list, tuple)) or not value or not all(isinstance(one, dict) for one in value):
        return False
    return any(map(is_message, value)) and not any(name in one for one in value for name in _OF_PROMPTS)


def is_message(value: Any) -> bool:
    """Is this meant as a message of a chat?"""
    return isinstance(value, dict) and ("role" in value or "content" in value)


def readable_chat(chat: Any, tokenizer: Any, keywords: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A chat whose contents are such as its template reads.

    Text parts are joined by spaces, as transformers' server joins them, where the template does not take parts.

    Args:
        chat: as `is_chat` knows it.
        keywords: of `apply_chat_template`, which decide on the template.

    Raises:
        ValueError, TypeError: a message without a role, or a part that is no text; names the message.
    """
    for number, message in enumerate(chat):
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{number}]={message!r:.80}: expected a role, as in "
                             "{'role': 'user', 'content': 'text'}")
    if not any(isinstance(message.get("content"), (list, tuple)) for message in chat):
        return list(chat)
    source = template_source(tokenizer, keywords)
    takes_parts = source is None or reads_parts(source)
    return [_readable(message, f"messages[{number}]['content']", takes_parts) for number, message in enumerate(chat)]


def _readable(message: dict[str, Any], name: str, takes_parts: bool) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return message
    parts = [_part(part, f"{name}[{number}]", takes_parts) for number, part in enumerate(content)]
    return {**message, "content": parts if takes_parts else " ".join(part["text"] for part in parts)}


def _part(part: Any, name: str, takes_parts: bool) -> dict[str, Any]:
    if not isinstance(part, dict):
        raise TypeError(f"{name}={part!r:.80}: {_EXPECTED}")
    kind = part.get("type")
    if media := [word for word in _MEDIA if word == kind or part.get(word) is not None]:
        raise ValueError(f"{name}: a part of type {media[0]!r}, {_EXPECTED}: a model generates from text alone here")
    if kind not in _TEXT_PARTS:
        if takes_parts and isinstance(kind, str):  # of the template's own
            return part
        raise ValueError(f"{name}: a part of type {kind!r:.80}, {_EXPECTED}")
    if not isinstance(part.get("text"), str):
        raise TypeError(f"{name}={part!r:.80}: {_EXPECTED}")
    return {"type": "text", "text": part["text"]}
