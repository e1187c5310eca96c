"""When a step gets its graph: not at its first uses, and never without a run that loaded what the graph launches."""

from __future__ import annotations

import math
from collections import Counter
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runner.test_graphs import graphs_of, uncaptured
from support import random_prompts, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged.kernels.attention.types import GroupedConfig
from hf_paged.models import ModelExecutor
from hf_paged.runner.graphs import Captured, Padded, StepGraphs
from hf_paged.runner.padded_steps import Drawn
from hf_paged.runner.step_shape import GroupedTiles, StepShape
from hf_paged.sampling.log_probs import FILTERS

PROMPTS = {"tokens": 16, "prompts": 2}
SHAPES = [
    StepShape("decode", rows=1, one_launch=True), StepShape("decode", rows=2),
    StepShape("decode", rows=2, stages=frozenset({"bad_words"})), StepShape("logits", rows=2),
    StepShape("undrawn", rows=2), StepShape("masked", rows=2), StepShape("prompts", **PROMPTS),
    StepShape("prompt_logits", **PROMPTS), StepShape("mixed", rows=2, **PROMPTS),
]
NO_MEMORY, NO_GRAPH = torch.OutOfMemoryError("no"), RuntimeError("not while a stream is captured")


class Device:
    """Steps of made-up results. A run loads what it launches; a graph launches what is loaded, and runs nothing."""

    def __init__(self):
        self.structure, self.moves, self.compiled = 1, 0, False
        self.loaded, self.ran, self.recorded = set(), [], None
        self.run_fails = self.record_fails = None

    def kernels(self, shape):
        return self.structure, self.moves, shape, shape.one_launch and self.compiled

    def run(self, shape, *arrays):
        if self.recorded is None:
            if self.run_fails is not None:
                raise self.run_fails
            self.loaded.add(self.kernels(shape))
            self.ran.append(shape)
            return made(shape, *arrays)
        assert self.kernels(shape) in self.loaded, "no graph can load a kernel"
        assert not self.kernels(shape)[-1] or self.ran[-1] == shape, "no graph can make the table for one launch"
        if self.record_fails is not None:
            raise self.record_fails
        self.recorded.step = shape, arrays, torch.zeros(1, 2)
        return self.recorded.step[2]


class Graph:
    """In place of a CUDA graph of a device."""

    def __init__(self, device):
        self.device, self.step = device, None

    def capture_begin(self, *_, **__):
        self.device.recorded = self

    def capture_end(self):
        self.device.recorded = None

    def reset(self):
        self.step = None

    def replay(self):
        shape, arrays, result = self.step
        self.device.ran.append(shape)
        result.copy_(made(shape, *arrays))


def made(shape, *arrays):
    """What the eager step would give."""
    return torch.stack(arrays).sum(0) * (1 + SHAPES.index(shape._replace(after=None))) if arrays else torch.zeros(2)


@pytest.fixture(scope="module")
def runner():
    with hf_paged.PagedGenerator(tiny_model(), num_blocks=50, max_num_seqs=8) as generator:
        generator.generate([[1, 2, 3]], max_new_tokens=1, do_sample=False)
        yield generator.engine._core.pool.runner


def steps_on(device, runner, patch):
    graphs = graphs_of(runner, 256)
    graphs.steps.run = device.run
    patch.setattr(graphs._executor, "uses_one_launch", lambda rows: device.compiled)
    patch.setattr(graphs._executor.watch, "step_structure", lambda model: device.structure)
    patch.setattr(graphs, "_aside", nullcontext)
    patch.setattr(torch.cuda, "CUDAGraph", lambda: Graph(device))
    patch.setattr(torch.cuda, "graph_pool_handle", object)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return graphs


def use(graphs, shape, number=0):
    """Compute a step as its callers do; returns its key, its graph if it has one, and its result."""
    if shape.kind == "masked":  # of the logits of a graph, if they come from one
        of_logits = graphs._captured.get(StepShape("undrawn", rows=2))
        shape = shape._replace(after=None if of_logits is None else of_logits.graph)
    padded = Padded(shape, (np.array([[number, 1.0]]),))
    found = graphs._get(padded)
    result = graphs._compute(found, padded)
    if result is not None:
        assert torch.equal(result, made(shape, torch.from_numpy(padded.inputs[0])))
    return graphs._key(shape), found if isinstance(found, Captured) else None, result


def runs_first(key):
    return math.inf if key.kind == "masked" and key.after is None else 2 if key.tokens else 1


