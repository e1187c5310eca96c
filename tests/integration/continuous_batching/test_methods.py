"""transformers' continuous batching methods on the paged engine: same tokens, same protocol, nothing left behind."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import gc
import inspect
import queue
import threading
import time
import warnings
import weakref
from contextlib import contextmanager

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support import assert_idle, random_prompts, stock_copy, tiny_model
from threads import threads_of_engines
from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3ForCausalLM
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

import hf_paged
from hf_paged import FallbackError, FallbackWarning
from hf_paged.engine.engine import Engine
from hf_paged.integration.continuous_batching import board, requests
from hf_paged.integration.continuous_batching.manager import KEPT, PagedBatchingManager

LENGTHS = [5, 21, 3, 40, 17]
PROMPTS = random_prompts(LENGTHS)


def greedy(max_new_tokens=12, **settings):
    return GenerationConfig(max_new_tokens=max_new_tokens, do_sample=False, **settings)


def expected_rows(model, prompts=PROMPTS, **kwargs):
    """What stock generate makes of each prompt alone: new tokens, EOS included."""
    stock = stock_copy(model)
    return [stock.generate(torch.tensor([p]), **kwargs)[0, len(p) :].tolist() for p in prompts]


@pytest.fixture
def model():
    model = hf_paged.enable(tiny_model())
    yield model
    hf_paged.disable(model)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert threads_of_engines() == []


@pytest.fixture(autouse=True)
def _native_unless_said():
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        yield


@contextmanager
def running(model, config=None, **kwargs):
    """A started manager that is stopped, whatever happens."""
    manager = model.init_continuous_batching(generation_config=config or greedy(), **kwargs)
    manager.start()
    try:
        yield manager
    finally:
        if manager.is_running():
            manager.stop(hard_stop=True, timeout=20)


@contextmanager
def held_back(model):
    """The engine makes no step in here."""
    engine = hf_paged.get_engine(model)
    with engine._lock.rlock:
        yield


# -- generate_batch ----------------------------------------


@pytest.mark.parametrize("record_timestamps", [False, True])
def test_generate_batch_is_generate_row_by_row(model, record_timestamps):
    expected = expected_rows(model, max_new_tokens=12)
    engine = hf_paged.get_engine(model)
    outputs = model.generate_batch(PROMPTS, generation_config=greedy(), record_timestamps=record_timestamps)
    assert list(outputs) == [f"req_{i}" for i in range(len(PROMPTS))]
    assert [o.generated_tokens for o in outputs.values()] == expected
    assert engine.stats().num_generated_tokens == 12 * len(PROMPTS)
    for (key, output), prompt in zip(outputs.items(), PROMPTS, strict=True):
        assert type(output) is GenerationOutput
        assert (output.request_id, output.prompt_ids, output.error, output.logprobs) == (key, prompt, None, [])
        assert output.status is RequestStatus.FINISHED
        assert output.is_finished()
        assert output.created_time <= output.lifespan[0] <= output.lifespan[1]
        if record_timestamps:
            assert len(output.timestamps) == 12
            assert output.timestamps == sorted(output.timestamps)
        else:
            assert output.timestamps is None
    assert_idle(model)


def test_same_outputs_as_transformers_own_continuous_batching(model):
    config = greedy(eos_token_id=3)
    sizes = ContinuousBatchingConfig(num_blocks=40, max_batch_tokens=64, use_cuda_graph=False)
    stock = stock_copy(model).generate_batch(PROMPTS, generation_config=copy.deepcopy(config), warmup=False,
                                             continuous_batching_config=sizes)
    ours = model.generate_batch(PROMPTS, generation_config=config, continuous_batching_config=sizes)
    assert list(ours) == list(stock)
    for key in stock:
        for name in ("request_id", "prompt_ids", "generated_tokens", "logprobs", "error", "status", "timestamps"):
            assert getattr(ours[key], name) == getattr(stock[key], name), (key, name)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [
    {"do_sample": False}, {"do_sample": False, "eos_token_id": 3}, {"do_sample": True, "temperature": 0.7, "top_k": 1},
    {"do_sample": True, "temperature": 1e-3},
])
def test_logprobs_are_those_of_transformers_own_continuous_batching(model, settings):
    """Settings whose tokens are certain, so that both make the same."""
    sizes = ContinuousBatchingConfig(**SMALL, return_logprobs=True)
    settings = {"max_new_tokens": 12, "pad_token_id": 0, **settings}
    stock = stock_copy(model).generate_batch(PROMPTS, generation_config=GenerationConfig(**settings), warmup=False,
                                             continuous_batching_config=sizes)
    for record_timestamps in (False, True):  # requests that are looked at at their end, and at every token
        ours = model.generate_batch(PROMPTS, GenerationConfig(**settings), continuous_batching_config=sizes,
                                    record_timestamps=record_timestamps)
        for key, right in stock.items():
            assert ours[key].generated_tokens == right.generated_tokens
            assert ours[key].logprobs == pytest.approx(right.logprobs, abs=1e-5)
            assert len(ours[key].logprobs) == len(right.generated_tokens)


def test_logprobs_of_streamed_sampled_children_are_the_models(model):
    """Of every copy its own, as many as tokens at any time, under the tempered distribution."""
    config = GenerationConfig(max_new_tokens=10, do_sample=True, temperature=3.0, num_return_sequences=2)
    sizes = ContinuousBatchingConfig(seed=1, return_logprobs=True)
    with running(model, config, continuous_batching_config=sizes) as manager:
        manager.add_request(PROMPTS[1], streaming=True)
        outputs = [manager.get_result(timeout=20) for _ in range(20)]
    assert all(len(o.logprobs) == len(o.generated_tokens) for o in outputs)
    ends = [o for o in outputs if o.is_finished()]
    assert len(ends) == 2
    assert ends[0].logprobs != ends[1].logprobs
    for output in ends:
        tokens = torch.tensor([PROMPTS[1] + output.generated_tokens])
        with torch.no_grad():
            rows = stock_copy(model)(tokens).logits[0, len(PROMPTS[1]) - 1 : -1].div(3.0).log_softmax(-1)
        right = rows[range(10), output.generated_tokens].tolist()
        assert output.logprobs == pytest.approx(right, abs=1e-4)


def test_empty_list_and_methods_keep_their_signatures(model):
    assert model.generate_batch([]) == {}
    for name in ("generate_batch", "init_continuous_batching", "continuous_batching_context_manager"):
        assert inspect.signature(getattr(model, name)) == inspect.signature(getattr(tiny_model(), name))


def test_eos_ends_a_request_and_is_kept(model):
    rows = expected_rows(model, max_new_tokens=12)
    eos = rows[1][4]
    expected = [row[: row.index(eos) + 1] if eos in row else row for row in rows]
    assert [o.generated_tokens for o in model.generate_batch(PROMPTS, greedy(eos_token_id=eos)).values()] == expected
    listed = greedy(eos_token_id=[eos, 10**6])
    assert [o.generated_tokens for o in model.generate_batch(PROMPTS, listed).values()] == expected
    model.generation_config.eos_token_id = eos  # a config that says nothing takes the model's, as generate does
    assert [o.generated_tokens for o in model.generate_batch(PROMPTS, greedy()).values()] == expected
    assert [o.generated_tokens for o in model.generate_batch(PROMPTS, greedy(eos_token_id=-1)).values()] == rows


def test_keywords_lie_over_the_config_and_unknown_ones_are_named(model):
    config = greedy(12)
    rows = expected_rows(model, max_new_tokens=5)
    assert [o.generated_tokens for o in model.generate_batch(PROMPTS, config, max_new_tokens=5).values()] == rows
    eos = rows[0][1]
    outputs = model.generate_batch(PROMPTS[:1], config, eos_token_id=eos, min_new_tokens=4)
    assert outputs["req_0"].generated_tokens == expected_rows(
        model, PROMPTS[:1], max_new_tokens=12, eos_token_id=eos, min_new_tokens=4)[0]
    assert config.max_new_tokens == 12 and config.eos_token_id is None
    with pytest.raises(ValueError, match="'temprature'"):
        model.generate_batch(PROMPTS, config, temprature=0.5)
    with pytest.raises(TypeError, match="generation_config="):
        model.generate_batch(PROMPTS, {"max_new_tokens": 5})


@pytest.mark.parametrize("copies", [-1, 0, 1.5, True])
def test_a_number_of_copies_that_is_none_is_named(model, copies):
    config = greedy(3)
    config.num_return_sequences = copies
    with pytest.raises(ValueError, match="num_return_sequences="):
        model.generate_batch(PROMPTS, config)
    with model.continuous_batching_context_manager(greedy(3)) as manager, \
         pytest.raises(ValueError, match="num_return_sequences="):
        manager.add_request(PROMPTS[0], num_return_sequences=copies)


def test_unset_length_takes_max_length_and_else_all_room(model):
    length = max(map(len, PROMPTS)) + 3
    outputs = model.generate_batch(PROMPTS, GenerationConfig(max_length=length))
    assert [len(o.generated_tokens) for o in outputs.values()] == [length - n for n in LENGTHS]
    hf_paged.enable(model, max_model_len=24)
    output = model.generate_batch(PROMPTS[:1], GenerationConfig())["req_0"]
    assert len(output.generated_tokens) == 24 - LENGTHS[0]
    assert output.status is RequestStatus.FAILED  # transformers would have gone on: this is no end of its own
    assert "stopped after 19 new tokens" in output.error


def test_sampling_follows_torchs_seed_and_unset_filters_are_off(model):
    config = GenerationConfig(max_new_tokens=10, do_sample=True, temperature=3.0)

    def run(seed, **kwargs):
        torch.manual_seed(seed)
        return [o.generated_tokens for o in model.generate_batch([PROMPTS[0]] * 40, config, **kwargs).values()]

    first = run(1)
    assert run(1) == first
    assert run(2) != first
    assert len(set(map(tuple, first))) > 30
    seeded = ContinuousBatchingConfig(seed=5)
    assert run(1, continuous_batching_config=seeded) == run(2, continuous_batching_config=seeded)
    assert run(3, top_k=1) == 40 * expected_rows(model, PROMPTS[:1], max_new_tokens=10)
    # generate would keep 50 tokens where top_k is unset; transformers' continuous batching keeps all, and so do we.
    with torch.no_grad():
        top = set(model(torch.tensor([PROMPTS[0]])).logits[0, -1].topk(50).indices.tolist())
    assert not {row[0] for row in first} <= top


def test_several_sequences_a_prompt_come_before_their_parent(model):
    config = GenerationConfig(max_new_tokens=6, do_sample=True, temperature=2.0, num_return_sequences=3)
    outputs = model.generate_batch(PROMPTS[:2], config)
    assert list(outputs) == ["req_0__child#0", "req_0__child#1", "req_0", "req_1__child#0", "req_1__child#1", "req_1"]
    assert [o.prompt_ids for o in outputs.values()] == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    assert len({tuple(o.generated_tokens) for o in outputs.values()}) == 6


def test_bad_request_ends_alone(model):
    good = expected_rows(model, PROMPTS[:2], max_new_tokens=12)
    outputs = model.generate_batch([PROMPTS[0], [1, 10**6], [], PROMPTS[1]], greedy())
    assert [outputs["req_0"].generated_tokens, outputs["req_3"].generated_tokens] == good
    assert [o.status for o in outputs.values()] == [RequestStatus.FINISHED, *[RequestStatus.FAILED] * 2,
                                                    RequestStatus.FINISHED]
    assert "1000000" in outputs["req_1"].error
    assert "at least one token" in outputs["req_2"].error
    assert outputs["req_1"].generated_tokens == []


def test_changed_weights_are_followed(model):
    for _ in range(2):
        expected = expected_rows(model, max_new_tokens=8)
        assert [o.generated_tokens for o in model.generate_batch(PROMPTS, greedy(8)).values()] == expected
        with torch.no_grad():
            model.lm_head.weight.mul_(-1.0)
            model.model.layers[0].self_attn.k_proj.weight.data.add_(0.1)


def test_interrupt_ends_what_runs_and_the_next_call_is_right(model, monkeypatch):
    expected = expected_rows(model, max_new_tokens=12)

    def interrupt(self, *args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PagedBatchingManager, "get_result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            model.generate_batch(PROMPTS, greedy(400))
    assert_idle(model)
    assert hf_paged.get_engine(model).stats().num_generated_tokens < 400 * len(PROMPTS)  # not finished first
    assert [o.generated_tokens for o in model.generate_batch(PROMPTS, greedy()).values()] == expected


# -- the manager ----------------------------------------


def test_streamed_outputs_grow_and_the_last_is_finished(model):
    expected = expected_rows(model, max_new_tokens=12)
    with running(model) as manager:
        ids = [manager.add_request(p, streaming=i % 2 == 0) for i, p in enumerate(PROMPTS)]
        seen = {request_id: [] for request_id in ids}
        while not all(outputs and outputs[-1].is_finished() for outputs in seen.values()):
            output = manager.get_result(timeout=20)
            seen[output.request_id].append(output)
        for i, request_id in enumerate(ids):
            outputs = seen[request_id]
            assert [len(o.generated_tokens) for o in outputs] == (list(range(1, 13)) if i % 2 == 0 else [12])
            assert all(o.generated_tokens == expected[i][: len(o.generated_tokens)] for o in outputs)
            assert {o.status for o in outputs[:-1]} <= {RequestStatus.DECODING}
            assert outputs[-1].status is RequestStatus.FINISHED
    assert_idle(model)


def test_requests_have_settings_of_their_own(model):
    rows = expected_rows(model, PROMPTS[:1], max_new_tokens=9)[0]
    eos = rows[3]
    with running(model) as manager:
        manager.add_request(PROMPTS[0], request_id="short", max_new_tokens=2)
        manager.add_request(PROMPTS[0], request_id="eos", max_new_tokens=9, eos_token_id=eos)
        manager.add_request(PROMPTS[0], request_id="sharp", max_new_tokens=9, do_sample=True, temperature=1e-4)
        manager.add_request(PROMPTS[0], request_id="wild", max_new_tokens=9, do_sample=True, temperature=50.0)
        manager.add_request(PROMPTS[0], request_id="typo", temprature=1.0)
        manager.add_request(PROMPTS[0], request_id="wrong", do_sample=True, top_p=7.0)
        manager.add_request(PROMPTS[0], request_id="unsupported", num_beams=2)
        outputs = {o.request_id: o for o in (manager.get_result(timeout=20) for _ in range(7))}
    assert outputs["short"].generated_tokens == rows[:2]
    assert outputs["eos"].generated_tokens == rows[: rows.index(eos) + 1]
    assert outputs["sharp"].generated_tokens == rows
    assert outputs["wild"].generated_tokens != rows
    for name, said in (("typo", "temprature"), ("wrong", "top_p"), ("unsupported", "num_beams=2")):
        assert outputs[name].status is RequestStatus.FAILED
        assert said in outputs[name].error


def test_requests_may_come_before_the_start(model):
    manager = model.init_continuous_batching(greedy(4))
    assert manager.add_requests(PROMPTS) == [f"req_{i}" for i in range(len(PROMPTS))]
    assert manager.get_result(timeout=5) is None  # as in transformers: there is no thread that could bring one
    manager.warmup()
    assert manager.warmed_up
    assert not manager.is_running()
    manager.start()
    outputs = [manager.get_result(timeout=20) for _ in PROMPTS]
    assert sorted(o.request_id for o in outputs) == [f"req_{i}" for i in range(len(PROMPTS))]
    manager.stop(timeout=20)
    assert not manager.is_running()


def test_request_ids_in_use_are_refused(model):
    with running(model) as manager, held_back(model):
        manager.add_request(PROMPTS[0], request_id="a")
        with pytest.raises(ValueError, match="request_id='a'"):
            manager.add_request(PROMPTS[1], request_id="a")


def test_cancelled_requests_give_their_blocks_back_without_an_output(model):
    expected = expected_rows(model, PROMPTS[1:2], max_new_tokens=12)[0]
    with running(model) as manager:
        manager.add_request(PROMPTS[0], request_id="long", max_new_tokens=400, streaming=True)
        assert manager.get_result("long", timeout=20).status is RequestStatus.DECODING
        other = manager.add_request(PROMPTS[1])
        manager.cancel_request("long")
        manager.cancel_request("never seen")
        assert manager.get_result(other, timeout=20).generated_tokens == expected
        deadline = time.monotonic() + 20
        while hf_paged.get_engine(model).stats().num_running and time.monotonic() < deadline:
            time.sleep(0.01)
        assert_idle(model)
        while (left := manager.get_result(timeout=0.05)) is not None:
            assert not left.is_finished()
        assert list(manager.request_id_iter("long")) == []


def test_cancelling_wakes_who_waits_for_the_request(model):
    with running(model) as manager:
        manager.add_request(PROMPTS[0], request_id="long", max_new_tokens=450)
        threading.Timer(0.1, manager.cancel_request, ["long"]).start()
        assert manager.get_result("long", timeout=60) is None


def test_nobody_waits_for_ever_for_a_request_that_is_gone(model):
    """Cancelled before, or fetched before: without a timeout there is nothing to wait for."""
    answers = []
    with running(model) as manager:
        manager.add_request(PROMPTS[0], request_id="cancelled", max_new_tokens=450)
        manager.cancel_request("cancelled")
        manager.add_request(PROMPTS[0], request_id="fetched")
        assert manager.get_result("fetched").is_finished()
        for request_id in ("cancelled", "fetched", "never seen"):
            thread = threading.Thread(target=lambda i=request_id: answers.append(manager.get_result(i)))
            thread.start()
            thread.join(5)
        assert answers == [None] * 3
        manager.add_request(PROMPTS[0], request_id="fetched")  # the id is free again
        assert manager.get_result("fetched").is_finished()


def test_no_step_runs_inside_pause(model):
    expected = expected_rows(model, PROMPTS[:1], max_new_tokens=60)[0]
    engine = hf_paged.get_engine(model)
    with running(model) as manager:
        manager.add_request(PROMPTS[0], max_new_tokens=60, streaming=True)
        assert manager.get_result(timeout=20) is not None
        with manager.pause(), manager.pause():
            steps = engine.stats().num_steps
            time.sleep(0.2)
            assert engine.stats().num_steps == steps < 60
            with pytest.raises(RuntimeError, match="inside `pause`"):
                manager.stop()
        outputs = list(manager.request_id_iter("req_0"))
        assert outputs[-1].generated_tokens == expected
    with pytest.raises(RuntimeError, match="no generation loop"), manager.pause():
        pass


def test_pause_of_an_idle_manager_and_weights_changed_in_it(model):
    with running(model) as manager:
        for _ in range(2):
            with manager.pause(), torch.no_grad():
                model.lm_head.weight.neg_()
            expected = expected_rows(model, PROMPTS[:1], max_new_tokens=12)[0]
            manager.add_request(PROMPTS[0])
            assert manager.get_result(timeout=20).generated_tokens == expected


def test_handlers_hear_everything_on_their_event_loop(model):
    expected = expected_rows(model, PROMPTS[:2], max_new_tokens=12)

    async def main(manager):
        loop, seen = asyncio.get_running_loop(), []
        early, late = loop.create_future(), []
        manager.add_request(PROMPTS[0], request_id="early", streaming=True)
        while "early" in manager.board.open:  # all of it is made before anybody listens
            await asyncio.sleep(0.01)

        def listen(output):
            seen.append((threading.get_ident(), output))
            if output.is_finished():
                early.set_result(None)

        manager.register_result_handler("early", listen)
        await asyncio.wait_for(early, 20)
        assert [len(o.generated_tokens) for _, o in seen] == list(range(1, 13))
        assert {ident for ident, _ in seen} == {threading.get_ident()}
        assert seen[-1][1].generated_tokens == expected[0]
        done = asyncio.Event()
        manager.register_result_handler("late", lambda output: (late.append(output), done.set()))
        manager.add_request(PROMPTS[1], request_id="late")
        await asyncio.wait_for(done.wait(), 20)
        assert [o.generated_tokens for o in late] == [expected[1]]

    with running(model) as manager:
        asyncio.run(main(manager))
        assert manager.get_result(timeout=0.05) is None
        asyncio.run(_register_and_leave(manager))  # its loop is closed when the output comes: nothing breaks
        manager.add_request(PROMPTS[0], request_id="gone")
        manager.add_request(PROMPTS[1], request_id="after")
        assert manager.get_result("after", timeout=20).generated_tokens == expected[1]


async def _register_and_leave(manager):
    manager.register_result_handler("gone", print)


def test_iterators_end_with_the_thread_and_with_the_request(model):
    expected = expected_rows(model, max_new_tokens=12)
    with running(model) as manager:
        ids = manager.add_requests(PROMPTS, streaming=True)
        lengths = [len(o.generated_tokens) for o in manager.request_id_iter(ids[2])]
        assert lengths == list(range(1, 13))
        manager.stop(block=False)
        last = {o.request_id: o.generated_tokens for o in manager}
        assert last == {ids[i]: expected[i] for i in (0, 1, 3, 4)}
        assert list(manager) == []


def test_get_result_waits_no_longer_than_told(model):
    with running(model) as manager:
        for wanted in (None, "nobody"):
            start = time.monotonic()
            assert manager.get_result(wanted, timeout=0.1) is None
            assert 0.09 < time.monotonic() - start < 5


def test_results_of_others_are_left_for_them(model):
    with running(model) as manager:
        ids = manager.add_requests(PROMPTS)
        for request_id in reversed(ids):
            assert manager.get_result(request_id, timeout=20).request_id == request_id


class Death(BaseException):
    """What no loop may survive."""


def break_engine(monkeypatch, model, after=3, error=Death):
    """The engine's loop raises at its n-th step."""
    loop, steps = hf_paged.get_engine(model)._core, []

    def step(**kwargs):
        steps.append(1)
        if len(steps) > after:
            raise error("the roof is on fire")
        return type(loop).step(loop, **kwargs)

    monkeypatch.setattr(loop, "step", step)


