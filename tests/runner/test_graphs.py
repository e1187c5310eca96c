"""Steps as graphs: padded inputs give what the eager step gives. Without a GPU the same functions run uncaptured."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from functools import cache, partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from fake_plan import Plans, fake_plans
from hypothesis import given, settings
from hypothesis import strategies as st
from planned_torch import PlannedTorch
from support import Interrupt, batch, byte_tokenizer, interrupted, random_prompts, run_out, stock_generate, tiny_model
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import GenerationConfig

import hf_paged
from hf_paged.attention import plan_prompts
from hf_paged.attention.plan_prompts import RowPrograms
from hf_paged.attention.triton_backend import TritonBackend
from hf_paged.engine.engine import Engine
from hf_paged.engine.features.drafts import Speculation
from hf_paged.engine.features.lockstep import LockstepThrottle
from hf_paged.kernels.attention.grouped import paged_attention_grouped, paged_attention_grouped_prefill
from hf_paged.kernels.attention.types import GroupedWork, PromptWork, TileQueue
from hf_paged.kernels.build import compiling
from hf_paged.kernels.hopper import decoder_layers_support as support
from hf_paged.models.fused import FusedExecutor
from hf_paged.runner import graphs as graphs_module
from hf_paged.runner import padded_steps, request_state
from hf_paged.runner.attention_inputs import AttentionInputs
from hf_paged.runner.dry_runs import dry_runs
from hf_paged.runner.graphs import Captured, Padded, StepGraphs
from hf_paged.runner.model_runner import ModelRunner
from hf_paged.runner.padded_steps import Drawn, PaddedSteps
from hf_paged.runner.step_shape import StepShape
from hf_paged.sampling import edit_lines
from hf_paged.sampling.log_probs import PROCESSED
from hf_paged.scheduler import Status


class InterpretedGroups(PlannedTorch):
    """Steps whose rows share prefixes run the kernel for them, in Triton's interpreter."""

    choose_groups, plan_prompts = TritonBackend.choose_groups, TritonBackend.plan_prompts
    prompt_kernel = TritonBackend.prompt_kernel

    def __init__(self):
        self.grouped, self.prompts = [], []  # the plans that ran, in each layer

    def run(self, q, k_cache, v_cache, meta, options, out=None):
        if isinstance(meta.work, PromptWork):
            self.prompts.append(meta.work)
            return paged_attention_grouped_prefill(q, k_cache, v_cache, meta, options, out=out)
        if not isinstance(meta.work, GroupedWork):
            return super().run(q, k_cache, v_cache, meta, options, out)
        self.grouped.append(meta.work)
        return paged_attention_grouped(q, k_cache, v_cache, meta, options, out=out)


def graphs_of(runner, max_num_batched_tokens):
    attention = runner.attention
    if not isinstance(attention.backend, PlannedTorch):
        attention = AttentionInputs(PlannedTorch(), runner.spec, runner.state, runner.max_model_len)
    return StepGraphs(runner.executor, runner.cache, runner.state, attention, max_num_batched_tokens)


class Uncaptured:
    """In place of a CUDA graph."""

    is_destroyed = False

    def reset(self):
        self.is_destroyed = True


def uncaptured(monkeypatch):
    """Every runner gets graphs that run uncaptured; returns the list of the padded steps that run as (kind, size)."""
    replayed: list[tuple[str, int]] = []

    def capture(self, run, inputs, name):
        self.num_captured += 1
        self._graphs.append(Uncaptured())
        return Captured(name, self._graphs[-1], tuple(torch.from_numpy(array.copy()) for array in inputs), run)

    def get(self, padded, *kept):
        captured, shape = own_get(self, padded, *kept), padded.shape
        if captured is not None:
            kind = shape.kind if shape.kind in ("decode", "masked", "mixed") else "prompt"
            sizes = [size for size in (shape.rows, shape.tokens, shape.prompts) if size]
            replayed.append((kind, tuple(sizes) if kind == "mixed" else sizes[0]))
        return captured

    def replay(self, captured):
        # Graphs share their memory: the next replay overwrites these tokens.
        drawn = captured.result(*captured.inputs)
        if isinstance(drawn, torch.Tensor):  # a step that ends at the logits
            return drawn
        if not isinstance(drawn, Drawn):  # the same, for a graph behind it: that reads them at one place
            return tuple(there.copy_(made) for there, made in zip(held.setdefault(captured.graph, drawn), drawn,
                                                                  strict=True))
        memory.tokens[: len(drawn.tokens)] = drawn.tokens
        for kind, values in drawn.logprobs.items():
            memory.logprobs.setdefault(kind, torch.empty(10_000, *values.shape[1:]))[: len(values)] = values
        return memory._replace(logprobs={kind: memory.logprobs[kind] for kind in drawn.logprobs}, logits=drawn.logits)

    held: dict[Uncaptured, tuple[torch.Tensor, ...]] = {}
    memory = Drawn(torch.empty(10_000, dtype=torch.int64), {})
    own_get = StepGraphs._get
    own = ModelRunner.__init__

    def init(self, executor, spec, **options):
        own(self, executor, spec, **options)
        self.graphs = graphs_of(self, options["max_num_batched_tokens"])

    monkeypatch.setattr(ModelRunner, "__init__", init)
    for name, function in (("_capture", capture), ("_get", get), ("_replay", replay), ("_aside", nullcontext)):
        monkeypatch.setattr(StepGraphs, name, function)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return replayed


@pytest.fixture
def steps(monkeypatch):
    return uncaptured(monkeypatch)


def generate(model, prompts, new_tokens, **options):
    with hf_paged.PagedGenerator(model, num_blocks=200, **options) as generator:
        configs = [GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=None) for n in new_tokens]
        return [c.token_ids for c in generator.generate(prompts, configs, use_tqdm=False)]


@pytest.mark.parametrize("overlap", [False, True])
def test_mixed_steps_replay_a_graph_of_each_kind_and_make_stocks_tokens(steps, overlap):
    """More prompts than slots, so that some are admitted while others decode."""
    model = tiny_model()
    prompts, new_tokens = random_prompts([5, 40, 17, 3, 60, 33, 1]), [12, 3, 9, 14, 5, 7, 11]
    made = generate(model, prompts, new_tokens, max_num_seqs=3, max_num_batched_tokens=128, overlap=overlap)
    for prompt, count, tokens in zip(prompts, new_tokens, made, strict=True):
        output = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=count, eos_token_id=None,
                                do_sample=False)
        assert tokens == output[0, len(prompt) :].tolist()
    kinds = [kind for kind, _ in steps]
    assert ("decode", "prompt") in list(itertools.pairwise(kinds))
    assert {size for kind, size in steps if kind == "prompt"} <= {16, 32, 64, 128}


@pytest.mark.parametrize("overlap", [False, True])
def test_decode_rows_beside_long_prompts_go_with_them_in_one_graph(steps, monkeypatch, overlap):
    """Long are here 32 tokens on: shorter prompts have a graph beside that of the decode rows."""
    monkeypatch.setattr(padded_steps, "_MIXED_TOKENS", 32)
    monkeypatch.setattr(padded_steps, "_FEW_PROMPT_ROWS", 2)
    model = tiny_model()
    prompts = random_prompts([5, 40, 17, 3, 60, 33, 1, 13, 14, 15, 50])
    new_tokens = [12, 3, 9, 14, 5, 3, 11, 4, 4, 4, 6]
    made = generate(model, prompts, new_tokens, max_num_seqs=8, max_num_batched_tokens=128, overlap=overlap)
    for prompt, count, tokens in zip(prompts, new_tokens, made, strict=True):
        output = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=count, eos_token_id=None,
                                do_sample=False)
        assert tokens == output[0, len(prompt) :].tolist()
    mixed = {size for kind, size in steps if kind == "mixed"}
    assert {rows for rows, _, _ in mixed} == {8} and {tokens for _, tokens, _ in mixed} <= {32, 64, 128}
    assert {rows for _, _, rows in mixed} == {2, 8}, "graphs of few prompts, and of as many as there may be"
    pairs = list(itertools.pairwise(steps))
    assert all(size < 32 for (before, _), (kind, size) in pairs if (before, kind) == ("decode", "prompt"))


