"""`generate(do_sample=True)` of an enabled model: stock's distribution, repeatable, row by row."""

from __future__ import annotations

import pytest
import torch
from support import assert_idle, batch, left_padded, random_prompts, tiny_model

import hf_paged

SAMPLE = {"do_sample": True, "temperature": 1.3, "top_k": 20}


@pytest.fixture
def model():
    return hf_paged.enable(tiny_model(), strict=True)


def generate(model, seed, inputs=None, **kwargs):
    torch.manual_seed(seed)
    return model.generate(**(inputs or batch([20, 7, 33])), **(SAMPLE | {"max_new_tokens": 12} | kwargs))


def test_manual_seed_makes_a_call_repeatable(model):
    first = generate(model, 1)
    assert torch.equal(generate(model, 1), first)
    assert not torch.equal(generate(model, 2), first)
    torch.manual_seed(1)
    again = model.generate(**batch([20, 7, 33]), **SAMPLE, max_new_tokens=12)
    following = model.generate(**batch([20, 7, 33]), **SAMPLE, max_new_tokens=12)
    assert torch.equal(again, first)
    assert not torch.equal(following, first)


@pytest.mark.parametrize("paged", [
    {"overlap": True}, {"num_blocks": 8}, {"block_size": 32}, {"max_num_seqs": 1}, {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 9, "max_num_seqs": 4},
])
def test_how_the_engine_runs_does_not_change_what_is_sampled(model, paged):
    first = generate(model, 1, max_new_tokens=40)
    again = generate(hf_paged.enable(tiny_model(), strict=True, **paged), 1, max_new_tokens=40)
    assert torch.equal(again, first)


def test_the_first_call_and_one_that_hits_the_cache_sample_alike(model):
    inputs = batch([40, 33])
    first = generate(model, 1, inputs)
    assert torch.equal(generate(model, 1, inputs), first)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits > 0


def test_a_config_seed_makes_every_call_the_same():
    model = hf_paged.enable(tiny_model(), strict=True, seed=9)
    first = generate(model, 1)
    assert torch.equal(generate(model, 2), first)


def test_num_return_sequences_follow_their_prompt_and_differ(model):
    inputs = batch([20, 7])
    output = generate(model, 3, inputs, num_return_sequences=3)
    assert output.shape == (6, 32)
    for row in range(6):
        assert torch.equal(output[row, :20], inputs["input_ids"][row // 3])
    assert len({tuple(row) for row in output[:, 20:].tolist()}) == 6
    assert_idle(model)


def test_equal_prompts_in_one_batch_draw_their_own_tokens(model):
    output = generate(model, 3, left_padded(random_prompts([9]) * 4))
    assert len({tuple(row) for row in output.tolist()}) == 4


def test_sampled_rows_end_at_eos_and_respect_the_minimum(model):
    inputs = batch([20, 7, 33])
    free = generate(model, 3, inputs, max_new_tokens=30)[:, 33:]
    eos = [int(free[0, 4]), int(free[1, 9])]
    output = generate(model, 3, inputs, max_new_tokens=30, eos_token_id=eos)[:, 33:]
    for row, unbounded in zip(output.tolist(), free.tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(unbounded) if token in eos), 30)
        assert row[:end] == unbounded[:end]
        assert all(token == 0 for token in row[end:])
    longer = generate(model, 3, inputs, max_new_tokens=30, eos_token_id=eos, min_new_tokens=12)[:, 33:]
    assert not set(longer[:, :12].flatten().tolist()) & set(eos)


@pytest.mark.parametrize("setting", [
    {"top_k": 12}, {"temperature": 0.8, "top_k": 0, "top_p": 0.7}, {"temperature": 2.0, "top_k": 10, "min_p": 0.05},
])
def test_first_and_second_tokens_follow_stocks_distribution(setting):
    """Chi-square of 4,000 draws against what stock's own processed scores say, for two tokens in a row."""
    model = tiny_model()
    ids, draws = torch.tensor([[5, 6, 7]]), 4000
    options = {"do_sample": True, "temperature": 1.0, **setting}
    scores = model.generate(
        ids, **options, max_new_tokens=1, return_dict_in_generate=True, output_scores=True
    ).scores[0][0]
    probabilities = scores.softmax(-1)
    hf_paged.enable(model, strict=True)
    torch.manual_seed(0)
    output = model.generate(ids, **options, max_new_tokens=2, num_return_sequences=draws)[:, 3:]
    _assert_follows(output[:, 0], probabilities)
    likely = int(probabilities.argmax())
    hf_paged.disable(model)
    scores = model.generate(
        torch.tensor([[5, 6, 7, likely]]), **options, max_new_tokens=1, return_dict_in_generate=True, output_scores=True
    ).scores[0][0]
    _assert_follows(output[output[:, 0] == likely, 1], scores.softmax(-1))


def _assert_follows(tokens, probabilities):
    counts = tokens.bincount(minlength=len(probabilities))
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    rare = expected < 5
    groups = [(counts[~rare], expected[~rare]), (counts[rare].sum()[None], expected[rare].sum()[None])]
    statistic = sum(float(((c - e) ** 2 / e)[e > 0].sum()) for c, e in groups)
    freedom = int((~rare).sum())
    assert freedom >= 2
    # Wilson-Hilferty: the 1-in-10,000 point of chi-square.
    assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