def test_death_of_the_thread_is_told_to_everybody(model, monkeypatch):
    expected = expected_rows(model, PROMPTS[:1], max_new_tokens=12)[0]
    with running(model) as manager:
        with monkeypatch.context() as patch:
            break_engine(patch, model)
            ids = manager.add_requests(PROMPTS)
            outputs = [manager.get_result(request_id, timeout=20) for request_id in ids]
            assert {o.status for o in outputs} == {RequestStatus.FAILED}
            assert all("the roof is on fire" in o.error for o in outputs)
            assert manager.get_result() is None  # without a timeout: it must not wait for ever
            assert "roof" in str(manager.background_thread_status.fatal_error)
            assert manager.add_request(PROMPTS[0]) is None
            manager.thread.join(20)
            assert not manager.is_running()
        manager.start()
        assert manager.background_thread_status.fatal_error is None
        manager.add_request(PROMPTS[0], request_id="again")
        assert manager.get_result("again", timeout=20).generated_tokens == expected
    assert_idle(model)


def test_death_of_the_thread_raises_in_generate_batch(model, monkeypatch):
    with monkeypatch.context() as patch:
        break_engine(patch, model)
        with pytest.raises(RuntimeError, match="the roof is on fire"):
            model.generate_batch(PROMPTS, greedy())
    assert len(model.generate_batch(PROMPTS, greedy())) == len(PROMPTS)