@pytest.mark.parametrize("fails", ["run", "capture"])
def test_a_mixed_step_whose_graph_cannot_be_had_replays_two(steps, monkeypatch, fails):
    """Both parts are then what they would have been: here no memory is left for the larger step, or its graph."""
    monkeypatch.setattr(padded_steps, "_MIXED_TOKENS", 1)
    model, prompts, new_tokens = tiny_model(), random_prompts([5, 40, 17, 3, 18, 19, 20]), [12, 3, 9, 6, 4, 3, 2]
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 128}
    expected = generate(model, prompts, new_tokens, **options)
    most = Counter(step for step in steps if step[0] == "mixed")
    apart = Counter(itertools.pairwise(kind for kind, _ in steps))["decode", "prompt"]
    assert max(most.values()) > 2
    del steps[:]

    def no_memory(*_):
        raise torch.OutOfMemoryError

    own = StepGraphs._capture
    if fails == "run":
        monkeypatch.setattr(PaddedSteps, "mixed", no_memory)
    else:
        monkeypatch.setattr(StepGraphs, "_capture", lambda self, run, inputs, name: (
            None if name.startswith("mixed") else own(self, run, inputs, name)))
    assert generate(model, prompts, new_tokens, **options) == expected
    assert Counter(itertools.pairwise(kind for kind, _ in steps))["decode", "prompt"] > apart
    tried = Counter(step for step in steps if step[0] == "mixed")
    assert tried == {step: min(count, 1 if fails == "run" else 2) for step, count in most.items()}


def test_a_decode_row_is_edited_beside_prompts_that_are_not(steps, monkeypatch):
    """The graph of both is told of the settings of both."""
    model, prompts, made = tiny_model(), random_prompts([20, 40, 30, 17, 60]), []
    edits = [{"sequence_bias": [[[5], 1000.0]]}, {}, {}, {}, {}]
    for tokens in (1, 10_000):
        monkeypatch.setattr(padded_steps, "_MIXED_TOKENS", tokens)
        with hf_paged.PagedGenerator(model, num_blocks=200, max_num_seqs=2, max_num_batched_tokens=64) as generator:
            configs = [GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=None, **edit)
                       for n, edit in zip([20, 2, 2, 2, 2], edits, strict=True)]
            made.append([c.token_ids for c in generator.generate(prompts, configs, use_tqdm=False)])
    assert made[0] == made[1] and set(made[0][0]) == {5}
    assert {"mixed", "decode"} <= {kind for kind, _ in steps}


@pytest.mark.interpreted
@pytest.mark.parametrize("mode", ["mixed", "apart", "eager"])
def test_last_tokens_are_read_by_a_plan_of_their_own(steps, monkeypatch, mode):
    """In the last layer, by the kernel of decode rows, which reads what its plan says and nothing else."""
    backend, planned = TritonBackend(), []
    own = backend.run

    def run(q, k_cache, v_cache, meta, options, out=None):
        planned.append((meta.max_query_len > 1, len(q)))
        return own(q, k_cache, v_cache, meta, options, out)

    monkeypatch.setattr(backend, "run", run)
    monkeypatch.setattr("hf_paged.runner.model_runner.resolve_backend", lambda *_: backend)
    monkeypatch.setattr(padded_steps, "_MIXED_TOKENS", 1 if mode == "mixed" else 10_000)
    monkeypatch.setattr(f"{__name__}.graphs_of", lambda runner, most: StepGraphs(
        runner.executor, runner.cache, runner.state, runner.attention, most))
    if mode == "eager":
        monkeypatch.setattr(StepGraphs, "launch", lambda *_, **__: None)
    model, prompts = tiny_model(head_dim=32), random_prompts([5, 40, 17])
    made = generate(model, prompts, [4, 2, 3], max_num_seqs=2, max_num_batched_tokens=64)
    for prompt, count, tokens in zip(prompts, [4, 2, 3], made, strict=True):
        output = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=count, eos_token_id=None,
                                do_sample=False)
        assert tokens == output[0, len(prompt) :].tolist()
    of_prompts = sum(many for many, _ in planned)
    layers = model.config.num_hidden_layers
    assert of_prompts and of_prompts % (layers - 1) == 0, "in all layers but the last"


@pytest.mark.parametrize("rows_elsewhere", [0, 2])
def test_prompts_of_graphs_take_tiles_from_one_queue_where_that_is_wanted(steps, monkeypatch, rows_elsewhere):
    """The question is put for every step, and a graph is captured for each answer."""
    asked, taken = [], []

    class Queued(PlannedTorch):
        has_queue = True

        def wants_queue(self, num_new, seq_lens, *_):
            assert (num_new <= seq_lens).all()
            asked.append(len(num_new) > 1)
            return asked[-1]

        def run(self, q, k_cache, v_cache, meta, options, out=None):
            if meta.max_query_len > 1:
                taken.append(meta.work)
            return super().run(q, k_cache, v_cache, meta, options, out)

    backend = Queued()
    monkeypatch.setattr("hf_paged.runner.model_runner.resolve_backend", lambda *_: backend)
    monkeypatch.setattr(padded_steps, "_MIXED_TOKENS", 1 if rows_elsewhere else 10_000)
    prompts, new_tokens = random_prompts([5, 40, 17, 3, 60]), [9, 3, 9, 6, 2]
    generate(tiny_model(), prompts, new_tokens, max_num_seqs=3, max_num_batched_tokens=128)
    assert set(asked) == {False, True}
    queues = {id(work) for work in taken if work is not None}
    assert len(queues) == 1 and isinstance(next(filter(None, taken)), TileQueue)
    layers = tiny_model().config.num_hidden_layers - 1  # of the last one single tokens are read
    assert [work is not None for work in taken[::layers]] == asked


@pytest.mark.interpreted
@pytest.mark.parametrize("mode", ["graphs", "eager", "off"])
def test_rows_that_share_a_prefix_read_it_once_and_make_stocks_tokens(steps, monkeypatch, mode):
    """In graphs of their own beside those of other rows: the last rows that are left share nothing."""
    monkeypatch.setattr("hf_paged.attention.choose_groups.MIN_SAVED", 0)
    backend = InterpretedGroups()
    monkeypatch.setattr("hf_paged.runner.model_runner.resolve_backend", lambda *_: backend)
    if mode == "eager":
        monkeypatch.setattr(StepGraphs, "launch", lambda *_, **__: None)
    model, shared = tiny_model(), random_prompts([100])[0]
    prompts = [shared + random_prompts([n], seed=n)[0] for n in (3, 9, 20)] + random_prompts([30], seed=5)
    new_tokens = [5, 4, 6, 9]
    expected = [stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=count, eos_token_id=None,
                               do_sample=False)[0, len(prompt):].tolist()
                for prompt, count in zip(prompts, new_tokens, strict=True)]
    with hf_paged.PagedGenerator(model, num_blocks=200, max_num_seqs=6, group_prefixes=mode != "off") as generator:
        configs = [GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=None) for n in new_tokens]
        made = [c.token_ids for c in generator.generate(prompts, configs, use_tqdm=False)]
        keys = set(generator.engine._core.pool.runner.graphs._captured)
        saved = generator.engine.stats().kv_bytes_saved
    assert made == expected
    if mode == "off":
        assert not backend.grouped and saved == 0
        return
    assert backend.grouped
    assert saved > 0
    assert all((work.items[:, 0] > 1).any() for work in backend.grouped)
    decodes = {shape for shape in keys if shape.kind == "decode"}
    if mode == "graphs":
        assert {shape.tiles is None for shape in decodes} == {False, True}
        assert {shape.rows for shape in decodes if shape.tiles is not None} == {4}


