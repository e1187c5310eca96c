"""Quantized layers in models of proved classes: called as they stand where each computes a token alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import assert_native_parity, batch, stock_generate
from tiny_configs import tiny_class_model
from torch import nn
from transformers import FineGrainedFP8Config
from transformers.pytorch_utils import Conv1D

import hf_paged

INPUTS, OPTIONS = batch([30, 17, 9]), {"max_new_tokens": 5}
NAMES = ("GPT2LMHeadModel", "Starcoder2ForCausalLM", "DeepseekV3ForCausalLM")
EACH = pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name.startswith("GPT2") else pytest.mark.slow) for name in NAMES])


class Packed(nn.Module):
    """Weights of 15 levels with a scale per output, in place of a Linear or a Conv1D."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        weight = layer.weight.detach().T if isinstance(layer, Conv1D) else layer.weight.detach()
        self.out_features, self.in_features = weight.shape
        scale = weight.abs().amax(1, keepdim=True) / 7
        self.weight = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("scale", scale)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale, self.bias)


def of_class(name: str, module: str) -> type:
    return type(name, (Packed,), {"__module__": module})


LINEAR_4BIT = of_class("Linear4bit", "bitsandbytes.nn.modules")


def quantized(model: Any, kind: type = LINEAR_4BIT) -> Any:
    """With all layers but the head replaced, as quantizers of transformers replace them."""
    for path, layer in list(model.named_modules()):
        if type(layer) in (nn.Linear, Conv1D) and layer is not model.get_output_embeddings():
            owner, _, key = path.rpartition(".")
            setattr(model.get_submodule(owner), key, kind(layer))
    return model


@EACH
@pytest.mark.parametrize("is_enabled", [False, True], ids=["before enable", "after it"])
def test_stand_ins_are_called_as_they_stand(name, is_enabled):
    model = tiny_class_model(name, 0)
    plain = stock_generate(model, **INPUTS, **OPTIONS)
    if is_enabled:
        hf_paged.enable(model, strict=True)
        assert_native_parity(model, plain, **INPUTS, **OPTIONS)
    quantized(model)
    expected = stock_generate(model, **INPUTS, **OPTIONS)
    assert not torch.equal(expected, plain)
    if not is_enabled:
        hf_paged.enable(model, strict=True)
    assert_native_parity(model, expected, **INPUTS, **OPTIONS)


@EACH
def test_stand_ins_under_lora(name):
    peft = pytest.importorskip("peft")
    from lora_models import with_adapter

    model = tiny_class_model(name, 0)
    targets = [path for path, layer in model.named_modules() if type(layer) in (nn.Linear, Conv1D)
               and "attn" in path][:3]
    wrapped = with_adapter(model, targets=targets)
    for layer in wrapped.modules():
        if isinstance(layer, peft.tuners.lora.LoraLayer):
            layer.base_layer = LINEAR_4BIT(layer.base_layer)
    hf_paged.enable(wrapped, strict=True)
    assert_native_parity(model, **INPUTS, **OPTIONS)


def test_a_config_that_says_how_weights_are_quantized():
    model = quantized(tiny_class_model("GPT2LMHeadModel", 0))
    model.config.quantization_config = FineGrainedFP8Config()
    assert_native_parity(hf_paged.enable(model, strict=True), **INPUTS, **OPTIONS)


def test_layers_that_keep_their_class_and_hold_more():
    """As compressed-tensors leaves them."""
    model = tiny_class_model("GPT2LMHeadModel", 0)
    for layer in (model.lm_head, model.transformer.h[0].mlp.c_fc):
        layer.quantization_status = "frozen"
        layer.register_parameter("weight_scale", nn.Parameter(torch.ones(1)))
    assert_native_parity(hf_paged.enable(model, strict=True), **INPUTS, **OPTIONS)


@pytest.mark.parametrize(("name", "module", "does"), [
    ("Linear8bitLt", "bitsandbytes.nn.modules", "finds outlier columns over all rows"),
    ("QuantLinear", "somebody.quantization", "may look at batch rows"),
])
def test_a_class_that_may_look_at_all_rows_goes_to_stock(name, module, does):
    model = hf_paged.enable(quantized(tiny_class_model("GPT2LMHeadModel", 0), of_class(name, module)))
    explained = hf_paged.explain(model, **INPUTS)
    assert explained.path == "stock" and does in str(explained) and "Quantize the weights only" in str(explained)
