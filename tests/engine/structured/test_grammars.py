"""Grammars by xgrammar: what compiles, and what ends an output."""

from __future__ import annotations

import pickle
import sys

import pytest
import torch
from support import byte_tokenizer
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from hf_paged.config import PagedConfig
from hf_paged.engine.structured.grammars import Grammars
from hf_paged.options.structured import Structured, read_structured


@pytest.fixture
def grammars():
    pytest.importorskip("xgrammar", reason="of the extra `structured`")
    return Grammars(300, PagedConfig())


def ids_of(text: str) -> list[int]:
    return byte_tokenizer()(text)["input_ids"]


def allowed(matcher, num_logits: int = 300) -> set[int]:
    words = torch.empty(-(-num_logits // 32), dtype=torch.int32)
    matcher.fill(words)
    bits = words[:, None] >> torch.arange(32, dtype=torch.int32) & 1
    return set(bits.flatten()[:num_logits].nonzero().flatten().tolist())


def test_a_matcher_follows_its_output_and_ends_with_a_stop_token(grammars):
    tokenizer = byte_tokenizer()
    grammar = grammars.compile(read_structured({"regex": "a[0-9]{1,2}"}), tokenizer)
    matcher = grammar.matcher((299,))
    assert allowed(matcher) == set(ids_of("a"))
    assert matcher.accept(*ids_of("a")) and not matcher.accept(*ids_of("a"))
    assert allowed(matcher) == set(ids_of("0123456789"))
    assert matcher.accept(*ids_of("7"))
    assert allowed(matcher) == {*ids_of("0123456789"), 299} and not matcher.is_over
    other = matcher.fork()
    assert matcher.accept(299) and matcher.is_over and not matcher.accept(299)
    assert not other.is_over and other.accept(*ids_of("8")) and allowed(other) == {299}


@pytest.mark.parametrize(("of_tokenizer", "eos", "expected"), [
    ([256], (256,), {256}), ([256], (257, 256), {256}), ([256], (257, 258), {257, 258}), ([256], (), {256}),
    (None, (257,), {257}),
])
def test_which_tokens_end_an_output(grammars, of_tokenizer, eos, expected):
    """Those of the tokenizer that end the request, as with xgrammar's own processor; else all that end the request."""
    tokenizer = byte_tokenizer()
    if of_tokenizer is not None:
        tokenizer.add_special_tokens({"eos_token": "<eos>"})
        assert tokenizer.eos_token_id == 256
    matcher = grammars.compile(Structured("regex", "a"), tokenizer).matcher(eos)
    assert matcher.accept(*ids_of("a"))
    assert allowed(matcher) == expected


def test_without_any_stop_token_an_output_ends_where_nothing_can_follow(grammars):
    matcher = grammars.compile(Structured("regex", "[0-9]{1,2}"), byte_tokenizer()).matcher(())
    assert matcher.accept(*ids_of("1")) and not matcher.is_over
    assert matcher.accept(*ids_of("1")) and matcher.is_over


def test_json_with_and_without_whitespace(grammars):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    text = '{\n "a" : true}'
    for given, fits in ({}, True), ({"any_whitespace": False}, False):
        matcher = grammars.compile(read_structured({"json_schema": schema, **given}), byte_tokenizer()).matcher(())
        assert all(map(matcher.accept, ids_of(text))) == fits
    matcher = grammars.compile(read_structured({"json_schema": schema, "any_whitespace": False}),
                               byte_tokenizer()).matcher(())
    assert all(map(matcher.accept, ids_of('{"a": true}'))) and matcher.is_over


@pytest.mark.parametrize(("structured", "text"), [
    ({"json_schema": {"type": "strng"}}, 'Unsupported type "strng"'),
    ({"json_schema": {"$ref": "#/nowhere"}}, "nowhere"),
    ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 1}}, "Invalid range"),
    ({"regex": "[a"}, "Unclosed '['"),
    ({"regex": "a\ud800"}, "surrogates"),
    ({"grammar": 'start ::= "a"'}, 'name "root" is not found'),
    ({"grammar": 'root ::= "a'}, "EBNF lexer error"),
])
def test_what_xgrammar_cannot_compile(grammars, structured, text):
    [kind] = structured
    with pytest.raises(ValueError) as error:
        grammars.compile(read_structured(structured), byte_tokenizer())
    message = str(error.value)
    assert message.startswith(f"structured={{{kind!r}: ") and text in message
    assert message.endswith("expected what xgrammar can make a grammar of") and "/project" not in message