def test_an_engine_that_breaks_fails_what_runs_and_starts_afresh(model, monkeypatch):
    """The thread lives on, says what happened, and serves the next request; requests that came later are unharmed."""
    expected = expected_rows(model, PROMPTS[:1], max_new_tokens=12)[0]
    with running(model) as manager:
        with monkeypatch.context() as patch:
            break_engine(patch, model, error=RuntimeError)
            outputs = [manager.get_result(request_id, timeout=20) for request_id in manager.add_requests(PROMPTS)]
            assert {o.status for o in outputs} == {RequestStatus.FAILED}
            assert all("the engine broke" in o.error and "the roof is on fire" in o.error for o in outputs)
        assert manager.is_running()
        assert manager.background_thread_status.fatal_error is None
        for streaming in (False, True):
            request_id = manager.add_request(PROMPTS[0], streaming=streaming)
            outputs = list(manager.request_id_iter(request_id))
            assert outputs[-1].generated_tokens == expected
    assert_idle(model)


def test_an_engine_that_breaks_while_a_request_is_cancelled_fails_what_runs_alone(model, monkeypatch):
    """The step in flight is committed for the cancellation, and may bring an error of the device."""
    expected = expected_rows(model, PROMPTS[:1], max_new_tokens=12)[0]
    with running(model) as manager:
        first, second = (manager.add_request(prompt, max_new_tokens=200, streaming=True) for prompt in PROMPTS[:2])
        assert manager.get_result(second, timeout=20) is not None
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "abort", lambda *_: (_ for _ in ()).throw(RuntimeError("the roof is on fire")))
            manager.cancel_request(first)
            outputs = list(manager.request_id_iter(second))
        assert outputs[-1].status == RequestStatus.FAILED and "the roof is on fire" in outputs[-1].error
        assert manager.is_running() and manager.background_thread_status.fatal_error is None
        again = manager.add_request(PROMPTS[0])
        assert manager.get_result(again, timeout=20).generated_tokens == expected
    assert_idle(model)


