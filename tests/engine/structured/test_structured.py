"""Structured output through the engine: stock's tokens under xgrammar's own processor, beside rows without a grammar,
whatever happens to the requests on their way."""

from __future__ import annotations

import functools
import json
import math
import re
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_idle, byte_tokenizer, random_prompts, run_out, stock_generate, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.engine.features.grammars import StructuredOutput
from hf_paged.engine.loop import EngineCore
from hf_paged.engine.structured import mask_maker
from hf_paged.engine.structured.mask_maker import MaskMaker
from hf_paged.engine.structured.matchers import XGrammarMatcher

xgrammar = pytest.importorskip("xgrammar", reason="of the extra `structured`")
from xgrammar.contrib.hf import LogitsProcessor  # noqa: E402

TOKENIZER = byte_tokenizer()
END = TOKENIZER("~")["input_ids"][0]
SCHEMA = {
    "type": "object", "required": ["name", "n"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{2,6}$"}, "n": {"enum": [1, 22, 333]}},
}
FORMS = [
    {"json_schema": SCHEMA, "any_whitespace": False}, {"regex": "[0-9]{3,9}"}, {"choice": ["yes", "no", "maybe"]},
    {"grammar": 'root ::= "<" word+ ">"\nword ::= [a-f] [0-9]'}, {"regex": "(ab|ac)*d"},
]
PROMPTS = random_prompts([20, 5, 33, 16, 9])
GREEDY = {"max_new_tokens": 40, "eos_token_id": END, "use_tqdm": False}
shared_model = functools.cache(lambda: tiny_model(eos_token_id=END))


def fits(form, text: str) -> bool:
    text = text.removesuffix("~")
    if "json_schema" in form:
        made = json.loads(text)
        return set(made) == {"name", "n"} and re.fullmatch("[a-z]{2,6}", made["name"]) and made["n"] in (1, 22, 333)
    if "choice" in form:
        return text in form["choice"]
    return re.fullmatch(form.get("regex") or "<([a-f][0-9])+>", text) is not None


def compiled(form):
    info = xgrammar.TokenizerInfo.from_huggingface(TOKENIZER, vocab_size=256, stop_token_ids=[END])
    compiler = xgrammar.GrammarCompiler(info)
    if "json_schema" in form:
        return compiler.compile_json_schema(form["json_schema"], any_whitespace=False)
    if "regex" in form:
        return compiler.compile_regex(form["regex"])
    if "choice" in form:
        return compiler.compile_grammar("root ::= " + " | ".join(f'"{text}"' for text in form["choice"]))
    return compiler.compile_grammar(form["grammar"])


def by_stock(prompt, form, **options):
    """The tokens that stock makes with xgrammar's own processor."""
    processors = [] if form is None else [LogitsProcessor(compiled(form))]
    options = {name: value for name, value in {**GREEDY, **options}.items() if name != "use_tqdm"}
    ids = torch.tensor([prompt])
    made = stock_generate(shared_model(), input_ids=ids, logits_processor=processors, **options)
    return made[0, len(prompt) :].tolist()


@pytest.fixture(params=["in turn", "overlap", "overlap, few rows in a thread"])
def generator(request, monkeypatch):
    if "thread" in request.param:
        monkeypatch.setattr(mask_maker, "_FEWEST_IN_THREADS", 1)
    with PagedGenerator(tiny_model(eos_token_id=END), TOKENIZER, overlap="overlap" in request.param) as generator:
        yield generator
        assert_idle(generator.model)


EDITED = {"repetition_penalty": 1.3, "suppress_tokens": TOKENIZER("0b")["input_ids"]}
OPTIONS = [{}, EDITED, {"min_new_tokens": 3}, {"no_repeat_ngram_size": 3}]


@pytest.mark.each_value
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_stocks_tokens_under_xgrammars_processor(generator, options):
    forms = FORMS[:2] + FORMS[3:] if options else FORMS
    forms = [*forms, None]
    prompts = (PROMPTS * 2)[: len(forms)]
    made = generator.generate(prompts, structured=forms, **GREEDY, **options)
    for prompt, form, one in zip(prompts, forms, made, strict=True):
        if one.finish_reason == "error":  # stock trips there, too: nothing is left to choose
            assert "bar all that the grammar allows" in one.error
            with pytest.raises(AssertionError):
                by_stock(prompt, form, **options)
            continue
        assert one.token_ids == by_stock(prompt, form, **options)
        assert form is None or one.finish_reason == "length" or fits(form, one.text)
    assert sum(one.finish_reason == "eos" for one in made) >= 2


@pytest.mark.slow
def test_sampled_rows_follow_their_grammars_and_rows_without_one_are_as_alone(generator):
    forms = [*FORMS, None, None]
    prompts = (PROMPTS * 2)[: len(forms)]
    options = {**GREEDY, "do_sample": True, "temperature": 1.3, "seed": 5}
    free = generator.generate(prompts, **options)
    for extra in ({}, {"top_k": 5}, {"top_p": 0.7}, {"repetition_penalty": 1.2}, {"typical_p": 0.9}):
        expected = generator.generate(prompts, **options, **extra) if extra else free
        made = generator.generate(prompts, structured=forms, **options, **extra)
        for form, one, before in zip(forms, made, expected, strict=True):
            if form is None:
                assert one.token_ids == before.token_ids
            else:
                assert one.finish_reason == "length" or fits(form, one.text), (extra, one)


def test_draws_are_from_stocks_distribution():
    """Log-probabilities of drawn tokens are those of stock's scores behind xgrammar's processor and the filters."""
    form, options = FORMS[0], {"do_sample": True, "temperature": 0.9, "top_k": 7}
    with PagedGenerator(tiny_model(eos_token_id=END), TOKENIZER) as generator:
        [one] = generator.generate([PROMPTS[0]], structured=form, seed=3, logprobs=True, **GREEDY, **options)
        [raw] = generator.generate([PROMPTS[0]], structured=form, seed=3, logprobs="raw", **GREEDY, **options)
    assert raw.token_ids == one.token_ids
    matcher = xgrammar.GrammarMatcher(compiled(form))
    for at, token in enumerate(one.token_ids):
        ids = torch.tensor([PROMPTS[0] + one.token_ids[:at]])
        logits = shared_model()(ids).logits[0, -1].float()
        assert raw.logprobs[at] == pytest.approx(logits.log_softmax(-1)[token].item(), abs=1e-4)
        words = xgrammar.allocate_token_bitmask(1, 256)
        matcher.fill_next_token_bitmask(words)
        scores = logits[None].clone()
        xgrammar.apply_token_bitmask_inplace(scores, words)
        scores = scores[0] / 0.9
        least = scores.topk(7).values[-1]
        scores = scores.masked_fill(scores < least, -torch.inf).log_softmax(-1)
        assert one.logprobs[at] == pytest.approx(scores[token].item(), abs=1e-4)
        matcher.accept_token(token)


def test_samples_of_a_prompt_have_matchers_of_their_own(generator):
    made = generator.generate(PROMPTS[:2], structured=[FORMS[3], FORMS[1]], num_return_sequences=4, do_sample=True,
                              temperature=2.0, seed=1, **GREEDY)
    for number, one in enumerate(made):
        assert one.finish_reason == "length" or fits(FORMS[3] if number < 4 else FORMS[1], one.text)
    assert len({tuple(one.token_ids) for one in made[:4]}) > 1


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_under_a_tiny_pool(overlap):
    forms = [*FORMS, None, {"regex": "[a-z]{60}"}, {"regex": "[0-9]{60}"}]
    prompts = (PROMPTS * 2)[: len(forms)]
    options = {**GREEDY, "max_new_tokens": 64}
    with PagedGenerator(tiny_model(eos_token_id=END), TOKENIZER, overlap=overlap) as roomy:
        expected = roomy.generate(prompts, structured=forms, **options)
    with PagedGenerator(tiny_model(eos_token_id=END), TOKENIZER, overlap=overlap, num_blocks=12) as tight:
        made = tight.generate(prompts, structured=forms, **options)
        assert tight.engine.stats().num_preemptions > 0
        assert_idle(tight.model)
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]


