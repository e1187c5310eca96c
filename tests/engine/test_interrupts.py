"""A call can die at any point: its blocks are freed, other callers are unharmed, the next call is right."""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections import deque
from contextlib import contextmanager, suppress

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import (
    Interrupt,
    RecordingStreamer,
    assert_idle,
    assert_native_parity,
    assert_same_tensor,
    batch,
    byte_tokenizer,
    interrupted,
    interrupted_behind,
    lent,
    random_prompts,
    run_out,
    stock_generate,
    tiny_model,
)
from threads import RowsElsewhere, together
from transformers import GenerationConfig, TextIteratorStreamer

import hf_paged
from hf_paged.engine.features.grammars import StructuredOutput
from hf_paged.engine.features.lockstep import LockstepThrottle
from hf_paged.engine.structured.mask_maker import MaskMaker

shared_model = functools.cache(tiny_model)
INPUTS = batch([30, 17, 25, 9, 31])
OPTIONS = {"max_new_tokens": 24, "eos_token_id": [80]}  # the second row ends after 8 tokens
POOLS = {"wide": None, "tight": 7}  # tight: five rows of up to 4 blocks each in 6 blocks, with preemption
SHORT = OPTIONS | {"max_new_tokens": 12}  # for hundreds of calls


@functools.cache
def of_stock(max_new_tokens=24):
    made = stock_generate(shared_model(), **INPUTS, **OPTIONS | {"max_new_tokens": max_new_tokens})
    assert made[1, 38] == 80
    return made


class LaunchError(RuntimeError):
    pass

model = lent(shared_model)


