"""Outlines: constrained text by a logits processor of its own, whose automaton the engine follows natively."""

from __future__ import annotations

import json

import pytest
from programs import assert_program

pytestmark = pytest.mark.slow  # Outlines compiles its mask with torch.compile: up to a minute on a loaded machine
outlines = pytest.importorskip("outlines", reason="of the extra `callers`")
types = pytest.importorskip("outlines.types")
pydantic = pytest.importorskip("pydantic")

PROMPT = "What is the code of bold-fox?"


def test_a_regular_expression(talker, trained_tokenizer):
    llm = outlines.from_transformers(talker, trained_tokenizer)
    digits = types.Regex("[0-9]{100}")
    text = assert_program(talker, lambda: llm(PROMPT, digits, max_new_tokens=200), ["native"])
    assert len(text) == 100 and text.isdecimal()


def test_a_batch_of_json(talker, trained_tokenizer):
    class Code(pydantic.BaseModel):
        name: pydantic.constr(pattern="[a-z]{60,80}")
        code: int

    llm = outlines.from_transformers(talker, trained_tokenizer)
    prompts = [PROMPT, "amber", "What is 47 + 8?"]
    texts = assert_program(talker, lambda: llm.batch(prompts, Code, max_new_tokens=160), ["native"])
    assert len(texts) == len(prompts)
    assert 60 <= len(json.loads(texts[0])["name"]) <= 80


def test_without_an_output_type(talker, trained_tokenizer):
    llm = outlines.from_transformers(talker, trained_tokenizer)
    assert_program(talker, lambda: llm(PROMPT, max_new_tokens=160), ["native"])


@pytest.mark.parametrize("backend", ["xgrammar"])
def test_another_backend(talker, trained_tokenizer, backend):
    pytest.importorskip(backend)
    llm = outlines.from_transformers(talker, trained_tokenizer)
    digits = outlines.Generator(llm, types.Regex("[0-9]{100}"), backend=backend)
    text = assert_program(talker, lambda: digits(PROMPT, max_new_tokens=200), ["native"])
    assert len(text) == 100 and text.isdecimal()
