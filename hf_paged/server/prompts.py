"""Prompts of the endpoints as token ids, and the checks of a body that need the model and its chat template."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Collection, Iterable
from typing import Any

from transformers import processing_utils

from hf_paged.options.chat_keywords import check_read, template_parameters
from hf_paged.options.processors import Prompt, render
from hf_paged.options.prompts import MEDIA
from hf_paged.server.errors import RefusedRequestError, blaming
from hf_paged.server.images import ImageReader, check_option
from hf_paged.server.protocol import (
    EXPECTED_INPUT,
    EXPECTED_MESSAGES,
    ChatBody,
    ConversationBody,
    RequestBody,
    ResponsesBody,
)
from hf_paged.server.served_model import ServedModel
from hf_paged.server.tools import check_tools

# Keywords of `apply_chat_template` that a body may set even if the template does not mention them.
_SETTABLE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "chat_template": ("a string", lambda value: isinstance(value, str)),
    "sanitize_control_tokens": ("true or false", lambda value: isinstance(value, bool)),
    "continue_final_message": ("false, since an answer is a message of its own", lambda value: value is False),
    "truncation": ("true or false", lambda value: isinstance(value, bool)),
    "max_length": ("an integer of at least 1, and truncation as true with it",
                   lambda value: isinstance(value, int) and not isinstance(value, bool) and value > 0),
}



def text_prompt(served: ServedModel, text: str | list[int]) -> Prompt:
    """Return a prompt of the completions endpoint."""
    with blaming("prompt: expected a text that the tokenizer takes"):
        ids = list(served.tokenizer(text)["input_ids"]) if isinstance(text, str) else text
    _check_ids("prompt", ids, served)
    return _checked(served, Prompt(ids))


def chat_prompt(served: ServedModel, body: ChatBody | ResponsesBody) -> Prompt:
    """Render the messages of a body by the model's chat template.

    Raises:
        RefusedRequestError: a value that the model does not have, that its template does not use, or that the template
            cannot render.
    """
    is_chat = isinstance(body, ChatBody)
    with blaming(f"messages: {EXPECTED_MESSAGES}" if is_chat else f"input: {EXPECTED_INPUT}"):
        given = body.messages if isinstance(body, ChatBody) else _messages_of_input(body)
        images = ImageReader(served.image_limits)
        messages = [_message(message, served.modalities, images) for message in given]
    check_for_model(served, body)
    keywords = {"add_generation_prompt": True, "tools": body.callable_tools or None, **served.template_keywords,
                **body.template_keywords, **_effort(body)}
    fields = "messages" if is_chat else "input"
    with blaming(f"{fields}, tools, chat_template_kwargs: expected what the model's chat template can render"):
        return _checked(served, render(served.processor, messages, keywords))


def _checked(served: ServedModel, prompt: Prompt) -> Prompt:
    """Raise RefusedRequestError if the prompt has no token, or leaves no room for an answer in `max_model_len`."""
    length = len(prompt.ids)
    if not length:
        raise RefusedRequestError("the prompt has no tokens: expected at least one")
    if served.engine is not None and length >= (most := served.engine.longest(length)):
        raise RefusedRequestError(f"the prompt has {length:,} tokens: expected at most {most - 1:,}, since prompt and "
                                  f"answer together may have {most:,} (max_model_len)")
    return prompt


# -- messages ---------------------------------------------------------------------------------------------------------


def _messages_of_input(body: ResponsesBody) -> list[dict[str, Any]]:
    """Return the chat of a body of the Responses API."""
    given = body.input
    if isinstance(given, str) or ("role" not in given[0] and str(given[0].get("type")).startswith("input_")):
        messages = [{"role": "user", "content": given}]
    else:
        messages = _messages_of_items(given)
    if body.instructions:
        if messages and messages[0]["role"] == "system":
            messages = messages[1:]
        messages = [{"role": "system", "content": body.instructions}, *messages]
    return messages


def _messages_of_items(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of input items: messages, reasoning, and calls of functions with their outputs."""
    messages: list[dict[str, Any]] = []
    reasoning: str | None = None  # of the assistant's message that follows
    for item in items:
        kind = item.get("type")
        if kind == "reasoning":
            reasoning = "".join(part["text"] for part in item.get("content") or [])
        elif "role" in item:
            message = {"role": item["role"], "content": item.get("content", "")}
            if reasoning is not None and item["role"] == "assistant":
                message["reasoning_content"], reasoning = reasoning, None
            messages.append(message)
        elif kind == "function_call":
            call = {"id": item["call_id"], "function": {"name": item["name"], "arguments": item["arguments"]}}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        else:
            raise RefusedRequestError(f"input: an item of type={kind!r:.200}, {EXPECTED_INPUT}")
    return messages


