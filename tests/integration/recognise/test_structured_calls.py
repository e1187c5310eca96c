"""`model.generate(structured=...)`, and processors with grammars that a caller gives: which path they take, and stock's
tokens on each."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from support import (
    assert_same_tensor,
    byte_tokenizer,
    left_padded,
    num_calls,
    random_prompts,
    stock_generate,
    tiny_model,
)
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper
from transformers.generation.logits_process import ExponentialDecayLengthPenalty, SuppressTokensLogitsProcessor

import hf_paged

xgrammar = pytest.importorskip("xgrammar", reason="of the extra `structured`")
from xgrammar.contrib import hf  # noqa: E402

TOKENIZER = byte_tokenizer()
END = TOKENIZER("~")["input_ids"][0]
INPUTS = left_padded(random_prompts([20, 7, 12]))
FORM = {"regex": "[a-z]{2,9}-[0-9]{3}"}
OPTIONS = {"max_new_tokens": 24, "eos_token_id": END}


@pytest.fixture
def model():
    model = tiny_model()
    hf_paged.enable(model)
    yield model
    hf_paged.disable(model)


def info(stop: int = END, vocab_size: int = 256):
    return xgrammar.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=vocab_size, stop_token_ids=[stop])


def compiled(regex: str = FORM["regex"], **of_info):
    return xgrammar.GrammarCompiler(info(**of_info)).compile_regex(regex)


def texts_of(ids: torch.Tensor) -> list[str]:
    return [text.split("~")[0] for text in TOKENIZER.batch_decode(ids[:, INPUTS["input_ids"].shape[1] :])]


def by_stock(regex: str | list[str] = FORM["regex"], **options):
    grammars = compiled(regex) if isinstance(regex, str) else list(map(compiled, regex))
    return stock_generate(tiny_model(), **{**INPUTS, **OPTIONS, **options},
                          logits_processor=[hf.LogitsProcessor(grammars)])


def test_greedy_calls_run_natively_and_give_stocks_tokens(model):
    expected = by_stock()
    assert_same_tensor(model.generate(**INPUTS, **OPTIONS, structured=FORM, tokenizer=TOKENIZER), expected)
    given = [hf.LogitsProcessor(compiled())]
    assert_same_tensor(model.generate(**INPUTS, **OPTIONS, logits_processor=given), expected)
    assert num_calls(model) == {"native": 2}
    assert all(re.fullmatch(FORM["regex"], text) for text in texts_of(expected))


def test_a_grammar_a_row(model):
    regexes = ["[0-9]{4}", "[a-f]{3}", "x+y"]
    expected = by_stock(regexes)
    given = hf.LogitsProcessor(list(map(compiled, regexes)))
    assert_same_tensor(model.generate(**INPUTS, **OPTIONS, logits_processor=[given]), expected)
    forms = [{"regex": regex} for regex in regexes]
    assert_same_tensor(model.generate(**INPUTS, **OPTIONS, structured=forms, tokenizer=TOKENIZER), expected)
    mixed = model.generate(**INPUTS, **OPTIONS, structured=[None, forms[1], None], tokenizer=TOKENIZER)
    free = stock_generate(tiny_model(), **INPUTS, **OPTIONS)
    width = min(mixed.shape[1], free.shape[1])
    assert torch.equal(mixed[0, :width], free[0, :width]) and torch.equal(mixed[2, :width], free[2, :width])
    assert re.fullmatch("[a-f]{3}", texts_of(mixed)[1])
    assert num_calls(model) == {"native": 3}


def test_beside_other_processors(model):
    suppressed = TOKENIZER("aeiou0")["input_ids"]
    for options in ({"repetition_penalty": 1.4}, {"suppress_tokens": suppressed}, {"no_repeat_ngram_size": 2}):
        expected = by_stock(**options)
        call = {**INPUTS, **OPTIONS, **options}
        assert_same_tensor(model.generate(**call, structured=FORM, tokenizer=TOKENIZER), expected)
    native = {**num_calls(model)}
    assert native.pop("native") == 2 and native == {"lockstep": 1}  # n-grams with left padding
    model.generate(**INPUTS, **OPTIONS, logits_processor=[
        hf.LogitsProcessor(compiled()), SuppressTokensLogitsProcessor(suppressed, device="cpu")])
    assert num_calls(model)["native"] == 3


@pytest.mark.parametrize(("options", "path"), [
    ({"num_beams": 3}, "lockstep"),
    ({"num_beams": 3, "num_return_sequences": 2}, "lockstep"),
    ({"prompt_lookup_num_tokens": 3}, "lockstep"),
    ({"encoder_repetition_penalty": 1.2}, "lockstep"),
    ({"output_scores": True, "return_dict_in_generate": True}, "lockstep"),
    ({"do_sample": True, "num_return_sequences": 3}, "native"),
    ({"do_sample": True, "top_k": 4, "temperature": 1.5}, "native"),
    ({"use_cache": False, "return_dict_in_generate": True, "output_attentions": True}, "stock"),
], ids=str)
def test_every_path_keeps_the_form(model, options, path):
    inputs = INPUTS if "prompt_lookup_num_tokens" not in options else left_padded(random_prompts([20]))
    call = {**inputs, **OPTIONS, **options, "structured": FORM, "tokenizer": TOKENIZER}
    assert hf_paged.explain(model, **call).path == path
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hf_paged.FallbackWarning)
        made = model.generate(**call)
    assert num_calls(model) == {path: 1}
    sequences = made if isinstance(made, torch.Tensor) else made.sequences
    assert all(re.fullmatch(FORM["regex"], text) for text in texts_of(sequences))
    if "num_beams" not in options and "do_sample" not in options:  # greedy, whatever carries it out
        assert_same_tensor(sequences[:1], model.generate(**inputs, **OPTIONS, structured=FORM, tokenizer=TOKENIZER)[
            :1, : sequences.shape[1]])


def test_beams_are_those_of_a_grammar_that_is_followed_from_the_start(model):
    """Stock's beam search, by a processor that reads each row anew."""

    class Anew(LogitsProcessor):
        def __call__(self, input_ids, scores):
            words = xgrammar.allocate_token_bitmask(len(scores), 256)
            for row, tokens in enumerate(input_ids[:, INPUTS["input_ids"].shape[1] :].tolist()):
                matcher = xgrammar.GrammarMatcher(grammar)
                if all(map(matcher.accept_token, tokens)) and not matcher.is_terminated():
                    matcher.fill_next_token_bitmask(words, row)
            scores = scores.clone()
            xgrammar.apply_token_bitmask_inplace(scores, words)
            return scores

    grammar, beams = compiled(), {"num_beams": 4, "num_return_sequences": 2}
    expected = stock_generate(tiny_model(), **INPUTS, **OPTIONS, **beams, logits_processor=[Anew()])
    assert_same_tensor(model.generate(**INPUTS, **OPTIONS, **beams, structured=FORM, tokenizer=TOKENIZER), expected)