def test_an_engine_that_breaks_raises_in_generate_batch(model, monkeypatch):
    with monkeypatch.context() as patch:
        break_engine(patch, model, error=RuntimeError)
        with pytest.raises(RuntimeError, match=r"the engine broke .*the roof is on fire"):
            model.generate_batch(PROMPTS, greedy())
    assert len(model.generate_batch(PROMPTS, greedy())) == len(PROMPTS)


def test_death_of_the_thread_wakes_a_waiting_pause(model, monkeypatch):
    with running(model) as manager:
        break_engine(monkeypatch, model, after=0)
        with held_back(model):
            manager.add_request(PROMPTS[0])
            while manager.board._arrivals:  # the thread took it, and now waits for the engine
                time.sleep(0.01)
            failed = []

            def pause():
                try:
                    with manager.pause():
                        pass
                except RuntimeError as error:
                    failed.append(str(error))

            thread = threading.Thread(target=pause)
            thread.start()
            time.sleep(0.1)
        thread.join(20)
        assert not thread.is_alive()
        assert failed == ["The generation loop stopped before it could pause."]


@pytest.mark.parametrize("streaming", [False, True])
def test_hard_stop_fails_what_runs(model, streaming):
    expected = expected_rows(model, PROMPTS[:1], max_new_tokens=400)[0]
    with running(model) as manager:
        manager.add_request(PROMPTS[0], max_new_tokens=400, streaming=streaming)
        while not hf_paged.get_engine(model).stats().num_generated_tokens:
            time.sleep(0.01)
        manager.stop(hard_stop=True, timeout=20)
        assert not manager.is_running()
        output = list(manager)[-1]
        assert output.status is RequestStatus.FAILED
        assert "stopped" in output.error
        assert 0 < len(output.generated_tokens) < 400
        assert output.generated_tokens == expected[: len(output.generated_tokens)]
        assert manager.add_request(PROMPTS[0]) is None
    assert_idle(model)