def test_a_prefix_that_is_cached(generator):
    first = generator.generate([PROMPTS[2]], structured=FORMS[0], **GREEDY)[0]
    again = generator.generate([PROMPTS[2]], structured=FORMS[0], **GREEDY)[0]
    assert again.num_cached_tokens > 0 and again.token_ids == first.token_ids


def test_one_bad_form_is_its_own_callers(generator):
    forms = [FORMS[0], {"regex": "[a"}, {"jsonschema": {}}, FORMS[1]]
    with pytest.raises(ValueError, match=r"prompts\[1\]: structured={'regex': '\[a'}: .*Unclosed"):
        generator.generate(PROMPTS[:4], structured=forms, **GREEDY)
    made = generator.generate(PROMPTS[:4], structured=forms, on_error="complete", **GREEDY)
    assert [one.finish_reason for one in made] == ["eos", "error", "error", "eos"]
    assert "Unclosed" in made[1].error and "expected a dict with one of" in made[2].error
    assert fits(FORMS[0], made[0].text)
    with pytest.raises(ValueError, match=r"^structured={'regex': '\[a'}"):  # wrong for every prompt
        generator.generate(PROMPTS[:2], structured={"regex": "[a"}, on_error="complete", **GREEDY)
    with pytest.raises(ValueError, match="a list of 1 for 2 prompts"):
        generator.generate(PROMPTS[:2], structured=[FORMS[0]], **GREEDY)


