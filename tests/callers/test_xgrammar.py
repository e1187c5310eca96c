"""XGrammar's logits processor, handed to `generate` as its documentation has it: its calls run natively."""

from __future__ import annotations

import json
import re

import pytest
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

    texts = assert_program(talker, program, ["native"])
    assert [70 <= len(json.loads(text)["name"]) <= 80 for text in texts] == [True] * 3, texts


def test_a_grammar_a_row_while_sampling(talker, trained_tokenizer):
    """Native draws are not torch's: what both models' rows have in common is their form."""
    info = xgrammar.TokenizerInfo.from_huggingface(trained_tokenizer, vocab_size=talker.config.vocab_size)
    compiler, forms = xgrammar.GrammarCompiler(info), ("[0-9]{100}", "[a-f]{100}")
    grammars = list(map(compiler.compile_regex, forms))
    inputs = trained_tokenizer(["bold-fox", "owl"], return_tensors="pt", padding=True)

    def program() -> list[bool]:
        processor = LogitsProcessor(grammars)
        ids = talker.generate(**inputs, max_new_tokens=140, do_sample=True, logits_processor=[processor])
        texts = trained_tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return [re.fullmatch(form, text) is not None for form, text in zip(forms, texts, strict=True)]

    assert assert_program(talker, program, ["native"]) == [True, True]
