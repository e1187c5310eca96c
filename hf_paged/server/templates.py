"""Checks of a request that need the model and its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from transformers import processing_utils

from hf_paged.integration.enable import get_engine, is_enabled
from hf_paged.integration.install import enable_once
from hf_paged.options.chat_keywords import check_read, template_parameters
from hf_paged.server.calls import RefusedRequestError
from hf_paged.server.forms import ask_for_calls
from hf_paged.server.server_request import ServerRequest

# Keywords of `apply_chat_template` that a body may set even if the template does not mention them.
_SETTABLE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "chat_template": ("a string", lambda value: isinstance(value, str)),
    "sanitize_control_tokens": ("true or false", lambda value: isinstance(value, bool)),
    "continue_final_message": ("false, since an answer is a message of its own", lambda value: value is False),
    "truncation": ("true or false", lambda value: isinstance(value, bool)),
    "max_length": ("an integer of at least 1, and truncation as true with it",
                   lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0),
}
# Content parts of a message that transformers' handler reads, by modality; the handler drops all other parts.
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_PARTS = {
    "LLM": _TEXT_PARTS,
    "VLM": _TEXT_PARTS | {"image_url", "input_image", "video_url"},
    "MULTIMODAL": _TEXT_PARTS | {"image_url", "input_image", "video_url", "input_audio", "audio_url"},
}


def check_for_model(wishes: ServerRequest, processor: Any, model: Any,
                    of_server: Mapping[str, Any] | None = None) -> None:
    """Raise RefusedRequestError for values that the model does not have or that its chat template does not use.

    Args:
        of_server: Template keywords of every chat, which `chat_template_kwargs` of the body overrides.
    """
    _check_tokens(wishes, model.config.get_text_config().vocab_size)
    given = dict(wishes.body.get("chat_template_kwargs") or {})
    fields: dict[str, Any] = {} if wishes.reasoning_effort is None else {"reasoning_effort": wishes.reasoning_effort}
    if wishes.has_tools:
        fields["tools"] = wishes.tools
    tokenizer = processor if hasattr(processor, "get_chat_template") else getattr(processor, "tokenizer", processor)
    settable = {*_SETTABLE} & template_parameters(processor)
    _check_values(given, settable)
    for keywords, others in ((given, fields), (fields, given)):
        try:
            check_read(keywords, tokenizer, others={**(of_server or {}), **others},
                       parameters=settable | _of_processor(processor))
        except ValueError as error:
            raise RefusedRequestError(f"{'chat_template_kwargs: ' if keywords is given else ''}{error}") from error
    if wishes.has_tools:
        _check_tools(wishes, processor, model)


def check_length(model: Any, inputs: Any) -> None:
    """Raise RefusedRequestError if the prompt leaves no room for an answer within `max_model_len`."""
    enable_once(model)
    if not is_enabled(model):
        return
    ids = inputs["input_ids"]
    length = len(ids) if isinstance(ids, list) else ids.shape[-1]
    most = get_engine(model).longest(length)
    if length >= most:
        raise RefusedRequestError(f"the prompt has {length:,} tokens: expected at most {most - 1:,}, since prompt and "
                                  f"answer together may have {most:,} (max_model_len)")


def check_parts(messages: Any, kind: str) -> None:
    """Raise RefusedRequestError for a content part that models of a modality do not read.

    Args:
        kind: Name of transformers' `Modality`.
    """
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            found = part.get("type") if isinstance(part, dict) else None
            if isinstance(found, str) and found not in _PARTS.get(kind, {found}):
                raise RefusedRequestError(f"messages: a part of type={found!r:.200}, expected what this model reads: "
                                          f"{', '.join(sorted(_PARTS[kind]))}")


def _check_tokens(wishes: ServerRequest, vocab_size: int) -> None:
    biased = [token for (token,) in wishes.settings.get("sequence_bias", ())]
    for name, tokens in (("stop_token_ids", wishes.stop_token_ids), ("logit_bias", biased)):
        if (wrong := next((token for token in tokens if token >= vocab_size), None)) is not None:
            raise RefusedRequestError(f"{name}: holds {wrong}, expected token ids in [0, {vocab_size})")


def _check_values(given: dict[Any, Any], settable: set[str]) -> None:
    for name in settable & given.keys():
        value, (expected, is_right) = given[name], _SETTABLE[name]
        if not is_right(value) or (name == "max_length" and given.get("truncation") is not True):
            raise RefusedRequestError(f"chat_template_kwargs: {name}={value!r:.200}, expected {expected}")


def _of_processor(processor: Any) -> set[str]:
    """Return the keywords of images, videos and audio that a processor accepts; empty for a tokenizer."""
    if not isinstance(processor, processing_utils.ProcessorMixin):
        return set()
    kinds = (processing_utils.ImagesKwargs, processing_utils.VideosKwargs, processing_utils.AudioKwargs)
    own = getattr(type(processor), "valid_processor_kwargs", processing_utils.ProcessingKwargs)
    of_model = [kind for kind in own.__annotations__.values() if hasattr(kind, "__annotations__")]
    return {name for kind in (*kinds, *of_model) for name in kind.__annotations__}


def _check_tools(wishes: ServerRequest, processor: Any, model: Any) -> None:
    from transformers.cli.serving.utils import get_response_template

    template = get_response_template(processor, model)
    if template is None:
        raise RefusedRequestError("tools: expected none, since transformers cannot read the calls of this model "
                                  f"(model_type {model.config.model_type!r}, no response_template of its tokenizer)")
    ask_for_calls(wishes, template)