@contextmanager
def raising(owner, name, at, after, error):
    """Make the `at`-th call of method `name` raise, before or after it did its work."""
    method, calls = getattr(owner, name), 0

    def wrapper(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == at and not after:
            raise error
        result = method(*args, **kwargs)
        if calls == at:
            raise error
        return result

    setattr(owner, name, wrapper)
    try:
        yield lambda: calls >= at
    finally:
        setattr(owner, name, method)


def _targets(engine):
    """Objects whose methods a step goes through; made by a first call."""
    runner, scheduler = engine._core.pool.runner, engine._core.scheduler
    return {
        "runner.launch": (runner, "launch"),
        "runner._sample": (runner, "_sample"),
        "state.admit": (runner.state, "admit"),
        "state.inputs": (runner.state, "inputs"),
        "executor.hidden_states": (runner.executor, "hidden_states"),
        "scheduler.schedule": (scheduler, "schedule"),
        "scheduler.commit": (scheduler, "commit"),
        "scheduler.add": (scheduler, "add"),
        "loop.end": (engine._core, "end"),
        "loop._commit": (engine._core, "_commit"),
        "loop._receive_requests": (engine._core, "_receive_requests"),
        "manager.allocate_slots": (scheduler.kv_cache_manager, "allocate_slots"),
        "manager.publish": (scheduler.kv_cache_manager, "publish"),
        "manager.free": (scheduler.kv_cache_manager, "free"),
        "pool.allocate": (scheduler.kv_cache_manager.block_pool, "allocate"),
    }


TARGETS = (
    "runner.launch", "runner._sample", "state.admit", "state.inputs", "executor.hidden_states", "scheduler.schedule",
    "scheduler.commit", "scheduler.add", "loop.end", "loop._commit", "loop._receive_requests",
    "manager.allocate_slots", "manager.publish", "manager.free", "pool.allocate",
)


def assert_survives(overlap, pool, target, at, after, error, warm):
    """A call that dies in the `at`-th call of `target`, if there are so many, leaves an engine that is right."""
    model = hf_paged.enable(shared_model(), strict=True, overlap=overlap, num_blocks=POOLS[pool])
    try:
        # The first call makes the pool; `warm` ones also leave a prefix cache behind, which the next may hit.
        assert_native_parity(model, of_stock(12), **INPUTS, **SHORT) if warm else model.generate(
            **batch([3]), max_new_tokens=2
        )
        engine = hf_paged.get_engine(model)
        owner, name = _targets(engine)[target]
        died = False
        with raising(owner, name, at, after, error("here")) as reached:
            try:
                output = model.generate(**INPUTS, **SHORT)
            except error:
                died = True
            else:
                assert not reached()
                assert_same_tensor(output, of_stock(12))
        assert died == reached()
        assert_idle(model)
        assert_native_parity(model, of_stock(12), **INPUTS, **SHORT)
        assert (engine.stats().num_preemptions > 0) == (pool == "tight")
        return died
    finally:
        hf_paged.disable(model)


@pytest.mark.each_value
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_a_call_that_dies_in_any_part_leaves_a_working_engine(target, after, overlap):
    """In the part's second call: the first step's sequences are known by then, and its tokens in flight."""
    assert assert_survives(overlap, "tight", target, 2, after, Interrupt, warm=False)


@settings(max_examples=15)
@given(
    overlap=st.booleans(),
    pool=st.sampled_from(list(POOLS)),
    target=st.sampled_from(TARGETS),
    at=st.integers(1, 25),
    after=st.booleans(),
    error=st.sampled_from([Interrupt, LaunchError, KeyboardInterrupt]),
    warm=st.booleans(),
)
@example(overlap=False, pool="tight", target="scheduler.add", at=1, after=True, error=Interrupt, warm=False)
@example(overlap=True, pool="wide", target="scheduler.add", at=1, after=True, error=Interrupt, warm=False)
def test_a_call_that_dies_anywhere_leaves_a_working_engine(overlap, pool, target, at, after, error, warm):
    assert_survives(overlap, pool, target, at, after, error, warm)


class RaisingStreamer(RecordingStreamer):
    def __init__(self, at, error):
        super().__init__()
        self.at, self.error = at, error

    def put(self, value):
        super().put(value)
        if len(self.puts) == self.at:
            raise self.error


@pytest.mark.each_value
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 9, 20])
@pytest.mark.parametrize("error", [Interrupt, ValueError, KeyboardInterrupt])
def test_a_raising_streamer(model, overlap, at, error):
    hf_paged.enable(model, strict=True, overlap=overlap)
    with pytest.raises(error):
        model.generate(**INPUTS, **OPTIONS, streamer=RaisingStreamer(at, error("enough")))
    engine = hf_paged.get_engine(model)
    if engine.stats().num_blocks:  # the first put is the prompt, before anything was made
        assert_idle(model)
    assert_native_parity(model, of_stock(), **INPUTS, **OPTIONS)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_raising_launch_in_the_first_call_of_all(model, overlap, monkeypatch):
    from hf_paged.runner.model_runner import ModelRunner

    hf_paged.enable(model, strict=True, overlap=overlap)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "launch", lambda *args: (_ for _ in ()).throw(LaunchError("no memory")))
        with pytest.raises(LaunchError):
            model.generate(**INPUTS, **OPTIONS)
    assert_idle(model)
    assert_native_parity(model, of_stock(), **INPUTS, **OPTIONS)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_launch_that_fails_half_way_leaves_no_prefix_behind(model, overlap):
    """The blocks of the failed step were promised to the prefix cache: a hit on them would read garbage."""
    hf_paged.enable(model, strict=True, overlap=overlap)
    model.generate(**batch([3]), max_new_tokens=2)
    engine = hf_paged.get_engine(model)
    for k, v in engine._core.pool.runner.cache.layers:
        k.fill_(float("nan"))
        v.fill_(float("nan"))
    with raising(engine._core.pool.runner, "launch", 1, False, LaunchError("no memory")), pytest.raises(LaunchError):
        model.generate(**INPUTS, **OPTIONS)
    before = engine.stats().prefix_cache_hits
    assert_native_parity(model, of_stock(), **INPUTS, **OPTIONS)
    assert engine.stats().prefix_cache_hits == before


def test_an_interrupt_while_the_pool_is_made(model, monkeypatch):
    import hf_paged.runner.memory as pool_module

    hf_paged.enable(model, strict=True)
    with monkeypatch.context() as patch:
        patch.setattr(pool_module, "ModelRunner", lambda *args, **kwargs: (_ for _ in ()).throw(Interrupt()))
        with pytest.raises(Interrupt):
            model.generate(**INPUTS, **OPTIONS)
    assert_native_parity(model, of_stock(), **INPUTS, **OPTIONS)


def test_an_interrupt_while_the_pool_grows(model):
    hf_paged.enable(model, strict=True)
    model.generate(**batch([3]), max_new_tokens=2)
    engine = hf_paged.get_engine(model)
    inputs = batch([100] * 12)
    with raising(engine._core.pool.runner.cache, "grow", 1, True, Interrupt()), pytest.raises(Interrupt):
        model.generate(**inputs, max_new_tokens=30)
    assert_idle(model)
    assert_native_parity(model, **inputs, max_new_tokens=30)


