"""The first request with an option waits for the compiler by itself: others go on, and its tokens are stock's."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import Interrupt, assert_idle, random_prompts, run_out, stock_generate, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged.engine.features.kernel_waits import KernelNeeds, KernelWaits

PENALTY = {"repetition_penalty": 1.3}
BARRED = {"suppress_tokens": [3, 4]}
PROMPTS = random_prompts([20, 9, 14, 6])


class Compiler:
    """A stand-in for the compiler: what is asked for, and the futures that a test completes."""

    def __init__(self, engine):
        feature = engine._core.features[KernelWaits]
        feature._is_on = lambda: True
        feature._find_missing = self.find_missing
        self.asked, self.coming, self.there, self.error = [], [], set(), None

    def find_missing(self, needs):
        self.asked.append(needs)
        if self.error is not None:
            raise self.error
        if needs in self.there:
            return []
        made = [Future(), Future()]
        self.coming += made
        return made

    def finish(self, error=None):
        for future in self.coming:
            if not future.done():
                future.set_exception(error) if error else future.set_result(None)
        self.there.update(self.asked)


@pytest.fixture
def engine():
    model = hf_paged.enable(tiny_model(), strict=True, overlap=True, max_num_seqs=8, num_blocks=60)
    yield hf_paged.get_engine(model)
    assert_idle(model)
    hf_paged.disable(model)


@pytest.fixture
def compiler(engine):
    return Compiler(engine)


OF_ENGINE = ("logprobs", "top_logprobs", "timeout")


def add(engine, prompt, length=12, **options):
    own = {name: options.pop(name) for name in OF_ENGINE if name in options}
    return engine.add_request(prompt, GenerationConfig(max_new_tokens=length, do_sample=False, **options), **own)


def steps(engine, count):
    return [output for _ in range(count) for output in engine.step()]


def run(engine, outputs=()):
    outputs = list(outputs)
    run_out(engine, outputs)
    return {output.request_id: output.completion for output in outputs if output.completion is not None}


def of_stock(engine, prompt, length=12, **options):
    ids = torch.tensor([prompt])
    made = stock_generate(engine.model, input_ids=ids, max_new_tokens=length, do_sample=False,
                          pad_token_id=0, **options)
    return made[0, len(prompt):].tolist()


def test_others_go_on_while_a_request_waits(engine, compiler):
    plain = add(engine, PROMPTS[0], 40)
    steps(engine, 2)
    late = add(engine, PROMPTS[1], **PENALTY)
    outputs = steps(engine, 10)
    assert engine.waiting_by_reason()["kernels"] == 1 and engine.stats().num_waiting == 1
    assert len(compiler.asked) == 1 and engine.stats().num_running == 1
    after = add(engine, PROMPTS[2], 5)
    outputs += steps(engine, 10)
    done = {output.request_id for output in outputs if output.completion is not None}
    assert done == {after}, "a later request without the option overtakes it"
    compiler.finish()
    found = run(engine, outputs)
    assert found[late].token_ids == of_stock(engine, PROMPTS[1], **PENALTY)
    assert found[plain].token_ids == of_stock(engine, PROMPTS[0], 40)
    assert engine.waiting_by_reason()["kernels"] == 0


def test_a_request_alone_waits_for_nothing(engine, compiler):
    """The step compiles what it launches sooner than other processes would."""
    one, other = add(engine, PROMPTS[0], **PENALTY), add(engine, PROMPTS[1], **BARRED)
    found = run(engine)
    assert found[one].token_ids == of_stock(engine, PROMPTS[0], **PENALTY)
    assert found[other].token_ids == of_stock(engine, PROMPTS[1], **BARRED)
    assert not any(future.done() for future in compiler.coming)


def test_one_that_waits_begins_when_the_last_other_one_has_ended(engine, compiler):
    add(engine, PROMPTS[0], 6)
    steps(engine, 1)
    late = add(engine, PROMPTS[1], **PENALTY)
    assert run(engine)[late].token_ids == of_stock(engine, PROMPTS[1], **PENALTY)


def test_an_option_is_looked_at_once(engine, compiler):
    add(engine, PROMPTS[0], 60)
    steps(engine, 1)
    add(engine, PROMPTS[1], **PENALTY)
    steps(engine, 3)
    compiler.finish()
    steps(engine, 3)
    add(engine, PROMPTS[2], **PENALTY)
    add(engine, PROMPTS[3], 3)
    steps(engine, 1)
    assert engine.waiting_by_reason()["kernels"] == 0 and engine.stats().num_running == 4
    assert set(compiler.asked) == {KernelNeeds(stages=frozenset({"repetition_penalty"}))} and len(compiler.asked) == 2
    run(engine)


@pytest.mark.parametrize("how", ["failed", "raises"])
def test_a_compiler_that_fails_holds_nothing_for_ever(engine, compiler, how):
    """The launch says what there is to say."""
    add(engine, PROMPTS[0], 60)
    steps(engine, 1)
    if how == "raises":
        compiler.error = RuntimeError("no compiler")
    late = add(engine, PROMPTS[1], **PENALTY)
    steps(engine, 2)
    compiler.finish(RuntimeError("it does not compile"))
    steps(engine, 2)
    assert engine.stats().num_running == 2
    assert run(engine)[late].token_ids == of_stock(engine, PROMPTS[1], **PENALTY)


def test_one_that_waits_may_end(engine, compiler):
    add(engine, PROMPTS[0], 60)
    steps(engine, 1)
    aborted, late = add(engine, PROMPTS[1], **PENALTY), add(engine, PROMPTS[2], timeout=1e-9, **BARRED)
    outputs = steps(engine, 2)
    engine.abort(aborted)
    found = run(engine, outputs)
    assert (found[aborted].finish_reason, found[late].finish_reason) == ("abort", "timeout")
    assert not found[aborted].token_ids and not engine._core.features[KernelWaits].requests


def test_an_interrupt_starts_over_and_it_waits_on(engine, compiler, monkeypatch):
    plain = add(engine, PROMPTS[0], 30)
    steps(engine, 2)
    late = add(engine, PROMPTS[1], **PENALTY)
    steps(engine, 2)
    with monkeypatch.context() as patch:
        patch.setattr(KernelWaits, "_are_there", lambda *_: (_ for _ in ()).throw(Interrupt))
        with pytest.raises(Interrupt):
            engine.step()
    outputs = steps(engine, 3)
    assert engine.waiting_by_reason()["kernels"] == 1
    compiler.finish()
    found = run(engine, outputs)
    assert found[late].token_ids == of_stock(engine, PROMPTS[1], **PENALTY)
    assert found[plain].token_ids == of_stock(engine, PROMPTS[0], 30)


def test_needs_of_requests(engine, compiler):
    add(engine, PROMPTS[0], 40)
    steps(engine, 1)
    for options in (PENALTY, {"logprobs": "raw", "top_logprobs": 3}, {"logprobs": "raw"}, {}):
        add(engine, PROMPTS[1], **options)
    steps(engine, 1)
    assert {(tuple(needs.stages), len(needs.scored)) for needs in compiler.asked} == {
        (("repetition_penalty",), 0), ((), 2), ((), 1)}
    run(engine)


@pytest.mark.slow
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_order_of_requests_and_compilations(data):
    """Tokens are stock's, whatever waits, whenever kernels come, and whatever is aborted."""
    model = hf_paged.enable(tiny_model(), strict=True, overlap=data.draw(st.booleans()), max_num_seqs=3, num_blocks=24)
    engine = hf_paged.get_engine(model)
    compiler, expected, outputs = Compiler(engine), {}, []
    kinds = [{}, PENALTY, BARRED, PENALTY | BARRED]
    for _ in range(data.draw(st.integers(3, 12))):
        action = data.draw(st.sampled_from(["add", "add", "steps", "finish", "fail", "abort"]))
        if action == "add":
            prompt, options = data.draw(st.sampled_from(PROMPTS)), data.draw(st.sampled_from(kinds))
            length = data.draw(st.integers(1, 12))
            expected[add(engine, prompt, length, **options)] = prompt, length, options
        elif action == "steps":
            outputs += steps(engine, data.draw(st.integers(1, 6)))
        elif action == "abort" and expected:
            name = data.draw(st.sampled_from(sorted(expected)))
            if name in engine._core.requests:
                engine.abort(name)
        else:
            compiler.finish(RuntimeError("no") if action == "fail" else None)
    found = run(engine, outputs)
    assert found.keys() == expected.keys()
    for name, (prompt, length, options) in expected.items():
        made = of_stock(engine, prompt, length, **options)
        assert found[name].token_ids == made[: len(found[name].token_ids)]
        assert len(found[name].token_ids) == length or found[name].finish_reason == "abort"
    assert_idle(model)
    hf_paged.disable(model)