def test_a_generator_without_a_tokenizer():
    with PagedGenerator(tiny_model()) as generator, pytest.raises(ValueError, match="expected an engine with a token"):
        generator.generate(PROMPTS[:1], structured=FORMS[1], max_new_tokens=3)


def test_a_stream_and_add_request(generator):
    expected = generator.generate(PROMPTS[:2], structured=[FORMS[0], None], **GREEDY)
    options = {name: value for name, value in GREEDY.items() if name != "use_tqdm"}
    pieces: dict[int, list[int]] = {0: [], 1: []}
    for index, output in generator.stream(PROMPTS[:2], structured=[FORMS[0], None], **options):
        pieces[index] += output.new_token_ids
    assert [pieces[0], pieces[1]] == [one.token_ids for one in expected]
    engine, config = generator.engine, GenerationConfig(**options)
    with pytest.raises(ValueError, match="structured="):
        engine.add_request(PROMPTS[0], config, structured={"regex": "("})
    engine.add_request(PROMPTS[0], config, structured=FORMS[0])
    made = [output.completion for output in drained(engine) if output.completion]
    assert [one.token_ids for one in made] == [expected[0].token_ids]


def drained(engine):
    outputs = run_out(engine)
    return outputs


def test_an_output_without_an_eos_ends_where_its_grammar_does(generator):
    options = {"max_new_tokens": 30, "eos_token_id": -1, "use_tqdm": False}
    made = generator.generate(PROMPTS[:2], structured=[{"regex": "[0-9]{4}"}, {"choice": ["yes", "no"]}], **options)
    assert [one.finish_reason for one in made] == ["stop", "stop"]
    assert re.fullmatch("[0-9]{4}", made[0].text) and made[1].text in ("yes", "no")


