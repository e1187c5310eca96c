"""LlamaIndex's `HuggingFaceLLM`: it always brings a stopping criterion of its own, so that its calls take lockstep."""

from __future__ import annotations

import pytest
from programs import assert_program

huggingface = pytest.importorskip("llama_index.llms.huggingface", reason="of the extra `callers`")
llms = pytest.importorskip("llama_index.core.llms")


def _llm(model, tokenizer, **options):
    return huggingface.HuggingFaceLLM(model=model, tokenizer=tokenizer, max_new_tokens=160, context_window=2048,
                                      generate_kwargs={"do_sample": False}, **options)


def test_complete(talker, trained_tokenizer):
    llm = _llm(talker, trained_tokenizer)
    assert_program(talker, lambda: llm.complete("bold-fox").text, ["lockstep"])


def test_a_chat_that_ends_at_a_stopping_id(talker, trained_tokenizer):
    messages = [llms.ChatMessage(role="user", content="What is 47 + 8?")]
    ids = trained_tokenizer(_llm(talker, trained_tokenizer).chat(messages).message.content)["input_ids"]
    stop = next(token for place, token in enumerate(ids) if place >= 60 and token not in ids[:place])
    llm = _llm(talker, trained_tokenizer, stopping_ids=[stop], is_chat_model=True)
    text = assert_program(talker, lambda: llm.chat(messages).message.content, ["lockstep"])
    assert 60 <= len(trained_tokenizer(text)["input_ids"]) < len(ids)


def test_a_streamed_chat(talker, trained_tokenizer):
    llm = _llm(talker, trained_tokenizer, is_chat_model=True)
    messages = [llms.ChatMessage(role="user", content="What is 47 + 8?")]
    pieces = assert_program(talker, lambda: [r.delta for r in llm.stream_chat(messages)], ["lockstep"])
    assert len(pieces) > 10
