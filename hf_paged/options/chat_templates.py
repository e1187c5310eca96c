"""What a chat template reads: its variables, and whether it takes a message's content in parts."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

RENDERED = ("conversation", "messages")  # the chat itself
_TEXT = "hello"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


def template_source(tokenizer: Any, keywords: Mapping[str, Any]) -> str | None:
    """The template that `apply_chat_template` renders with these keywords; None where there is none to read."""
    if not hasattr(tokenizer, "get_chat_template"):
        return None
    try:
        source = tokenizer.get_chat_template(keywords.get("chat_template"), keywords.get("tools"))
        variables_of(source)
    except Exception:  # no template, or one that is none: applying it says so
        return None
    return str(source)


@functools.lru_cache(maxsize=32)
def variables_of(source: str) -> frozenset[str]:
    """Variables that a template refers to and does not set itself, but for the chat."""
    from jinja2 import meta

    environment = _compiled(source).environment
    return frozenset(meta.find_undeclared_variables(environment.parse(source))) - {*RENDERED}


@functools.lru_cache(maxsize=32)
def reads_parts(source: str) -> bool:
    """Does a template take a list of parts as a message's content, rather than fail or write the list down?"""
    chat = [{"role": "user", "content": [{"type": "text", "text": _TEXT}]}]
    try:
        rendered = _compiled(source).render(messages=chat, **dict.fromkeys(_SPECIAL, ""))
    except Exception:
        return False
    return _TEXT in rendered and re.search("['\"]type['\"]", rendered) is None


def _compiled(source: str) -> Any:
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(source)