def test_an_output_that_goes_on(generator):
    whole = generator.generate([PROMPTS[0]], structured=FORMS[0], seed=7, do_sample=True, **GREEDY)[0]
    for cut in (0, 1, len(whole.token_ids) // 2, len(whole.token_ids)):
        before = {"prompt_token_ids": PROMPTS[0], "output_token_ids": whole.token_ids[:cut]}
        [one] = generator.generate([before], structured=FORMS[0], seed=7, do_sample=True, **GREEDY)
        assert one.token_ids == whole.token_ids and one.finish_reason == whole.finish_reason
    other = {"prompt_token_ids": PROMPTS[0], "output_token_ids": TOKENIZER('{"x')["input_ids"]}
    with pytest.raises(ValueError, match=r"output_token_ids: token \d+ at place 2 is not what structured allows"):
        generator.generate([other], structured=FORMS[0], **GREEDY)


STOPS = TOKENIZER("9x")["input_ids"]


@pytest.mark.parametrize("eos", [-1, 5000])
def test_an_output_that_ends_at_a_stop_token_alone_goes_on(generator, eos):
    """What ends the request is what may follow the complete output, however often it begins."""
    options = {**GREEDY, "eos_token_id": eos, "stop_token_ids": STOPS}
    form = {"regex": "[0-8]{3}([0-8]{5})?"}
    whole = generator.generate([PROMPTS[0]], structured=form, seed=7, do_sample=True, **options)[0]
    assert whole.finish_reason == "stop" and whole.token_ids[-1] in STOPS
    for cut in (0, 1, len(whole.token_ids) - 1, len(whole.token_ids)):
        before = {"prompt_token_ids": PROMPTS[0], "output_token_ids": whole.token_ids[:cut]}
        [one] = generator.generate([before], structured=form, seed=7, do_sample=True, **options)
        assert (one.token_ids, one.stop_reason) == (whole.token_ids, whole.stop_reason)


def test_settings_that_bar_what_the_grammar_allows_end_that_row(generator):
    digits = TOKENIZER("0123456789")["input_ids"]
    for extra in ({}, {"do_sample": True}):
        configs = [GenerationConfig(suppress_tokens=digits, **extra), GenerationConfig(**extra)]
        made = generator.generate(PROMPTS[:2], configs, structured=FORMS[1], **GREEDY)
        assert made[0].finish_reason == "error" and "bar all" in made[0].error
        assert fits(FORMS[1], made[1].text)


def test_rows_in_lockstep_join_the_steps_of_rows_with_grammars(generator):
    model, engine = generator.model, generator.engine
    ids = torch.tensor([PROMPTS[2]])
    expected = stock_generate(shared_model(), input_ids=ids, max_new_tokens=30, eos_token_id=END,
                              encoder_repetition_penalty=1.2)
    alone = generator.generate([PROMPTS[0]] * 3, structured={"regex": "[a-z]{38}"}, **GREEDY)
    results = []

    def lockstep() -> None:
        results.append(model.generate(input_ids=ids, max_new_tokens=30, eos_token_id=END,
                                      encoder_repetition_penalty=1.2))

    thread = threading.Thread(target=lockstep)
    thread.start()
    made = generator.generate([PROMPTS[0]] * 3, structured={"regex": "[a-z]{38}"}, **GREEDY)
    thread.join()
    assert torch.equal(results[0], expected)
    assert [one.token_ids for one in made] == [one.token_ids for one in alone]
    assert engine.stats().calls["lockstep"].num_calls == 1


def test_an_interrupt_starts_the_matchers_anew(generator):
    engine = generator.engine
    expected = generator.generate(PROMPTS[:3], structured=[FORMS[0], None, FORMS[3]], **GREEDY)
    config = GenerationConfig(**{name: value for name, value in GREEDY.items() if name != "use_tqdm"})
    for prompt, form in zip(PROMPTS, [FORMS[0], None, FORMS[3]], strict=False):
        engine.add_request(prompt, config, structured=form)
    outputs = [output for _ in range(5) for output in engine.step()]
    engine._core.dirty = True  # as an interrupt leaves it
    outputs += drained(engine)
    made = sorted(((o.request_id, o.completion) for o in outputs if o.completion), key=lambda pair: pair[0])
    assert [one.token_ids for _, one in made] == [one.token_ids for one in expected]


def test_an_interrupt_leaves_an_output_its_stop_tokens(generator):
    engine, form = generator.engine, {"regex": "[0-8]{3}"}
    [expected] = generator.generate([PROMPTS[0]], structured=form, **{**GREEDY, "eos_token_id": -1},
                                    stop_token_ids=STOPS)
    engine.add_request(PROMPTS[0], GenerationConfig(max_new_tokens=40, eos_token_id=-1), structured=form,
                       stop_token_ids=STOPS)
    outputs = engine.step()
    engine._core.dirty = True  # as an interrupt leaves it
    outputs += drained(engine)
    made = outputs[-1].completion
    assert (made.token_ids, made.stop_reason) == (expected.token_ids, expected.stop_reason)


def test_a_step_whose_sampling_raises_is_taken_back(generator, monkeypatch):
    engine, kw = generator.engine, {"structured": [FORMS[0], None], **GREEDY}
    expected = generator.generate(PROMPTS[:2], **kw)
    runner, calls = engine._core.runner, []
    own = runner.sample

    def breaking(*args):
        calls.append(args)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no memory")
        return own(*args)

    monkeypatch.setattr(runner, "sample", breaking)
    with pytest.raises(torch.OutOfMemoryError):
        generator.generate(PROMPTS[:2], **kw)
    assert_idle(generator.model)
    assert [one.token_ids for one in generator.generate(PROMPTS[:2], **kw)] == [one.token_ids for one in expected]


def test_tokens_that_cannot_be_drawn_between_two_steps_are_drawn_anew(monkeypatch):
    """Masks of the step in flight may be wanted before the next step: by an abort, say, which gets the error."""
    with PagedGenerator(tiny_model(eos_token_id=END), TOKENIZER, overlap=True) as generator:
        engine, forms = generator.engine, [FORMS[0], None, FORMS[3]]
        expected = generator.generate(PROMPTS[:3], structured=forms, **GREEDY)
        config = GenerationConfig(**{name: value for name, value in GREEDY.items() if name != "use_tqdm"})
        ids = [engine.add_request(prompt, config, structured=form)
               for prompt, form in zip(PROMPTS, forms, strict=False)]
        outputs = [output for _ in range(4) for output in engine.step()]

        def failing(*_):
            raise torch.OutOfMemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr(engine._core.runner, "sample", failing)
            with pytest.raises(torch.OutOfMemoryError):
                engine.abort(ids[0])
        outputs += drained(engine)
        made = {output.request_id: output.completion for output in outputs if output.completion}
        assert [made[i].token_ids for i in ids] == [one.token_ids for one in expected]
        assert_idle(generator.model)


def test_steps_without_such_rows_make_no_masks(generator, monkeypatch):
    """Once the row with a grammar has ended, those beside it run as if it had not been there."""
    steps, masked = [], []
    launch = EngineCore._launch
    monkeypatch.setattr(EngineCore, "_launch", lambda *args: (steps.append(1), launch(*args))[1])
    fill = MaskMaker._fill
    monkeypatch.setattr(MaskMaker, "_fill", lambda *args: (masked.append(1), fill(*args))[1])
    generator.generate(PROMPTS[:2], structured=[None, {"choice": ["a"]}], **{**GREEDY, "eos_token_id": END})
    assert len(masked) <= 3 < len(steps)


@pytest.mark.parametrize("overlap", [False, True])
def test_masks_wait_for_tokens_and_not_for_their_commit(monkeypatch, overlap):
    """The device has what it needs before the host does its books; and each token is taken by its matcher once."""
    log, accepted = [], []
    for kind, name in ((MaskMaker, "_fill"), (StructuredOutput, "take")):
        own = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *args, own=own, name=name: (log.append(name), own(*args))[1])
    accept = XGrammarMatcher.accept
    monkeypatch.setattr(XGrammarMatcher, "accept", lambda *args: (accepted.append(args[1]), accept(*args))[1])
    with PagedGenerator(tiny_model(eos_token_id=END), TOKENIZER, overlap=overlap) as generator:
        [one] = generator.generate(PROMPTS[:1], structured={"regex": "[a-z]{9}"}, **{**GREEDY, "max_new_tokens": 5})
    assert log == (["_fill", *["_fill", "take"] * 4, "take"] if overlap else ["_fill", "take"] * 5)
    assert accepted == one.token_ids and len(accepted) == 5


