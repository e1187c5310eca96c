"""XGrammar's logits processor, handed to `generate` as its documentation has it: its calls take lockstep."""

from __future__ import annotations

import json

import pytest
import torch
from programs import assert_program

xgrammar = pytest.importorskip("xgrammar", reason="of the extra `callers`")
from xgrammar.contrib.hf import LogitsProcessor  # noqa: E402

SCHEMA = json.dumps({
    "type": "object", "required": ["name", "known"],
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{70,80}$"}, "known": {"type": "boolean"}},
})


def test_batches_under_a_schema(talker, trained_tokenizer):
    info = xgrammar.TokenizerInfo.from_huggingface(trained_tokenizer, vocab_size=talker.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(SCHEMA, any_whitespace=False)
    inputs = trained_tokenizer(["bold-fox", "amber", "What is 47 + 8?"], return_tensors="pt", padding=True)

    def program() -> list[str]:
        ids = talker.generate(**inputs, max_new_tokens=160, logits_processor=[LogitsProcessor(grammar)])
        return trained_tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    texts = assert_program(talker, program, ["lockstep"])
    assert [70 <= len(json.loads(text)["name"]) <= 80 for text in texts] == [True] * 3, texts


def test_a_grammar_a_row_while_sampling(talker, trained_tokenizer):
    """The draws are torch's own, so that seeded calls give the tokens of stock."""
    info = xgrammar.TokenizerInfo.from_huggingface(trained_tokenizer, vocab_size=talker.config.vocab_size)
    compiler = xgrammar.GrammarCompiler(info)
    grammars = [compiler.compile_regex(f"[{letters}]{{100}}") for letters in ("0-9", "a-f")]
    inputs = trained_tokenizer(["bold-fox", "owl"], return_tensors="pt", padding=True)

    def program() -> list[list[int]]:
        processor = LogitsProcessor(grammars)
        return talker.generate(**inputs, max_new_tokens=140, do_sample=True, logits_processor=[processor]).tolist()

    rows = torch.tensor(assert_program(talker, program, ["lockstep"]))
    texts = trained_tokenizer.batch_decode(rows[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert texts[0].isdecimal() and set(texts[1]) <= set("abcdef")
