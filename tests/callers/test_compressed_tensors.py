"""compressed-tensors: layers that round weights, or activations token by token, are called as they stand."""

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
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import hf_paged

pytest.importorskip("compressed_tensors")
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
)

INPUTS = batch([40, 33, 7])
OPTIONS = {"max_new_tokens": 8}
MARGIN = 0.1  # of logits that spread by 1.6; found: 0.02
INT8, FP8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
CHANNEL, TOKEN = {"strategy": "channel"}, {"strategy": "token", "dynamic": True}
SCHEMES = {
    "int8 weights": (INT8 | CHANNEL, None),
    "int4 weights in groups": ({"num_bits": 4, "strategy": "group", "group_size": 32}, None),
    "fp8 weights": (FP8 | CHANNEL, None),
    "int8, activations per token": (INT8 | CHANNEL, INT8 | TOKEN),
    "fp8, activations per token": (FP8 | CHANNEL, FP8 | TOKEN),
    "fp8, a fixed scale of activations": (FP8 | {"strategy": "tensor"}, FP8 | {"strategy": "tensor"}),
}


def _quantized(weights, activations, seed=0):
    model = tiny_model(seed)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=QuantizationArgs(**weights),
        input_activations=None if activations is None else QuantizationArgs(**activations),
    )
    config = QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config, show_progress=False)
    largest = 2 ** (weights["num_bits"] - 1) - 1 if weights.get("type") != "float" else 448
    for module in model.modules():
        if isinstance(module, nn.Linear) and hasattr(module, "weight_scale"):
            module.weight_scale.data.fill_(module.weight.abs().max() / largest)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.02)
    return model


@pytest.mark.parametrize("kind", SCHEMES)
def test_rows_computed_alone_are_native(kind):
    model = _quantized(*SCHEMES[kind])
    assert "forward" in vars(model.model.layers[0].mlp.up_proj)
    assert_native_beside_others(model, margin=MARGIN if "activations" in kind else 0.0)


def test_a_scale_over_all_rows_goes_to_stock():
    model = _quantized(INT8 | CHANNEL, INT8 | {"strategy": "tensor", "dynamic": True})
    reason = r"q_proj is a quantized Linear, which scales activations by the largest of all rows \(compressed-tensors"
    assert_falls_back(model, reason, **INPUTS, **OPTIONS)


@pytest.mark.parametrize("kind", ["int8 weights", "int8, activations per token", "fp8, activations per token"])
def test_a_compressed_checkpoint(kind, tmp_path):
    """Its first forward decompresses it: stock runs that one, and the next calls are native."""
    _save_compressed(_quantized(*SCHEMES[kind]), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_falls_back(AutoModelForCausalLM.from_pretrained(tmp_path), "decompresses the weights in the first forward",
                      call=_of_a_fresh_copy(tmp_path), **INPUTS, **OPTIONS)
    model(INPUTS["input_ids"])
    assert type(model.model.norm._parameters) is not dict  # it stays wrapped for offloading
    assert_native_beside_others(model, margin=MARGIN if "activations" in kind else 0.0)


def _of_a_fresh_copy(path):
    """A call of the model after its weights were compressed again."""
    def call(model, **kwargs):
        if "ct_decompress_hook" not in vars(model):
            ModelCompressor.from_pretrained_model(model).compress_model(model)
        return model.generate(**kwargs)

    return call


def _save_compressed(model, path):
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(path)
    compressor.update_config(path)


def test_a_checkpoint_decompressed_while_it_is_loaded(tmp_path):
    _save_compressed(_quantized(*SCHEMES["int8 weights"]), tmp_path)
    config = CompressedTensorsConfig(dequantize=True)
    assert_native_beside_others(AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=config))


@pytest.mark.parametrize("what", ["weight", "weight_scale"])
def test_a_changed_weight_is_noticed(what):
    model = hf_paged.enable(_quantized(*SCHEMES["int8, activations per token"]), strict=True)
    first = assert_native_parity(model, **INPUTS, **OPTIONS)
    getattr(model.model.layers[0].mlp.up_proj, what).data.mul_(-60)
    changed = stock_generate(model, **INPUTS, **OPTIONS)
    assert not torch.equal(changed, first)
    assert_native_parity(model, changed, **INPUTS, **OPTIONS)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == 0


def test_settings_changed_in_place_are_noticed():
    model = hf_paged.enable(_quantized(*SCHEMES["int8, activations per token"]), strict=True)
    first = assert_native_parity(model, **INPUTS, **OPTIONS)
    linears = [module for layer in model.model.layers for module in layer.modules() if isinstance(module, nn.Linear)]
    for linear in linears:
        linear.quantization_enabled = False
    changed = stock_generate(model, **INPUTS, **OPTIONS)
    assert not torch.equal(changed, first)
    assert_native_parity(model, changed, **INPUTS, **OPTIONS)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits == 0
    linears[3].quantization_scheme.input_activations.strategy = "tensor"
    with pytest.raises(hf_paged.FallbackError, match="scales activations by the largest of all rows"):
        model.generate(**INPUTS, **OPTIONS)