@pytest.mark.interpreted
@pytest.mark.parametrize("mode", ["graphs", "eager", "off"])
def test_prompts_behind_a_cached_prefix_read_it_once_and_make_stocks_tokens(steps, monkeypatch, mode):
    """In graphs of their own, beside rows that decode and a prompt that shares nothing; one has its last token left."""
    for name, value in (("PIECE_COST", 0.0), ("LAUNCH", 0.0), ("MOST", 9.0), ("MOST_ELSEWHERE", 9.0)):
        monkeypatch.setattr(plan_prompts, name, value)
    monkeypatch.setattr(plan_prompts, "RowPrograms", lambda tokens, slots, *_: RowPrograms(tokens, slots, 50.0, 1.0))
    backend = InterpretedGroups()
    monkeypatch.setattr("hf_paged.runner.model_runner.resolve_backend", lambda *_: backend)
    if mode == "eager":
        monkeypatch.setattr(StepGraphs, "launch", lambda *_, **__: None)
    model, shared = tiny_model(), random_prompts([100])[0]
    prompts = [shared[:97], *(shared + random_prompts([n], seed=n)[0] for n in (3, 9, 20)), random_prompts([30], 5)[0]]
    expected = [stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=4, eos_token_id=None,
                               do_sample=False)[0, len(prompt):].tolist() for prompt in prompts]
    config = GenerationConfig(max_new_tokens=4, do_sample=False, eos_token_id=None)
    with hf_paged.PagedGenerator(model, num_blocks=200, max_num_seqs=6, group_prefixes=mode != "off") as generator:
        engine = generator.engine
        engine.add_request(shared, GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=None))
        for _ in range(3):
            engine.step()
        assert not backend.prompts, "one prompt reads for itself"
        ids = [engine.add_request(prompt, config) for prompt in prompts]
        made = {}
        while len(made) < len(ids):
            for output in engine.step():
                if output.completion is not None:
                    made[output.request_id] = output.completion.token_ids
        assert [made[name] for name in ids] == expected
        keys = set(engine._core.pool.runner.graphs._runs)
    if mode == "off":
        assert not backend.prompts
        return
    assert backend.prompts
    assert all((work.shared.items[:, 0] > 1).any() and (work.own_begin == 96).sum() >= 3 for work in backend.prompts)
    if mode == "graphs":
        assert {shape.tiles is None for shape in keys if shape.kind == "prompts"} == {False, True}


@pytest.mark.interpreted
def test_steps_that_read_shared_prefixes_are_captured_ahead(steps, monkeypatch):
    """On padding that reads a prefix together, in arrays like those that requests bring, and writes nothing."""
    for name, value in (("PIECE_COST", 0.0), ("LAUNCH", 0.0), ("MOST", 9.0), ("MOST_ELSEWHERE", 9.0)):
        monkeypatch.setattr(plan_prompts, name, value)
    monkeypatch.setattr(plan_prompts, "RowPrograms", lambda tokens, slots, *_: RowPrograms(tokens, slots, 50.0, 1.0))
    monkeypatch.setattr("hf_paged.attention.choose_groups.MIN_SAVED", 0)
    monkeypatch.setattr("hf_paged.runner.model_runner.resolve_backend", lambda *_: InterpretedGroups())
    found, compute = {}, StepGraphs._compute

    def kept(self, made, padded):
        found[padded.shape] = padded.inputs
        return compute(self, made, padded)

    shared = random_prompts([100])[0]
    prompts = [shared + random_prompts([n], seed=n)[0] for n in (3, 9, 20)]

    def serve(generator):
        generator.generate([shared], max_new_tokens=1, do_sample=False)
        config = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=None)
        return [made.token_ids for made in generator.generate(prompts, config, use_tqdm=False)]

    options = {"num_blocks": 200, "max_num_seqs": 6}
    with monkeypatch.context() as watched, hf_paged.PagedGenerator(tiny_model(), **options) as generator:
        watched.setattr(StepGraphs, "_compute", kept)
        expected = serve(generator)
    grouped = {shape: inputs for shape, inputs in found.items() if shape.tiles is not None}
    assert {shape.kind for shape in grouped} == {"decode", "prompts"}
    with hf_paged.PagedGenerator(tiny_model(), **options) as generator:
        generator.generate([[1, 2, 3]], max_new_tokens=1, do_sample=False)
        runner = generator.engine._core.pool.runner
        before = [cache.view(torch.int32).clone() for caches in runner.cache.layers for cache in caches]
        for shape, inputs in grouped.items():
            arrays = runner.graphs.steps.padding_of(shape)
            assert [(one.shape, one.dtype) for one in arrays] == [(one.shape, one.dtype) for one in inputs]
            other = shape._replace(tiles=shape.tiles._replace(num_parts=shape.tiles.num_parts + 1))
            assert runner.graphs.steps.padding_of(other) is None, "of an engine with another plan"
        with torch.no_grad():
            runner.graphs.capture_ahead(grouped)
        assert runner.graphs._captured.keys() >= grouped.keys()
        after = [cache.view(torch.int32) for caches in runner.cache.layers for cache in caches]
        assert all(map(torch.equal, after, before))
        assert serve(generator) == expected


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_steps_with_guesses_replay_graphs_of_a_row_for_each(steps, monkeypatch, max_num_seqs):
    """Up to 8 rows a request, also where there are fewer slots than that."""
    def drafts(self, num_running, costs):
        running = [r.sequence for r in self._running.values() if r.sequence.status is Status.RUNNING]
        return {s.slot: [*outputs[tuple(s.prompt_token_ids)][s.num_output_tokens :][:5], 7, 7]
                for s in running if s.num_output_tokens}

    launch, eager = StepGraphs.launch, []

    def seen(self, *args, **kwargs):
        logits = launch(self, *args, **kwargs)
        eager.append(logits is None)
        return logits

    monkeypatch.setattr(StepGraphs, "launch", seen)
    monkeypatch.setattr(Speculation, "drafts", drafts)
    model, prompts = tiny_model(), random_prompts([20, 9, 14])
    outputs = {tuple(prompt): stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=30,
                                             do_sample=False)[0, len(prompt):].tolist() for prompt in prompts}
    with hf_paged.PagedGenerator(model, num_blocks=200, max_num_seqs=max_num_seqs) as generator:
        made = generator.generate(prompts, max_new_tokens=30, do_sample=False, prompt_lookup_num_tokens=7)
        assert generator.engine.stats().num_accepted_draft_tokens > 50
    assert [one.token_ids for one in made] == list(outputs.values())
    assert {size for kind, size in steps if kind == "decode"} >= ({8} if max_num_seqs == 1 else {32})
    assert not any(eager)


def test_chunks_and_shared_prefixes_go_through_prompt_graphs(steps):
    """A prompt longer than a step is cut: its first chunks sample nothing. A cached prompt computes one token."""
    model = tiny_model()
    prompt = random_prompts([90])[0]
    expected = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=6, eos_token_id=None,
                              do_sample=False)[0, 90:].tolist()
    with hf_paged.PagedGenerator(model, num_blocks=50, max_num_seqs=4, max_num_batched_tokens=32) as generator:
        for _ in range(2):
            completion = generator.generate([prompt], max_new_tokens=6, eos_token_id=None, do_sample=False)[0]
            assert completion.token_ids == expected
    assert completion.num_cached_tokens >= 80
    assert [size for kind, size in steps if kind == "prompt"] == [32, 32, 32, 16]


class EveryThird:
    """A grammar that allows every third token, from another one on after each token; and its matcher."""

    is_over = False

    def __init__(self, at=0):
        self.at = at

    def matcher(self, eos):
        return EveryThird()

    def allows(self, token):
        return token % 3 == self.at % 3

    def accept(self, token):
        is_allowed, self.at = self.allows(token), self.at + 1
        return is_allowed

    def fill(self, words):
        bits = torch.arange(32 * len(words)).view(-1, 32)
        allowed = (bits % 3 == self.at % 3).long() << torch.arange(32)
        words.copy_(allowed.sum(-1).to(torch.int32))


@pytest.mark.each_value
@pytest.mark.parametrize("options", [
    {}, {"do_sample": True, "temperature": 2.0}, {"do_sample": True, "top_k": 9, "logprobs": True},
    {"repetition_penalty": 1.4, "logprobs": "raw"},
], ids=str)
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_wait_for_masks_are_drawn_by_a_graph_of_their_own(monkeypatch, overlap, options):
    """Decode rows in two graphs; steps with prompts end at the logits of a graph of each kind. Others are as alone."""
    monkeypatch.setattr(Engine, "grammar_of", lambda *_: EveryThird())
    model, flags = tiny_model(), {"logprobs": options.get("logprobs")}
    prompts, new_tokens = random_prompts([5, 40, 17, 3, 60, 33, 1]), [12, 3, 9, 14, 5, 7, 11]
    forms = [{"regex": ".*"}, None, {"regex": ".*"}, None, {"regex": ".*"}, {"regex": ".*"}, {"regex": ".*"}]
    settings = {name: value for name, value in options.items() if name != "logprobs"}

    def run(structured):
        with hf_paged.PagedGenerator(model, max_num_seqs=3, max_num_batched_tokens=128, overlap=overlap,
                                     num_blocks=200) as generator:
            configs = [GenerationConfig(max_new_tokens=n, eos_token_id=None, **settings) for n in new_tokens]
            made = generator.generate(prompts, configs, structured=structured, seed=3, use_tqdm=False, **flags)
            graphs = generator.engine._core.pool.runner.graphs
            names = set() if graphs is None else {shape.kind for shape in graphs._captured}
        assert all(one.error is None for one in made)
        return made, names

    expected, free = run(forms)[0], run(None)[0]
    uncaptured(monkeypatch)
    made, names = run(forms)
    assert [one.token_ids for one in made] == [one.token_ids for one in expected]
    assert {"undrawn", "logits", "prompt_logits", "masked"} <= names
    for form, one, same, alone in zip(forms, made, expected, free, strict=True):
        assert one.token_ids == alone.token_ids if form is None else all(
            token % 3 == at % 3 for at, token in enumerate(one.token_ids))
        if one.logprobs is not None:
            torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(same.logprobs), rtol=1e-4, atol=1e-4)


