"""The engine below lockstep calls: other callers, threads, interrupts, and the logits that come out."""

from __future__ import annotations

import functools
import threading

import invariants
import pytest
import torch
from pairs import every_pair
from support import (
    assert_idle,
    assert_lockstep,
    assert_native_parity,
    assert_same_tensor,
    batch,
    lent,
    random_prompts,
    run_out,
    stock_copy,
    stock_generate,
    tiny_model,
)
from threads import rows_of, run_threads
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import hf_paged
from hf_paged.engine.features.lockstep import LockstepThrottle
from hf_paged.engine.lockstep import LockstepBatch
from hf_paged.integration.caches import CACHE_NAME, PagedCache
from hf_paged.integration.enabled import view_of
from hf_paged.integration.stock_loop import paged_forwards
from hf_paged.runner.model_runner import ModelRunner
from hf_paged.scheduler import Sequence

shared_model = functools.cache(tiny_model)
INPUTS = batch([20, 13, 5])
OPTIONS = {"max_new_tokens": 12, "encoder_repetition_penalty": 1.2}
of_stock = functools.cache(lambda: stock_generate(shared_model(), **INPUTS, **OPTIONS))

model = lent(shared_model)


def test_logits_are_those_of_the_models_own_forward(model):
    engine = hf_paged.get_engine(hf_paged.enable(model))
    prompts = random_prompts([20, 7])
    with engine.lockstep(rows_of(prompts, 5)) as rows:
        found = rows.prompts()
        steps = torch.tensor([[3, 4], [5, 6]])
        after = rows.decode(steps)
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = model(input_ids=torch.tensor([[*prompt, *steps[row].tolist()]])).logits[0]
        assert torch.allclose(found[row], expected[-3], atol=1e-4)
        assert torch.allclose(after[row], expected[-2:], atol=1e-4)
    assert_idle(model)


def test_rows_inside_rows_and_memory_that_they_hold(model):
    engine = hf_paged.get_engine(hf_paged.enable(model))
    with engine.lockstep(rows_of([[1, 2]], 3)) as outer, engine.lockstep(rows_of([[1, 2]], 3)) as inner:
        assert torch.equal(outer.prompts(), inner.prompts())
        with pytest.raises(RuntimeError, match="under way"):
            engine.release_memory()
    engine.release_memory()
    assert engine.stats().num_blocks == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("beams", [1, 3])
def test_running_requests_of_others_survive(model, overlap, beams, monkeypatch):
    """They keep their slots and blocks, make the same tokens, and go on meanwhile, in the very same steps."""
    monkeypatch.setattr(LockstepThrottle, "may_join", lambda self: True)
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True, overlap=overlap))
    prompt = random_prompts([20], seed=8)[0]
    expected = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=20)[0, 20:].tolist()
    engine.add_request(prompt, GenerationConfig(max_new_tokens=20))
    tokens = [t for _ in range(4) for output in engine.step() for t in output.new_token_ids]
    preempted = engine.stats().num_preemptions
    steps = engine.stats().num_steps
    output = model.generate(**INPUTS, **OPTIONS, num_beams=beams)
    assert engine.stats().num_steps - steps == 12 + 1  # the prompts are a forward of their own
    invariants.check(engine._core.scheduler)
    tokens += [t for output_ in run_out(engine) for t in output_.new_token_ids]
    assert tokens == expected
    assert engine.stats().num_preemptions == preempted
    assert_same_tensor(output, stock_generate(model, **INPUTS, **OPTIONS, num_beams=beams))
    assert_idle(model)


def test_threads_in_lockstep_and_native_at_once(model):
    native = stock_generate(model, **INPUTS, max_new_tokens=12)
    hf_paged.enable(model, strict=True)
    results = {}

    def run(name, **kwargs):
        results[name] = model.generate(**INPUTS, **kwargs)

    threads = [threading.Thread(target=run, args=(i,), kwargs=OPTIONS if i % 2 else {"max_new_tokens": 12})
               for i in range(4)]
    run_threads(threads)
    for i in range(4):
        assert_same_tensor(results[i], of_stock() if i % 2 else native)
    assert_idle(model)