FAILURES = st.sampled_from([{}] * 6 + [{"run_fails": NO_MEMORY}, {"run_fails": KeyboardInterrupt()},
                                       {"record_fails": NO_MEMORY}, {"record_fails": NO_GRAPH}])
HAPPENS = st.sampled_from(["drop", "drop of edits", "modules", "compiler"])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(*[st.tuples(st.sampled_from(SHAPES), FAILURES)] * 5, HAPPENS), max_size=60))
def test_whatever_happens_each_use_runs_once_and_graphs_come_behind_one_or_two(runner, events):
    """Memory that moves, modules that are exchanged, kernels that come and go, errors in runs and in captures."""
    device, alone = Device(), Counter()
    with pytest.MonkeyPatch.context() as patch:
        graphs = steps_on(device, runner, patch)
        for number, event in enumerate(events):
            if isinstance(event, str):
                happen(event, device, graphs)
                if event.startswith("drop"):
                    alone = Counter({key: count for key, count in alone.items() if key.after is None})
                continue
            shape, fails = event
            vars(device).update({"run_fails": None, "record_fails": None} | fails)
            ran, refused = len(device.ran), None in graphs._captured.values()
            key = result = None
            with suppress(KeyboardInterrupt):
                key, graph, result = use(graphs, shape, number)
            assert len(device.ran) == ran + (result is not None)
            if result is None:
                assert fails or refused
            elif graph is None:
                alone[key] += 1
                assert (key in graphs._captured) == (alone[key] > runs_first(key))
            else:
                assert alone[key] >= runs_first(key), "captured too early"


def happen(event, device, graphs):
    if event == "drop":
        device.moves += 1
        graphs.drop("a test")
    elif event == "drop of edits":
        graphs._drop_editing("a test")
    elif event == "modules":
        device.structure += 1
    else:
        device.compiled = not device.compiled


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[-1]], ids=lambda shape: shape.kind)
def test_a_shape_that_had_a_graph_has_one_again_behind_its_next_run(runner, monkeypatch, shape):
    """Which comes first, since what moved may need other kernels; nothing runs a second time."""
    device = Device()
    graphs = steps_on(device, runner, monkeypatch)
    first = runs_first(shape)
    found = [use(graphs, shape)[1] is not None for _ in range(first + 1)]
    assert found == [False] * first + [True] and graphs.num_captured == 1
    happen("drop", device, graphs)
    assert use(graphs, shape)[1] is None and graphs.num_captured == 2
    assert use(graphs, shape)[1] is not None
    assert len(device.ran) == first + 3
    for event in ("modules", "compiler"):  # a graph goes when what it reads moves, which others look after
        happen(event, device, graphs)
        assert use(graphs, shape)[1] is not None


def test_a_step_in_one_launch_is_captured_behind_a_run(runner, monkeypatch):
    """The launch reads a table of addresses, which a run makes anew where it is gone."""
    device = Device()
    device.compiled = True
    graphs = steps_on(device, runner, monkeypatch)
    shapes = [SHAPES[0], SHAPES[1], SHAPES[0], SHAPES[0]]
    assert [use(graphs, shape)[1] is not None for shape in shapes] == [False, False, False, True]
    assert device.ran == shapes


def test_runs_that_read_logits_of_a_graph_are_forgotten_with_it(runner, monkeypatch):
    graphs, undrawn, masked = steps_on(Device(), runner, monkeypatch), SHAPES[4], SHAPES[5]
    found = [use(graphs, shape) for shape in (masked, undrawn, undrawn, masked, masked)]
    assert [graph is not None for _, graph, _ in found] == [False, False, True, False, True]
    assert any(key.after is not None for key in graphs._runs)
    graphs.drop("a test")
    assert all(key.after is None for key in graphs._runs)


def test_errors_among_ranks_are_raised(runner, monkeypatch):
    """The others would wait in collectives for ever; what is captured follows from the plans alone on all of them."""
    device = Device()
    graphs = steps_on(device, runner, monkeypatch)
    monkeypatch.setattr(ModelExecutor, "group", SimpleNamespace(is_parallel=True))
    device.run_fails = NO_MEMORY
    with pytest.raises(torch.OutOfMemoryError):
        use(graphs, SHAPES[1])
    device.run_fails, device.record_fails = None, NO_MEMORY
    use(graphs, SHAPES[1])
    for error in (NO_MEMORY, NO_GRAPH):
        device.record_fails = error
        with pytest.raises(type(error)):
            use(graphs, SHAPES[1])
    assert not graphs._captured


