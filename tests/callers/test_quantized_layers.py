"""Quantized linear layers: called as they stand where they are known to work token by token, else stock.

Stand-ins under bitsandbytes' module path, which needs a GPU; BitNet's layer and torch's dynamic int8 are real.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from support import assert_falls_back, assert_native_parity, assert_same_tensor, batch, stock_copy, tiny_model
from torch import nn
from transformers import Qwen3ForCausalLM
from transformers.integrations import bitnet

import hf_paged

INPUTS = batch([40, 33, 7])
OPTIONS = {"max_new_tokens": 8}
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class PackedLinear(nn.Module):
    """Weights of 15 levels with a scale per output, unpacked in the forward; notes the shapes it is called with."""

    calls: ClassVar[list[tuple[int, ...]]] = []

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 7
        self.weight = nn.Parameter((linear.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        type(self).calls.append(tuple(hidden.shape))
        return nn.functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale)


def _class(name: str, module: str) -> type[PackedLinear]:
    return type(name, (PackedLinear,), {"__module__": module, "calls": []})


def _quantize(model: Qwen3ForCausalLM, make: type) -> Qwen3ForCausalLM:
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name in LAYERS:
                if hasattr(block, name):
                    setattr(block, name, make(getattr(block, name)))
    return model


def test_a_4bit_stand_in_is_called_as_it_stands():
    """Also for its memory: nothing is merged, so no float copy of it appears."""
    kind = _class("Linear4bit", "bitsandbytes.nn.modules")
    model = _quantize(tiny_model(), kind)
    plain = tiny_model().generate(**INPUTS, **OPTIONS)
    expected = model.generate(**INPUTS, **OPTIONS)
    assert not torch.equal(plain, expected)
    hf_paged.enable(model, strict=True)
    kind.calls.clear()
    assert_native_parity(model, expected, **INPUTS, **OPTIONS)
    engine = hf_paged.get_engine(model)
    assert len(kind.calls) == len(LAYERS) * len(model.model.layers) * engine.stats().num_steps
    assert {shape[0] for shape in kind.calls} == {1}  # packed: [1, tokens, hidden], no row and no padding
    assert max(shape[1] for shape in kind.calls) == 40 + 33 + 7
    assert {p.dtype for n, p in model.named_parameters() if "proj" in n} == {torch.int8}


def test_a_4bit_layer_under_lora():
    peft = pytest.importorskip("peft")
    kind = _class("Linear4bit", "bitsandbytes.nn.modules")
    model = tiny_model()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config).eval()
    for layer in model.model.layers:
        for lora in (layer.self_attn.q_proj, layer.mlp.down_proj):
            lora.base_layer = kind(lora.base_layer)
    expected = wrapped.generate(**INPUTS, **OPTIONS)
    hf_paged.enable(wrapped, strict=True)
    assert_native_parity(model, expected, **INPUTS, **OPTIONS)
    with wrapped.disable_adapter():
        base = stock_copy(model).generate(**INPUTS, **OPTIONS)
        assert not torch.equal(base, expected)
        assert_native_parity(model, base, **INPUTS, **OPTIONS)


@pytest.mark.parametrize("what", ["weight", "scale"])
def test_quantized_weights_written_in_place_are_noticed(what):
    """Integer bytes and scales are part of the checksum that guards the prefix cache."""
    model = _quantize(tiny_model(), _class("Linear4bit", "bitsandbytes.nn.modules"))
    hf_paged.enable(model, strict=True)
    first = assert_native_parity(model, **INPUTS, **OPTIONS)
    with torch.no_grad():
        tensor = getattr(model.model.layers[0].mlp.up_proj, what)
        tensor.data.copy_(tensor.flip(0))
    changed = stock_copy(model).generate(**INPUTS, **OPTIONS)
    assert not torch.equal(changed, first)
    assert_native_parity(model, changed, **INPUTS, **OPTIONS)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == 0


@pytest.mark.parametrize(("name", "module", "does"), [
    ("Linear8bitLt", "bitsandbytes.nn.modules", r"finds outlier columns over all rows \(LLM\.int8\)"),
    ("NVFP4Linear", "transformers.integrations.nvfp4", "scales activations by the largest of all rows"),
    ("QuantLinear", "somebody.quantization", "may look at batch rows"),
])
def test_a_class_that_may_look_at_all_rows_goes_to_stock(name, module, does):
    model = _quantize(tiny_model(), _class(name, module))
    assert_falls_back(model, rf"q_proj is a {module}\.{name}, which {does}", **INPUTS, **OPTIONS)


def _bitlinear(linear: nn.Linear) -> nn.Module:
    """transformers' own BitNet layer: ternary weights, activations rounded to int8 by each token's largest."""
    layer = bitnet.BitLinear(linear.in_features, linear.out_features, bias=False, dtype=torch.float32)
    scale = 1.0 / linear.weight.detach().abs().mean()
    ternary = (linear.weight.detach() * scale).round().clamp(-1, 1)
    layer.weight.copy_(bitnet.pack_weights(ternary))
    layer.weight_scale.copy_(1.0 / scale)
    return layer


def test_transformers_bitnet_layers_are_native():
    model = _quantize(tiny_model(), _bitlinear)
    with torch.compiler.set_stance("force_eager"):  # unpacking is compiled, which takes minutes on a CPU
        expected = model.generate(**INPUTS, **OPTIONS)
        assert not torch.equal(expected, tiny_model().generate(**INPUTS, **OPTIONS))
        assert_native_parity(hf_paged.enable(model, strict=True), expected, **INPUTS, **OPTIONS)


def test_torchs_dynamic_int8_goes_to_stock():
    """Its activation scale is one for the whole batch."""
    model = torch.ao.quantization.quantize_dynamic(tiny_model(), {nn.Linear}, dtype=torch.qint8)
    assert_falls_back(model, r"is a torch\.ao\.nn\.quantized\.dynamic.*, which scales activations by the largest",
                      **INPUTS, **OPTIONS)


class PackedTensor(torch.Tensor):
    """A stand-in for torchao's and quanto's tensor subclasses."""


def test_a_tensor_subclass_goes_to_stock():
    model = tiny_model()
    expected = model.generate(**INPUTS, **OPTIONS)
    linear = model.model.layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(PackedTensor))
    reason = r"up_proj\.weight is a .*\.PackedTensor: a layer that multiplies with it may look at batch rows"
    assert_same_tensor(assert_falls_back(model, reason, **INPUTS, **OPTIONS), expected)