def test_what_the_next_step_reads_is_sent_before_tokens_are_drawn_and_memory_may_move_meanwhile(steps, monkeypatch):
    """Of steps without new rows; where the state has grown in between, tokens are drawn into the new one."""
    monkeypatch.setattr(Engine, "grammar_of", lambda *_: EveryThird())
    prompts = random_prompts([5, 40, 17])
    options = {"max_new_tokens": 9, "eos_token_id": None, "use_tqdm": False, "structured": {"regex": ".*"}}
    with hf_paged.PagedGenerator(tiny_model(), num_blocks=200, overlap=True) as generator:
        expected = [one.token_ids for one in generator.generate(prompts, **options)]
        graphs, log = generator.engine._core.pool.runner.graphs, []
        for name in ("_send", "_replay"):
            own = getattr(graphs, name)
            monkeypatch.setattr(graphs, name, lambda captured, *args, own=own, name=name: (
                log.append((name, captured.name.split()[0])), own(captured, *args))[1])
        assert [one.token_ids for one in generator.generate(prompts, **options)] == expected
        sent, drawn, computed = ("_send", "undrawn"), ("_replay", "masked"), ("_replay", "undrawn")
        assert [one for one in log if one in (sent, drawn, computed)] == [
            sent, computed, *[sent, drawn, computed] * 7, drawn]
        monkeypatch.undo()
        monkeypatch.setattr(Engine, "grammar_of", lambda *_: EveryThird())
        draw, moved = StepGraphs.draw, []

        def moving(self, *args):
            if len(moved) in (2, 3, 5):
                self._state.tokens = self._state.tokens.clone()
                self._state.moves["token history"] += 1
            moved.append(draw(self, *args))
            return moved[-1]

        with pytest.MonkeyPatch.context() as patch:
            uncaptured(patch)
            patch.setattr(StepGraphs, "draw", moving)
            with hf_paged.PagedGenerator(tiny_model(), num_blocks=200, overlap=True) as other:
                assert [one.token_ids for one in other.generate(prompts, **options)] == expected
        assert [i for i, is_drawn in enumerate(moved) if not is_drawn] == [2, 3, 5]


def test_tokens_under_masks_are_drawn_eagerly_where_a_graph_cannot_be_had(steps, monkeypatch):
    monkeypatch.setattr(Engine, "grammar_of", lambda *_: EveryThird())
    prompts, options = random_prompts([5, 40, 17]), {"max_new_tokens": 9, "eos_token_id": None, "use_tqdm": False}
    capture = StepGraphs._capture
    made = []
    for refused in ("masked", "nothing"):
        monkeypatch.setattr(StepGraphs, "_capture", lambda self, run, *args, refused=refused: (
            None if run.args[0].kind == refused else capture(self, run, *args)))
        with hf_paged.PagedGenerator(tiny_model(), num_blocks=200) as generator:
            made.append([one.token_ids for one in generator.generate(prompts, structured={"regex": ".*"}, **options)])
            captured = generator.engine._core.pool.runner.graphs._captured
            refusals = {shape.kind for shape, found in captured.items() if found is None}
        assert refusals == ({"masked"} if refused == "masked" else set())
    assert made[0] == made[1] and all(token % 3 == at % 3 for row in made[0] for at, token in enumerate(row))


@pytest.fixture
def under_masks(steps, monkeypatch):
    """Graphs of steps of three rows under masks, and what the last one was drawn with."""
    monkeypatch.setattr(Engine, "grammar_of", lambda *_: EveryThird())
    draw, drawn = StepGraphs.draw, []

    def seen(self, *args):
        drawn.append(args)
        return draw(self, *args)

    monkeypatch.setattr(StepGraphs, "draw", seen)
    with hf_paged.PagedGenerator(tiny_model(), num_blocks=200) as generator:
        generator.generate(random_prompts([5, 40, 17]), structured={"regex": ".*"}, max_new_tokens=4,
                           eos_token_id=None, use_tqdm=False)
        yield generator.engine._core.pool.runner.graphs, *drawn[-1]


