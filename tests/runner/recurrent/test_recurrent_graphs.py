"""Decode steps of models with a recurrent state as graphs: stock's tokens, by the slots in the graph's own inputs, and
padding rows that change no row's state. Without a GPU the same steps run uncaptured."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from recurrent_models import outlined, recurrent_model, run, with_idiom
from runner.test_graphs import uncaptured
from support import Interrupt, interrupted_behind, random_prompts
from test_recurrent_runner import GREEDY, PROMPTS, greedy

import hf_paged
from hf_paged.kernels.attention.prefill import FULL_TILE
from hf_paged.kernels.build import compiling
from hf_paged.models import experts
from hf_paged.models.base import StateShape
from hf_paged.models.recurrent.view import StateView
from hf_paged.runner.dry_runs import dry_runs
from hf_paged.runner.padded_steps import PaddedSteps
from hf_paged.runner.recurrent.state_pool import StatePool

pytestmark = with_idiom
OPTIONS = {"max_num_batched_tokens": 64, "max_num_seqs": 5}


@pytest.fixture
def steps(monkeypatch):
    return uncaptured(monkeypatch)


@pytest.fixture(params=["Lfm2", "Qwen3_5", "Mamba2"])
def model(request):
    return outlined(recurrent_model(request.param))


def decoding(model, prompts, num_steps=4):
    """An engine some steps behind these prompts."""
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True, **OPTIONS))
    made = {engine.add_request(prompt, GREEDY): [] for prompt in prompts}
    for _ in range(num_steps):
        for output in engine.step():
            made[output.request_id] += output.new_token_ids
    return engine, made


def finished(engine, made):
    """All tokens of requests that have made some."""
    rest = run(engine, GREEDY)
    return [tokens + rest[name] for name, tokens in made.items()]


def states_of(engine):
    return engine._core.runner.cache.states._tensors


@pytest.mark.parametrize("overlap", [False, True])
def test_decode_rows_replay_graphs_and_make_stocks_tokens(model, steps, overlap):
    """Rows come and go, so that each graph is replayed with other slots, and steps with prompts run between."""
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True, overlap=overlap, **OPTIONS))
    assert list(run(engine, GREEDY, PROMPTS).values()) == greedy(model, PROMPTS)
    assert {kind for kind, _ in steps} == {"decode"} and {1, 2, 4} <= {size for _, size in steps}
    # A step for each prompt, whose last token and the decode rows are a graph, and then those of the last request.
    assert len(steps) == len(PROMPTS) + len(greedy(model, PROMPTS[:1])[0]) - 1
    captured = engine.stats().num_graphs_captured
    prompts = random_prompts([21, 8, 30], seed=5)
    assert list(run(engine, GREEDY, prompts).values()) == greedy(model, prompts)
    assert 0 < captured <= engine.stats().num_graphs_captured and engine.stats().num_graphs_dropped == 0


@pytest.mark.parametrize("lengths", [[20, 17], [20, 17, 200], [1, 20], [20, 1]])
def test_last_tokens_of_prompts_are_one_graph_where_no_other_row_samples(model, steps, lengths):
    """A prompt that is cut in the same step has no token yet; a prompt of one token has no state before it."""
    prompts = random_prompts(lengths, seed=4)
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True, **OPTIONS | {"max_num_batched_tokens": 64}))
    names = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    first = {output.request_id: output.new_token_ids for output in engine.step()}
    assert steps == ([] if 1 in lengths else [("decode", 2)])
    made = {name: first.get(name, []) for name in names}
    rest = run(engine, GREEDY)
    assert [made[name] + rest[name] for name in names] == greedy(model, prompts)


@pytest.mark.parametrize("length", [17, 18, 40])
def test_last_tokens_behind_a_prefix_hit_join_the_graph_of_decode_rows(model, steps, length):
    """Within a block, too, which has the tokens before that a prompt reads."""
    again, other = random_prompts([length, 20], seed=4)
    engine, made = decoding(model, [again, other])
    name = engine.add_request(again, GREEDY)
    del steps[:]
    made[name] = []
    for output in engine.step():
        made[output.request_id] += output.new_token_ids
    assert steps == [("decode", 4)]
    assert finished(engine, made) == greedy(model, [again, other, again])


def test_a_padded_step_changes_the_states_of_its_rows_alone(model, steps):
    """Three rows in a graph of four; NaN in the line of padding rows is read by these alone."""
    engine, made = decoding(model, PROMPTS[:3])
    tensors = states_of(engine)
    for tensor in tensors.values():
        tensor[5] = float("nan")
        tensor[3:5] = 7.0
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    del steps[:]
    for output in engine.step():
        made[output.request_id] += output.new_token_ids
    assert steps == [("decode", 4)]
    for key, tensor in tensors.items():
        assert (tensor != before[key]).flatten(1).any(1)[:5].tolist() == [True] * 3 + [False] * 2
    assert finished(engine, made) == greedy(model, PROMPTS[:3])


@torch.no_grad()
def test_dry_runs_and_padding_change_no_state_of_a_row(model, steps, monkeypatch):
    """Dry runs leave out layers with states: that of a prompt once scanned it, token by token in the first Mamba."""
    engine, _ = decoding(model, PROMPTS[:2])
    runner, tensors = engine._core.runner, states_of(engine)
    for tensor in tensors.values():
        tensor[2:] = 7.0
    before = {key: tensor.clone() for key, tensor in tensors.items()}
    works = list(dry_runs(runner.graphs.steps, 5, 64, optional=True))
    assert {work.func.__name__ for work in works} <= {"run_padding_rows", "run_masked_padding",
                                                          "run_padding_prompt"}
    for work in works:
        work()
    for key, tensor in tensors.items():
        assert torch.equal(tensor[:-1], before[key][:-1])
    plan = engine._core.scheduler.schedule()
    asked, read = [], StateView._read
    monkeypatch.setattr(StateView, "_read", lambda *args: asked.append(args) or read(*args))
    monkeypatch.setattr(compiling._thread, "dry_run", compiling._DryRun(), raising=False)
    runner._hidden_states(plan, every_token=False)
    for work in works:
        work()
    for key, tensor in tensors.items():
        assert torch.equal(tensor[:-1], before[key][:-1])
    assert asked == []
    monkeypatch.setattr(compiling._thread, "dry_run", None)
    runner._hidden_states(plan, every_token=False)
    assert asked
    assert not all(torch.equal(tensor, before[key]) for key, tensor in tensors.items())


@pytest.mark.parametrize(("name", "longest"), [("Jamba", FULL_TILE), ("Lfm2", FULL_TILE), ("Qwen3_5Moe", 256)])
def test_prompts_as_long_as_a_step_are_looked_at_only_for_kernels_of_experts(name, longest, steps, monkeypatch):
    """Jamba's router is not known: its blocks run by themselves, whatever a prompt's length."""
    model = outlined(recurrent_model(name).bfloat16())
    engine, _ = decoding(model, PROMPTS[:1], 1)
    runner = engine._core.runner
    monkeypatch.setattr(experts, "why_not_on", lambda device: None)
    found = PaddedSteps(runner.executor, runner.cache, runner.state, runner.graphs.steps.attention, 256)
    assert found.prompt_lengths == [1 << i for i in range(longest.bit_length())]


def test_a_step_that_finds_no_memory_is_not_repeated(model, steps, monkeypatch):
    """It has changed states: its rows are computed again."""
    engine, made = decoding(model, PROMPTS[:2])
    own, calls = PaddedSteps._draw, []

    def no_memory(*args, **kwargs):
        calls.append(compiling.is_dry())
        raise torch.OutOfMemoryError

    monkeypatch.setattr(PaddedSteps, "_draw", no_memory)
    engine._core.runner.graphs.drop("a test")
    with pytest.raises(torch.OutOfMemoryError):
        engine.step()
    assert calls == [True, False]
    monkeypatch.setattr(PaddedSteps, "_draw", own)
    assert finished(engine, made) == greedy(model, PROMPTS[:2])


def test_graphs_go_when_states_move(model, steps):
    engine, _ = decoding(model, PROMPTS[:2])
    assert engine.stats().num_graphs_captured
    engine._core.runner.cache.states.grow(9)
    run(engine, GREEDY)
    assert engine.stats().graphs_dropped_by == {"states": 1}


def test_a_pool_that_cannot_grow_keeps_its_states(monkeypatch):
    keys = [(0, "conv", 0), (1, "recurrent", 0)]
    model = outlined(recurrent_model("Lfm2"))
    engine, _ = decoding(model, PROMPTS[:2])
    spec = engine._core.runner.spec._replace(states=tuple(StateShape(key, (3,), torch.float32) for key in keys))
    pool = StatePool(spec, 2)
    for tensor in pool._tensors.values():
        tensor[:2] = 7.0

    def none(*args, **kwargs):
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", none)
        with pytest.raises(torch.OutOfMemoryError):
            pool.grow(4)
    assert (pool.num_slots, pool.version) == (2, 0)  # nothing moved: graphs stay
    pool.grow(6)
    for tensor in pool._tensors.values():
        assert len(tensor) == 7 and tensor[:2].eq(7.0).all() and tensor[6].eq(0.0).all()


def test_an_interrupt_while_a_pool_grows_leaves_all_states(model):
    """A state that the pool lacks would count as one that no row has yet."""
    spec, at, left = decoding(model, PROMPTS[:1])[0]._core.runner.spec, 0, True
    while left:
        at, left, pool = at + 1, False, StatePool(spec, 2)
        for slot in range(2):
            pool.put(slot, torch.full_like(pool.copy_of(slot), slot + 1))
        before = {key: tensor[:2].clone() for key, tensor in pool._tensors.items()}
        with suppress(Interrupt), interrupted_behind(at, "state_pool.py"):
            left = True
            pool.grow(4)
            left = False
        assert pool._tensors.keys() == before.keys()
        assert all(torch.equal(tensor[:2], before[key]) for key, tensor in pool._tensors.items())
        pool.put(0, torch.full_like(pool.copy_of(0), 2))
        assert all(torch.equal(tensor[0], tensor[1]) for tensor in pool._tensors.values())
    assert at > 5
