"""Models with a recurrent state have stock's tokens and log-probabilities: ragged rows, in chunks, side by side."""

from __future__ import annotations

import pytest
import torch
from derived_models import assert_scored_as_stock
from peft import LoraConfig, get_peft_model
from recurrent_models import CLASSES, CORE, outlined, recurrent_model, with_idiom
from support import assert_native_parity, batch, random_prompts

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.models import find_executor
from hf_paged.models.derivation import derive

pytestmark = with_idiom

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


def test_other_devices_go_to_stock(monkeypatch):
    model = recurrent_model("Lfm2")
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    assert "which steps on cuda do not have yet" in str(derive(model))


def test_rows_of_named_adapters_go_to_stock():
    model = get_peft_model(outlined(recurrent_model("Lfm2")), LoraConfig(target_modules=["in_proj"]))
    executor = find_executor(model.base_model.model)(model.base_model.model)
    assert "row by row" in str(executor.why_not_adapter("default"))
    assert "no adapter" in str(executor.why_not_adapter("other"))