def test_other_callers_survive_an_interrupt(model):
    """A request of the engine's own API runs on, from its start if need be, and each token is delivered once."""
    hf_paged.enable(model, strict=True)
    engine = hf_paged.get_engine(model)
    prompt = random_prompts([20], seed=8)[0]
    expected = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=12)[0, 20:].tolist()
    config = type(model.generation_config)(max_new_tokens=12)
    request_id = engine.add_request(prompt, config)
    tokens = [t for _ in range(4) for output in engine.step() for t in output.new_token_ids]
    with raising(engine._core.pool.runner, "launch", 2, True, Interrupt()), pytest.raises(Interrupt):
        model.generate(**INPUTS, **OPTIONS)
    completion = None
    while engine.has_unfinished():
        for output in engine.step():
            assert output.request_id == request_id
            tokens += output.new_token_ids
            completion = output.completion or completion
    assert tokens == expected
    assert completion.token_ids == expected
    assert_idle(model)


# -- threads and re-entrance ------------------------------------------


@pytest.mark.parametrize("overlap", [False, True])
def test_streaming_text_from_a_thread(model, overlap):
    tokenizer = byte_tokenizer()
    stock, ours = TextIteratorStreamer(tokenizer), TextIteratorStreamer(tokenizer)
    inputs = batch([17])
    shared_model().generate(**inputs, max_new_tokens=24, streamer=stock)
    hf_paged.enable(model, strict=True, overlap=overlap)
    thread = threading.Thread(target=model.generate, kwargs={**inputs, "max_new_tokens": 24, "streamer": ours})
    thread.start()
    assert "".join(ours) == "".join(stock)
    thread.join(60)
    assert not thread.is_alive()
    assert_idle(model)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_streamer_gets_what_stock_puts(model, overlap):
    stock, ours = RecordingStreamer(), RecordingStreamer()
    shared_model().generate(**INPUTS, **OPTIONS, streamer=stock)
    hf_paged.enable(model, strict=True, overlap=overlap)
    assert_native_parity(model, of_stock(), **INPUTS, **OPTIONS, streamer=ours)
    assert ours.puts == stock.puts
    assert ours.ended == stock.ended == 1


def test_a_streamer_gets_columns_in_order_where_rows_are_preempted(model):
    stock, ours = RecordingStreamer(), RecordingStreamer()
    shared_model().generate(**INPUTS, max_new_tokens=40, streamer=stock)
    hf_paged.enable(model, strict=True, num_blocks=9)
    model.generate(**INPUTS, max_new_tokens=40, streamer=ours)
    assert hf_paged.get_engine(model).stats().num_preemptions > 0
    assert ours.puts == stock.puts


def test_a_streamer_is_called_while_tokens_are_made_and_not_at_the_end(model):
    hf_paged.enable(model, strict=True, overlap=True)
    engine, made = hf_paged.get_engine(model), []

    class Watching(RecordingStreamer):
        def put(self, value):
            made.append(engine.stats().num_generated_tokens)

    model.generate(**batch([20]), max_new_tokens=10, streamer=Watching())
    assert made[0] == 0
    assert all(count <= i + 2 for i, count in enumerate(made)), made


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("overlap", [False, True])
def test_threads_at_once_on_one_model(model, pool, overlap):
    batches = [batch([30, 17, 25], seed=i) for i in range(3)] + [INPUTS]
    expected = [stock_generate(model, **b, max_new_tokens=24) for b in batches]
    hf_paged.enable(model, strict=True, overlap=overlap, num_blocks=POOLS[pool])
    engine = hf_paged.get_engine(model)
    results = together(*(lambda b=b: model.generate(**b, max_new_tokens=24) for b in batches))
    for actual, wanted in zip(results, expected, strict=True):
        assert isinstance(actual, torch.Tensor), actual
        assert_same_tensor(actual, wanted)
    assert engine.stats().num_generated_tokens == (3 * 3 + 5) * 24
    assert_idle(model)


def test_threads_where_one_dies_do_not_hurt_the_other(model):
    batches = [batch([30, 17, 25], seed=i) for i in range(2)]
    expected = stock_generate(model, **batches[0], max_new_tokens=24)
    hf_paged.enable(model, strict=True)
    for at in (2, 5, 11):
        good, bad = together(
            lambda: model.generate(**batches[0], max_new_tokens=24),
            lambda at=at: model.generate(**batches[1], max_new_tokens=24, streamer=RaisingStreamer(at, Interrupt())),
        )
        assert isinstance(bad, Interrupt)
        assert isinstance(good, torch.Tensor), good
        assert_same_tensor(good, expected)
        assert_idle(model)


def test_threads_share_steps(model):
    """Two callers at once are batched together: fewer steps than one after the other would take."""
    hf_paged.enable(model, strict=True)
    engine = hf_paged.get_engine(model)
    model.generate(**batch([3]), max_new_tokens=2)
    before = engine.stats().num_steps
    together(*(lambda i=i: model.generate(**batch([20], seed=i), max_new_tokens=200) for i in range(2)))
    assert engine.stats().num_steps - before < 350