def test_inputs_that_are_ready_are_sent_again_once_another_step_ran(runner, monkeypatch):
    """What was counted of the step that waits is the other step's then."""
    graphs, plan = steps_on(Device(), runner, monkeypatch), object()
    graphs._ready = plan, None
    assert graphs.is_ready(plan)
    use(graphs, SHAPES[0])
    assert not graphs.is_ready(plan)


class OfStream(torch.Tensor):
    """A result in memory of a stream."""

    is_cuda, read_by = True, None

    def record_stream(self, stream):
        self.read_by = stream


def test_memory_of_a_run_is_kept_for_the_stream_that_reads_it(runner, monkeypatch):
    """Tokens, log-probabilities and logits lie in memory of the engine's own stream, which may reuse or free it."""
    graphs = steps_on(Device(), runner, monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the caller's")
    results = [torch.zeros(1).as_subclass(OfStream) for _ in range(6)]
    for result in (results[0], (results[1], results[2]), Drawn(results[3], {"raw": results[4]}, results[5]),
                   Drawn(results[3], {})):
        graphs._run(partial(lambda *_, result=result: result), Padded(SHAPES[1], (np.zeros((1, 2)),)))
    assert [result.read_by for result in results] == ["the caller's"] * 6


# -- with a model ------------------------------------------


def generate(generator, prompts, new_tokens):
    configs = [GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=None) for n in new_tokens]
    return [one.token_ids for one in generator.generate(prompts, configs, use_tqdm=False)]


def test_graphs_that_are_captured_ahead_serve_the_first_steps_and_write_nothing(monkeypatch):
    """The largest first. Requests whose logits are edited, or filtered, have graphs of their own."""
    steps = uncaptured(monkeypatch)
    model, prompts = tiny_model(), random_prompts([40, 17, 5])
    with hf_paged.PagedGenerator(model, num_blocks=50, max_num_seqs=24) as generator:
        expected = generate(generator, prompts, [9, 9, 9])
        runner = generator.engine._core.pool.runner
        runner.graphs.drop("a test")
        runner.graphs._runs.clear()
        held = [runner.state.tokens[:-1], runner.state.block_table[:-1], runner.state.sampling.ints[:-1],
                *(cache[1:].view(torch.int32) for caches in runner.cache.layers for cache in caches)]  # as bits: new
        # blocks are not filled, and a NaN in them equals nothing
        before, captured = [tensor.clone() for tensor in held], runner.graphs.num_captured
        with torch.no_grad():
            runner.capture_ahead(5)
            names = [one.name for one in runner.graphs._captured.values()]
            assert names == ["decode 8", "decode 4", "decode 2", "decode 1"]
            runner.capture_ahead(5)
        assert runner.graphs.num_captured == captured + 4
        assert all(map(torch.equal, held, before))
        del steps[:]
        assert generate(generator, prompts, [9, 9, 9]) == expected
        assert runner.graphs.num_captured == captured + 4 and ("decode", 4) in steps
        with torch.no_grad():
            runner.graphs.capture_ahead(runner.graphs.decode_shapes(1000, frozenset({FILTERS})))
        assert [shape.rows for shape in runner.graphs._captured if shape.stages] == [24, 16, 8, 4, 2, 1]


def test_what_an_earlier_engine_repeated_is_captured_ahead(monkeypatch):
    """In arrays like those that requests bring; then none of these steps is captured late."""
    uncaptured(monkeypatch)
    monkeypatch.setattr("hf_paged.runner.padded_steps._MIXED_TOKENS", 32)
    found, compute = {}, StepGraphs._compute

    def kept(self, found_for, padded):
        if padded.known is None:
            found[padded.shape] = padded.inputs
        return compute(self, found_for, padded)

    monkeypatch.setattr(StepGraphs, "_compute", kept)
    model, options = tiny_model(), {"num_blocks": 90, "max_num_seqs": 3, "max_num_batched_tokens": 32}
    prompts, lengths = random_prompts([40, 17, 5, 33, 20, 16, 9, 40, 8, 7, 9, 6]), [3, 9, 5, 9, 4, 8, 3, 6, 3, 2, 4, 3]
    with hf_paged.PagedGenerator(model, **options) as generator:
        expected = generate(generator, prompts, lengths)
        uses = generator.engine._core.pool.runner.graphs.uses
    repeated = [shape for shape, number in uses.items() if number > runs_first(shape)]
    assert {"decode", "mixed", "prompts"} <= {shape.kind for shape in repeated}
    with hf_paged.PagedGenerator(model, **options) as generator:
        generator.generate([[1, 2, 3]], max_new_tokens=1, do_sample=False)
        generator.engine.reset_prefix_cache()
        runner = generator.engine._core.pool.runner
        for shape, inputs in found.items():
            arrays = runner.graphs.steps.padding_of(shape)
            assert [(one.shape, one.dtype) for one in arrays] == [(one.shape, one.dtype) for one in inputs]
        runner.graphs._runs.clear()
        with torch.no_grad():
            runner.capture_ahead(1, repeated)
        assert runner.graphs._captured.keys() >= set(repeated)
        before = runner.graphs.num_captured
        assert generate(generator, prompts, lengths) == expected
        assert runner.graphs.num_captured == before