@pytest.mark.parametrize("fails", [False, RuntimeError("no memory for its state")])
def test_a_matcher_that_refuses_a_token_ends_its_own_request(monkeypatch, fails):
    """With the tokens before this one, however steps overlap; also where it raises."""
    prompts, forms, accept = PROMPTS[:3], [FORMS[3], FORMS[0], None], XGrammarMatcher.accept
    made = []
    for overlap in (False, True):
        with PagedGenerator(tiny_model(eos_token_id=END), TOKENIZER, overlap=overlap) as generator:
            expected = generator.generate(prompts, structured=forms, **GREEDY)
            numbers: dict[int, int] = {}

            def refusing(matcher, token, numbers=numbers):
                number = numbers[id(matcher)] = numbers.get(id(matcher), 0) + 1
                if number == 4 and next(iter(numbers)) == id(matcher):
                    if fails:
                        raise fails
                    return False
                return accept(matcher, token)

            monkeypatch.setattr(XGrammarMatcher, "accept", refusing)
            made.append(generator.generate(prompts, structured=forms, **GREEDY))
            monkeypatch.setattr(XGrammarMatcher, "accept", accept)
            assert_idle(generator.model)
        bad, *others = made[-1]
        assert bad.finish_reason == "error" and bad.token_ids == expected[0].token_ids[:3]
        assert (str(fails) if fails else "does not allow token") in bad.error
        assert [one.token_ids for one in others] == [one.token_ids for one in expected[1:]]
    assert made[0][0].error == made[1][0].error


