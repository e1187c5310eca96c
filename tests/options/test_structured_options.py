"""Forms of outputs as callers give them: what is read, what is refused and how the error names it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged.options.structured import Structured, choices_as_grammar, read_structured

SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}}


class Model:
    """As pydantic's."""

    @classmethod
    def model_json_schema(cls):
        return SCHEMA


@pytest.mark.parametrize(("given", "expected"), [
    (None, None),
    ({"json_schema": SCHEMA}, Structured("json_schema", json.dumps(SCHEMA, ensure_ascii=False))),
    ({"json_schema": json.dumps(SCHEMA)}, Structured("json_schema", json.dumps(SCHEMA, ensure_ascii=False))),
    ({"json_schema": Model}, Structured("json_schema", json.dumps(SCHEMA, ensure_ascii=False))),
    ({"json_schema": True}, Structured("json_schema", "true")),
    ({"json_schema": {}, "any_whitespace": False}, Structured("json_schema", "{}", False)),
    ({"regex": "[a-z]+"}, Structured("regex", "[a-z]+")),
    ({"choice": ["yes", "no", "yes"]}, Structured("choice", '["yes", "no"]')),
    ({"grammar": 'root ::= "a"'}, Structured("grammar", 'root ::= "a"')),
    (Structured("regex", "a"), Structured("regex", "a")),
])
def test_what_is_read(given, expected):
    assert read_structured(given) == expected


@pytest.mark.parametrize(("given", "kind", "text"), [
    ("json", TypeError, "structured='json': expected None or a dict with one of"),
    ([{"regex": "a"}], TypeError, "expected None or a dict"),
    ({}, ValueError, "structured={}: expected a dict with one of"),
    ({"regex": "a", "choice": ["b"]}, ValueError, "expected a dict with one of"),
    ({"regex": "a", "any_whitespace": False}, ValueError, "expected a dict with one of"),
    ({"json_schema": {}, "any_whitespace": 0}, ValueError, "expected a dict with one of"),
    ({"any_whitespace": True}, ValueError, "expected a dict with one of"),
    ({"json": {}}, ValueError, "expected a dict with one of"),
    ({"json_schema": "{"}, ValueError, "structured={'json_schema': '{'}: expected a JSON text"),
    ({"json_schema": None}, TypeError, "expected a JSON schema"),
    ({"json_schema": False}, TypeError, "expected a JSON schema"),
    ({"json_schema": "[1]"}, TypeError, "expected a JSON schema"),
    ({"json_schema": {"const": float("nan")}}, ValueError, "expected what JSON can hold"),
    ({"json_schema": {"const": object()}}, ValueError, "expected what JSON can hold"),
    ({"regex": 3}, TypeError, "structured={'regex': 3}: expected a str, got int"),
    ({"regex": ""}, ValueError, "not empty"),
    ({"grammar": b"root"}, TypeError, "expected a str"),
    ({"choice": "yes"}, TypeError, "expected a list of texts"),
    ({"choice": []}, ValueError, "at least one"),
    ({"choice": ["a", ""]}, ValueError, "none of them empty"),
    ({"choice": ["a", 1]}, ValueError, "expected a list of texts"),
])
def test_what_is_refused(given, kind, text):
    with pytest.raises(kind) as error:
        read_structured(given)
    assert text in str(error.value)


@given(st.lists(st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=6), min_size=1, max_size=4))
def test_texts_as_a_grammar_of_these_and_no_others(texts):
    xgrammar = pytest.importorskip("xgrammar", reason="of the extra `structured`")
    info = xgrammar.TokenizerInfo([bytes([i]) for i in range(256)] + [b"<end>"], xgrammar.VocabType.RAW,
                                  stop_token_ids=[256])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar(choices_as_grammar(texts))
    for text in texts:
        matcher = xgrammar.GrammarMatcher(compiled)
        assert all(matcher.accept_token(byte) for byte in text.encode()) and matcher.accept_token(256)
        longer = xgrammar.GrammarMatcher(compiled)
        other = text + "x"
        taken = all(longer.accept_token(byte) for byte in other.encode()) and longer.is_completed()
        assert taken == (other in texts)
