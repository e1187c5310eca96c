"""Rows that begin with the same blocks reach the runner as groups, whoever asked for them; reads are counted."""

from __future__ import annotations

import functools
import threading

import numpy as np
import pytest
import torch
from support import assert_same_tensor, batch, lent, random_prompts, run_out, stock_generate, tiny_model
from threads import run_threads
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.engine.features.lockstep import LockstepThrottle
from hf_paged.models import KVSpec
from hf_paged.models.base import PoolShape
from hf_paged.runner.attention_inputs import AttentionInputs
from hf_paged.runner.kv_cache import KVReads
from hf_paged.runner.model_runner import ModelRunner

shared_model = functools.cache(tiny_model)
PROMPT = random_prompts([40])[0]  # two full blocks of 16
SAMPLED = {"do_sample": True, "max_new_tokens": 6, "seed": 0}

model = lent(shared_model)


@pytest.fixture
def plans(monkeypatch):
    """Of every step, what the runner computes; groups are looked at in those that decode."""
    seen, own = [], ModelRunner._hidden_states

    def hidden_states(self, plan, **options):
        if plan.num_decode_rows:
            seen.append(plan)
        return own(self, plan, **options)

    monkeypatch.setattr(ModelRunner, "_hidden_states", hidden_states)
    return seen


def found(plan):
    """[(number of rows, begin, end)] of the groups of a plan."""
    if plan.groups is None:
        return []
    return sorted(zip(*(column.tolist() for column in (plan.groups.count, plan.groups.begin, plan.groups.end)),
                      strict=True))


@pytest.mark.parametrize("overlap", [False, True])
def test_samples_of_one_prompt(model, plans, overlap):
    with PagedGenerator(model, overlap=overlap) as generator:
        generator.generate([PROMPT], num_return_sequences=4, **SAMPLED)
    assert {len(plan.slots) for plan in plans} == {4}
    assert all(found(plan) == [(4, 0, 32)] for plan in plans)


def test_equal_prompts_beside_others(model, plans):
    with PagedGenerator(model) as generator:
        generator.generate([PROMPT, random_prompts([40], seed=5)[0], PROMPT], **SAMPLED)
    assert all(found(plan) == [(2, 0, 32)] for plan in plans)


def test_samples_of_questions_under_a_system_prompt(model, plans):
    questions = [PROMPT[:32] + question for question in random_prompts([20, 20], seed=6)]
    with PagedGenerator(model) as generator:
        generator.generate(questions, num_return_sequences=2, **SAMPLED)
    assert all(found(plan) == [(2, 32, 48), (2, 32, 48), (4, 0, 32)] for plan in plans)


def test_samples_of_a_call_of_the_models_own_generate(model, plans):
    hf_paged.enable(model, strict=True)
    model.generate(torch.tensor([PROMPT]), do_sample=True, num_return_sequences=3, max_new_tokens=6)
    assert all(found(plan) == [(3, 0, 32)] for plan in plans)


def test_a_prompt_that_an_earlier_call_cached(model, plans):
    """Both hit blocks that nobody used in between."""
    with PagedGenerator(model) as generator:
        generator.generate([PROMPT], **SAMPLED)
        plans.clear()
        generator.generate([PROMPT + [7, 8], PROMPT + [8, 7]], **SAMPLED)
    assert all(found(plan) == [(2, 0, 32)] for plan in plans)


def test_a_request_that_comes_later(model, plans):
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True))
    engine.add_request(PROMPT, GenerationConfig(max_new_tokens=20))
    for _ in range(4):
        engine.step()
    assert not any(found(plan) for plan in plans)
    engine.add_request(PROMPT[:35], GenerationConfig(max_new_tokens=4))
    run_out(engine)
    assert (2, 0, 32) in {group for plan in plans for group in found(plan)}
    assert found(plans[-1]) == []


def test_beams(model, plans):
    """All beams share the prompt, and beams of one parent what it had computed."""
    hf_paged.enable(model, strict=True)
    inputs = {"input_ids": torch.tensor([PROMPT[:34]]), "max_new_tokens": 40, "num_beams": 4}
    assert_same_tensor(model.generate(**inputs), stock_generate(model, **inputs))
    assert all((4, 0, 32) in found(plan) or max(end for _, _, end in found(plan)) > 32 for plan in plans)
    assert any(len(found(plan)) > 1 or found(plan)[0][2] > 32 for plan in plans)


class Plain(LogitsProcessor):
    """Of the caller's own: its calls go in lockstep."""

    def __init__(self, meanwhile=lambda: None):
        self.meanwhile = meanwhile

    def __call__(self, input_ids, scores):
        self.meanwhile()
        return scores


