"""Steps as graphs: padded inputs give what the eager step gives. Without a GPU the same functions run uncaptured."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import random_prompts, stock_generate, tiny_model
from transformers import GenerationConfig

import hf_paged
from hf_paged.runner.model_runner import ModelRunner
from hf_paged.runner.step_graphs import StepGraphs, decode_sizes, prompt_sizes


@pytest.mark.parametrize("most", [1, 3, 8, 100, 256, 1024])
def test_decode_sizes_pad_little_and_end_with_the_most(most):
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for count in range(9, most + 1):
        padded = sizes[np.searchsorted(sizes, count)]
        assert padded - count < max(8, 0.13 * padded), count


def test_prompt_sizes_shrink_with_the_model():
    assert prompt_sizes(750_000_000, 8192) == [16, 32, 64, 128, 256, 512, *range(1024, 8193, 1024)]
    assert prompt_sizes(8_000_000_000, 8192)[-1] == 1024
    assert prompt_sizes(70_000_000_000, 8192)[-1] == 128
    assert prompt_sizes(1_000, 100)[-1] == 64
    assert prompt_sizes(1_000, 4) == []


def uncaptured(monkeypatch):
    """Every runner gets graphs that run uncaptured; returns the list of what is replayed as (kind, size)."""
    replayed: list[tuple[str, int]] = []

    def capture(self, run, inputs):
        return run

    def get(self, kind, size, inputs):
        captured = own_get(self, kind, size, inputs)
        if captured is not None:
            replayed.append((kind, size))
        return captured

    def replay(self, run, inputs):
        return run(*(torch.from_numpy(array) for array in inputs))

    own_get = StepGraphs._get
    own = ModelRunner.__init__

    def init(self, adapter, spec, **options):
        own(self, adapter, spec, **options)
        self.graphs = StepGraphs(adapter, self.cache, self.state, options["max_model_len"],
                                 options["max_num_batched_tokens"], "torch")  # fmt: skip

    monkeypatch.setattr(ModelRunner, "__init__", init)
    for name, function in (("_capture", capture), ("_get", get), ("_replay", replay)):
        monkeypatch.setattr(StepGraphs, name, function)
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
                                do_sample=False)  # fmt: skip
        assert tokens == output[0, len(prompt) :].tolist()
    kinds = [kind for kind, _ in steps]
    assert ("decode", "prompt") in list(itertools.pairwise(kinds))
    assert {size for kind, size in steps if kind == "prompt"} <= {16, 32, 64, 128}


def test_chunks_and_shared_prefixes_go_through_prompt_graphs(steps):
    """A prompt longer than a step is cut: its first chunks sample nothing. A cached prompt computes one token."""
    model = tiny_model()
    prompt = random_prompts([90])[0]
    expected = stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=6, eos_token_id=None,
                              do_sample=False)[0, 90:].tolist()  # fmt: skip
    with hf_paged.PagedGenerator(model, num_blocks=50, max_num_seqs=4, max_num_batched_tokens=32) as generator:
        for _ in range(2):
            completion = generator.generate([prompt], max_new_tokens=6, eos_token_id=None, do_sample=False)[0]
            assert completion.token_ids == expected
    assert completion.num_cached_tokens >= 80
    assert [size for kind, size in steps if kind == "prompt"] == [32, 32, 32, 16]


@pytest.mark.parametrize("kind", ["decode", "prompt"])
def test_a_step_is_eager_where_there_is_no_memory_for_its_graph(steps, monkeypatch, kind):
    capture, tried = StepGraphs._capture, []

    def refuse(self, run, inputs):
        tried.append((run.__name__, inputs[0].shape))
        if run.__name__.startswith(f"_{kind}"):
            raise torch.OutOfMemoryError("no")
        return capture(self, run, inputs)

    monkeypatch.setattr(StepGraphs, "_capture", refuse)
    model, prompts = tiny_model(), random_prompts([5, 40, 17, 3])
    made = generate(model, prompts, [8] * 4, max_num_seqs=2)
    monkeypatch.setattr(StepGraphs, "launch", lambda *_: False)
    assert made == generate(model, prompts, [8] * 4, max_num_seqs=2)
    assert len(tried) == len(set(tried)), "asked again for memory that is not there"
    assert kind not in {replayed for replayed, _ in steps}


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 70), st.integers(1, 8)), min_size=1, max_size=8), st.integers(1, 4))
def test_any_mix_equals_the_eager_steps(requests, max_num_seqs):
    model = tiny_model()
    prompts, new_tokens = random_prompts([n for n, _ in requests]), [count for _, count in requests]
    options = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": 64}
    eager = generate(model, prompts, new_tokens, **options)
    with pytest.MonkeyPatch.context() as patch:
        replayed = uncaptured(patch)
        assert generate(model, prompts, new_tokens, **options) == eager
    assert replayed


@pytest.mark.gpu
def test_gpu_mixed_steps_capture_few_graphs_and_make_the_eager_tokens():
    model = tiny_model().to("cuda", torch.bfloat16)
    prompts = random_prompts([5, 40, 17, 3, 60, 33, 1, 90, 12, 20])
    new_tokens = [12, 3, 9, 14, 5, 7, 11, 4, 20, 6]
    options = {"max_num_seqs": 3, "max_num_batched_tokens": 128}
    with hf_paged.PagedGenerator(model, num_blocks=200, **options) as generator:
        configs = [GenerationConfig(max_new_tokens=n, do_sample=False, eos_token_id=None) for n in new_tokens]
        runs = []
        for _ in range(2):
            generator.engine.reset_prefix_cache()
            runs.append([c.token_ids for c in generator.generate(prompts, configs, use_tqdm=False)])
            captured = generator.engine.stats().num_graphs_captured
        assert runs[0] == runs[1]
        assert captured == generator.engine.stats().num_graphs_captured
        assert captured <= 3 + 4
    assert [len(tokens) for tokens in runs[0]] == new_tokens