def test_equal_forms_are_compiled_once_and_another_tokenizer_anew(grammars, monkeypatch):
    import xgrammar

    compiled = []
    own = xgrammar.TokenizerInfo.from_huggingface
    monkeypatch.setattr(xgrammar.TokenizerInfo, "from_huggingface",
                        staticmethod(lambda *args, **kwargs: compiled.append(args[0]) or own(*args, **kwargs)))
    first, second = byte_tokenizer(), byte_tokenizer()
    for tokenizer in (first, first, second):
        grammars.compile(Structured("regex", "a{3}"), tokenizer)
    assert compiled == [first, second]
    second.add_tokens(["abc"])  # in place
    matcher = grammars.compile(Structured("regex", "abc"), second).matcher(())
    assert allowed(matcher) == {*ids_of("a"), second.convert_tokens_to_ids("abc")}
    assert len(compiled) == 3


def test_forms_of_a_vocabulary_that_is_gone_are_dropped(grammars):
    form = Structured("regex", "[0-9]{3}")
    for eos in (256, 257, 258):
        tokenizer = byte_tokenizer()
        tokenizer.add_special_tokens({"eos_token": f"<eos{eos}>"})
        grammars.compile(form, tokenizer)
        with pytest.raises(ValueError, match="no output that ends"):
            grammars.compile(Structured("grammar", "root ::= root"), tokenizer)
    assert len(grammars._known) == len(grammars._refused) == 1
    late = grammars.begin(Structured("regex", "[0-9]{4}"), tokenizer)
    grammars._of(byte_tokenizer())
    assert late.result(timeout=20) is not None and not grammars._known


def test_a_vocabulary_that_another_rank_sent(grammars):
    tokenizer = byte_tokenizer()
    vocabulary = pickle.loads(pickle.dumps(grammars.vocabulary(tokenizer)))
    other = Grammars(300, PagedConfig())
    with pytest.raises(ValueError, match="expected an engine with a tokenizer"):
        other.compile(Structured("regex", "ab"), None)
    other.share(vocabulary)
    assert other.has_shared(vocabulary) and not grammars.has_shared(vocabulary)
    matcher = other.compile(Structured("regex", "ab"), None).matcher((299,))
    assert all(map(matcher.accept, ids_of("ab"))) and allowed(matcher) == {299}


def test_without_xgrammar_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ImportError, match=r"pip install 'hf-paged\[structured\]'"):
        Grammars(300, PagedConfig()).compile(Structured("regex", "a"), byte_tokenizer())


def test_a_tokenizer_that_xgrammar_does_not_know(grammars):
    with pytest.raises(ValueError, match="xgrammar cannot read this Odd"):
        grammars.compile(Structured("regex", "a"), type("Odd", (), {"get_vocab": dict})())


def test_a_form_that_no_token_can_begin_is_refused(grammars):
    letters = Tokenizer(BPE({"a": 0, "b": 1}, []))
    letters.decoder = ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters)
    for text, fits in (("a|c", True), ("c", False)):
        if fits:
            assert allowed(grammars.compile(Structured("regex", text), tokenizer).matcher(())) == {0}
        else:
            with pytest.raises(ValueError, match="no token of the vocabulary can begin it"):
                grammars.compile(Structured("regex", text), tokenizer)


def special_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<eos>", "pad_token": "<pad>"})
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257)
    return tokenizer


def ends_of(grammars, tokenizer, eos):
    """Special tokens that may follow in the middle of a text, and at its end."""
    matcher = grammars.compile(Structured("regex", '"[^"]*"'), tokenizer).matcher(eos)
    assert matcher.accept(*ids_of('"'))
    before = allowed(matcher) & {256, 257}
    assert matcher.accept(*ids_of('"'))
    return before, allowed(matcher)


def test_a_tokenizer_whose_eos_changes_ends_outputs_as_it_is_now(grammars):
    tokenizer = special_tokenizer()
    assert ends_of(grammars, tokenizer, ()) == ({257}, {256})
    tokenizer.eos_token = "<pad>"  # the same vocabulary, as long as before
    assert ends_of(grammars, tokenizer, ()) == ({256}, {257})
    assert ends_of(grammars, tokenizer, (256,)) == ({257}, {256})  # a generation config of its own


def test_no_special_eos_of_the_request_stands_inside_of_an_output(grammars):
    """It would end the output there, in the middle of its form; any of them may come where the form is complete."""
    tokenizer = special_tokenizer()
    assert ends_of(grammars, tokenizer, (256, 257)) == (set(), {256, 257})
    assert ends_of(grammars, tokenizer, (257,)) == ({256}, {257})
