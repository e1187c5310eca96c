"""Layers that clamp their steps for prompts alone: the last token of a prompt is one, never a decode row."""

from __future__ import annotations

import pytest
import torch
from recurrent_models import outlined, recurrent_model, with_idiom
from support import left_padded, random_prompts, stock_generate
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.models.derivation import recurrent_executor

pytestmark = with_idiom
NEW = 5
GREEDY = GenerationConfig(max_new_tokens=NEW, do_sample=False)
PROMPTS = random_prompts([30, 5, 17, 1, 70, 2, 3, 33, 49])


@pytest.fixture(params=[("Mamba2", False), ("Bamba", False), ("Mamba2", True), ("Bamba", True)],
                ids=lambda case: f"{case[0]} by {'kernels' if case[1] else 'modules'}")
def model(request, monkeypatch):
    """Limits that most steps exceed."""
    name, by_kernels = request.param
    if by_kernels:
        monkeypatch.setattr(recurrent_executor, "why_not_on", lambda device: None)
    return outlined(recurrent_model(name, time_step_limit=(0.6, 0.7)))


def greedy(model, prompts):
    return [stock_generate(model, **left_padded([prompt]), max_new_tokens=NEW, do_sample=False)[0, -NEW:].tolist()
            for prompt in prompts]


@pytest.mark.parametrize("budget", [None, 3, 17, 34])
def test_tokens_are_stocks(model, budget):
    """Cold, from snapshots, and in chunks that end anywhere; each prompt twice in one call, too."""
    expected = greedy(model, PROMPTS)
    options = {} if budget is None else {"max_num_batched_tokens": budget, "max_num_seqs": min(3, budget)}
    with PagedGenerator(model, **options) as generator:
        for _ in range(2):
            found = generator.generate(PROMPTS + PROMPTS[:3], GREEDY, use_tqdm=False)
            assert [one.token_ids for one in found] == expected + expected[:3]
        cached = [one.num_cached_tokens for one in found[: len(PROMPTS)]]
        # Chunks of three leave no room for a cut.
        assert budget == 3 or cached == [max(0, len(prompt) - 2) for prompt in PROMPTS]


def test_prompts_that_begin_alike_are_stocks(model):
    """Snapshots stand at least two tokens before and behind one another, a block's end and the prompt's end."""
    common = random_prompts([48], seed=3)[0]
    prompts = [common[:length] + [7] * more for length in (31, 32, 33, 47) for more in (1, 2, 3)]
    expected = greedy(model, prompts)
    with PagedGenerator(model, max_num_batched_tokens=40, max_num_seqs=4) as generator:
        for _ in range(2):
            assert [one.token_ids for one in generator.generate(prompts, GREEDY, use_tqdm=False)] == expected
            for prompt, tokens in zip(prompts, expected, strict=True):
                assert generator.generate([prompt], GREEDY, use_tqdm=False)[0].token_ids == tokens


def test_rows_in_lockstep_are_stocks(model):
    inputs = left_padded(PROMPTS[:5])
    expected = stock_generate(model, **inputs, max_new_tokens=NEW, num_beams=2, do_sample=False)
    hf_paged.enable(model, strict=True, max_num_batched_tokens=34, max_num_seqs=10)
    assert torch.equal(model.generate(**inputs, max_new_tokens=NEW, num_beams=2, do_sample=False), expected)
    hf_paged.disable(model)


def test_models_without_limits_compute_one_token_alone():
    with PagedGenerator(outlined(recurrent_model("Mamba2"))) as generator:
        for cached in (0, 29):
            assert generator.generate(PROMPTS[:1], GREEDY, use_tqdm=False)[0].num_cached_tokens == cached