def test_generate_called_by_a_streamer_of_the_same_model(model):
    inner_inputs = batch([12], seed=4)
    inner_expected = stock_generate(model, **inner_inputs, max_new_tokens=6)
    hf_paged.enable(model)
    inner = []

    class Nested(RecordingStreamer):
        def put(self, value):
            super().put(value)
            if len(self.puts) == 4:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", hf_paged.FallbackWarning)
                    inner.append(model.generate(**inner_inputs, max_new_tokens=6))

    assert_same_tensor(model.generate(**INPUTS, **OPTIONS, streamer=Nested()), of_stock())
    assert_same_tensor(inner[0], inner_expected)
    assert_idle(model)


def test_generate_called_inside_a_step_goes_to_stock(model):
    """From a module that the step calls (a LoRA layer, a quantized linear): stock, since the step is not done."""
    hf_paged.enable(model)
    inputs = batch([12], seed=4)
    inner_expected = stock_generate(model, **inputs, max_new_tokens=3)
    model.generate(**batch([3]), max_new_tokens=2)
    engine = hf_paged.get_engine(model)
    launch, inner = engine._core.pool.runner.launch, []

    def nested_launch(*args):
        if not inner:
            inner.append(None)
            inner[0] = model.generate(**inputs, max_new_tokens=3)
        return launch(*args)

    engine._core.pool.runner.launch = nested_launch
    with pytest.warns(hf_paged.FallbackWarning, match="inside a step"):
        assert_same_tensor(model.generate(**INPUTS, **OPTIONS), of_stock())
    assert_same_tensor(inner[0], inner_expected)


def test_disable_while_a_stream_is_open_ends_it(model):
    hf_paged.enable(model)
    engine = hf_paged.get_engine(model)
    engine.add_request([1, 2, 3], type(model.generation_config)(max_new_tokens=20))
    engine.step()
    hf_paged.disable(model)
    assert engine.stats().num_running == 0
    assert engine.stats().kv_cache_bytes == 0
    assert_same_tensor(model.generate(**INPUTS, **OPTIONS), of_stock())


@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["native", "lockstep", "beams"])
@pytest.mark.parametrize("part", ["all over", "end"])
def test_a_call_that_is_interrupted_in_any_function_leaves_nothing_behind(model, kind, part):
    """Also in those that end it; another caller's request, which its steps took along, is made as it should be."""
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True))
    extra = {"native": {}, "lockstep": {"encoder_repetition_penalty": 1.2}, "beams": {"num_beams": 2}}[kind]
    call = {**batch([30, 17]), "max_new_tokens": 4, **extra}
    prompt = random_prompts([11], seed=3)[0]
    short = {"input_ids": torch.tensor([prompt]), "max_new_tokens": 6}
    expected, expected_short = stock_generate(model, **call), stock_generate(model, **short)
    model.generate(**call)
    with interrupted(None) as count:
        model.generate(**call)
    points = range(1, count(), max(1, count() // 20)) if part == "all over" else range(count() - 130, count() + 1, 4)
    for at in points:
        engine.add_request(prompt, GenerationConfig(max_new_tokens=6))
        with pytest.raises(Interrupt), interrupted(at):
            model.generate(**call)
        tokens = []
        tokens += [token for output in run_out(engine) for token in output.new_token_ids]
        assert prompt + tokens == expected_short[0].tolist(), at
        assert_same_tensor(model.generate(**call), expected)
        while engine._core.requests:  # those of a call that was interrupted while it ended them
            assert_same_tensor(model.generate(**short), expected_short)
        assert not engine._core.batches, at
        assert_idle(model)
    assert len(points) >= 20


@pytest.mark.parametrize("overlap", [False, True])
def test_other_callers_get_everything_once_wherever_a_call_is_interrupted(model, monkeypatch, overlap):
    """In each line that calls something for a request or rows: streams, completions, and tokens of rows in lockstep."""
    monkeypatch.setattr(LockstepThrottle, "may_join", lambda self: True)
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True, overlap=overlap))
    engine.tokenizer = byte_tokenizer()
    call, rows = {**batch([30, 17]), "max_new_tokens": 3}, random_prompts([40, 9], seed=5)
    prompts, lengths = [*random_prompts([11, 20], seed=3), random_prompts([5], seed=9)[0] * 5], [3, 5, 9]
    lookup = {"prompt_lookup_num_tokens": 5}

    def alone(prompt, count):
        return stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=count)[0, len(prompt) :].tolist()

    made, texts = [alone(*request) for request in zip(prompts, lengths, strict=True)], []
    texts = [engine.tokenizer.decode(tokens) for tokens in made]
    expected, expected_rows = stock_generate(model, **call), [alone(row, 4) for row in rows]
    assert_same_tensor(model.generate(**call), expected)

    def run(at):
        ids = [engine.add_request(prompt, GenerationConfig(max_new_tokens=count, **lookup), logprobs=True)
               for prompt, count in zip(prompts, lengths, strict=True)]
        others, outputs = RowsElsewhere(engine, rows, 4), []
        for steps in itertools.count():
            others.take()
            if steps == 1:
                with suppress(Interrupt), interrupted_behind(at, "engine/session.py", "engine/lockstep.py") as places:
                    assert_same_tensor(model.generate(**call), expected)
            if not engine.has_unfinished():
                break
            outputs += engine.step()
        assert others.finish() == expected_rows, at
        for request_id, tokens, text in zip(ids, made, texts, strict=True):
            got = [output for output in outputs if output.request_id == request_id]
            assert [token for output in got for token in output.new_token_ids] == tokens, at
            assert "".join(output.new_text for output in got) == text, at
            assert len([value for output in got for value in output.new_logprobs]) == len(tokens), at
            assert [output.completion.token_ids for output in got if output.completion] == [tokens], at
        assert not engine._core.requests and not engine._core.batches
        assert_idle(model)
        return places

    numbers: dict[tuple[str, int], list[int]] = {}
    for number, place in enumerate(run(None), 1):
        numbers.setdefault(place, []).append(number)
    assert {file.rpartition("/")[2] for file, _ in numbers} == {"session.py", "lockstep.py"}
    for at in numbers.values():
        for number in {at[0], at[-1]}:
            run(number)