def test_a_stock_model_in_a_fallback_follows_the_form_too(model):
    with pytest.warns(hf_paged.FallbackWarning):
        made = model.generate(**INPUTS, **OPTIONS, structured=FORM, tokenizer=TOKENIZER, cache_implementation="static")
    assert all(re.fullmatch(FORM["regex"], text) for text in texts_of(made))


class Patched(hf.LogitsProcessor):
    """A caller's own."""


def used():
    processor = hf.LogitsProcessor(compiled())
    processor(torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 256))
    processor.matchers, processor.prefilled = [], True
    return processor


@pytest.mark.parametrize(("make", "reason"), [
    (lambda: [Patched(compiled())], "logits processor Patched is not carried out"),
    (lambda: [used()], "a LogitsProcessor of the caller's own"),
    (lambda: [hf.LogitsProcessor(compiled(stop=7))], "a LogitsProcessor of the caller's own"),
    (lambda: [hf.LogitsProcessor(compiled(vocab_size=255))], "a LogitsProcessor of the caller's own"),
    (lambda: [hf.LogitsProcessor(compiled()), hf.LogitsProcessor(compiled())], "more than one LogitsProcessor"),
    (lambda: [hf.LogitsProcessor(compiled()), ExponentialDecayLengthPenalty((1, 1.1), END, 20)],
     "a LogitsProcessor in another place than stock's"),
    (lambda: [TemperatureLogitsWarper(0.5), hf.LogitsProcessor(compiled())], "in another place than stock's"),
])
def test_what_is_not_certain_runs_in_lockstep(model, make, reason):
    given = LogitsProcessorList(make())
    found = hf_paged.explain(model, **INPUTS, **OPTIONS, logits_processor=given)
    assert found.path == "lockstep"
    assert any(reason in text for text in found.reasons), found.reasons


