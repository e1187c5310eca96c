"""smolagents' `TransformersModel`: native without stop sequences; with them it brings a criterion of its own."""

from __future__ import annotations

import pytest
from programs import assert_program

import hf_paged

smolagents = pytest.importorskip("smolagents", reason="of the extra `callers`")

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "What is 47 + 8?"}]}]


@pytest.fixture
def llm(talker_path):
    llm = smolagents.TransformersModel(talker_path, max_new_tokens=160, do_sample=False)
    yield llm
    hf_paged.disable(llm.model)


def test_without_stop_sequences(llm):
    assert_program(llm.model, lambda: llm(MESSAGES).content, ["native"])


def test_stop_sequences(llm):
    text = llm(MESSAGES).content
    stop = text[-40:]
    assert text.find(stop) > len(text) // 2
    stopped = assert_program(llm.model, lambda: llm(MESSAGES, stop_sequences=[stop]).content, ["lockstep"])
    assert stopped == text[: text.find(stop)]


def test_a_stream(llm):
    pieces = assert_program(llm.model, lambda: [d.content for d in llm.generate_stream(MESSAGES)], ["native"])
    assert len(pieces) > 10


def test_an_agent(llm):
    """Each step of an agent is a call with the stop sequences that end its code."""
    def program():
        agent = smolagents.CodeAgent(tools=[], model=llm, max_steps=1, verbosity_level=0)
        agent.run("What is 47 + 8?")
        return [step.model_output for step in agent.memory.steps if hasattr(step, "model_output")]

    assert_program(llm.model, program, ["lockstep", "native"])