@pytest.mark.parametrize("kwargs", [{"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {}], ids=["beams", "lookup", ""])
def test_another_thread_that_disables_the_model_waits_for_the_end(model, kwargs):
    """Beam search and prompt lookup call the model itself in every step: it must stay what it is until then."""

    class Disabling(LogitsProcessor):
        thread = None

        def __call__(self, input_ids, scores):
            if self.thread is None:
                self.thread = threading.Thread(target=hf_paged.disable, args=(model,))
                self.thread.start()
                self.thread.join(0.2)
                assert self.thread.is_alive()
            return scores

    inputs, disabling = batch([20]), Disabling()
    expected = stock_generate(model, **inputs, max_new_tokens=8, **kwargs)
    hf_paged.enable(model, strict=True)
    output = model.generate(**inputs, max_new_tokens=8, logits_processor=LogitsProcessorList([disabling]), **kwargs)
    disabling.thread.join(60)
    assert_same_tensor(output, expected)
    assert not hf_paged.is_enabled(model) and type(model) is type(stock_copy(model))


class Interrupt(BaseException):
    """Stands for KeyboardInterrupt."""


TARGETS = {
    "logits": lambda engine: (engine._core.pool.runner, "logits"),
    "admit": lambda engine: (engine._core.pool.runner.state, "admit"),
    "set_tokens": lambda engine: (engine._core.pool.runner.state, "set_tokens"),
    "set_tables": lambda engine: (engine._core.pool.runner.state, "set_tables"),
    "copy_blocks": lambda engine: (engine._core.pool.runner.cache, "copy_blocks"),
    "allocate_slots": lambda engine: (engine._core.scheduler.kv_cache_manager, "allocate_slots"),
    "allocate": lambda engine: (engine._core.scheduler.kv_cache_manager.block_pool, "allocate"),
    "touch": lambda engine: (engine._core.scheduler.kv_cache_manager.block_pool, "touch"),
    "publish": lambda engine: (engine._core.scheduler.kv_cache_manager, "publish"),
    "free": lambda engine: (engine._core.scheduler.kv_cache_manager, "free"),
    "take_slots": lambda engine: (engine._core.scheduler, "take_slots"),
    "give_slots": lambda engine: (engine._core.scheduler, "give_slots"),
    "hidden_states": lambda engine: (engine._executor, "hidden_states"),
}


@pytest.mark.each_value
@pytest.mark.parametrize(("target", "at", "after", "error"), every_pair(
    list(TARGETS), [pytest.param(at, after) for at in (1, 4) for after in (False, True)], [Interrupt, RuntimeError],
))
def test_a_call_that_dies_anywhere_leaves_a_working_engine(model, target, at, after, error):
    hf_paged.enable(model, strict=True)
    model.generate(**batch([3]), max_new_tokens=2)
    engine = hf_paged.get_engine(model)
    prompt = random_prompts([9], seed=8)[0]
    expected = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=9)[0, 9:].tolist()
    engine.add_request(prompt, GenerationConfig(max_new_tokens=9))
    tokens = [t for _ in range(3) for output in engine.step() for t in output.new_token_ids]
    other = random_prompts([19, 4], seed=9)
    with engine.lockstep(rows_of(other, 4)) as rows:  # of another caller, in the middle of their call
        rows.prompts()
        rows.decode(torch.tensor([[3], [4]]))
        _die(model, engine, target, at, after, error)
        after_all = rows.decode(torch.tensor([[5], [6]]))[:, 0]
    for i, prompt in enumerate(other):
        with torch.no_grad():
            answer = model(input_ids=torch.tensor([[*prompt, 3 + i, 5 + i]])).logits[0, -1]
        assert torch.allclose(after_all[i], answer, atol=1e-4)
    tokens += [t for output in run_out(engine) for t in output.new_token_ids]
    assert tokens == expected
    assert_idle(model)
    invariants.check(engine._core.scheduler)
    assert_same_tensor(model.generate(**INPUTS, **OPTIONS), of_stock())
    assert_native_parity(model, **INPUTS, max_new_tokens=6)


def _die(model, engine, target, at, after, error):
    """A beam search whose `at`-th call of the target raises, before or after it did its work."""
    owner, name = TARGETS[target](engine)
    method, calls = getattr(owner, name), 0

    def wrapper(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == at and not after:
            raise error("here")
        result = method(*args, **kwargs)
        if calls == at:
            raise error("here")
        return result

    try:
        setattr(owner, name, wrapper)
        died = False
        try:
            model.generate(**INPUTS, **OPTIONS, num_beams=3)
        except error:
            died = True
    finally:
        delattr(owner, name)
    assert died == (calls >= at)


def test_a_call_that_is_interrupted_before_it_gives_its_blocks_back_keeps_none(model, monkeypatch):
    """Between the call of `close` and its first line."""
    hf_paged.enable(model, strict=True)
    call = {**batch([40, 17]), "max_new_tokens": 4, "encoder_repetition_penalty": 1.2}
    expected = model.generate(**call)
    with monkeypatch.context() as patch:
        patch.setattr(LockstepBatch, "close", lambda _: (_ for _ in ()).throw(Interrupt()))
        with pytest.raises(Interrupt):
            model.generate(**call)
    assert_same_tensor(model.generate(**call), expected)
    assert_idle(model)


class Changing(LogitsProcessor):
    """In its third call the model gets another epsilon."""

    def __init__(self, model):
        self.norm, self.calls = model.model.layers[0].input_layernorm, 0
        self.before = lambda: None

    def __call__(self, input_ids, scores):
        self.calls += 1
        if self.calls == 3:
            self.before()
            self.norm.variance_epsilon = 4.0
        return scores


def test_a_model_that_changes_in_the_middle_leaves_nothing_stale_behind(monkeypatch):
    """Stock computes on with the old keys and values; nobody else may get to see what comes of that."""
    monkeypatch.setattr(LockstepThrottle, "may_join", lambda self: True)

    def call(model, before=lambda: None, **kwargs):
        model.model.layers[0].input_layernorm.variance_epsilon = 1e-6
        changing = Changing(model)
        changing.before = before
        return model.generate(logits_processor=LogitsProcessorList([changing]), **kwargs)

    model = tiny_model()
    prompt = random_prompts([20], seed=8)[0]
    output = assert_lockstep(model, call=call, **batch([20]), max_new_tokens=40)
    engine = hf_paged.get_engine(model)
    assert_native_parity(model, input_ids=output, max_new_tokens=8)
    model.model.layers[0].input_layernorm.variance_epsilon = 1e-6
    running = engine.add_request(prompt, GenerationConfig(max_new_tokens=30))
    for _ in range(3):
        engine.step()
    old = []
    call(model, lambda: old.extend(engine._core.requests[running].sequence.output_token_ids), **batch([20]),
         max_new_tokens=40)
    assert 3 < len(old) < 10
    done = [output.completion for _ in range(60) for output in engine.step() if output.completion]
    answer = stock_generate(model, input_ids=torch.tensor([prompt + old]), max_new_tokens=30 - len(old))
    assert done[0].token_ids == old + answer[0, 20 + len(old) :].tolist()  # computed anew by the model as it is now
    assert_idle(model)


@pytest.mark.parametrize("after", ["nothing", "two tokens at once", "other rows", "a crop", "keys and values"])
def test_what_was_planned_ahead_is_taken_back_where_the_caller_wants_something_else(model, after):
    """Rows alone have their next token planned before it is asked for; the cache gets what was computed, no more."""
    engine = hf_paged.get_engine(hf_paged.enable(model))
    size = engine.config.block_size
    prompts = random_prompts([size - 2, 2 * size - 2])
    free = engine.stats().num_free_blocks
    with engine.lockstep(rows_of(prompts, 3 * size)) as rows:
        rows.prompts()
        rows.decode(torch.tensor([[3], [4]]))
        assert rows._ahead is not None and rows.rows.lengths.tolist() == [size, 2 * size]
        kept = [[*prompts[0], 3], [*prompts[1], 4]]
        if after == "two tokens at once":
            found = rows.decode(torch.tensor([[5, 6], [7, 8]]))
            kept = [[*kept[0], 5, 6], [*kept[1], 7, 8]]
        elif after == "other rows":
            rows.reorder([1, 1])
            kept = [kept[1]] * 2
            found = rows.decode(torch.tensor([[5], [5]]))
            kept = [[*row, 5] for row in kept]
            assert rows._ahead is None, "planned for nothing: beams move in every step"
        elif after == "a crop":
            rows.crop(1)
            found = rows.decode(torch.tensor([[9], [9]]))
            kept = [[*prompts[0], 9], [*prompts[1], 9]]
        elif after == "keys and values":
            assert rows.keys_and_values(2 * size - 1)[0][0].shape[2] == 2 * size - 1
            found = rows.decode(torch.tensor([[5], [5]]))
            kept = [[*row, 5] for row in kept]
        if after != "nothing":
            for row, tokens in enumerate(kept):
                with torch.no_grad():
                    expected = model(input_ids=torch.tensor([tokens])).logits[0, -1]
                assert torch.allclose(found[row, -1], expected, atol=1e-4)
    invariants.check(engine._core.scheduler)
    manager = engine._core.scheduler.kv_cache_manager
    cached = [manager.get_computed_blocks(Sequence("x", [*row, 0, 0, 0], max_new_tokens=1,
                                                   cache_key=engine._core._state_key)) for row in kept]
    assert [num for _, num in cached] == [len(row) // size * size for row in kept]
    assert engine.stats().num_free_blocks >= free
    assert_idle(model)


@pytest.mark.parametrize("action", [hf_paged.disable, lambda model: hf_paged.enable(model, num_blocks=50)])
def test_two_callers_whose_own_code_disables_the_model_do_not_wait_for_each_other(action):
    """Each call ends, with stock's tokens or with an error that says what happened."""
    model, barrier, ended = hf_paged.enable(tiny_model()), threading.Barrier(2), []

    class Ending(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            if self.calls == 2:
                barrier.wait(20)
                action(model)
            return scores

    def call():
        try:
            ended.append(model.generate(**INPUTS, **OPTIONS, logits_processor=LogitsProcessorList([Ending()])))
        except RuntimeError as error:
            ended.append(error)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    run_threads(threads)
    assert len(ended) == 2
    for result in ended:
        assert "disabled" in str(result) if isinstance(result, RuntimeError) else torch.equal(result, of_stock())


@pytest.mark.parametrize("method", ["answer", "plan_ahead"])
def test_what_goes_wrong_in_one_callers_rows_is_that_callers(model, method, monkeypatch):
    """A request and another caller's rows, which are in the same steps, end as they should."""
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True))
    monkeypatch.setattr(LockstepThrottle, "may_join", lambda self: True)
    own, victims = getattr(LockstepBatch, method), []

    def raising(self, *args):
        if self in victims and self._count > 2:
            raise ZeroDivisionError("here")
        return own(self, *args)

    monkeypatch.setattr(LockstepBatch, method, raising)
    prompt = random_prompts([11], seed=3)[0]
    expected = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=30)[0].tolist()
    if method == "answer":  # nothing is planned ahead where requests run
        engine.add_request(prompt, GenerationConfig(max_new_tokens=30))

    class Marking(LogitsProcessor):
        def __call__(self, input_ids, scores):
            victims[:] = engine._core.batches[:1]
            return scores

    with pytest.raises(ZeroDivisionError, match="here"):
        model.generate(**INPUTS, **OPTIONS, logits_processor=LogitsProcessorList([Marking()]))
    tokens = []
    tokens += [token for output in run_out(engine) for token in output.new_token_ids]
    assert method != "answer" or prompt + tokens == expected
    monkeypatch.undo()
    assert_idle(model)
    assert_lockstep(model, **INPUTS, **OPTIONS)


def test_a_pool_that_cannot_grow_in_the_middle_is_out_of_memory(model, monkeypatch):
    hf_paged.enable(model, strict=True)
    monkeypatch.setattr("hf_paged.runner.memory.DevicePool.grow", lambda self, missing: self.num_blocks)
    with pytest.raises(torch.OutOfMemoryError, match="blocks are missing"):
        model.generate(**batch([100] * 6), max_new_tokens=120, encoder_repetition_penalty=1.2)
    assert_idle(model)
    assert_lockstep(model, **INPUTS, **OPTIONS)


@pytest.mark.gpu
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_steps_give_what_eager_ones_give(beams, dtype):
    """The decode graph that ends at the logits, over several padded sizes and a pool that moves in between.

    Padding rows give a product another kernel, and its sums another order.
    """
    model, outputs = tiny_model().to("cuda", dtype), []
    for eager in (True, False):
        hf_paged.enable(model, strict=True, enforce_eager=eager)
        outputs.append([
            model.generate(**{k: v.cuda() for k, v in batch(lengths).items()}, max_new_tokens=40, num_beams=beams,
                           encoder_repetition_penalty=1.2, return_dict_in_generate=True, output_scores=True)
            for lengths in ([20], [20, 13, 5], [100] * 12, [7] * 3)
        ])
    assert hf_paged.get_engine(model).stats().num_graphs_captured >= 3
    for eager, captured in zip(*outputs, strict=True):
        assert_same_tensor(captured.sequences, eager.sequences)
        for a, b in zip(captured.scores, eager.scores, strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps)


class Noting(LogitsProcessor):
    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(scores)
        return scores


@pytest.mark.gpu
def test_scores_that_a_processor_keeps_are_not_overwritten_by_the_next_replay():
    model = hf_paged.enable(tiny_model().to("cuda"), strict=True)
    noting = Noting()
    inputs = {k: v.cuda() for k, v in INPUTS.items()}
    result = model.generate(**inputs, max_new_tokens=8, logits_processor=LogitsProcessorList([noting]),
                            return_dict_in_generate=True, output_logits=True)
    again = model.generate(**inputs, max_new_tokens=8)
    assert_same_tensor(result.sequences, again)
    for step, scores in enumerate(noting.seen):
        assert torch.equal(scores.argmax(-1), again[:, 20 + step])


@pytest.mark.gpu
def test_a_step_that_was_launched_before_the_look_is_computed_again_where_the_model_has_changed():
    """The graph of a decode step holds the epsilon that it was captured with, and is replayed before anyone looks at
    what the caller's code did. Keys and values of before the change stay, as in stock."""
    model, inputs = tiny_model().to("cuda"), {k: v.cuda() for k, v in batch([20, 13]).items()}
    stock, epsilon = stock_copy(model), model.model.layers[0].input_layernorm.variance_epsilon

    def logits(model, change):
        changing = Changing(model)
        changing.calls, changing.norm.variance_epsilon = 0 if change else 3, epsilon
        result = model.generate(**inputs, max_new_tokens=8, logits_processor=LogitsProcessorList([changing]),
                                return_dict_in_generate=True, output_logits=True)
        assert changing.norm.variance_epsilon == (4.0 if change else epsilon)
        return torch.stack(result.logits)

    unchanged, changed = (logits(stock, change) for change in (False, True))
    assert torch.equal(changed[:3], unchanged[:3]) and (changed[3] - unchanged[3]).abs().max() > 0.1
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True))
    for change in (False, True, False, True):
        found = logits(model, change)
        assert engine.stats().num_graphs_captured >= 1  # before the first change already
        assert torch.allclose(found, changed if change else unchanged, rtol=1e-3, atol=1e-3)
    assert_idle(model)