def test_plain_stop_finishes_what_runs(model):
    expected = expected_rows(model, max_new_tokens=30)
    with running(model, greedy(30)) as manager:
        manager.add_requests(PROMPTS)
        manager.stop(block=True)
        assert not manager.is_running()
        assert [o.generated_tokens for o in sorted(manager, key=lambda o: o.request_id)] == expected
        manager.stop()  # a warning, no more
        manager.destroy()


def test_context_manager_stops_also_where_its_block_raises(model):
    with model.continuous_batching_context_manager(generation_config=greedy(4)) as manager:
        assert manager.warmed_up
        manager.add_request(PROMPTS[0])
        assert manager.get_result(timeout=20).is_finished()
    assert not manager.is_running()
    with pytest.raises(ZeroDivisionError), model.continuous_batching_context_manager(greedy(450)) as manager:
        1 / (manager.add_request(PROMPTS[0]) is None)
    assert not manager.is_running()
    assert hf_paged.get_engine(model).stats().num_generated_tokens < 450
    assert_idle(model)


def test_managers_after_each_other_and_side_by_side(model):
    expected = expected_rows(model, max_new_tokens=12)
    for _ in range(2):
        with running(model) as manager:
            manager.add_requests(PROMPTS)
            assert manager.get_result("req_4", timeout=20).generated_tokens == expected[4]
    with running(model) as one, running(model, greedy(6)) as other:
        one.add_requests(PROMPTS)
        other.add_requests(PROMPTS)  # the same ids
        alone = model.generate(torch.tensor([PROMPTS[3]]), max_new_tokens=12)
        assert alone[0, LENGTHS[3] :].tolist() == expected[3]
        for i, row in enumerate(expected):
            assert one.get_result(f"req_{i}", timeout=20).generated_tokens == row
            assert other.get_result(f"req_{i}", timeout=20).generated_tokens == row[:6]
    assert_idle(model)


