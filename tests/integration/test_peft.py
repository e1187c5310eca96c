"""PEFT around an enabled model, or enabled later: adapters on, off, switched and merged; prompt learning."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support import (
    assert_falls_back,
    assert_native_parity,
    assert_native_tokens,
    assert_same_tensor,
    batch,
    run_out,
    stock_copy,
    tiny_model,
)
from torch import nn
from transformers import GenerationConfig, Qwen3ForCausalLM

import hf_paged
from hf_paged import FallbackWarning

peft = pytest.importorskip("peft")  # the GPU image has none; the development environment always does

from lora_models import with_adapter  # noqa: E402

_lora = partial(with_adapter, targets=("q_proj", "v_proj", "down_proj"), scale=0.3)


def test_lora_active_disabled_switched_and_merged():
    model = tiny_model()
    inputs = batch([40, 33, 7])
    options = {"max_new_tokens": 8}
    plain = model.generate(**inputs, **options)
    wrapped = _lora(model)
    first = wrapped.generate(**inputs, **options)
    _lora(wrapped, "second", seed=6)
    wrapped.set_adapter("second")
    second = wrapped.generate(**inputs, **options)
    outputs = [plain, first, second]
    assert all(not torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])

    assert hf_paged.enable(wrapped, strict=True) is wrapped
    assert hf_paged.is_enabled(wrapped)
    assert hf_paged.is_enabled(wrapped.get_base_model())
    assert_native_tokens(wrapped, second, inputs, **options)
    wrapped.set_adapter("default")
    assert_native_tokens(wrapped, first, inputs, **options)
    with wrapped.disable_adapter():
        assert_native_tokens(wrapped, plain, inputs, **options)
    assert_native_tokens(wrapped, first, inputs, **options)
    wrapped.set_adapter("second")
    assert_native_tokens(wrapped, second, inputs, **options)
    wrapped.merge_adapter()
    assert_native_tokens(wrapped, second, inputs, **options)
    wrapped.unmerge_adapter()
    assert_native_tokens(wrapped, second, inputs, **options)
    merged = wrapped.merge_and_unload()
    assert hf_paged.is_enabled(merged)
    assert_native_tokens(merged, second, inputs, **options)
    hf_paged.disable(merged)
    assert type(merged) is Qwen3ForCausalLM


@pytest.mark.parametrize("used", [False, True])
def test_enabling_first_and_wrapping_later(used):
    model = tiny_model()
    reference = _lora(stock_copy(model))
    inputs = batch([40, 7])
    expected = reference.generate(**inputs, max_new_tokens=8)
    hf_paged.enable(model, strict=True)
    engine = hf_paged.get_engine(model)
    if used:
        assert not torch.equal(assert_native_parity(model, **inputs, max_new_tokens=8), expected)
    wrapped = _lora(model)
    assert hf_paged.is_enabled(wrapped)
    assert hf_paged.get_engine(wrapped) is engine
    assert_native_tokens(wrapped, expected, inputs, max_new_tokens=8)
    assert_native_tokens(wrapped, expected, inputs, max_new_tokens=8)


def test_two_active_adapters_at_once():
    wrapped = _lora(_lora(tiny_model()), "second", seed=6)
    wrapped.base_model.set_adapter(["default", "second"])
    inputs = batch([40, 7])
    expected = wrapped.generate(**inputs, max_new_tokens=8)
    assert_native_tokens(hf_paged.enable(wrapped, strict=True), expected, inputs, max_new_tokens=8)


def test_an_adapter_scaled_anew_does_not_hit_what_was_cached_before():
    wrapped = _lora(tiny_model())
    inputs = batch([40, 7])
    hf_paged.enable(wrapped, strict=True)
    first = wrapped.generate(**inputs, max_new_tokens=8)
    for module in wrapped.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 3.0)
    expected = stock_copy(wrapped).generate(**inputs, max_new_tokens=8)
    assert not torch.equal(expected, first)
    assert_native_tokens(wrapped, expected, inputs, max_new_tokens=8)


def test_lora_on_embeddings_and_head():
    wrapped = _lora(tiny_model(), targets=("embed_tokens", "lm_head", "k_proj"))
    inputs = batch([40, 7])
    expected = wrapped.generate(**inputs, max_new_tokens=8)
    assert_native_tokens(hf_paged.enable(wrapped, strict=True), expected, inputs, max_new_tokens=8)


def test_dora_is_native():
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True, init_lora_weights=False)
    model, inputs = tiny_model(), batch([40, 7])
    plain = model.generate(**inputs, max_new_tokens=8)
    wrapped = peft.get_peft_model(model, config).eval()
    expected = wrapped.generate(**inputs, max_new_tokens=8)
    assert not torch.equal(expected, plain)
    assert_native_tokens(hf_paged.enable(wrapped, strict=True), expected, inputs, max_new_tokens=8)


@pytest.mark.parametrize("kind", ["prompt", "prefix", "p"])
def test_prompt_learning_gives_stocks_tokens(kind):
    config = {
        "prompt": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "prefix": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
        "p": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    }[kind]()
    model = tiny_model()
    inputs = batch([20, 7])
    plain = model.generate(**inputs, max_new_tokens=6)
    torch.manual_seed(1)
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for parameter in wrapped.prompt_encoder.parameters():
            parameter.mul_(3.0)
    expected = wrapped.generate(**inputs, max_new_tokens=6)
    assert not torch.equal(expected, plain)
    hf_paged.enable(wrapped)
    with pytest.warns(FallbackWarning):
        actual = wrapped.generate(**inputs, max_new_tokens=6)
    assert_same_tensor(actual, expected)
    hf_paged.enable(wrapped, strict=True)
    with pytest.raises(hf_paged.FallbackError):
        wrapped.generate(**inputs, max_new_tokens=6)


def test_ia3_goes_to_stock():
    config = peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"])
    model, inputs = tiny_model(), batch([20, 7])
    plain = model.generate(**inputs, max_new_tokens=6)
    wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "ia3" in name:
                parameter.uniform_(0.2, 2.0)
    expected = assert_falls_back(wrapped, r"k_proj is a peft\.tuners\.ia3", **inputs, max_new_tokens=6)
    assert not torch.equal(expected, plain)


def test_lora_in_ddp_in_compile(process_group):
    lora = _lora(tiny_model())
    inputs = batch([20, 7])
    expected = lora.generate(**inputs, max_new_tokens=6)
    wrapped = torch.compile(nn.parallel.DistributedDataParallel(lora), backend="eager")
    hf_paged.enable(wrapped, strict=True)
    assert_native_tokens(lora, expected, inputs, max_new_tokens=6)


def test_lora_dropout_in_train_mode():
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(), config).train()
    assert_falls_back(model, "drops out in train mode", **batch([20, 7]), max_new_tokens=6)


CACHE_INPUTS = batch([70, 40])  # 64 + 32 tokens in full blocks


def test_adapters_keep_their_own_prefixes():
    """Keys of one adapter are never served to another, and are found again when it comes back."""
    wrapped = peft.get_peft_model(
        tiny_model(), peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    wrapped.add_adapter("other", peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False))
    model = wrapped.get_base_model()
    hf_paged.enable(wrapped, strict=True)
    assert_native_parity(model, **CACHE_INPUTS, max_new_tokens=8)
    wrapped.set_adapter("other")
    assert_native_parity(model, **CACHE_INPUTS, max_new_tokens=8)
    with wrapped.disable_adapter():
        assert_native_parity(model, **CACHE_INPUTS, max_new_tokens=8)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == 0
    wrapped.set_adapter("default")
    assert_native_parity(model, **CACHE_INPUTS, max_new_tokens=8)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == 64 + 32


def test_merging_an_adapter_changes_the_weights():
    wrapped = peft.get_peft_model(
        tiny_model(), peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    ).eval()
    model = wrapped.get_base_model()
    hf_paged.enable(wrapped, strict=True)
    assert_native_parity(model, **CACHE_INPUTS, max_new_tokens=8)
    wrapped.merge_adapter()
    assert_native_parity(model, **CACHE_INPUTS, max_new_tokens=8)
    wrapped.unmerge_adapter()
    assert_native_parity(model, **CACHE_INPUTS, max_new_tokens=8)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == 0


# -- adapters switched under a request ------------------------------------------


def _two_adapters():
    wrapped = _lora(_lora(tiny_model(), "a", targets=("q_proj", "v_proj", "up_proj")), "b", seed=6)
    wrapped.set_adapter("a")
    hf_paged.enable(wrapped, strict=True)
    return wrapped, wrapped.get_base_model()


def _set_scale(wrapped, value):
    for module in wrapped.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("a", value)


SWITCHES = {
    "other adapter": (lambda w: w.set_adapter("b"), lambda w: w.set_adapter("a")),
    "disabled": (lambda w: w.base_model.disable_adapter_layers(), lambda w: w.base_model.enable_adapter_layers()),
    "scale": (lambda w: _set_scale(w, 3.0), lambda w: _set_scale(w, 1.0)),
    "merged": (lambda w: w.merge_adapter(), lambda w: w.unmerge_adapter()),
}


@pytest.mark.each_value
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", SWITCHES)
def test_an_adapter_switched_under_a_request_poisons_nothing(name, overlap, steps):
    """Between arrival and computation (`steps` 0), or half-way through; then switched back."""
    wrapped, model = _two_adapters()
    if overlap:
        hf_paged.enable(model, strict=True, overlap=True)
    engine = hf_paged.get_engine(model)
    inputs = batch([40])
    prompt = inputs["input_ids"][0].tolist()
    there, back = SWITCHES[name]
    engine.add_request(prompt, GenerationConfig(max_new_tokens=40))
    tokens = prompt + [t for _ in range(steps) for output in engine.step() for t in output.new_token_ids]
    there(wrapped)
    tokens += [t for output in run_out(engine) for t in output.new_token_ids]
    full = {"input_ids": torch.tensor([tokens])}
    assert len(tokens) == 80
    assert_native_parity(model, **full, max_new_tokens=8)
    back(wrapped)
    assert_native_parity(model, **full, max_new_tokens=8)
    assert_native_parity(model, **inputs, max_new_tokens=8)
    there(wrapped)
    assert_native_parity(model, **full, max_new_tokens=8)


def test_an_adapter_added_to_a_model_that_was_used_and_removed_again():
    model = hf_paged.enable(tiny_model(), strict=True)
    inputs = batch([40, 7])
    plain = assert_native_parity(model, **inputs, max_new_tokens=8)
    wrapped = _lora(model, targets=("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
    assert not torch.equal(assert_native_parity(model, **inputs, max_new_tokens=8), plain)
    base = wrapped.unload()
    assert base is model
    assert_native_parity(model, plain, **inputs, max_new_tokens=8)


def test_an_adapter_merged_for_good_into_a_model_that_was_used():
    model = hf_paged.enable(tiny_model(), strict=True)
    inputs = batch([40, 7])
    plain = assert_native_parity(model, **inputs, max_new_tokens=8)
    wrapped = _lora(model, targets=("q_proj", "gate_proj"))
    merged = wrapped.merge_and_unload()
    assert merged is model
    assert not torch.equal(assert_native_parity(model, **inputs, max_new_tokens=8), plain)