def test_an_interrupt_while_lines_of_masks_are_sent_has_them_sent_again(under_masks, monkeypatch):
    graphs, step, masks, *rest = under_masks
    (captured,) = (found for shape, found in graphs._captured.items() if shape.kind == "masked")
    send = graphs._send

    def interrupted(captured, inputs):
        send(captured, inputs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(graphs, "_send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            graphs.draw(step, masks._replace(lines=np.array([0, -1, 2], np.int32)), *rest)
    assert graphs.draw(step, masks, *rest)
    assert captured.inputs[0].tolist() == [0, 1, 2, -1]


def test_an_interrupt_while_graphs_learn_of_more_slots_has_them_learn_again(under_masks):
    graphs, state = under_masks[0], under_masks[0]._state
    for at in itertools.count(1):
        state.grow(state.num_slots + 8)
        graphs._room_for_masks()
        with suppress(Interrupt), interrupted(at) as calls:
            graphs._drop_if_moved()
        graphs._drop_if_moved()
        assert (graphs.steps.num_slots, graphs.steps.decode_sizes[-1]) == (state.num_slots, state.num_slots)
        assert len(graphs._room_for_masks()) == state.num_slots
        if calls() < at:
            break
    assert at > 5


def test_no_graph_draws_from_logits_of_a_graph_that_was_dropped(under_masks):
    """It would be taken for steps of later graphs, which have their logits elsewhere."""
    graphs, step, *rest = under_masks
    assert graphs.draw(step, *rest)
    graphs.drop("a test")
    assert not graphs.draw(step, *rest)
    assert not graphs._captured


def test_looking_at_what_comes_leaves_the_counts_of_the_step_that_waits(steps):
    with hf_paged.PagedGenerator(tiny_model(), num_blocks=50) as generator:
        generator.generate([[1, 2, 3]], max_new_tokens=2, do_sample=False)
        graphs = generator.engine._core.pool.runner.graphs
        attention = graphs._attention
        attention.saved_positions = attention.saved_prompt_positions = 7
        with torch.no_grad():
            for run in dry_runs(graphs.steps, 2, 16):
                run()
        assert (attention.saved_positions, attention.saved_prompt_positions) == (7, 7)


def test_a_dry_run_leaves_it_to_the_real_one_to_look_at_a_model_that_was_touched(steps):
    """Else what the kernels of copies were to write would be taken for written."""
    model = tiny_model()
    with hf_paged.PagedGenerator(model, num_blocks=50) as generator:
        generator.generate([[1, 2, 3]], max_new_tokens=2, do_sample=False)
        graphs = generator.engine._core.pool.runner.graphs
        model.model.layers[0].mlp.up_proj = copy.deepcopy(model.model.layers[0].mlp.up_proj)
        (run,) = dry_runs(graphs.steps, 1)
        with torch.no_grad():
            compiling._DryRun().run(run)
            executor = graphs._executor
            assert model.model.layers[0].mlp.up_proj not in executor._layer_parts[0].gate_up.linears
            run()
            assert model.model.layers[0].mlp.up_proj in executor._layer_parts[0].gate_up.linears


def test_log_probs_are_the_eager_steps_and_have_graphs_of_their_own(monkeypatch):
    """Mixed steps replay a graph of each kind; prompts that are scored run eagerly."""
    options = {"num_blocks": 200, "max_num_seqs": 3, "max_num_batched_tokens": 64, "enable_prefix_caching": False}
    prompts = random_prompts([5, 40, 17, 3, 60, 33, 2])
    configs = [GenerationConfig(max_new_tokens=n, do_sample=n % 2 == 0) for n in (6, 3, 9, 4, 5, 7, 2)]
    calls = [{}, {"logprobs": True}, {"logprobs": True, "prompt_logprobs": True}]

    def run(generator, **flags):
        completions = generator.generate(prompts, configs, seed=1, use_tqdm=False, **flags)
        assert all((c.logprobs is not None) == ("logprobs" in flags) for c in completions)
        scores = [score for c in completions for score in [*(c.logprobs or []), *(c.prompt_logprobs or [None])[1:]]]
        return [c.token_ids for c in completions], torch.tensor(scores)

    with hf_paged.PagedGenerator(tiny_model(), **options) as generator:
        eager = [run(generator, **flags) for flags in calls]
    replayed = uncaptured(monkeypatch)
    kinds = []
    with hf_paged.PagedGenerator(tiny_model(), **options) as generator:
        for flags, (tokens, scores) in zip(calls, eager, strict=True):
            del replayed[:]
            made = run(generator, **flags)
            kinds.append({kind for kind, _ in replayed})
            assert made[0] == tokens
            torch.testing.assert_close(made[1], scores, rtol=1e-4, atol=1e-4)
        captured = {shape.scored for shape in generator.engine._core.pool.runner.graphs._captured}
    assert kinds[:2] == [{"decode", "prompt"}] * 2
    assert "decode" in kinds[2]
    assert captured == {(), (PROCESSED,)}


@pytest.mark.parametrize("kind", ["decode", "prompt"])
def test_a_step_is_eager_where_its_graph_cannot_be_had(steps, monkeypatch, kind):
    capture, tried = StepGraphs._capture, []

    def refuse(self, run, inputs, name):
        of_prompts = run.args[0].kind == "prompts"
        tried.append((of_prompts, inputs[0].shape))
        return None if of_prompts == (kind == "prompt") else capture(self, run, inputs, name)

    monkeypatch.setattr(StepGraphs, "_capture", refuse)
    model, prompts = tiny_model(), random_prompts([5, 40, 17, 3, 18, 19, 20, 21, 22, 23])
    made = generate(model, prompts, [8] * 10, max_num_seqs=2)
    assert len(tried) == len(set(tried)), "asked again for what cannot be had"
    assert (kind == "prompt") in {of_prompts for of_prompts, _ in tried}
    ran = Counter(step for step in steps if step[0] == kind)
    assert max(ran.values()) == (1 if kind == "decode" else 2)
    monkeypatch.setattr(StepGraphs, "launch", lambda *_, **__: None)
    assert made == generate(model, prompts, [8] * 10, max_num_seqs=2)


@pytest.mark.parametrize("how", ["close", "drop"])
def test_dropped_graphs_are_destroyed_whatever_refers_to_them(steps, how):
    """Such as the traceback of an error in a step; NCCL waits for the end of every graph that holds its kernels."""
    with hf_paged.PagedGenerator(tiny_model(), num_blocks=50) as generator:
        for _ in range(3):
            expected = generator.generate([[1, 2, 3]], max_new_tokens=4, do_sample=False)[0].token_ids
        graphs = generator.engine._core.pool.runner.graphs
        captured = list(graphs._captured.values())
        assert len(captured) >= 2 and not any(kept.graph.is_destroyed for kept in captured)
        if how == "drop":
            graphs.drop("a test")
            assert generator.engine.stats().num_graphs_dropped == len(captured)
            assert generator.generate([[1, 2, 3]], max_new_tokens=4, do_sample=False)[0].token_ids == expected
            assert graphs.num_captured == 2 * len(captured)
    assert all(kept.graph.is_destroyed for kept in captured)


def test_only_graphs_that_edit_logits_go_when_a_list_of_edits_moves(steps, monkeypatch):
    """Other requests' graphs do not read it. All go when the token history moves, and each is counted by its reason."""
    monkeypatch.setattr(edit_lines, "_FIRST_WIDTH", 2)
    monkeypatch.setattr(request_state, "_HISTORY_BYTES", 64 * 4 * 9)
    model = tiny_model()

    def made(generator, prompt, **options):
        return generator.generate([prompt], GenerationConfig(max_new_tokens=4, do_sample=False, **options),
                                  use_tqdm=False)[0].token_ids

    with hf_paged.PagedGenerator(model, num_blocks=50, max_num_seqs=8) as generator:
        plain, edited = made(generator, [1, 2, 3]), made(generator, [1, 2, 3], bad_words_ids=[[5]])
        graphs, stats = generator.engine._core.pool.runner.graphs, generator.engine.stats
        kept = {shape for shape in graphs._captured if not shape.stages}
        gone = [captured.graph for shape, captured in graphs._captured.items() if shape.stages]
        moved = dict(stats().graphs_dropped_by)
        longer = made(generator, [1, 2, 3], bad_words_ids=[[token] for token in range(5, 60)])
        dropped = {reason: count - moved.get(reason, 0) for reason, count in stats().graphs_dropped_by.items()}
        assert dropped == {"edit lists": len(gone)} and all(graph.is_destroyed for graph in gone) and gone and kept
        assert kept <= graphs._captured.keys() and not any(graphs._captured[shape].graph.is_destroyed for shape in kept)
        number = graphs.num_captured
        assert made(generator, [1, 2, 3]) == plain and graphs.num_captured == number
        assert made(generator, [1, 2, 3], bad_words_ids=[[5]]) == edited and set(longer).isdisjoint(range(5, 60))
        number = len(graphs._captured)
        made(generator, list(range(1, 100)))
        assert stats().graphs_dropped_by["token history"] == number
        assert made(generator, [1, 2, 3]) == plain
        assert stats().num_graphs_dropped == sum(stats().graphs_dropped_by.values())


def test_a_pool_without_a_graph_takes_no_capture(graphs, monkeypatch):
    """As torch's allocator has it. A graph of an earlier pool, or of a capture that failed, is of another pool."""
    uses, numbers = Counter(), itertools.count()

    class Graph:
        pool = None

        def capture_begin(self, pool, **_):
            if pool in uses and not uses[pool]:
                raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
            uses[pool] += 1
            self.pool = pool

        def capture_end(self):
            pass

        def reset(self):
            if self.pool is not None:
                uses[self.pool] -= 1
            self.pool = None

    def no_memory():
        raise torch.OutOfMemoryError

    def capture(shape, run=lambda: torch.zeros(1)):
        graphs._captured[shape] = graphs._record(partial(run), (), shape.name)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, next(numbers)))
    graphs._drop_if_moved()
    capture(StepShape("decode", rows=1))
    with suppress(torch.OutOfMemoryError):
        capture(StepShape("prompts", tokens=64), no_memory)
    capture(StepShape("decode", rows=1, stages=frozenset({"bad_words"})))
    graphs._state.edits._lists["bad_words"].moves += 1
    graphs._drop_if_moved()
    assert graphs.dropped_by == {"edit lists": 1} and StepShape("decode", rows=1) in graphs._captured
    capture(StepShape("decode", rows=2))
    capture(StepShape("decode", rows=2, stages=frozenset({"bad_words"})))
    graphs._state.edits._lists["bad_words"].moves += 1
    graphs._drop_if_moved()
    capture(StepShape("decode", rows=4))
    assert graphs._captured[StepShape("decode", rows=4)].pool == graphs._captured[StepShape("decode", rows=2)].pool


@pytest.mark.parametrize("structured", [False, True])
def test_a_step_is_captured_anew_once_its_kernel_is_there(steps, monkeypatch, structured):
    """Until then it is launched layer by layer; masks go with the graph whose logits they bar."""
    plans = fake_plans(monkeypatch)
    model, tokenizer = tiny_model(head_dim=128), byte_tokenizer()
    options = {"max_new_tokens": 6, "do_sample": False, "use_tqdm": False}
    if structured:
        pytest.importorskip("xgrammar")
        options |= {"structured": {"regex": "[a-z]*"}}
    prompt = random_prompts([9])
    with hf_paged.PagedGenerator(copy.deepcopy(model), tokenizer, num_blocks=50, one_launch=False) as generator:
        expected = [one.token_ids for one in generator.generate(prompt, **options)]
    plans.compiled = Future()
    with hf_paged.PagedGenerator(model, tokenizer, num_blocks=50) as generator:
        def made():
            return [one.token_ids for one in generator.generate(prompt, **options)]

        assert made() == expected and plans.rows == []
        graphs = generator.engine._core.pool.runner.graphs
        before = {shape for shape in graphs._captured if shape.kind in ("decode", "undrawn")}
        plans.compiled.set_result(None)
        assert made() == expected and set(plans.rows) == {1}
        added = {shape for shape in graphs._captured if shape.kind in ("decode", "undrawn")} - before
        assert [shape.one_launch for shape in before] == [False] and [shape.one_launch for shape in added] == [True]
        assert graphs._captured[before.pop()].graph is not graphs._captured[added.pop()].graph


