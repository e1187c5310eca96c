"""bitsandbytes itself, on a CPU: 4-bit layers run by copies or as they stand, LLM.int8 goes to stock."""

from __future__ import annotations

import copy

import pytest
import torch
from support import assert_falls_back, assert_native_beside_others, assert_native_parity, batch, stock_copy, tiny_model
from torch import nn

import hf_paged
from hf_paged.kernels.lora.lora_expand import lora_expand
from hf_paged.models.copied_weights import CopiedWeights
from hf_paged.models.lora import Adapters

bnb = pytest.importorskip("bitsandbytes")

INPUTS = batch([40, 33, 7])
OPTIONS = {"max_new_tokens": 8}


def _linear4bit(linear, nested=False):
    layer = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32,
                              compress_statistics=nested, quant_type="nf4")
    layer.load_state_dict(linear.state_dict())
    return layer.to("cpu")  # which quantizes


def _linear8bit(linear):
    layer = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(linear.weight.detach(), requires_grad=False, has_fp16_weights=False)
    return layer


def _quantized(make, **settings):
    model = tiny_model(intermediate_size=128)
    for layer in model.model.layers:
        for name, linear in list(layer.named_modules()):
            if isinstance(linear, nn.Linear):
                layer.set_submodule(name, make(linear, **settings))
    return model


@pytest.mark.parametrize("nested", [False, True])
def test_4bit_is_native(nested):
    assert_native_beside_others(_quantized(_linear4bit, nested=nested))


def test_llm_int8_goes_to_stock():
    reason = r"q_proj is a bitsandbytes\.nn\.modules\.Linear8bitLt, which finds outlier columns over all rows"
    assert_falls_back(_quantized(_linear8bit), reason, **INPUTS, **OPTIONS)


@pytest.mark.parametrize("what", ["absmax", "absmax of absmax"])
def test_scales_that_lie_beside_the_bytes_are_watched(what):
    """They are attributes of an object that hangs at the parameter: neither parameters nor buffers."""
    model = _quantized(_linear4bit, nested=what.endswith("of absmax"))
    first = model.generate(**INPUTS, **OPTIONS)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, first, **INPUTS, **OPTIONS)
    state = model.model.layers[0].mlp.up_proj.weight.quant_state
    tensor = state.state2.absmax if what.endswith("of absmax") else state.absmax
    tensor.data.mul_(-9)
    hf_paged.disable(model)
    changed = model.generate(**INPUTS, **OPTIONS)
    assert not torch.equal(changed, first)
    tensor.data.div_(-9)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, **INPUTS, **OPTIONS, expected=first)
    tensor.data.mul_(-9)
    assert_native_parity(model, **INPUTS, **OPTIONS, expected=changed)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == 0


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_copy_is_what_bitsandbytes_multiplies_with(kind, nested, dtype):
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(256, 96, bias=False, compute_dtype=dtype, compress_statistics=nested, quant_type=kind)
    layer = layer.to("cpu")  # which quantizes
    copied = CopiedWeights({"a": (layer,)}, dtype)
    copied.refresh({"a": (layer,)}, None)
    state = copy.copy(layer.weight.quant_state)
    state.dtype = dtype
    (weight,) = copied.tensors()
    assert torch.equal(weight, bnb.functional.dequantize_4bit(layer.weight.data, state))
    hidden = torch.randn(5, 256, dtype=dtype)
    assert torch.equal(nn.functional.linear(hidden, weight), layer(hidden))


@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_updates_are_rounded_as_by_pefts_class(adapters):
    """Bit by bit, of whole numbers, whose sums are exact."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    layer = bnb.nn.Linear4bit(64, 96, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4").to("cpu")
    model = nn.Sequential(layer)
    model.is_loaded_in_4bit = True
    lora = peft.inject_adapter_in_model(peft.LoraConfig(r=4, lora_alpha=16, target_modules=["0"]), model)[0]
    assert type(lora).__module__ == "peft.tuners.lora.bnb"
    for module in (lora.lora_A, lora.lora_B):
        weight = module["default"].weight
        weight.data = torch.randint(-9, 10, weight.shape).to(adapters)
    hidden = torch.randint(-9, 10, (7, 64)).bfloat16()
    with torch.no_grad():
        expected, product = lora(hidden), lora.base_layer(hidden)
    found = Adapters([(lora,)])
    found.load(torch.device("cpu"))
    delta = found.group((lora,)).delta(hidden, None)
    assert delta.table.rounds_delta
    assert not torch.equal(expected, product)
    assert torch.equal(lora_expand(product, *delta), expected)


@pytest.mark.parametrize("dequantize", [True, False])
@pytest.mark.parametrize("nested", [False, True])
def test_4bit_runs_by_copies(nested, dequantize):
    model = _quantized(_linear4bit, nested=nested)
    expected = model.generate(**INPUTS, **OPTIONS)
    hf_paged.enable(model, strict=True, dequantize=dequantize)
    assert_native_parity(model, expected, **INPUTS, **OPTIONS)
    assert (hf_paged.get_engine(model).stats().shadow_bytes > 0) == dequantize
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = bnb.nn.Params4bit(torch.randn(layer.out_features, layer.in_features), compress_statistics=nested,
                                     quant_type="nf4", module=layer).to("cpu")
    changed = stock_copy(model).generate(**INPUTS, **OPTIONS)
    assert not torch.equal(changed, expected)
    assert_native_parity(model, changed, **INPUTS, **OPTIONS)