def test_a_method_that_was_replaced_is_seen(model, monkeypatch):
    own = hf.LogitsProcessor.__call__
    monkeypatch.setattr(hf.LogitsProcessor, "__call__", lambda *args: own(*args))
    found = hf_paged.explain(model, **INPUTS, **OPTIONS, logits_processor=[hf.LogitsProcessor(compiled())])
    assert found.path == "lockstep"


@pytest.mark.parametrize(("extra", "text"), [
    ({"structured": FORM}, "expected tokenizer= beside it"),
    ({"structured": {"regex": "["}, "tokenizer": TOKENIZER}, "Regex parsing error"),
    ({"structured": {"form": 1}, "tokenizer": TOKENIZER}, "expected a dict with one of"),
    ({"structured": [FORM], "tokenizer": TOKENIZER}, "a list of 1 for 3 prompts"),
])
def test_what_is_refused_before_anything_runs(model, extra, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        model.generate(**INPUTS, **OPTIONS, **extra)
    assert num_calls(model) == {}


def test_tensors_in_a_generator():
    with hf_paged.PagedGenerator(tiny_model(), TOKENIZER) as generator:
        made = generator.generate(**INPUTS, **OPTIONS, structured=FORM)
    assert_same_tensor(made, by_stock())


@pytest.mark.parametrize("eos", [-1, 5000])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}], ids=str)
def test_an_eos_that_never_comes_is_none_on_any_path(model, eos, options):
    inputs = {name: value[:1] for name, value in INPUTS.items()}
    made = model.generate(**inputs, max_new_tokens=8, eos_token_id=eos, pad_token_id=0, tokenizer=TOKENIZER,
                          structured={"regex": "[a-c]{8}"}, **options)
    assert re.fullmatch("[a-c]{8}", TOKENIZER.decode(made[0, inputs["input_ids"].shape[1] :]))


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"encoder_repetition_penalty": 1.2}], ids=str)
@pytest.mark.parametrize("bars", [{"min_new_tokens": 9}, {"suppress_tokens": TOKENIZER("0123")["input_ids"]}], ids=str)
def test_settings_that_bar_what_the_form_allows_are_an_error_and_no_other_text(model, options, bars):
    forms = [{"regex": "[0-3]{3}"}, None, {"regex": "[a-z]{20}"}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the native call ends with that row's error, and goes to stock
        with pytest.raises(ValueError, match="nothing that the grammar allows can follow"):
            model.generate(**INPUTS, **OPTIONS, structured=forms, tokenizer=TOKENIZER, **options, **bars)
    made = model.generate(**INPUTS, **OPTIONS, structured=[None, None, forms[2]], tokenizer=TOKENIZER, **options,
                          **({} if "suppress_tokens" in bars else bars))
    assert re.fullmatch("[a-z]{20}", texts_of(made)[2])