class OneLaunch(NamedTuple):
    """Steps by one launch, uncaptured: plans, and of whatever was sent its graph and how many of its inputs."""

    plans: Plans
    sent: list[tuple[Captured, int]]


@pytest.fixture
def one_launch(steps, monkeypatch):
    """The kernel was on the disk: it is there in the first step that wants it."""
    plans, sent = fake_plans(monkeypatch), []
    own_capture, own_send = StepGraphs._capture, StepGraphs._send

    def capture(self, run, inputs, name):
        made, plans.is_captured = own_capture(self, run, inputs, name), True
        with torch.no_grad():
            run(*map(torch.from_numpy, inputs))
        plans.is_captured = False
        return made._replace(kept=tuple(self._executor.captured_tensors()))

    def send(self, captured, inputs):
        own_send(self, captured, inputs)
        sent.append((captured, len(inputs)))

    monkeypatch.setattr(StepGraphs, "_capture", capture)
    monkeypatch.setattr(StepGraphs, "_send", send)
    yield OneLaunch(plans, sent)
    assert not any(plan.conflicts for plan in plans.made), "a row reads what another one writes"
    assert all(captured.kept or count == len(captured.inputs) for captured, count in sent), "a stale plan of attention"


def test_a_graph_that_was_captured_with_the_kernel_is_found_by_it(steps, one_launch):
    with hf_paged.PagedGenerator(tiny_model(head_dim=128), num_blocks=50) as generator:
        generator.generate([[1, 2, 3]], max_new_tokens=6, do_sample=False)
        graphs = generator.engine._core.pool.runner.graphs
        found = {shape.one_launch: one for shape, one in graphs._captured.items() if shape.kind == "decode"}
        assert len(one_launch.plans.rows) == 6 and found.keys() == {True} and found[True].kept
        assert sum(kind == "decode" for kind, _ in steps) == 5
    # Behind the second step, which runs on all of its inputs; attention's plan is for nobody after that.
    assert [count for captured, count in one_launch.sent if captured.kept] == [1, 1, 1]


def test_a_graph_without_the_launch_has_attentions_plan_sent(one_launch):
    """Rows that name an adapter of the head alone: their layers are plain, and run one by one."""
    peft = pytest.importorskip("peft")
    model = tiny_model(head_dim=128)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["lm_head"]), model, "a")
    with hf_paged.PagedGenerator(model, num_blocks=50) as generator:
        for names in ({}, {"adapter_names": ["a"]}):
            one_launch.sent.clear()
            generator.generate([[1, 2, 3]], max_new_tokens=6, do_sample=False, **names)
        captured = generator.engine._core.pool.runner.graphs._captured
        found = [(shape.one_launch, bool(one.kept)) for shape, one in captured.items() if shape.kind == "decode"]
        assert found == [(True, True), (True, False)]
    assert sum(captured.name.startswith("decode") for captured, _ in one_launch.sent) == 3


def test_a_kernel_that_fails_elsewhere_while_a_step_is_prepared(one_launch, monkeypatch):
    """Another engine says so between two looks of this one."""
    own, calls = PaddedSteps.unplanned_rows, []

    def rows(self, plan, size):
        calls.append(size)
        if len(calls) == 2:
            support.refuse(torch.device("cpu"), RuntimeError("no cooperative launch"))
        return own(self, plan, size)

    monkeypatch.setattr(PaddedSteps, "unplanned_rows", rows)
    options = {"max_new_tokens": 8, "do_sample": False, "use_tqdm": False}
    with hf_paged.PagedGenerator(tiny_model(head_dim=128), num_blocks=50, one_launch=False) as generator:
        expected = generator.generate([[1, 2, 3]], **options)[0].token_ids
    with hf_paged.PagedGenerator(tiny_model(head_dim=128), num_blocks=50) as generator:
        assert generator.generate([[1, 2, 3]], **options)[0].token_ids == expected
        captured = generator.engine._core.pool.runner.graphs._captured
        assert len(calls) == 2 and {shape.one_launch for shape in captured if shape.kind == "decode"} == {True, False}


def test_guesses_are_no_rows_of_one_launch(one_launch):
    prompt = random_prompts([6])[0] * 4
    with hf_paged.PagedGenerator(tiny_model(head_dim=128), num_blocks=50) as generator:
        expected = generator.generate([prompt], max_new_tokens=30, do_sample=False)[0].token_ids
        assert one_launch.plans.rows
        made = generator.generate([prompt], max_new_tokens=30, do_sample=False, prompt_lookup_num_tokens=7)[0]
        assert made.token_ids == expected and generator.engine.stats().num_draft_tokens


@pytest.mark.interpreted
def test_what_rows_share_is_counted_in_one_launch_as_layer_by_layer(one_launch, monkeypatch):
    """Rows that share are read in groups; those that are left read all of their positions, and nothing is saved."""
    monkeypatch.setattr("hf_paged.attention.choose_groups.MIN_SAVED", 0)
    backend = InterpretedGroups()
    monkeypatch.setattr("hf_paged.runner.model_runner.resolve_backend", lambda *_: backend)
    prompts = [random_prompts([100])[0] + [5 + i] for i in range(4)]
    counted = []
    for option in (True, False):
        with hf_paged.PagedGenerator(tiny_model(head_dim=128), num_blocks=200, max_num_seqs=6,
                                     one_launch=option) as generator:
            engine, found = generator.engine, []
            for rows in (1, 4):  # of which there are graphs from now on
                generator.generate([[i, 2, 3] for i in range(rows)], max_new_tokens=3, do_sample=False, use_tqdm=False)
            last = engine.stats().kv_bytes_read, engine.stats().kv_bytes_saved
            for prompt, count in zip(prompts, (4, 4, 4, 12), strict=True):
                engine.add_request(prompt, GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None))
            while engine.has_unfinished():
                engine.step()
                stats = engine.stats()
                now = stats.kv_bytes_read, stats.kv_bytes_saved
                found.append((now[0] - last[0], now[1] - last[1]))
                last = now
        counted.append(found)
    assert backend.grouped and one_launch.plans.rows and counted[0] == counted[1]
    assert any(saved for _, saved in counted[0]) and not counted[0][-3][1]


