"""A warm-up makes an engine ready and runs examples; on a CPU there is nothing to compile."""

from __future__ import annotations

import pytest
from support import random_prompts, run_out, tiny_model

import hf_paged
from hf_paged.kernels.build import compiling
from hf_paged.runner import warm_up as warm_up_module


@pytest.fixture
def engine():
    model = hf_paged.enable(tiny_model(), warmup="full")
    yield hf_paged.get_engine(model)
    hf_paged.disable(model)


def test_on_a_cpu_nothing_is_loaded_compiled_or_written(monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError

    for name in ("compiled_before", "in_background", "loaded", "manifest_path"):
        monkeypatch.setattr(warm_up_module, name, fail)
    monkeypatch.setattr(compiling, "prepare_triton", fail)
    with hf_paged.PagedGenerator(tiny_model(), warmup="full") as generator:
        assert not generator.engine.needs_warm_up
        report = generator.warm_up()
        assert (report.num_kernels_compiled, report.num_kernels_loaded, report.num_graphs_captured) == (0, 0, 0)
        assert generator.engine.stats().num_steps == 0


def test_examples_run_to_their_ends_beside_other_requests(engine):
    waiting = engine.add_request(random_prompts([5])[0], max_new_tokens=3)
    report = engine.warm_up(random_prompts([4, 9]), max_new_tokens=2, logprobs=True, presence_penalty=0.5)
    assert report.seconds > 0.0 and engine.stats().num_generated_tokens >= 4
    outputs = run_out(engine)
    assert {output.request_id for output in outputs} == {waiting}
    assert outputs[-1].completion.finish_reason == "length"


def test_an_example_has_sixteen_tokens_if_nothing_else_is_said(engine):
    engine.warm_up([7, 8, 9])
    assert engine.stats().num_generated_tokens <= 16


@pytest.mark.parametrize(("arguments", "said"), [
    (([7, 8], None, {"max_tokens": 3}), "max_new_tokens"), (([10**9], None, {}), r"\[0, 256\)"),
    (("a text", None, {}), "tokenizer=None"),
])
def test_a_wrong_example_is_an_error_that_names_it(engine, arguments, said):
    requests, config, keywords = arguments
    with pytest.raises((TypeError, ValueError), match=said):
        engine.warm_up(requests, config, **keywords)


def test_steps_behind_a_warm_up_are_those_of_a_ready_engine(engine, monkeypatch):
    ready = []
    launch = type(engine._core)._launch

    def noted(self, *args):
        ready.append(self.delays.is_ready)
        return launch(self, *args)

    monkeypatch.setattr(type(engine._core), "_launch", noted)
    engine._core.pool.warm_up.is_done = True  # as on a GPU
    engine.warm_up([7, 8, 9], max_new_tokens=2)
    assert set(ready) == {False}
    ready.clear()
    engine.add_request([7, 8, 9], max_new_tokens=2)
    run_out(engine)
    assert set(ready) == {True}


def test_a_generator_runs_a_call_with_its_options(trained_path):
    with hf_paged.PagedGenerator.from_pretrained(trained_path, device="cpu", dtype="float32") as generator:
        report = generator.warm_up([[{"role": "user", "content": "Hello"}]], max_new_tokens=2, top_logprobs=2,
                                   logprobs=True)
        assert isinstance(report, hf_paged.WarmUpReport) and generator.engine.stats().num_generated_tokens > 0
