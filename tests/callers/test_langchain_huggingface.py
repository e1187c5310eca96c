"""LangChain's `HuggingFacePipeline`: native but for its streams, which bring a stopping criterion of its own."""

from __future__ import annotations

import pytest
from programs import assert_program

import hf_paged

langchain = pytest.importorskip("langchain_huggingface", reason="of the extra `callers`")
messages = pytest.importorskip("langchain_core.messages")


@pytest.fixture
def llm(talker_path):
    options = {"max_new_tokens": 160, "do_sample": False, "return_full_text": False}
    llm = langchain.HuggingFacePipeline.from_model_id(talker_path, "text-generation", pipeline_kwargs=options)
    yield llm
    hf_paged.disable(llm.pipeline.model)


def test_a_text(llm):
    assert_program(llm.pipeline.model, lambda: llm.invoke("bold-fox"), ["native"])


def test_a_batch_is_one_call(llm):
    texts = assert_program(llm.pipeline.model, lambda: llm.batch(["bold-fox", "amber", "What is 47 + 8?"]), ["native"])
    assert len(set(texts)) == 3


def test_a_chat(llm):
    chat = langchain.ChatHuggingFace(llm=llm)
    question = [messages.HumanMessage("What is 47 + 8?")]
    assert_program(llm.pipeline.model, lambda: chat.invoke(question).content, ["native"])


def test_a_stream(llm):
    pieces = assert_program(llm.pipeline.model, lambda: [*llm.stream("bold-fox")], ["lockstep"])
    assert len(pieces) > 10