def test_a_graph_keeps_what_a_launch_reads(monkeypatch):
    """As long as the graph may be replayed, whatever becomes of the plan."""
    plan = torch.zeros(1)
    found = [[torch.ones(1)], [plan]]  # of a capture that an error ended, and of this one
    graph = SimpleNamespace(capture_begin=lambda *_, **__: None, capture_end=lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    fake = SimpleNamespace(_pool=1, _graphs=[], num_captured=0,
                           _executor=SimpleNamespace(captured_tensors=lambda: found.pop(0)))
    captured = StepGraphs._record(fake, partial(lambda x: x, 3), (), "decode 1")
    assert (captured.kept, captured.result, captured.graph) == ((plan,), 3, graph)


class Log(list):
    """Stands in for torch.cuda's streams and graphs, and notes what happens."""

    error_at_end = None

    def end(self):
        self.append("end")
        if self.error_at_end is not None:
            raise self.error_at_end

    def stream(self, name):
        return SimpleNamespace(wait_stream=lambda other: self.append(f"{name} waits for {other.name}"), name=name)

    def graph(self):
        return SimpleNamespace(capture_begin=lambda *_, **__: self.append("begin"),
                               capture_end=self.end, reset=lambda: self.append("destroy"))


@pytest.fixture
def graphs():
    """Graphs of a runner that never ran."""
    with hf_paged.PagedGenerator(tiny_model(), num_blocks=50, max_num_seqs=8) as generator:
        generator.generate([[1, 2, 3]], max_new_tokens=1, do_sample=False)
        runner = generator.engine._core.pool.runner
        yield graphs_of(runner, 256)


def attention_of(model):
    return model.model.layers[1].self_attn


def pointed_elsewhere(model):
    attention_of(model).o_proj.weight.data = attention_of(model).o_proj.weight.data.clone()


def replaced(model):
    attention_of(model).k_norm.weight = torch.nn.Parameter(attention_of(model).k_norm.weight.detach().clone())


def another_layer(model):
    model.model.layers[0].mlp.up_proj = copy.deepcopy(model.model.layers[0].mlp.up_proj)


def another_buffer(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()


def transposed(model):
    attention_of(model).o_proj.weight.data = attention_of(model).o_proj.weight.data.t()


def narrowed(model):
    """As pruning by views does it: every tensor begins where it began, with the strides that it had."""
    mlp = model.model.layers[0].mlp
    for linear in (mlp.gate_proj, mlp.up_proj):
        linear.weight.data = linear.weight.data[:64]
    mlp.down_proj.weight.data = mlp.down_proj.weight.data[:, :64]


def resized(model):
    """As offloading does it; what has the old address meanwhile keeps it from coming back."""
    storage = model.model.norm.weight.untyped_storage()
    storage.resize_(0)
    held = [torch.empty(64) for _ in range(64)]
    storage.resize_(4 * 64)
    del held


def another_attribute(model):
    attention_of(model).extra = attention_of(model).extra.clone()


def another_constant(model):
    attention_of(model).scaling *= 2.0


@pytest.mark.parametrize("change", [pointed_elsewhere, replaced, another_layer, another_buffer, transposed, narrowed,
                                    resized, another_attribute, another_constant], ids=lambda f: f.__name__)
def test_graphs_go_once_a_tensor_of_the_model_is_another(graphs, change):
    model = graphs._executor.model
    attention_of(model).extra = torch.zeros(3)  # a module's own, neither a parameter nor a buffer
    graphs.check()
    graphs._captured["one"] = Captured("one", Uncaptured(), (), None)
    graphs.check()
    assert graphs.is_current() and not graphs.num_dropped
    change(model)
    assert not graphs.is_current()
    graphs.check()
    assert graphs.is_current() and graphs.num_dropped == 1


def test_graphs_hold_what_they_read_until_they_are_checked(graphs):
    """Whoever re-points a parameter; also where another storage has come to lie at the address of the one before."""
    weight = attention_of(graphs._executor.model).o_proj.weight
    graphs.check()
    graphs.check()
    first = StorageWeakRef(weight.untyped_storage())
    weight.data = weight.data.clone()
    assert not first.expired()
    graphs.check()
    assert first.expired()
    address = weight.data_ptr()
    weight.data = torch.from_dlpack(weight.data)
    assert weight.data_ptr() == address and graphs.is_current()
    graphs.check()
    second = StorageWeakRef(weight.untyped_storage())
    weight.data = weight.data.clone()
    assert not second.expired()
    graphs.drop_references()
    assert second.expired()
    graphs.check()
    third = StorageWeakRef(weight.untyped_storage())
    weight.data = weight.data.clone()
    assert not third.expired()


@pytest.fixture
def streams(graphs, monkeypatch):
    """A log of what happens on streams, and in captures, which hold a lock."""
    log, lock = Log(), threading.Lock()
    monkeypatch.setattr(graphs_module, "capture_lock", lambda _: lock)
    graphs._stream = log.stream("side")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _=None: log.stream("main"))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", log.graph)
    yield log
    assert not lock.locked()


def step(log, error=None):
    def run(_):
        log.append("run")
        if error is not None:
            raise error
        return torch.zeros(1)

    return partial(run)


@pytest.mark.parametrize(("error", "result"), [
    (torch.OutOfMemoryError("no"), None), (RuntimeError("cannot be captured"), None),
    (KeyboardInterrupt(), KeyboardInterrupt), (None, "a graph"),
])
def test_a_step_is_captured_on_the_engines_own_stream(graphs, streams, error, result):
    """After what the caller's stream has to do, which in turn waits for it, whatever happens there."""
    call = partial(graphs._capture, step(streams, error), (np.zeros(1),), "decode 1")
    if isinstance(result, type):
        with pytest.raises(result):
            call()
    else:
        assert (call() is None) == (result is None)
    destroyed = [] if error is None else ["destroy"]
    assert streams == ["side waits for main", "begin", "run", "end", *destroyed, "main waits for side"]


@pytest.mark.parametrize(("error", "result"), [
    (torch.OutOfMemoryError("no"), None), (RuntimeError("bad"), RuntimeError), (None, "logits"),
])
def test_a_step_without_a_graph_runs_on_that_stream_too(graphs, streams, error, result):
    """Where memory is short there it runs eagerly from then on; other errors are the caller's."""
    shape = StepShape("logits", rows=1)
    call = partial(graphs._run, step(streams, error), Padded(shape, (np.zeros((1, 1)),)))
    if isinstance(result, type):
        with pytest.raises(result):
            call()
    else:
        assert (call() is None) == (result is None)
    assert streams == ["side waits for main", "run", "main waits for side"]
    assert graphs._captured == ({shape: None} if result is None else {})
    assert graphs._runs[shape] == (error is None)


def test_engines_capture_on_streams_of_their_own(graphs, monkeypatch):
    """The cuBLAS workspace of a stream is its graphs'; the stream of an engine that is gone goes to the next."""
    made, synchronized, lock = [], [], threading.Lock()

    def synchronize(device):
        assert lock.locked(), "CUDA refuses to wait for a device while a thread captures there, and ends the capture"
        synchronized.append(device)

    monkeypatch.setattr(graphs_module, "capture_lock", lambda _: lock)
    monkeypatch.setattr(graphs_module, "captures", cache(lambda _: ([], threading.Lock())))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: made.append(object()) or made[-1])
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)

    def another():
        return StepGraphs(graphs._executor, graphs._cache, graphs._state, graphs._attention, 256)

    first, second = another(), another()
    streams = first._own_stream(), second._own_stream()
    assert streams == tuple(made) and len(set(streams)) == 2 and not synchronized
    assert first._own_stream() is streams[0]
    del first
    gc.collect()
    assert another()._own_stream() is streams[0] and synchronized == [graphs._device]
    assert len(made) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("no memory to instantiate it")])
def test_a_graph_that_an_error_in_the_end_of_its_capture_left_is_destroyed(graphs, monkeypatch, error):
    """Only the traceback refers to it."""
    log = Log()
    log.error_at_end = error
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", log.graph)
    with pytest.raises(type(error)):
        graphs._record(lambda: torch.zeros(1), (), "decode 1")
    graphs.drop("a test")
    assert log == ["begin", "end", "destroy"]


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 70), st.integers(1, 8)), min_size=1, max_size=8), st.integers(1, 4),
       st.sampled_from([1, 16, 32, 1024]))
def test_any_mix_equals_the_eager_steps(requests, max_num_seqs, mixed_tokens):
    model = tiny_model()
    prompts, new_tokens = random_prompts([n for n, _ in requests]), [count for _, count in requests]
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 64}
    eager = generate(model, prompts, new_tokens, **options)
    with pytest.MonkeyPatch.context() as patch:
        replayed = uncaptured(patch)
        patch.setattr(padded_steps, "_MIXED_TOKENS", mixed_tokens)
        assert generate(model, prompts, new_tokens, **options) == eager
    assert replayed


@pytest.mark.gpu
def test_gpu_mixed_steps_capture_few_graphs_and_make_the_eager_tokens():
    """fp32, where the rounding of differently shaped products decides no token."""
    prompts = random_prompts([5, 40, 17, 3, 60, 33, 1, 90, 12, 20])
    new_tokens = [12, 3, 9, 14, 5, 7, 11, 4, 20, 6]
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 128}
    eager = generate(tiny_model().cuda(), prompts, new_tokens, enforce_eager=True, **options)
    with hf_paged.PagedGenerator(tiny_model().cuda(), num_blocks=200, **options) as generator:
        configs = [GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=None) for n in new_tokens]
        captured = 0
        for call in range(4):
            generator.engine.reset_prefix_cache()
            assert [c.token_ids for c in generator.generate(prompts, configs, use_tqdm=False)] == eager
            if call == 3:  # no shape comes for the first, second or third time
                assert captured == generator.engine.stats().num_graphs_captured
            captured = generator.engine.stats().num_graphs_captured
    assert 2 <= captured <= 3 + 4