def test_rows_in_lockstep_share_with_requests(model, plans, monkeypatch):
    monkeypatch.setattr(LockstepThrottle, "may_join", lambda self: True)
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True))
    inputs = {"input_ids": torch.tensor([PROMPT] * 2), "max_new_tokens": 8}
    expected = stock_generate(model, **inputs)
    engine.add_request(PROMPT, GenerationConfig(max_new_tokens=20))
    engine.step()
    output = model.generate(**inputs, logits_processor=LogitsProcessorList([Plain()]))
    assert_same_tensor(output, expected)
    assert (3, 0, 32) in {group for plan in plans for group in found(plan)}
    run_out(engine)


@pytest.mark.parametrize("lockstep", [False, True])
def test_without_a_prefix_cache_only_rows_in_lockstep_share(model, plans, lockstep):
    hf_paged.enable(model, strict=True, enable_prefix_caching=False)
    own = {"logits_processor": LogitsProcessorList([Plain()])} if lockstep else {}
    model.generate(torch.tensor([PROMPT]), do_sample=True, num_return_sequences=3, max_new_tokens=6, **own)
    assert all(found(plan) == ([(3, 0, 32)] if lockstep else []) for plan in plans)


def test_threads_with_one_prompt(model, plans):
    """Calls of several threads that take the same steps."""
    hf_paged.enable(model, strict=True)
    inputs = {"input_ids": torch.tensor([PROMPT]), "max_new_tokens": 60}
    expected, ready = stock_generate(model, **inputs), threading.Barrier(3)
    results = []

    def call():
        ready.wait()
        results.append(model.generate(**inputs))

    threads = [threading.Thread(target=call) for _ in range(3)]
    run_threads(threads)
    for result in results:
        assert_same_tensor(result, expected)
    assert all(found(plan) == [(len(plan.slots), 0, 32)] for plan in plans
               if plan.num_decode_rows == len(plan.slots) > 1)
    assert any(len(plan.slots) > 1 for plan in plans)


def spec_bytes(spec: KVSpec) -> int:
    return 2 * spec.num_kv_heads * spec.head_dim * spec.cache_dtype.itemsize


def test_bytes_that_steps_read_and_save(model, monkeypatch):
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True))
    assert (engine.stats().kv_bytes_read, engine.stats().kv_bytes_saved) == (0, 0)
    model.generate(**batch([20, 5]), max_new_tokens=4)
    # The first of four tokens comes from the prompt's last, whose step reads the prompt; so is the newest token.
    positions = sum(length + i for length in (20, 5) for i in range(4))
    spec = engine._core.runner.spec
    read = positions * spec.num_layers * spec_bytes(spec)
    assert (engine.stats().kv_bytes_read, engine.stats().kv_bytes_saved) == (read, 0)

    own = AttentionInputs.split_plan

    def split_plan(self, *args):
        plan = own(self, *args)
        self.saved_positions = 5  # on a CPU nothing is saved
        return plan

    monkeypatch.setattr(AttentionInputs, "split_plan", split_plan)
    model.generate(torch.tensor([PROMPT[:8]] * 2), max_new_tokens=2)
    saved = 5 * spec.num_layers * spec_bytes(spec)
    read += 2 * (8 + 9) * spec.num_layers * spec_bytes(spec) - saved
    assert (engine.stats().kv_bytes_read, engine.stats().kv_bytes_saved) == (read, saved)
    engine.release_memory()
    assert engine.stats().kv_bytes_read == read, "the counters outlive the pool"


def test_a_window_is_counted_as_far_as_it_reaches():
    spec = KVSpec(num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16, cache_dtype=torch.float16,
                  compute_dtype=torch.float16, device=torch.device("cpu"))
    reads = KVReads()
    reads.use(spec, (None, 8, 8))
    reads.count(np.array([3, 7, 20], np.int32), np.ones(3, np.int32), saved_positions=4)
    full, windowed = 4 + 8 + 21, 4 + 8 + 8
    assert reads.num_bytes == (full + 2 * windowed - 4) * spec_bytes(spec)
    assert reads.num_saved_bytes == 4 * spec_bytes(spec)
    reads.count(np.array([0, 20], np.int32), np.array([5, 3], np.int32), saved_positions=0)  # of prompts
    assert reads.num_bytes == (full + 2 * windowed - 4 + 5 + 23 + 2 * (5 + 10)) * spec_bytes(spec)
    unlike = KVReads()
    unlike.use(spec._replace(pools=(PoolShape(2, 24, 16), PoolShape(1, 8, 8), PoolShape(1, 8, 8))), (None, 8, 8))
    unlike.count(np.array([3, 7, 20], np.int32), np.ones(3, np.int32), saved_positions=4)
    assert unlike.num_bytes == 2 * ((full - 4) * 2 * 40 + 2 * windowed * 16)