@pytest.mark.gpu
def test_prompt_lookup_on_a_gpu_gives_the_greedy_tokens():
    """Drafts are counted on the device there."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = hf_paged.enable(tiny_model().cuda(), strict=True)
    ids = torch.tensor(random_prompts([6])).repeat(1, 6).cuda()
    plain = model.generate(input_ids=ids, max_new_tokens=24)
    assert_same_tensor(model.generate(input_ids=ids, max_new_tokens=24, prompt_lookup_num_tokens=4), plain)
    assert_idle(model)


def test_a_cache_is_cropped_by_numbers_and_by_tensors(model):
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True))
    with engine.lockstep(rows_of([[1, 2, 3, 4, 5, 6]], 4)) as rows:
        cache = PagedCache(rows, 6, model.config.num_hidden_layers)
        view = view_of(model, paged_forwards)
        view(input_ids=torch.tensor([[1, 2, 3, 4, 5, 6]]), logits_to_keep=1, **{CACHE_NAME: cache})
        length = cache.get_seq_length()
        cache.crop(torch.tensor(-2))
        cache.crop(-1)
        assert type(cache.get_seq_length()) is int
        assert cache.get_seq_length() == length - 3
        assert rows.rows.lengths.tolist() == [3]
    assert_idle(model)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("where", ["a beam's parent", "a prompt of several rows", "a published prompt"])
def test_rows_that_forget_what_others_hold_as_well_go_on_in_blocks_of_their_own(model, where, caching):
    engine = hf_paged.get_engine(hf_paged.enable(model, enable_prefix_caching=caching))
    size = engine.config.block_size
    prompt, new = random_prompts([size + 4])[0], random_prompts([2 * size], seed=3)[0]
    if where == "a published prompt":
        prompt = prompt[:size]
    if where != "a beam's parent":
        new = new[:2]
    with engine.lockstep(rows_of([prompt] * 2, 4 * size)) as rows:
        rows.prompts()
        for token in new:
            rows.decode(torch.tensor([[token]] * 2))
        if where == "a beam's parent":
            rows.reorder([1, 1])
        forgotten = 8 if where == "a beam's parent" else len(new) + 5
        rows.crop(forgotten)
        kept = [[*prompt, *new][:-forgotten] for _ in range(2)]
        for tokens in ([3, 9], [5, 7], [8, 2]):
            found = rows.decode(torch.tensor(tokens)[:, None])[:, -1]
            for row, token, logits in zip(kept, tokens, found, strict=True):
                row.append(token)
                with torch.no_grad():
                    assert torch.allclose(logits, model(input_ids=torch.tensor([row])).logits[0, -1], atol=1e-4)
            invariants.check(engine._core.scheduler, [seq.block_table for seq in rows.rows.sequences])
    assert_idle(model)


def test_launch_is_not_asked_for_lockstep(model, monkeypatch):
    """Native steps sample on the device; these must not."""
    hf_paged.enable(model, strict=True)
    monkeypatch.setattr(ModelRunner, "launch", lambda *args: (_ for _ in ()).throw(AssertionError("sampled")))
    assert_same_tensor(model.generate(**INPUTS, **OPTIONS), of_stock())
