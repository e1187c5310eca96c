"""The chat template of a tokenizer, and the variables that it reads."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

RENDERED = ("conversation", "messages")  # the chat itself


def template_source(tokenizer: Any, keywords: Mapping[str, Any]) -> str | None:
    """Return the template that `apply_chat_template` renders with these keywords; None if there is none to read."""
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
    """Return the variables that a template refers to and does not set itself, except the chat's."""
    from jinja2 import meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(source).environment
    return frozenset(meta.find_undeclared_variables(environment.parse(source))) - {*RENDERED}