def test_shapes_that_padding_does_not_have_are_not_captured_ahead(runner, monkeypatch):
    graphs = steps_on(device := Device(), runner, monkeypatch)
    tiles = GroupedTiles(3, GroupedConfig(16, 64, 3, 32, 2, 4, 2, None))
    graphs.capture_ahead([
        StepShape("decode", rows=2, tiles=tiles), StepShape("mixed", rows=2, **PROMPTS, decode_tiles=tiles),
        StepShape("masked", rows=2), StepShape("decode", rows=2, named=True),
        StepShape("decode", rows=2, stages=frozenset({"bad_words"})),
        # of a file that is damaged, or of an engine with other sizes
        *(StepShape("decode", rows=rows) for rows in (-1, 0, 3, 200)), StepShape("decode", rows=2, tokens=16),
        StepShape("decode", rows=2, scored=("nonsense",)), StepShape("prompts", tokens=17, prompts=8),
        StepShape("prompts", tokens=16, prompts=200), StepShape("mixed", rows=200, tokens=1024, prompts=8),
        *(StepShape(kind, rows=2) for kind in ("nonsense", "run", "use_slots")),
    ])
    assert not device.ran and not graphs._captured


def test_where_memory_is_short_the_rest_is_left_to_requests(runner, monkeypatch):
    """Steps of decode rows come first, the largest before others; what failed is tried again by a request."""
    graphs = steps_on(device := Device(), runner, monkeypatch)
    shapes = [StepShape("prompts", tokens=16, prompts=8), *(StepShape("decode", rows=rows) for rows in (1, 4, 8, 2))]

    def run(shape, *arrays):
        if device.recorded is not None:
            if shape.rows == 2:
                raise NO_MEMORY
            device.recorded.step = shape, arrays, torch.zeros(2)
        return torch.zeros(2)

    graphs.steps.run = run
    graphs.capture_ahead(shapes)
    assert [shape.rows for shape in graphs._captured] == [8, 4]
    assert None not in graphs._captured.values()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 70), st.integers(1, 8)), min_size=3, max_size=9), st.integers(1, 4),
       st.randoms(use_true_random=False))
def test_tokens_are_the_eager_steps_whatever_graphs_are_dropped_or_cannot_be_had(requests, max_num_seqs, rng):
    model = tiny_model()
    prompts, new_tokens = random_prompts([n for n, _ in requests]), [count for _, count in requests]
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 64, "num_blocks": 200}
    with hf_paged.PagedGenerator(model, **options) as generator:
        eager = generate(generator, prompts, new_tokens)
    with pytest.MonkeyPatch.context() as patch:
        uncaptured(patch)
        patch.setattr("hf_paged.runner.padded_steps._MIXED_TOKENS", rng.choice([1, 16, 1024]))
        launch, run, capture = StepGraphs.launch, StepGraphs._run_compiled, StepGraphs._capture

        def launched(self, *args, **kwargs):
            if rng.random() < 0.1:
                self.drop("a test")
            return launch(self, *args, **kwargs)

        def ran(self, step, *of_step):
            made = run(self, step, *of_step)
            if rng.random() < 0.05:  # when all of it is done, the eager step does it again
                raise torch.OutOfMemoryError
            return made

        patch.setattr(StepGraphs, "launch", launched)
        patch.setattr(StepGraphs, "_run_compiled", ran)
        patch.setattr(StepGraphs, "_capture", lambda *args: None if rng.random() < 0.2 else capture(*args))
        with hf_paged.PagedGenerator(model, **options) as generator:
            assert generate(generator, prompts, new_tokens) == eager