@pytest.mark.parametrize("at", [1, 2, 4], ids=["first", "middle", "last"])
def test_an_output_that_was_given_out_when_an_interrupt_came_is_not_given_out_again(model, at):
    """Whether the next to look at it makes a step or takes what is there."""
    class Outbox(deque):
        def append(self, output):
            super().append(output)
            given.append(output)
            if len(given) == at:
                raise Interrupt

    prompt, given, got = random_prompts([11])[0], [], []
    engine = hf_paged.get_engine(hf_paged.enable(model))
    engine._public.outbox = Outbox()
    engine.add_request(prompt, GenerationConfig(max_new_tokens=4))
    while engine.has_unfinished():
        with suppress(Interrupt):
            got += engine.advance([engine._public])[0]
    wanted = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=4)[0, 11:].tolist()
    assert [token for output in got for token in output.new_token_ids] == wanted
    assert [output.completion.token_ids for output in got if output.completion] == [wanted]
    assert_idle(model)


def test_a_request_that_was_half_added_or_half_finished_does_not_start_again(model):
    """No session waits for it."""
    engine = hf_paged.get_engine(hf_paged.enable(model))
    request_id = engine.add_request([1, 2, 3], GenerationConfig(max_new_tokens=4))
    del engine._public.open[request_id]
    engine._core.dirty = True
    assert_native_parity(model, of_stock(12), **INPUTS, **SHORT)
    assert not engine._core.requests
    assert_idle(model)


def test_an_interrupt_while_the_engine_recovers_counts_nothing_twice(model, monkeypatch):
    engine = hf_paged.get_engine(hf_paged.enable(model, num_blocks=7))
    model.generate(**INPUTS, **SHORT)
    before = engine.stats()
    assert before.num_preemptions and before.prefix_cache_queries
    engine._core.dirty = True
    with monkeypatch.context() as patch:
        patch.setattr(engine._core, "_new_scheduler", lambda _: (_ for _ in ()).throw(Interrupt()))
        with pytest.raises(Interrupt):
            engine.step()
    engine.step()
    after = engine.stats()
    assert (after.num_preemptions, after.prefix_cache_queries) == (before.num_preemptions, before.prefix_cache_queries)
    assert_native_parity(model, of_stock(12), **INPUTS, **SHORT)


def test_masks_after_an_interrupt_are_made_where_no_thread_writes(model):
    """A thread that the interrupted step started may not have been noted."""
    engine = hf_paged.get_engine(hf_paged.enable(model))
    engine._core.features[StructuredOutput]._masks = masks = MaskMaker(256, torch.device("cpu"))
    engine._core.dirty = True
    engine.step()
    assert engine._core.features[StructuredOutput]._masks is not masks
