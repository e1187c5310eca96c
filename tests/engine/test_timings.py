"""The times in a completion: in their order, those of the process, and those of the steps that they speak of."""

from __future__ import annotations

import time

import pytest
from support import Interrupt, assert_idle, random_prompts, run_out, tiny_model
from test_interrupts import raising
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedGenerator, Timings
from hf_paged.runner.model_runner import ModelRunner

GREEDY = GenerationConfig(max_new_tokens=6, do_sample=False)


@pytest.fixture(params=[False, True])
def engine(request):
    model = hf_paged.enable(tiny_model(), strict=True, overlap=request.param, max_num_seqs=1, num_blocks=16)
    yield hf_paged.get_engine(model)
    assert_idle(model)


def finished(outputs):
    return {output.request_id: output.completion.timings for output in outputs if output.completion is not None}


def run(engine):
    outputs = run_out(engine)
    return finished(outputs)


def assert_in_order(timings: Timings, before: float, after: float):
    assert None not in timings
    assert before <= timings.queued <= timings.started <= timings.first_token <= timings.ended <= after


def test_stages_of_requests_that_wait_for_each_other(engine):
    """One runs at a time, so each starts after the one before it has ended, and is queued before."""
    before = time.monotonic()
    first, second = (engine.add_request(prompt, GREEDY) for prompt in random_prompts([20, 9]))
    queued = time.monotonic()
    timings = run(engine)
    for one in timings.values():
        assert_in_order(one, before, time.monotonic())
        assert one.queued <= queued <= one.started
        assert one.first_token < one.ended
    assert timings[first].first_token < timings[second].started


def test_each_stage_is_its_steps(engine, monkeypatch):
    """A request starts with the launch of its prompt, and has its first token when that step was committed."""
    launch, prefills = ModelRunner.launch, []

    def watched(runner, plan, *args):
        begun = time.monotonic()
        handle = launch(runner, plan, *args)
        if len(plan.slots) > plan.num_decode_rows:
            prefills.append((begun, time.monotonic()))
        return handle

    monkeypatch.setattr(ModelRunner, "launch", watched)
    request_id = engine.add_request(random_prompts([20])[0], GREEDY)
    timings = run(engine)[request_id]
    [(begun, done)] = prefills
    assert timings.started <= begun
    assert done <= timings.first_token


def test_an_aborted_request_has_the_stages_that_it_reached(engine):
    running, waiting = (engine.add_request(prompt, GREEDY) for prompt in random_prompts([20, 9]))
    outputs = engine.step() + engine.step()
    engine.abort(running)
    engine.abort(waiting)
    timings = finished(outputs) | run(engine)
    assert timings[running].first_token is not None
    assert timings[waiting].queued <= timings[waiting].ended
    assert (timings[waiting].started, timings[waiting].first_token) == (None, None)


def test_what_starts_over_keeps_its_first_times(engine):
    request_id = engine.add_request(random_prompts([20])[0], GREEDY)
    for _ in range(3):
        engine.step()
    request = engine._core.requests[request_id]
    started, first_token = request.started, request.first_token
    assert None not in (started, first_token)
    with raising(engine._core.pool.runner, "launch", 1, True, Interrupt()), pytest.raises(Interrupt):
        engine.step()
    timings = run(engine)[request_id]
    assert (timings.started, timings.first_token) == (started, first_token)


def test_every_completion_of_a_generator_has_them(engine):
    with PagedGenerator(tiny_model()) as generator:
        before = time.monotonic()
        completions = generator.generate([*random_prompts([5, 9]), [1] * 50000], max_new_tokens=3, on_error="complete")
        for completion in completions[:2]:
            assert_in_order(completion.timings, before, time.monotonic())
        assert completions[2].finish_reason == "error"
        assert completions[2].timings is None
        whole = generator.generate(random_prompts([5]), max_new_tokens=3)[0]
        [again] = generator.generate(whole, max_new_tokens=3)
        assert again.timings.first_token is None  # it had reached its end