def test_full_queue_pushes_back(model, monkeypatch):
    monkeypatch.setattr(board, "QUEUE_TIMEOUT_S", 0.05)
    batching = ContinuousBatchingConfig(max_queue_size=2)
    manager = model.init_continuous_batching(greedy(2), batching)
    manager.add_requests(PROMPTS[:2])
    with pytest.raises(queue.Full):
        manager.add_request(PROMPTS[2])
    manager.start()
    assert [manager.get_result(f"req_{i}", timeout=20).is_finished() for i in range(2)] == [True, True]
    manager.add_request(PROMPTS[2])  # there is room again
    manager.stop(timeout=20)


def test_kept_managers_count_on_and_do_not_keep_the_model(model):
    first = model.generate_batch(PROMPTS[:2], greedy(3), persistent_manager=True)
    kept = KEPT[model]
    second = model.generate_batch(PROMPTS[:2], greedy(5), persistent_manager=True)
    assert list(first) + list(second) == [f"req_{i}" for i in range(4)]
    assert [len(o.generated_tokens) for o in second.values()] == [5, 5]  # the later call's settings
    assert model.init_continuous_batching(greedy()) is kept
    assert not hf_paged.is_enabled(copy.deepcopy(model))  # a manager is nothing that a copy would meet
    model.destroy_cached_continuous_batching_manager()
    assert model.init_continuous_batching(greedy()) is not kept
    other = hf_paged.enable(tiny_model())
    other.generate_batch(PROMPTS[:1], greedy(2), persistent_manager=True)
    gone = weakref.ref(other)
    del other
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("block", [True, False])
def test_kept_managers_let_the_model_go_when_they_are_done(block):
    model = hf_paged.enable(tiny_model())
    manager = model.init_continuous_batching(greedy(30))
    manager.start()
    manager.add_requests(PROMPTS)
    manager.stop(block=block, keep_for_next_session=True)
    assert KEPT[model] is manager
    manager.join(0.0, timeout=20)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    manager.destroy()
    with pytest.raises(RuntimeError, match="disabled"):
        manager.start()