def test_edits_get_graphs_of_their_own_and_leave_other_requests_alone(steps):
    """Requests with and without edited logits share steps; each gets what it gets without graphs."""
    model = tiny_model(4, initializer_range=0.05)
    prompts = random_prompts([5, 40, 17, 3, 60, 33, 1])
    configs = [GenerationConfig(max_new_tokens=9, repetition_penalty=1.0 + 0.4 * (i % 2), no_repeat_ngram_size=i % 3)
               for i in range(len(prompts))]
    with hf_paged.PagedGenerator(model, num_blocks=200, max_num_seqs=3, max_num_batched_tokens=128) as generator:
        made = [c.token_ids for c in generator.generate(prompts, configs, use_tqdm=False)]
    assert {kind for kind, _ in steps} == {"decode", "prompt"}
    for prompt, config, tokens in zip(prompts, configs, made, strict=True):
        output = stock_generate(model, input_ids=torch.tensor([prompt]), generation_config=config)
        assert tokens == output[0, len(prompt) :].tolist()


@pytest.mark.gpu
def test_gpu_steps_are_first_run_and_recorded_on_a_stream_of_the_engine(monkeypatch):
    """Two live engines on one stream would share a cuBLAS workspace, and spoil each other's products."""
    own, seen = FusedExecutor.hidden_states, []

    def hidden_states(self, *args):
        current = torch.cuda.current_stream()
        seen.append((torch.cuda.is_current_stream_capturing(), current == torch.cuda.default_stream(), current))
        return own(self, *args)

    monkeypatch.setattr(FusedExecutor, "hidden_states", hidden_states)
    streams = []
    with ExitStack() as stack:
        for _ in range(2):
            generator = stack.enter_context(hf_paged.PagedGenerator(tiny_model().cuda(), num_blocks=50))
            generator.generate([[1, 2, 3], [4, 5]], max_new_tokens=5, do_sample=False)
            assert {(captures, is_default) for captures, is_default, _ in seen} <= {
                (True, False), (False, False), (False, True)}
            assert {captures for captures, is_default, _ in seen if not is_default} == {True, False}
            streams.append({stream for _, is_default, stream in seen if not is_default})
            del seen[:]
    assert [len(of_engine) for of_engine in streams] == [1, 1]
    assert streams[0] != streams[1]


def test_what_a_step_of_rows_alone_reads_is_sent_while_the_step_before_it_runs(steps, monkeypatch):
    """Between two questions only the caller's own code and a launch remain; the first step has nothing before it."""
    model, log, seen = tiny_model(), [], []

    def noted(name, own):
        def method(self, *args):
            log.append(name)
            return own(self, *args)

        monkeypatch.setattr(StepGraphs, name, method)

    noted("_send", StepGraphs._send)
    noted("_replay", StepGraphs._replay)

    def look(input_ids, scores):
        seen.append((log.count("_send"), log.count("_replay")))
        return scores

    inputs = {**batch([20, 13, 5]), "max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    expected = stock_generate(model, **inputs)
    hf_paged.enable(model, strict=True)
    try:
        assert torch.equal(model.generate(**inputs, logits_processor=[look]), expected)
    finally:
        hf_paged.disable(model)
    assert seen[:2] == [(0, 0)] * 2, "the prompts are computed eagerly here, and the first rows have no graph"
    assert seen[2:] == [(replays + 1, replays) for replays in range(1, 8)]


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_rows_of_stocks_loop_and_requests_replay_one_graph(steps, num_beams, logprobs):
    """The graph keeps the logits of the rows that joined; the requests' tokens are drawn in it."""
    model, options = tiny_model(), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    rows = batch([20, 13, 5])
    expected = stock_generate(model, **rows, **options, num_beams=num_beams, encoder_repetition_penalty=1.2)
    prompts = random_prompts([9, 30], seed=4)
    alone = [stock_generate(model, input_ids=torch.tensor([p]), max_new_tokens=40, do_sample=False, eos_token_id=None)
             for p in prompts]
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True, max_num_seqs=4, num_blocks=200))
    try:
        for prompt in prompts:
            engine.add_request(prompt, GenerationConfig(max_new_tokens=40, do_sample=False, eos_token_id=None),
                               logprobs=logprobs)
        outputs = engine.step()
        del steps[:]
        found = model.generate(**rows, **options, num_beams=num_beams, encoder_repetition_penalty=1.2)
        keys = set(engine._core.pool.runner.graphs._captured)
        run_out(engine, outputs)
    finally:
        hf_paged.disable(model)
    assert torch.equal(found, expected)
    made = {output.request_id: [] for output in outputs}
    for output in outputs:
        made[output.request_id] += output.new_token_ids
    assert list(made.values()) == [tokens[0, len(p):].tolist() for p, tokens in zip(prompts, alone, strict=True)]
    joined = {shape.rows for shape in keys if shape.kind == "decode" and shape.with_logits}
    assert joined and min(joined) >= 2 + 3 * num_beams
    assert {("decode", size) for size in joined} <= set(steps)


@pytest.mark.parametrize(("logprobs", "mixed_tokens"), [(False, 1024), (True, 1024), (False, 1)])
def test_steps_in_which_rows_name_adapters_have_graphs_of_their_own(steps, monkeypatch, logprobs, mixed_tokens):
    """They read each row's adapter from its slot, so one graph serves any mix; others are what they were."""
    monkeypatch.setattr(padded_steps, "_MIXED_TOKENS", mixed_tokens)
    pytest.importorskip("peft", reason="an extra of the test environment")
    from lora_models import with_adapter

    wrapped = with_adapter(with_adapter(tiny_model(), "one", 5), "two", 6, ("q_proj", "v_proj", "lm_head"))
    prompts = random_prompts([20, 13, 5, 30])
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}

    def stocks(names):
        named = [{} if name is None else {"adapter_names": [name]} for name in names]
        return [wrapped.generate(torch.tensor([p]), **options, **n)[0, len(p):].tolist()
                for p, n in zip(prompts, named, strict=True)]

    mixes = [None] * 4, ["one", "two", "__base__", None], ["two", None, "one", "two"]
    expected = [stocks(names) for names in mixes]
    assert expected[1] != expected[2]
    with hf_paged.PagedGenerator(wrapped, num_blocks=200, max_num_seqs=4) as generator:
        graphs, kept = generator.engine._core.pool.build().graphs, []
        for names, tokens in zip(mixes, expected, strict=True):
            del steps[:]
            made = generator.generate(prompts, adapter_names=names, logprobs=logprobs, use_tqdm=False, **options)
            assert [c.token_ids for c in made] == tokens
            assert {kind for kind, _ in steps} == {"decode", "prompt"}
            kept.append(set(graphs._captured))
    assert not any(shape.named for shape in kept[0])
    assert all(shape.named for shape in kept[1] - kept[0])
    assert {shape for shape in kept[2] - kept[1] if shape.kind == "decode"} == set()


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [1, 3])
def test_rows_of_stocks_loop_beside_rows_whose_tokens_wait_for_masks(steps, monkeypatch, num_beams):
    """Their steps come between the forward of such rows and the drawing of its tokens, and replay graphs as well."""
    monkeypatch.setattr(Engine, "grammar_of", lambda *_: EveryThird())
    monkeypatch.setattr(LockstepThrottle, "may_join", lambda self: True)  # else requests may end before
    model, options = tiny_model(), {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    rows, prompts = batch([20, 13, 5]), random_prompts([9, 30, 4], seed=4)
    expected = stock_generate(model, **rows, **options, num_beams=num_beams, encoder_repetition_penalty=1.2)
    lengths = [6, 150, 9]  # the first and the last end while the others' rows go on
    made = []
    for beside in (False, True):
        engine = hf_paged.get_engine(hf_paged.enable(model, strict=True, max_num_seqs=4, num_blocks=200, overlap=True))
        try:
            for prompt, count in zip(prompts, lengths, strict=True):
                engine.add_request(prompt, GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None),
                                   structured={"regex": ".*"})
            outputs = [*engine.step(), *engine.step()]
            if beside:
                found = model.generate(**rows, **options, num_beams=num_beams, encoder_repetition_penalty=1.2)
                assert torch.equal(found, expected)
                outputs += engine.step()
                engine.abort(next(iter(engine._core.requests)))
            run_out(engine, outputs)
        finally:
            hf_paged.disable(model)
        made.append({o.request_id: o.completion.token_ids for o in outputs if o.completion is not None})
    assert made[0].keys() == made[1].keys()
    for request_id, tokens in made[1].items():
        whole = made[0][request_id]
        assert tokens == whole[: len(tokens)]
        assert len(tokens) == len(whole) or len(whole) == 150
    assert {kind for kind, _ in steps} >= {"masked", "prompt"}
