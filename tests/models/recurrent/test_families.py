"""Models with a recurrent state have stock's tokens and log-probabilities: ragged rows, in chunks, side by side."""

from __future__ import annotations

import pytest
import torch
from derived_models import assert_scored_as_stock
from recurrent_models import CLASSES, CORE, outlined, recurrent_model, with_idiom
from support import assert_native_parity, batch, random_prompts, stock_copy

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.models.derivation import derive

pytestmark = with_idiom
CASTING = ("Lfm2", "NemotronH")
BRAIN = torch.autocast("cpu", torch.bfloat16)

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


@pytest.mark.parametrize("name", [*CASTING, *(pytest.param(name, marks=pytest.mark.slow) for name in CLASSES
                                              if name not in CASTING)])
def test_log_probabilities_under_autocast_are_as_far_from_float32s_as_stocks(name):
    model, prompts = outlined(recurrent_model(name), tries_precisions=True), random_prompts([33, 17])
    with PagedGenerator(model, strict=True, max_num_batched_tokens=19, max_num_seqs=6) as generator:
        with BRAIN:
            found = generator.generate(prompts, max_new_tokens=8, logprobs=True)
            kept = {state.key: state.dtype for state in generator.engine._executor.kv_spec().states}
        # The states are float32's again.
        exactly, = generator.generate(prompts[:1], max_new_tokens=4, logprobs=True, prompt_logprobs=True)
    assert_scored_as_stock(model, exactly)
    stock, errors = stock_copy(model), [torch.zeros(2, 0)]
    for prompt, one in zip(prompts, found, strict=True):
        exact, _ = forced(stock, prompt, one.token_ids)
        with BRAIN:
            scores, cache = forced(stock, prompt, one.token_ids)
        errors.append(torch.stack([torch.tensor(one.logprobs) - exact, scores - exact]))
    ours, stocks = torch.cat(errors, 1).norm(dim=1).tolist()
    assert 0 < ours < 1.5 * stocks
    assert kept == dtypes_in(cache)


def forced(stock, prompt, tokens):
    """Stock's log-probabilities of tokens that it is made to pick, and its cache behind them."""
    def force(input_ids, scores):
        return torch.full_like(scores, float("-inf")).index_fill(
            1, torch.tensor(tokens[input_ids.shape[1] - len(prompt)]), 0.0)

    result = stock.generate(torch.tensor([prompt]), max_new_tokens=len(tokens), do_sample=False,
                            logits_processor=[force], output_logits=True, return_dict_in_generate=True)
    logits = torch.cat(result.logits).float().log_softmax(-1)
    return logits[range(len(tokens)), tokens], result.get("cache", result.get("past_key_values"))


def dtypes_in(cache):
    found = {(layer, kind, 0): getattr(one, f"{kind}_states", [None])[0] for layer, one in enumerate(cache.layers)
             for kind in ("conv", "recurrent")}
    return {key: state.dtype for key, state in found.items() if state is not None}


def test_other_devices_go_to_stock(monkeypatch):
    model = recurrent_model("Lfm2")
    monkeypatch.setattr(type(model), "device", torch.device("xpu"))
    assert "which steps on xpu do not have yet" in str(derive(model))