def test_disable_ends_requests_and_managers_say_so():
    model = hf_paged.enable(tiny_model())
    with running(model, greedy(400)) as manager:
        ids = [manager.add_request(PROMPTS[0]), manager.add_request(PROMPTS[1], streaming=True)]
        while hf_paged.get_engine(model).stats().num_running < 2:
            time.sleep(0.01)
        hf_paged.disable(model)
        for request_id in ids:
            last = list(manager.request_id_iter(request_id))[-1]
            assert last.status is RequestStatus.FAILED
            assert "disabled" in last.error
        with pytest.raises(RuntimeError, match="disabled"):
            manager.add_request(PROMPTS[0])
    with pytest.raises(RuntimeError, match="disabled"):
        manager.start()
    assert type(model) is Qwen3ForCausalLM


def test_hooked_model_fails_the_requests_that_come_after(model):
    with running(model) as manager:
        handle = model.model.layers[0].register_forward_hook(lambda *args: None)
        manager.add_request(PROMPTS[0])
        assert "hook" in manager.get_result(timeout=20).error
        handle.remove()
        manager.add_request(PROMPTS[0])
        assert manager.get_result(timeout=20).error is None


# -- what goes to transformers' own ----------------------------------------


SMALL = {"num_blocks": 40, "max_batch_tokens": 64, "use_cuda_graph": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "batching", "reason"),
    [
        ({"num_beams": 2}, {}, "num_beams=2 .*, and transformers' own continuous batching ignores it"),
        ({"max_new_tokens": 600}, {}, "max_model_len"),
    ],
)
def test_what_the_engine_lacks_goes_to_transformers_with_a_word(settings, batching, reason):
    model = tiny_model()
    config, batching = greedy(**settings), ContinuousBatchingConfig(**SMALL, **batching)
    if settings.get("max_new_tokens"):
        config.eos_token_id = expected_rows(model, PROMPTS[:1], max_new_tokens=12)[0][6]

    def call():
        return model.generate_batch(PROMPTS[:1], generation_config=copy.deepcopy(config), warmup=False,
                                    continuous_batching_config=batching)["req_0"]

    expected = call()
    hf_paged.enable(model)
    with pytest.warns(FallbackWarning, match=reason) as caught:
        actual = call()
    assert len([w for w in caught if w.category is FallbackWarning]) == 1
    assert (actual.generated_tokens, actual.error) == (expected.generated_tokens, None)
    assert hf_paged.get_engine(model).stats().num_generated_tokens == 0
    hf_paged.enable(model, strict=True)
    with pytest.raises(FallbackError, match=reason):
        call()
    hf_paged.disable(model)


def test_manager_of_unsupported_settings_is_transformers_own(model):
    with pytest.warns(FallbackWarning, match="num_beams=2"):
        manager = model.init_continuous_batching(greedy(num_beams=2), ContinuousBatchingConfig(**SMALL))
    assert not isinstance(manager, PagedBatchingManager)
    manager.stop()


def test_train_mode_and_autocast_of_the_caller_change_nothing(model):
    expected = expected_rows(model, max_new_tokens=8)
    model.train()
    with torch.autocast("cpu", torch.bfloat16):  # thread-local: transformers' thread does not see it, either
        outputs = model.generate_batch(PROMPTS, greedy(8))
    assert [o.generated_tokens for o in outputs.values()] == expected
    assert not model.training  # as transformers leaves it