def test_an_eos_that_the_form_needs_ends_the_output_or_the_request():
    """One that counts stands inside of no output; another one, beside it, ends the output where it stands."""
    tokenizer, [one] = byte_tokenizer(), byte_tokenizer()("1")["input_ids"]
    tokenizer.add_special_tokens({"eos_token": "<eos>"})
    with PagedGenerator(tiny_model(vocab_size=257), tokenizer) as generator:
        [ended], [failed] = (generator.generate(
            PROMPTS[:1], structured={"regex": "1{3}"}, eos_token_id=eos, on_error="complete", use_tqdm=False,
            max_new_tokens=5) for eos in ([256, one], [one]))
    assert (ended.token_ids, ended.finish_reason) == ([one], "eos")
    assert failed.finish_reason == "error" and "an eos_token_id that the form needs" in failed.error


ACTIONS = st.lists(st.one_of(
    st.tuples(st.just("add"), st.integers(0, len(PROMPTS) - 1), st.integers(-1, len(FORMS) - 1), st.integers(1, 30)),
    st.tuples(st.just("step"), st.integers(1, 6)),
    st.tuples(st.just("abort"), st.integers(0, 8)),
    st.tuples(st.just("interrupt")), st.tuples(st.just("update")),
), min_size=3, max_size=16)
_ALONE: dict[tuple[int, int, int], list[int]] = {}


def alone(prompt: int, form: int, count: int) -> list[int]:
    key = prompt, form, count
    if key not in _ALONE:
        _ALONE[key] = by_stock(PROMPTS[prompt], FORMS[form] if form >= 0 else None, max_new_tokens=count)
    return _ALONE[key]


@settings(max_examples=25)
@given(actions=ACTIONS, overlap=st.booleans(), num_blocks=st.sampled_from([8, 12, 40]), fewest=st.sampled_from([1, 4]))
def test_any_order_of_requests_steps_ends_and_interrupts(actions, overlap, num_blocks, fewest):
    """Each request's tokens are those that stock makes of it alone, or a beginning of them where it was ended."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mask_maker, "_FEWEST_IN_THREADS", fewest)
        run_in_any_order(actions, overlap, num_blocks)


def run_in_any_order(actions, overlap, num_blocks):
    model = tiny_model(eos_token_id=END)
    engine = hf_paged.Engine(model, hf_paged.PagedConfig(overlap=overlap, num_blocks=num_blocks), TOKENIZER)
    asked: dict[str, tuple[int, int, int]] = {}
    outputs, aborted = [], set()
    for action, *args in [*actions, ("step", 0)]:
        if action == "add":
            prompt, form, count = args
            config = GenerationConfig(max_new_tokens=count, eos_token_id=END)
            made = engine.add_request(PROMPTS[prompt], config, structured=FORMS[form] if form >= 0 else None)
            asked[made] = prompt, form, count
        elif action == "abort" and args[0] < len(asked):
            request_id = list(asked)[args[0]]
            if request_id in engine._core.requests:
                engine.abort(request_id)
                aborted.add(request_id)
        elif action == "interrupt":
            engine._core.dirty = True
        elif action == "update":
            with engine.weight_update():
                pass
        else:
            outputs += [o for _ in range(args[0] if args else 0) for o in engine.step()]
    outputs += drained(engine)
    made = {output.request_id: output.completion for output in outputs if output.completion}
    assert made.keys() == asked.keys()
    for request_id, one in made.items():
        expected = alone(*asked[request_id])
        if request_id in aborted and one.finish_reason == "abort":
            expected = expected[: len(one.token_ids)]
        assert one.token_ids == expected, (asked[request_id], one)
    stats = engine.stats()
    assert stats.num_free_blocks == max(stats.num_blocks - 1, 0)


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"logprobs": 2}], ids=str)
def test_a_request_that_fails_hands_out_no_token_of_the_failing_step(generator, options):
    """Whatever fails: what the output has is what its form allows, with finite log-probabilities of all of it."""
    digits, letters = (TOKENIZER(text)["input_ids"] for text in ("0123456789", "abcdefghijklmnopqrstuvwxyz"))
    form = {"regex": "[a-z]{4}[0-9]{4}"}
    settings = {**GREEDY, "structured": form, "suppress_tokens": digits, **options}
    [one] = generator.generate(PROMPTS[:1], **settings)
    assert one.finish_reason == "error" and "bar all that the grammar allows" in one.error
    assert len(one.token_ids) == 4 and {*one.token_ids} <= {*letters}
    assert one.logprobs is None or (len(one.logprobs) == 4 and all(map(math.isfinite, one.logprobs)))
    streamed = [output for _, output in generator.stream(PROMPTS[:1], **{k: settings[k] for k in settings
                                                                         if k != "use_tqdm"})]
    assert [token for output in streamed for token in output.new_token_ids] == streamed[-1].completion.token_ids
    assert len(streamed[-1].completion.token_ids) == 4


@pytest.mark.parametrize("form", [
    {"json_schema": {"$ref": "#"}}, {"grammar": "root ::= root"}, {"grammar": 'root ::= "a" root'},
    {"grammar": 'root ::= a\na ::= b "x"\nb ::= a "y"'}, {"grammar": 'root ::= a{1,3}\na ::= a "x"'},
    {"json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
    {"json_schema": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
], ids=str)
def test_a_form_that_no_output_has_is_refused_before_anything_runs(generator, form):
    why = r"no output that ends has this form|Circular \$ref chain"  # from xgrammar 0.2.9 on
    for _ in range(2):
        with pytest.raises(ValueError, match=why):
            generator.generate(PROMPTS[:1], structured=form, **GREEDY)
    with pytest.raises(ValueError, match=why):
        generator.model.generate(torch.tensor(PROMPTS[:1]), structured=form, tokenizer=TOKENIZER, max_new_tokens=2)
    assert generator.engine.stats().num_steps == 0


@pytest.mark.parametrize("form", [
    {"grammar": 'root ::= root "x" | "y"'}, {"grammar": 'root ::= a{0,3} "z"\na ::= a "x"'},
    {"json_schema": {"type": "array", "items": {"$ref": "#"}}},
    {"json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}}},
], ids=str)
def test_a_form_that_needs_itself_in_some_outputs_only_is_none_of_those(generator, form):
    [one] = generator.generate(PROMPTS[:1], structured=form, **GREEDY)
    assert one.finish_reason in ("eos", "length") and one.token_ids


def special_generator():
    """Of a model over bytes and two special tokens, either of which may end an output."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<eos>", "pad_token": "<pad>"})
    return PagedGenerator(tiny_model(vocab_size=258, eos_token_id=256), tokenizer)


