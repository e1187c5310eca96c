"""Processors in place of tokenizers: chats that they render, with what they make of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from transformers.processing_utils import ProcessorMixin


class Prompt(NamedTuple):
    """A prompt as token ids.

    Attributes:
        inputs: What a processor made besides the ids, with a leading dimension for prompts: pixels of images, for
            example.
    """

    ids: list[int]
    inputs: Mapping[str, Any] = MappingProxyType({})


def tokenizer_in(given: Any) -> Any:
    """Return the tokenizer of a processor; anything else is returned unchanged."""
    return getattr(given, "tokenizer", None) if isinstance(given, ProcessorMixin) else given


def reads_images(given: Any) -> bool:
    """Return whether this is a processor of texts and images."""
    return isinstance(given, ProcessorMixin) and hasattr(given, "image_processor") and hasattr(given, "tokenizer")


def with_template(given: Any) -> Any:
    """Return a processor with its tokenizer's chat template where it has none; anything else is returned unchanged."""
    if (tokenizer := tokenizer_in(given)) is not given and given.chat_template is None:
        given.chat_template = getattr(tokenizer, "chat_template", None)
    return given


def render(renderer: Any, chat: Sequence[Mapping[str, Any]], keywords: Mapping[str, Any]) -> Prompt:
    """Return a chat as the template of a tokenizer or of a processor renders it.

    Raises whatever the template raises, and a processor about images.
    """
    if not isinstance(renderer, ProcessorMixin):
        return Prompt(renderer.apply_chat_template(chat, **keywords, tokenize=True, return_dict=True)["input_ids"])
    made: Any = renderer.apply_chat_template(chat_for(renderer, chat), **keywords, tokenize=True,
                                             return_dict=True, return_tensors="pt")
    others = {name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")}
    return Prompt(made["input_ids"][0].tolist(), others)


def chat_for(renderer: Any, chat: Sequence[Mapping[str, Any]]) -> Any:
    """Return a chat as a tokenizer or a processor takes it: a processor gets copies of messages, whose contents it
    replaces, with parts in lists."""
    if not isinstance(renderer, ProcessorMixin):
        return chat
    return [{name: list(value) if name == "content" and isinstance(value, tuple) else value
             for name, value in message.items()} for message in chat]


def own_template(processor: Any, given: Any) -> str | None:
    """Return the template that a processor renders: that of a keyword, by its name or as it is, else its own."""
    known = processor.chat_template
    if isinstance(known, dict):
        return known.get("default" if given is None else given, given)
    return known if given is None else given
