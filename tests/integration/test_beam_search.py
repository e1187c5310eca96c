"""Stock's beam search over the engine's pages: blocks are shared between beams, and beams are stock's."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    assert_idle,
    assert_lockstep,
    assert_native_parity,
    assert_same_tensor,
    batch,
    lent,
    stock_generate,
    tiny_model,
)
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

import hf_paged

shared_model = functools.cache(tiny_model)
INPUTS = batch([20, 13, 5])
EOS = [172, 42, 137]  # what stock makes of each row as fifth token

model = lent(shared_model)


@pytest.mark.each_value
@pytest.mark.parametrize("num_beams", [2, 3, 4])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.5, 2.0])
def test_beams_with_eos(model, num_beams, early_stopping, length_penalty):
    """Sequences, their scores, every step's scores and the beam indices."""
    assert_lockstep(
        model, **INPUTS, max_new_tokens=24, num_beams=num_beams, early_stopping=early_stopping, eos_token_id=EOS,
        length_penalty=length_penalty, num_return_sequences=num_beams - 1, return_dict_in_generate=True,
        output_scores=True, output_logits=True,
    )


@pytest.mark.slow
@settings(max_examples=10)
@given(
    num_beams=st.integers(2, 5),
    lengths=st.sampled_from([[17], [32, 16], [1, 31, 48], [9, 9, 20]]),
    do_sample=st.booleans(),
    eos=st.booleans(),
    caching=st.booleans(),
    block_size=st.sampled_from([16, 32]),
    options=st.sampled_from([{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2}, {"length_penalty": 0.0}]),
)
def test_beams_of_all_kinds(num_beams, lengths, do_sample, eos, caching, block_size, options):
    """Long enough that rows fill several blocks and take them over from each other."""
    if eos:
        options = options | {"eos_token_id": EOS}
    paged = {"strict": True, "enable_prefix_caching": caching, "block_size": block_size}
    try:
        assert_lockstep(shared_model(), **batch(lengths), max_new_tokens=36, num_beams=num_beams, do_sample=do_sample,
                        paged=paged, **options)
    finally:
        hf_paged.disable(shared_model())


def test_the_trained_models_beams(trained_model, trained_tokenizer):
    ids = trained_tokenizer(["amber-fox: 4711", "calm-owl: 12"], padding=True, return_tensors="pt")
    assert_lockstep(trained_model, input_ids=ids["input_ids"], attention_mask=ids["attention_mask"],
                    max_new_tokens=24, num_beams=4, num_return_sequences=2)


def test_a_prompt_is_computed_once_for_all_its_beams(model):
    hf_paged.enable(model, strict=True, enable_prefix_caching=False)
    model.generate(**INPUTS, max_new_tokens=3, num_beams=4)
    assert hf_paged.get_engine(model).stats().num_prefill_tokens == 20 + 13 + 5


def test_beams_share_the_blocks_of_their_prompt(model):
    """A pool for one prompt of 6 blocks and four beams' own: four prompts would not fit."""
    inputs = batch([96])
    hf_paged.enable(model, strict=True, num_blocks=1 + 6 + 4 * 2)
    expected = stock_generate(model, **inputs, max_new_tokens=30, num_beams=4)
    assert_same_tensor(model.generate(**inputs, max_new_tokens=30, num_beams=4), expected)
    assert_idle(model)
    hf_paged.enable(model, num_blocks=6 + 4 * 2)
    with pytest.warns(hf_paged.FallbackWarning, match="14 blocks.* holds 13"):
        assert_same_tensor(model.generate(**inputs, max_new_tokens=30, num_beams=4), expected)


def test_the_returned_cache_is_that_of_the_last_beams(model):
    options = {"max_new_tokens": 12, "num_beams": 3, "return_dict_in_generate": True}
    expected = model.generate(**batch([20]), **options)
    actual = assert_lockstep(model, **batch([20]), **options)
    assert type(actual.past_key_values) is DynamicCache
    for ours, stocks in zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert torch.allclose(ours.keys, stocks.keys, atol=1e-4)
        assert torch.allclose(ours.values, stocks.values, atol=1e-4)


def test_an_answer_of_beams_is_in_the_prefix_cache(model):
    hf_paged.enable(model, strict=True)
    engine = hf_paged.get_engine(model)
    best = model.generate(**batch([20]), max_new_tokens=30, num_beams=3)
    before = engine.stats().prefix_cache_hits
    assert_native_parity(model, input_ids=best, max_new_tokens=8)
    assert engine.stats().prefix_cache_hits - before >= 32


def test_a_processor_that_raises_in_the_middle_of_beams(model):
    class Raising(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            if self.calls == 19:  # beams have forked and share blocks
                raise KeyError("enough")
            return scores

    hf_paged.enable(model, strict=True)
    with pytest.raises(KeyError):
        model.generate(**INPUTS, max_new_tokens=30, num_beams=3, logits_processor=LogitsProcessorList([Raising()]))
    assert_idle(model)
    pool = hf_paged.get_engine(model)._core.scheduler.kv_cache_manager.block_pool
    assert all(block.ref_count == 0 for block in pool.blocks)
    assert_lockstep(model, **INPUTS, max_new_tokens=30, num_beams=3)


@pytest.mark.parametrize("kwargs", [{"num_beams": 2, "num_return_sequences": 3}, {"num_beams": 2, "low_memory": True},
                                    {"num_beams": 0}])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bad_settings_raise_what_stock_raises(model, kwargs):
    with pytest.raises(Exception) as stocks:
        model.generate(**INPUTS, max_new_tokens=4, **kwargs)
    hf_paged.enable(model, strict=True)
    with pytest.raises(stocks.type, match=None) as ours:
        model.generate(**INPUTS, max_new_tokens=4, **kwargs)
    assert str(ours.value) == str(stocks.value)
    assert_native_parity(model, **INPUTS, max_new_tokens=4)
