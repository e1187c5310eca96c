"""torchao's quantized weights: called as they stand where each row is computed alone, and their inner bytes watched."""

from __future__ import annotations

import pytest
import torch
from support import (
    assert_falls_back,
    assert_native_beside_others,
    assert_native_parity,
    batch,
    stock_generate,
    tiny_model,
)
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

import hf_paged

pytest.importorskip("torchao")
from torchao import quantization as ao
from torchao.quantization.granularity import PerGroup, PerRow, PerTensor

INPUTS = batch([40, 33, 7])
OPTIONS = {"max_new_tokens": 8}
MARGIN = 0.1  # of logits that spread by 1.6; found: 0.03
ROWWISE = {
    "int8 weights": lambda: ao.Int8WeightOnlyConfig(),
    "int8 weights in groups": lambda: ao.Int8WeightOnlyConfig(granularity=PerGroup(32)),
    "int8, activations per row": lambda: ao.Int8DynamicActivationInt8WeightConfig(),
    "fp8 weights": lambda: ao.Float8WeightOnlyConfig(),
    "int8 weights of any bits": lambda: ao.IntxWeightOnlyConfig(),
    "int8 activations per token, int8 weights of any bits": lambda: ao.Int8DynamicActivationIntxWeightConfig(),
}


def _quantized(config, model=None):
    model = tiny_model() if model is None else model
    ao.quantize_(model, config)
    return model


def _float8(granularity):
    """As `Float8DynamicActivationFloat8WeightConfig` makes them, which asks for a GPU first."""
    workflow = pytest.importorskip("torchao.quantization.quantize_.workflows.float8.float8_tensor")
    from torchao.float8.inference import Float8MMConfig

    model, mm_config = tiny_model(), Float8MMConfig()
    kwargs = workflow.QuantizeTensorToFloat8Kwargs(granularity=granularity, mm_config=mm_config)
    for layer in model.model.layers:
        for linear in (module for module in layer.modules() if isinstance(module, nn.Linear)):
            weight = workflow.Float8Tensor.from_hp(
                linear.weight.detach(), granularity=granularity, mm_config=mm_config, act_quant_kwargs=kwargs)
            linear.weight = nn.Parameter(weight, requires_grad=False)
    return model


@pytest.mark.parametrize("kind", [
    pytest.param(kind, marks=pytest.mark.slow) if "activations" in kind else kind for kind in ROWWISE
])
def test_rows_computed_alone_are_native(kind):
    model = _quantized(ROWWISE[kind]())
    assert "Tensor" in type(model.model.layers[0].mlp.up_proj.weight).__name__
    assert_native_beside_others(model, margin=MARGIN if "activations" in kind else 0.0)


def test_float8_activations_per_row():
    """Without padding: torchao divides by 0 in a row of zeros, and stock's rows of padding spoil the others then."""
    model = _float8(PerRow())
    inputs = batch([40])
    expected = model.generate(**inputs, **OPTIONS)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, expected, **inputs, **OPTIONS)


@pytest.mark.parametrize("make", [
    lambda: _quantized(ao.Int8DynamicActivationInt8WeightConfig(granularity=[PerTensor(), PerRow()])),
    lambda: _float8(PerTensor()),
], ids=["int8", "fp8"])
def test_scales_over_all_rows_go_to_stock(make):
    reason = r"q_proj\.weight is a torchao.*Tensor: .* scales activations by the largest of all rows \(torchao"
    assert_falls_back(make(), reason, **batch([40]), **OPTIONS)


def test_under_lora():
    peft = pytest.importorskip("peft")
    model = tiny_model()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(_quantized(ao.Int8WeightOnlyConfig(), model), config).eval()
    expected = wrapped.generate(**INPUTS, **OPTIONS)
    hf_paged.enable(wrapped, strict=True)
    assert_native_parity(model, expected, **INPUTS, **OPTIONS)


@pytest.mark.parametrize("make", [
    ao.Int8WeightOnlyConfig, pytest.param(ao.Int8DynamicActivationInt8WeightConfig, marks=pytest.mark.slow),
])
def test_a_checkpoint_quantized_by_transformers(make, tmp_path):
    tiny_model().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=TorchAoConfig(make()))
    assert type(model.model.layers[0].mlp.up_proj.weight).__name__ == "Int8Tensor"
    assert_native_beside_others(model, margin=MARGIN if "Dynamic" in make.__name__ else 0.0)


def _bytes(weight):
    weight.qdata.neg_()


def _data(weight):
    weight.scale.data.mul_(-1)


def _inner_tensor(weight):
    weight.qdata = -weight.qdata


CHANGES = {"bytes": _bytes, "data": _data, "inner tensor": _inner_tensor}


@pytest.mark.parametrize("what", [*CHANGES, "parameter"])
def test_a_changed_weight_is_noticed(what):
    model = hf_paged.enable(_quantized(ao.Int8WeightOnlyConfig()), strict=True)
    first = assert_native_parity(model, **INPUTS, **OPTIONS)
    module = model.model.layers[0].mlp.up_proj
    if what == "parameter":
        module.weight = _quantized(ao.Int8WeightOnlyConfig(), tiny_model(7)).model.layers[0].mlp.up_proj.weight
    else:
        with torch.no_grad():
            CHANGES[what](module.weight)
    changed = stock_generate(model, **INPUTS, **OPTIONS)
    assert not torch.equal(changed, first)
    assert_native_parity(model, changed, **INPUTS, **OPTIONS)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == 0


def test_a_setting_changed_in_place_is_noticed():
    """The next look asks again whether rows are computed alone."""
    model = hf_paged.enable(_quantized(ao.Int8DynamicActivationInt8WeightConfig()), strict=True)
    assert_native_parity(model, **INPUTS, **OPTIONS)
    model.model.layers[1].mlp.up_proj.weight.act_quant_kwargs.granularity = PerTensor()
    with pytest.raises(hf_paged.FallbackError, match=r"layers\.1\.mlp\.up_proj\.weight .* PerTensor"):
        model.generate(**INPUTS, **OPTIONS)
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.act_quant_kwargs = None
    expected = stock_generate(model, **INPUTS, **OPTIONS)
    assert_native_parity(model, expected, **INPUTS, **OPTIONS)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == 0
