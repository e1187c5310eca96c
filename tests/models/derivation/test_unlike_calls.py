"""Models whose attention has chunks, values of another size than keys, or other shapes in some layers."""

from __future__ import annotations

import pytest
import torch
from support import assert_falls_back, assert_lockstep, assert_native_parity, assert_same_tensor, batch, stock_copy
from unlike_models import MODELS, unlike_model

import hf_paged
from hf_paged.models.base import AttentionMask, PoolShape

CORE = ("gemma4", "llama4", "mimo-v2", "youtu")
STEPS = {"max_num_batched_tokens": 19, "max_num_seqs": 6}
BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.interpreted)]
CASES = [pytest.param(name, marks=() if name in CORE else pytest.mark.slow) for name in MODELS]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_stocks(name, backend):
    """Through windows and chunks, in steps of decode rows and parts of prompts, and over pages of an earlier call."""
    model = hf_paged.enable(unlike_model(name), strict=True, attention_backend=backend, **STEPS)
    for _ in range(2):
        assert_native_parity(model, **batch([25, 9]), max_new_tokens=3)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits > 0


def test_a_pool_of_several_shapes_grows_and_preempts():
    model = unlike_model("mimo-v2")
    hf_paged.enable(model, strict=True, block_size=16, num_blocks=9)
    assert_native_parity(model, **batch([30, 28, 33]), max_new_tokens=24)
    engine = hf_paged.get_engine(model)
    assert engine.stats().num_preemptions > 0
    assert engine.cache_spec.pools == (PoolShape(2, 16, 24), PoolShape(4, 16, 24))
    found = engine.cache_spec.attention(16)
    assert (found.num_kv_heads, found.head_dim, found.has_value_dim) == (4, 24, True), "the largest ones"


@pytest.mark.parametrize(("name", "is_grouped"), [("llama4", True), ("youtu", True), ("mimo-v2", False),
                                                  ("gemma4", False)])
def test_shared_prefixes_are_read_once_where_all_calls_are_alike(name, is_grouped):
    model = hf_paged.enable(unlike_model(name))
    assert hf_paged.get_engine(model).cache_spec.attention(16).are_calls_alike is is_grouped


def test_chunks_are_masks_of_their_own():
    model = hf_paged.enable(unlike_model("llama4"))
    assert hf_paged.get_engine(model)._executor.masks() == (AttentionMask(None, 16), AttentionMask(None))


def assert_same_cache(actual, expected):
    for ours, stocks in zip(actual.layers, expected.layers, strict=True):
        torch.testing.assert_close(ours.keys, stocks.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.values, stocks.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["youtu", "gemma4-shared", "llama4"])
def test_a_result_has_stocks_cache_whatever_that_holds(name):
    """Latents in place of keys and values, or fewer layers."""
    model = hf_paged.enable(unlike_model(name), strict=True)
    call = batch([18, 7]) | {"max_new_tokens": 3, "return_dict_in_generate": True}
    expected, actual = stock_copy(model).generate(**call), model.generate(**call)
    assert_same_tensor(actual.sequences, expected.sequences)
    assert_same_cache(actual.past_key_values, expected.past_key_values)
    made = assert_lockstep(model, **call, output_scores=True)
    assert_same_cache(made.past_key_values, expected.past_key_values)


def test_beams_run_over_pages_unless_a_cache_of_latents_is_returned():
    call = batch([18]) | {"max_new_tokens": 3, "num_beams": 2}
    assert_falls_back(unlike_model("youtu"), "pages hold something else than stock's cache", **call,
                      return_dict_in_generate=True)
    assert_lockstep(unlike_model("youtu"), **call)
