"""bitsandbytes itself, on a CPU: 4-bit layers are called as they stand, LLM.int8 goes to stock."""

from __future__ import annotations

import pytest
import torch
from support import assert_falls_back, assert_native_beside_others, assert_native_parity, batch, tiny_model
from torch import nn

import hf_paged

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
