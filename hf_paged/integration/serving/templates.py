"""Wishes that the model's chat template and transformers' parser of its answers have to know."""

from __future__ import annotations

from typing import Any

from hf_paged.integration.serving.calls import RefusedRequestError
from hf_paged.integration.serving.wishes import Wishes
from hf_paged.options.chat_keywords import template_variables


def check_template(wishes: Wishes, processor: Any, model: Any) -> None:
    """RefusedRequestError for tools or an effort that would change nothing, or calls that nobody would read."""
    if not wishes.has_tools and wishes.reasoning_effort is None:
        return
    from transformers.cli.serving.utils import get_response_template

    tokenizer = processor if hasattr(processor, "get_chat_template") else getattr(processor, "tokenizer", processor)
    given = dict(wishes.for_transformers().get("chat_template_kwargs") or {})
    known = template_variables(tokenizer, {**given, "tools": wishes.tools or None})
    if wishes.reasoning_effort is not None and "reasoning_effort" not in known:
        raise RefusedRequestError(f"reasoning_effort={wishes.reasoning_effort!r:.200}: expected it left out, since the "
                                  "model's chat template does not refer to it")
    if not wishes.has_tools:
        return
    if "tools" not in known:
        raise RefusedRequestError("tools: expected none, since the model's chat template does not refer to them")
    if get_response_template(processor, model) is None:
        raise RefusedRequestError("tools: expected none, since transformers cannot read the calls of this model "
                                  f"(model_type {model.config.model_type!r}, no response_template of its tokenizer)")