def test_cache_options_and_sizes_on_the_generation_config_are_no_obstacle(model):
    expected = expected_rows(model, PROMPTS[:1], max_new_tokens=12)[0]
    config = greedy(use_cache=False)  # transformers serve says so
    config.use_cuda_graph, config.max_batch_tokens = False, 256  # lighteval does
    assert model.generate_batch(PROMPTS[:1], config)["req_0"].generated_tokens == expected


# -- sizes ----------------------------------------


def test_sizes_that_are_given_are_the_engines(model):
    expected = expected_rows(model, max_new_tokens=12)
    batching = ContinuousBatchingConfig(num_blocks=10, max_batch_tokens=33, max_requests_per_batch=2,
                                        allow_block_sharing=False)
    size = "page_size" if hasattr(batching, "page_size") else "block_size"
    setattr(batching, size, 20)
    outputs = model.generate_batch(PROMPTS, greedy(), batching)
    assert [o.generated_tokens for o in outputs.values()] == expected
    config = hf_paged.get_engine(model).config
    assert (config.block_size, config.num_blocks) == (32, 8)  # at least 200 tokens, and the null block
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.enable_prefix_caching) == (33, 2, False)
    engine = hf_paged.get_engine(model)
    model.generate_batch(PROMPTS, greedy(), batching)
    assert hf_paged.get_engine(model) is engine  # nothing new was asked for
    with running(model), pytest.warns(UserWarning, match="in use and keeps its sizes"):
        model.init_continuous_batching(greedy(), ContinuousBatchingConfig(num_blocks=50))
    assert hf_paged.get_engine(model) is engine


def test_fields_without_effect_are_named_once(model, monkeypatch):
    monkeypatch.setattr(requests, "_warned_of", set())
    batching = ContinuousBatchingConfig(max_memory_percent=0.5, scheduler_type="prefill_first", max_queue_size=3)
    with pytest.warns(UserWarning, match="no effect") as given:
        model.generate_batch(PROMPTS, greedy(2), batching)
    first, second = (str(one.message) for one in given)
    assert "max_memory_percent=0.5" in first and "gpu_memory_utilization" in first
    assert "scheduler_type='prefill_first'" in second
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate_batch(PROMPTS, greedy(2), batching)
        model.generate_batch(PROMPTS, greedy(2), ContinuousBatchingConfig())


def test_every_field_that_is_read_is_one():
    """A name that transformers changed would count as read for ever; the sizes have two names in its versions."""
    fields = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    assert requests._READ - fields <= {"page_size", "block_size"}


# -- callers ----------------------------------------


def test_peft_model_reaches_the_model_inside():
    torch.manual_seed(0)
    peft = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    hf_paged.enable(peft)
    inner = peft.get_base_model()
    expected = expected_rows(inner, max_new_tokens=6)
    assert [o.generated_tokens for o in peft.generate_batch(PROMPTS, greedy(6)).values()] == expected
    hf_paged.disable(peft)


def test_call_of_trls_grpo_trainer(model):
    """`GRPOTrainer._generate_single_turn` with `use_transformers_continuous_batching`, trl 1.16."""
    eos = expected_rows(model, PROMPTS[:1], max_new_tokens=8)[0][5]
    config = GenerationConfig(max_new_tokens=8, do_sample=True, pad_token_id=0, bos_token_id=None, eos_token_id=[eos],
                              temperature=1e-3, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0,
                              cache_implementation=None, disable_compile=True)
    batching = ContinuousBatchingConfig(max_memory_percent=0.5)
    model.train()
    prompts = [prompt for prompt in PROMPTS for _ in range(2)]
    with torch.no_grad():
        outputs = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching,
                                       progress_bar=False)
    model.train()
    rows = expected_rows(model, max_new_tokens=8, eos_token_id=eos)
    assert [output.generated_tokens for output in outputs.values()] == [row for row in rows for _ in range(2)]


def test_call_of_lightevals_transformers_model(model):
    """`TransformersModel._generate_continuous`, lighteval 0.13: settings on the model, only inputs in the call."""
    expected = expected_rows(model, max_new_tokens=7)
    model.generation_config = GenerationConfig(max_new_tokens=7)
    model.generation_config.use_cuda_graph = False
    model.generation_config.max_batch_tokens = 256
    outputs = model.generate_batch(inputs=PROMPTS, generation_config=model.generation_config)
    assert [outputs[key].generated_tokens for key in outputs] == expected
    assert [outputs[key].prompt_ids for key in outputs] == PROMPTS


def test_stopped_manager_drops_requests(model):
    manager = model.init_continuous_batching(greedy())
    manager.start()
    manager.stop(timeout=20)
    assert manager.add_requests(PROMPTS[:2]) == ["req_0", "req_1"]  # ids also of dropped requests, as in transformers
    assert manager.get_result() is None
