"""Llama and Qwen3-MoE run fused, like Qwen3: every technique gives stock's tokens, and the parameters stay theirs."""

from __future__ import annotations

import pytest
import torch
from family_models import family_model
from support import HostMemory, assert_native_parity, batch, stock_generate

import hf_paged
from hf_paged.models import find_adapter
from hf_paged.models import fused as fused_adapter
from hf_paged.models.fused import FusedAdapter
from hf_paged.models.generic import GenericAdapter

VARIANTS = ["llama", "llama-3", "qwen3-moe", "qwen3-moe-mixed"]


@pytest.mark.parametrize(("variant", "adapter"), [
    *((variant, FusedAdapter) for variant in VARIANTS), ("gemma3", GenericAdapter), ("gpt-oss", GenericAdapter),
])  # fmt: skip
def test_which_adapter_a_family_gets(variant, adapter):
    assert find_adapter(family_model(variant)).func is adapter


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_with_and_without_each_technique(variant, merge, fused):
    model = hf_paged.enable(family_model(variant), strict=True, merge_weights=merge, fused_kernels=fused)
    assert_native_parity(model, **batch([3, 17, 40]), max_new_tokens=16)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("variant", ["llama", "qwen3-moe-mixed"])
def test_other_activations(variant, activation):
    model = hf_paged.enable(family_model(variant, hidden_act=activation), strict=True)
    assert_native_parity(model, **batch([17, 40]), max_new_tokens=16)


@pytest.mark.parametrize(("variant", "dense_layers"), [("llama", [0, 1]), ("qwen3-moe", []), ("qwen3-moe-mixed", [0])])
def test_projections_lie_side_by_side_while_enabled(variant, dense_layers, monkeypatch):
    monkeypatch.setattr(fused_adapter, "adjacent_memory", HostMemory)
    model, inputs = family_model(variant), batch([9])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = stock_generate(model, **inputs, max_new_tokens=4)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, expected, **inputs, max_new_tokens=4)
    for i, layer in enumerate(model.model.layers):
        groups = [(layer.self_attn, ("q_proj", "k_proj", "v_proj"))]
        groups += [(layer.mlp, ("gate_proj", "up_proj"))] if i in dense_layers else []
        for owner, names in groups:
            weights = [getattr(owner, name).weight for name in names]
            ends = [w.data_ptr() + w.numel() * w.element_size() for w in weights]
            assert ends[:-1] == [w.data_ptr() for w in weights[1:]]
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    hf_paged.disable(model)
    assert torch.equal(model.generate(**inputs, max_new_tokens=4), expected)


def test_head_norms_with_different_epsilons():
    model = hf_paged.enable(family_model("qwen3-moe"))
    model.model.layers[1].self_attn.k_norm.variance_epsilon = 0.1
    reason = hf_paged.get_engine(model).unsupported_reason()
    assert reason == "layer 1's q_norm and k_norm have different epsilons"


def test_weights_changed_in_place_are_seen():
    model = hf_paged.enable(family_model("qwen3-moe"), strict=True)
    inputs = batch([40, 9])
    before = assert_native_parity(model, **inputs, max_new_tokens=8)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(-1)
        model.model.layers[0].self_attn.k_proj.weight.mul_(0.5)
    assert not torch.equal(assert_native_parity(model, **inputs, max_new_tokens=8), before)