def test_outputs_end_by_the_eos_of_the_moment():
    """Of the tokenizer, of the model's generation config and of the call, whichever was changed after a first call."""
    form, ids = {"regex": '"[a-z]{3}"'}, torch.tensor(PROMPTS[:1])
    with special_generator() as generator:
        model, tokenizer = generator.model, generator.tokenizer

        def ends(**options):
            [one] = generator.generate(PROMPTS[:1], structured=form, max_new_tokens=20, use_tqdm=False, **options)
            rows = model.generate(ids, structured=form, tokenizer=tokenizer, max_new_tokens=20, **options)
            assert rows[0, ids.shape[1] :].tolist() == one.token_ids
            generator.engine.add_request(PROMPTS[0], GenerationConfig(max_new_tokens=20, **options), structured=form)
            [again] = [output.completion for output in drained(generator.engine) if output.completion]
            assert again.token_ids == one.token_ids and len(one.token_ids) == 6
            return one.token_ids[-1], one.finish_reason

        assert ends() == (256, "eos")
        tokenizer.eos_token = "<pad>"
        assert ends() == (256, "eos")  # which the model's generation config still says
        assert ends(eos_token_id=257) == (257, "eos")
        model.generation_config.eos_token_id = 257
        assert ends() == (257, "eos")
        tokenizer.eos_token = "<eos>"
        assert ends() == (257, "eos")
        model.generation_config.eos_token_id = [256, 257]
        assert ends()[1] == "eos"
        letter = TOKENIZER("a")["input_ids"][0]
        assert ends(eos_token_id=letter)[0] == letter


def test_tokens_that_are_added_to_a_tokenizer_in_place_may_stand_in_outputs():
    tokenizer = byte_tokenizer()
    with PagedGenerator(tiny_model(vocab_size=258), tokenizer) as generator:
        options = {"structured": {"choice": ["zebra"]}, "max_new_tokens": 9, "eos_token_id": -1, "use_tqdm": False}
        [before] = generator.generate(PROMPTS[:1], sequence_bias={(256,): 90.0}, **options)
        tokenizer.add_tokens(["zebra"])
        [after] = generator.generate(PROMPTS[:1], sequence_bias={(256,): 90.0}, **options)
    assert (before.text, after.text, len(before.token_ids), after.token_ids) == ("zebra", "zebra", 5, [256])
