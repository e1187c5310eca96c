"""Haystack's local chat generator: native, or lockstep where stop words bring a criterion of its own."""

from __future__ import annotations

import pytest
from programs import assert_program

import hf_paged

transformers_haystack = pytest.importorskip("haystack_integrations.components.generators.transformers",
                                            reason="of the extra `callers`")
haystack = pytest.importorskip("haystack")
dataclasses = pytest.importorskip("haystack.dataclasses")

QUESTION = [dataclasses.ChatMessage.from_user("What is 47 + 8?")]


def _generator(path, **options):
    generator = transformers_haystack.TransformersChatGenerator(
        path, "text-generation", generation_kwargs={"max_new_tokens": 160, "do_sample": False}, **options
    )
    generator.warm_up()
    return generator


def test_in_a_pipeline(talker_path):
    generator = _generator(talker_path)
    pipeline = haystack.Pipeline()
    pipeline.add_component("llm", generator)
    assert_program(generator.pipeline.model,
                   lambda: pipeline.run({"llm": {"messages": QUESTION}})["llm"]["replies"][0].text, ["native"])
    hf_paged.disable(generator.pipeline.model)


def test_a_stop_word(talker_path):
    text = _generator(talker_path).run(QUESTION)["replies"][0].text
    stop = text[-40:]
    assert text.find(stop) > len(text) // 2
    generator = _generator(talker_path, stop_words=[stop])
    stopped = assert_program(generator.pipeline.model, lambda: generator.run(QUESTION)["replies"][0].text, ["lockstep"])
    assert stopped == text[: text.find(stop)].rstrip()


def test_a_stream(talker_path):
    pieces = []
    generator = _generator(talker_path, streaming_callback=lambda chunk: pieces.append(chunk.content))

    def program():
        pieces.clear()
        return generator.run(QUESTION)["replies"][0].text, [*pieces]

    _, streamed = assert_program(generator.pipeline.model, program, ["native"])
    assert len(streamed) > 10
