"""Models of usual classes give stock's tokens (CPU, fp32, strict), and stay stock's models around the engine."""

from __future__ import annotations

import pytest
import torch
from family_models import VARIANTS, family_model
from support import assert_lockstep, assert_native_parity, assert_same_tensor, batch, stock_copy, stock_generate

import hf_paged

FAMILIES = sorted(VARIANTS)
ONE_OF_EACH = sorted({variant.config: name for name, variant in reversed(VARIANTS.items())}.values())


def enabled(variant, **paged):
    return hf_paged.enable(family_model(variant), strict=True, **paged)


@pytest.mark.parametrize("variant", FAMILIES)
def test_greedy_ragged_rows_and_prefix_hits(variant):
    """Rows shorter and longer than the window, left-padded; the second call hits what the first one cached."""
    model = enabled(variant)
    inputs = batch([3, 17, 40, 33])
    expected = assert_native_parity(model, **inputs, max_new_tokens=24)
    assert len(set(expected[:, 40:].flatten().tolist())) > 20  # the model says something
    before = hf_paged.get_engine(model).stats().prefix_cache_hits
    assert_native_parity(model, expected, **inputs, max_new_tokens=24)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits - before == 16 + 32 + 32


@pytest.mark.slow
@pytest.mark.parametrize("variant", FAMILIES)
def test_chunked_prefill_in_a_pool_that_preempts(variant):
    model = enabled(variant, num_blocks=10, max_num_batched_tokens=19, max_num_seqs=6)
    assert_native_parity(model, **batch([30, 17, 40, 9, 25]), max_new_tokens=30)
    assert hf_paged.get_engine(model).stats().num_preemptions > 0


@pytest.mark.parametrize("variant", FAMILIES)
def test_sampled_tokens_are_likely_in_stock_and_do_not_depend_on_the_engine(variant):
    model = enabled(variant, seed=3)
    inputs, options = batch([21, 6]), {"do_sample": True, "top_k": 3, "temperature": 1.5, "max_new_tokens": 16}
    output = model.generate(**inputs, **options)
    again = enabled(variant, seed=3, num_blocks=7, max_num_batched_tokens=8, max_num_seqs=2)
    assert_same_tensor(again.generate(**inputs, **options), output)
    stock, picks = stock_copy(model), []
    for row, length in zip(output, (21, 6), strict=True):
        tokens = row[21 - length :]
        top = stock(tokens[None, :-1]).logits[0, length - 1 :].topk(3).indices
        picks += (top == tokens[length:, None]).nonzero()[:, 1].tolist()
    assert len(picks) == 32
    assert set(picks) == {0, 1, 2}


@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_logits_are_stocks(variant):
    """Scaled or capped as stock's are, which greedy tokens do not show."""
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}
    assert_lockstep(family_model(variant), **batch([9, 30]), **options)


@pytest.mark.parametrize("variant", ONE_OF_EACH)
def test_plain_forward_and_training_are_stocks(variant):
    """Logits, loss and gradients, before, between the tokens of and after a generate."""
    model = family_model(variant)
    stock, inputs = stock_copy(model), batch([9, 21], seed=4)
    name = model.config._attn_implementation

    def results(model):
        model.zero_grad()
        output = model(**inputs, labels=inputs["input_ids"])
        output.loss.backward()
        return output.logits, output.loss, *(p.grad for p in model.parameters())

    expected = results(stock)
    between = []

    class Streamer:
        def put(self, value):
            between.append(model.config._attn_implementation)
            if len(between) == 3:
                with torch.enable_grad():
                    compare()

        def end(self):
            pass

    def compare():
        for actual, right in zip(results(model), expected, strict=True):
            assert (actual is None and right is None) or torch.equal(actual, right)

    hf_paged.enable(model, strict=True)
    tokens = stock_generate(model, **inputs, max_new_tokens=5)
    assert_same_tensor(model.generate(**inputs, max_new_tokens=5, streamer=Streamer()), tokens)
    assert between == [name] * 6
    compare()


def test_the_list_of_classes_is_named_where_a_model_is_refused():
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    model = GPTNeoForCausalLM(GPTNeoConfig(num_layers=1, num_heads=1, hidden_size=8, vocab_size=10,
                                           attention_types=[[["global"], 1]]))
    with pytest.raises(hf_paged.UnsupportedModelError) as error:
        hf_paged.enable(model)
    assert "docs/models.md" in str(error.value)
