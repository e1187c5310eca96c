"""Processors in place of tokenizers: what belongs to which, and which template is rendered."""

from __future__ import annotations

import copy

import pytest
from image_processors import image, processor, user
from support import byte_tokenizer
from transformers.processing_utils import ProcessorMixin

from hf_paged.options.chat_keywords import template_source
from hf_paged.options.processors import chat_for, own_template, reads_images, render, tokenizer_in, with_template


class Bare(ProcessorMixin):
    """Of sounds, without a tokenizer."""

    def __init__(self):
        self.chat_template = None


@pytest.fixture(scope="module")
def made():
    return processor("llava")


def test_what_is_a_processor_of_images(made):
    tokenizer = byte_tokenizer()
    assert reads_images(made) and tokenizer_in(made) is made.tokenizer
    for other in (tokenizer, None, "name", Bare()):
        assert not reads_images(other)
    assert tokenizer_in(tokenizer) is tokenizer and tokenizer_in(None) is None and tokenizer_in(Bare()) is None


def test_the_template_that_is_rendered(made):
    made = copy.copy(made)
    assert own_template(made, None) == made.chat_template and own_template(made, "{{ x }}") == "{{ x }}"
    made.chat_template = {"default": "{{ messages }}", "other": "{{ y }}"}
    assert [own_template(made, name) for name in (None, "other", "{{ z }}")] == ["{{ messages }}", "{{ y }}", "{{ z }}"]
    assert template_source(made, {"chat_template": "other"}) == "{{ y }}"
    del made.chat_template["default"]
    assert own_template(made, None) is None and template_source(made, {}) is None


def test_a_processor_gets_its_tokenizers_template(made):
    made = copy.copy(made)
    assert with_template(made).chat_template == made.chat_template
    made.tokenizer.chat_template, made.chat_template = "{{ messages }}", None
    try:
        assert with_template(made).chat_template == "{{ messages }}"
    finally:
        made.tokenizer.chat_template = None
    tokenizer = byte_tokenizer()
    assert with_template(tokenizer) is tokenizer and with_template(Bare()).chat_template is None


def test_a_chat_stays_as_it_was_given(made):
    chat = [{"role": "user", "content": tuple(user("a", image(1))["content"])}, {"role": "assistant"}]
    assert chat_for(byte_tokenizer(), chat) is chat
    copied = chat_for(made, chat)
    assert copied[0]["content"] == list(chat[0]["content"]) and copied[1] == chat[1] and copied[1] is not chat[1]
    prompt = render(made, chat[:1], {"add_generation_prompt": True})
    assert {*prompt.inputs} >= {"pixel_values"} and "attention_mask" not in prompt.inputs
    assert type(prompt.ids) is list and type(chat[0]["content"]) is tuple
