"""Models with a recurrent state have stock's tokens and log-probabilities: ragged rows, in chunks, side by side."""

from __future__ import annotations

import pytest
from derived_models import assert_scored_as_stock
from recurrent_models import CLASSES, CORE, outlined, recurrent_model
from support import assert_native_parity, batch, random_prompts

import hf_paged
from hf_paged import PagedGenerator

FAMILIES = [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in CLASSES]


@pytest.mark.parametrize("name", FAMILIES)
def test_tokens_are_stocks(name):
    model = hf_paged.enable(outlined(recurrent_model(name)), strict=True, max_num_batched_tokens=19, max_num_seqs=6)
    assert_native_parity(model, **batch([30, 17, 40, 1]), max_new_tokens=9)


@pytest.mark.parametrize("name", FAMILIES)
def test_log_probabilities_are_stocks(name):
    model = outlined(recurrent_model(name))
    with PagedGenerator(model, max_num_batched_tokens=19, max_num_seqs=6) as generator:
        completions = generator.generate(random_prompts([33, 5]), max_new_tokens=4, logprobs=True, prompt_logprobs=True)
    for completion in completions:
        assert_scored_as_stock(model, completion)