def _message(message: dict[str, Any], modalities: frozenset[str], images: ImageReader) -> dict[str, Any]:
    """Return a message as chat templates read it; without modalities besides text, its content is one text."""
    if not isinstance(message["role"], str):
        raise TypeError("role: expected a string")
    kept: tuple[str, ...] = ("tool_call_id", "reasoning_content")
    made = {name: message[name] for name in kept if name in message}
    content = message.get("content") or []
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [_call(call) for call in calls]
        content = []  # empty, or the calls as the model wrote them, which the template writes anew
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [
        _part(part, modalities, images) for part in content]
    text = " ".join([part["text"] for part in parts if part["type"] == "text"])
    return {"role": message["role"], "content": parts if modalities else text, **made}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, over which templates iterate."""
    call = copy.deepcopy(call)
    function = call.get("function") or call
    if isinstance(function["arguments"], str):
        function["arguments"] = json.loads(function["arguments"])
    return call


# The kind of part that a processor reads by the type of a part in a body, and the field that holds it.
_TEXT_PARTS = ("input_text", "output_text", "text")
_PARTS = {"image_url": ("image", "image_url"), "input_image": ("image", "image_url"),
          "audio_url": ("audio", "audio_url"), "input_audio": ("audio", "input_audio")}


def _part(part: dict[str, Any], modalities: frozenset[str], images: ImageReader) -> dict[str, Any]:
    """Return a part of a message as processors read it."""
    kind = part["type"]
    if kind in _TEXT_PARTS:
        if not isinstance(part["text"], str):
            raise TypeError("text: expected a string")
        if media := [name for name in MEDIA if part.get(name) is not None]:
            raise RefusedRequestError(f"messages: {media[0]} in a part of type={kind!r}, expected a part of its own")
        return {"type": "text", "text": part["text"]}
    known = {name for name, (modality, _) in _PARTS.items() if modality in modalities}
    if kind not in known:
        raise RefusedRequestError(f"messages: a part of type={kind!r:.200}, expected what this model reads: "
                                  f"{', '.join(sorted({*_TEXT_PARTS, *known}))}")
    modality, field = _PARTS[kind]
    value = part[field]
    if modality == "image":
        url, beside = (value["url"], value) if isinstance(value, dict) else (value, part)
        return {"type": "image", "image": images.read(url, beside.get("detail"))}
    if isinstance(value, dict):
        value = value["url"] if "url" in value else f"data:audio/{value.get('format', 'wav')};base64,{value['data']}"
    if not isinstance(value, str) or not value.startswith("data:audio/"):
        raise RefusedRequestError(f"messages: {value!r:.80} as audio, expected a data URL (data:audio/wav;base64,...): "
                                  "the server fetches no URLs and reads no files")
    return {"type": "audio", "url": value}


# -- the model and its template ---------------------------------------------------------------------------------------


def check_tokens(served: ServedModel, body: RequestBody) -> None:
    """Raise RefusedRequestError for token ids that the model does not have."""
    _check_ids("stop_token_ids", body.stop_token_ids or (), served)
    _check_ids("logit_bias", body.bias, served)


def _check_ids(name: str, tokens: Iterable[int], served: ServedModel) -> None:
    if (wrong := next((token for token in tokens if not 0 <= token < served.vocab_size), None)) is not None:
        raise RefusedRequestError(f"{name}: holds {wrong}, expected token ids in [0, {served.vocab_size})")


def check_for_model(served: ServedModel, body: ConversationBody) -> None:
    """Raise RefusedRequestError for values that the model does not have or that its chat template does not use."""
    given = body.template_keywords
    fields: dict[str, Any] = _effort(body)
    if body.callable_tools:
        fields["tools"] = body.callable_tools
    processor = served.processor
    settable = {*_SETTABLE} & template_parameters(processor)
    for name in settable & given.keys():
        value, (expected, is_right) = given[name], _SETTABLE[name]
        if not is_right(value) or (name == "max_length" and given.get("truncation") is not True):
            raise RefusedRequestError(f"chat_template_kwargs: {name}={value!r:.200}, expected {expected}")
    for name in sorted(_of_processor(processor, ("images",)) & given.keys()):
        check_option(processor, name, given[name])
    for keywords, others in ((given, fields), (fields, given)):
        try:
            check_read(keywords, processor, others={**served.template_keywords, **others},
                       parameters=settable | _of_processor(processor))
        except ValueError as error:
            raise RefusedRequestError(f"{'chat_template_kwargs: ' if keywords is given else ''}{error}") from error
    if body.callable_tools:
        check_tools(processor, served.model)


def _effort(body: ConversationBody) -> dict[str, Any]:
    return {} if body.effort is None else {"reasoning_effort": body.effort}


# The part of a processor that reads each modality.
_READERS = {"images": "image_processor", "videos": "video_processor", "audio": "feature_extractor"}


def _of_processor(processor: Any, modalities: Collection[str] = _READERS) -> set[str]:
    """Return the keywords of those of these modalities that a processor reads; empty for a tokenizer."""
    if not isinstance(processor, processing_utils.ProcessorMixin):
        return set()
    own = getattr(type(processor), "valid_processor_kwargs", processing_utils.ProcessingKwargs)
    kinds = [kind for modality in modalities if hasattr(processor, _READERS[modality]) for kind in (
        getattr(processing_utils, f"{modality.title()}Kwargs"), own.__annotations__.get(f"{modality}_kwargs"))]
    return {name for kind in kinds for name in getattr(kind, "__annotations__", ())}
