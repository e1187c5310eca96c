"""Kernels of the Hub: models that `use_kernels=True` made, and transformers where `kernels` is installed.

Where it is not, a stand-in does to a model what its `kernelize` does.
"""

from __future__ import annotations

import importlib
import sys
from types import MethodType, ModuleType

import pytest
import torch
from family_models import family_model
from support import assert_falls_back, assert_native_parity, batch, stock_copy, tiny_model
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3 import modeling_qwen3
from transformers.utils.import_utils import is_kernels_available

import hf_paged
from hf_paged.guards import replaced_forwards
from hf_paged.models.derivation.executor import DerivedExecutor
from hf_paged.models.fused import FusedExecutor
from hf_paged.models.paged_calls import paged_call

kernels = importlib.import_module("kernels") if is_kernels_available() else None
pytestmark = pytest.mark.filterwarnings("ignore:\\nNo kernel mapping found:UserWarning")
CALL = {**batch([40, 7, 21]), "max_new_tokens": 8}


class HubRMSNorm(nn.Module):
    """Another normalisation than stock's, so that it shows which one ran."""

    def forward(self, hidden_states):
        return self.weight * hidden_states / (hidden_states.abs().mean(-1, keepdim=True) + 0.1)


class OtherRMSNorm(nn.Module):
    def forward(self, hidden_states):
        return self.weight * hidden_states / (hidden_states.abs().amax(-1, keepdim=True) + 0.1)


class Repository:
    """What a mapping holds for a kernel, without a download."""

    def __init__(self, layer):
        self.layer_name, self._layer = layer.__name__, layer

    def load(self):
        return self._layer

    def __str__(self):
        return f"local {self.layer_name}"


def _kernelize(model, name, layer):
    """Runs `layer` for every module of `model` that transformers names so; None: everything's own forward."""
    if kernels is not None:
        mapping = {} if layer is None else {name: {"cpu": Repository(layer)}}
        with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
            kernels.kernelize(model, mode=kernels.Mode.INFERENCE, device="cpu")
        return
    if layer is not None:
        sys.modules[replaced_forwards._LAYERS]._CACHED_LAYER[layer] = layer
    for module in model.modules():
        if getattr(type(module), "kernel_layer_name", None) == name:
            module.forward = MethodType((layer or type(module)).forward, module)


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    if kernels is None:
        layers = ModuleType(replaced_forwards._LAYERS)
        layers._CACHED_LAYER = {}
        monkeypatch.setitem(sys.modules, replaced_forwards._LAYERS, layers)
        for variant in ("qwen3", "mistral"):
            for module in _model(variant).modules():
                if type(module).__name__.endswith("RMSNorm"):
                    monkeypatch.setattr(type(module), "kernel_layer_name", "RMSNorm", raising=False)
    elif replaced_forwards._LAYERS in sys.modules:
        monkeypatch.setattr(sys.modules[replaced_forwards._LAYERS], "_CACHED_LAYER", {})


def _model(variant):
    return tiny_model() if variant == "qwen3" else family_model(variant)


def _reason(model):
    return hf_paged.get_engine(model).unsupported_reason()


@pytest.mark.parametrize("variant", ["qwen3", "mistral"])
def test_kernels_run_as_they_stand(variant):
    """Also in a family that is fused otherwise; ragged rows, prefix hits, and the kernel shows in the tokens."""
    plain, model = _model(variant), _model(variant)
    _kernelize(model, "RMSNorm", HubRMSNorm)
    expected = stock_copy(model).generate(**CALL)
    assert not torch.equal(expected, plain.generate(**CALL))
    hf_paged.enable(model, strict=True)
    assert type(hf_paged.get_engine(model)._executor) is DerivedExecutor
    for _ in range(2):
        assert_native_parity(model, expected, **CALL)
    hf_paged.disable(model)
    assert torch.equal(model.generate(**CALL), expected)


def test_own_forwards_that_kernelize_put_back_are_none():
    """As on a device that the mapping has no kernel for: the fused path goes on."""
    model = tiny_model()
    _kernelize(model, "RMSNorm", None)
    assert any("forward" in vars(module) for module in model.modules())
    hf_paged.enable(model, strict=True)
    assert type(hf_paged.get_engine(model)._executor) is FusedExecutor
    assert_native_parity(model, **CALL)


def test_kernels_that_come_after_enable():
    """The fused path would compute something else; a generic one notices that its cache is the other's."""
    model = hf_paged.enable(tiny_model())
    assert_native_parity(model, **CALL)
    _kernelize(model, "RMSNorm", HubRMSNorm)
    expected = stock_copy(model).generate(**CALL)
    with pytest.warns(hf_paged.FallbackWarning, match=r"runs the Hub kernel HubRMSNorm only since the model was enabl"):
        assert torch.equal(model.generate(**CALL), expected)
    hf_paged.disable(model)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, expected, **CALL)


def test_keys_and_values_of_another_kernel_are_not_hit():
    model = hf_paged.enable(_model("mistral"), strict=True)
    for layer in (HubRMSNorm, OtherRMSNorm, None, HubRMSNorm):
        _kernelize(model, "RMSNorm", layer)
        assert_native_parity(model, stock_copy(model).generate(**CALL), **CALL)


def test_a_kernel_for_something_that_may_look_at_rows(monkeypatch):
    model = _model("mistral")
    _kernelize(model, "RMSNorm", HubRMSNorm)
    monkeypatch.setattr(type(model.model.norm), "kernel_layer_name", "BatchNorm")
    assert_falls_back(model, "runs the Hub kernel HubRMSNorm as BatchNorm, which may look at batch rows", **CALL)


@pytest.mark.parametrize("variant", ["qwen3", "mistral"])
def test_a_forward_that_no_kernel_brought(variant):
    """Bound as kernels are (Liger's patches of an instance do that), or not."""
    model = _model(variant)
    model.model.norm.forward = MethodType(HubRMSNorm.forward, model.model.norm)
    assert_falls_back(model, "the forward of model.norm is replaced on the instance", **CALL)
    other = _model(variant).model.norm
    model.model.norm.forward = other.forward  # of another module: another weight
    assert_falls_back(model, "the forward of model.norm is replaced on the instance", **CALL)


def test_attention_kernels_of_the_hub(monkeypatch):
    """transformers calls those that have FlashAttention's function by its own wrapper; others do what they like."""
    name = "kernels-community/flash-attn2"
    mapping = ALL_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(mapping, name, mapping["flash_attention_2"])
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name,
                        ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"])
    for variant in ("qwen3", "gpt-oss"):  # whose sinks FlashAttention takes
        model = hf_paged.enable(_model(variant))
        model.config._attn_implementation = name
        assert _reason(model) is None
    with paged_call([model.config]), pytest.raises(RuntimeError, match="'kernels-community/flash-attn2' met a paged"):
        model(**batch([9]))
    monkeypatch.setitem(mapping, name, lambda *args, **kwargs: None)
    assert _reason(model) == (
        f"attention implementation {name!r} is a Hub kernel that transformers does not call as FlashAttention")


@pytest.mark.skipif(kernels is None, reason="needs the kernels package")
@pytest.mark.parametrize("variant", ["qwen3", "mistral"])
def test_a_kernel_in_place_of_a_function(variant):
    """One for RoPE runs for every model of the family."""
    model = hf_paged.enable(_model(variant))
    modeling = sys.modules[type(model).__module__]
    function = modeling.apply_rotary_pos_emb
    assert replaced_forwards.function_inside(function) is not None
    before = assert_native_parity(model, **CALL)

    class HubRotary(nn.Module):
        def forward(self, q, k, cos, sin, unsqueeze_dim=1):
            return q * cos.unsqueeze(1), k * cos.unsqueeze(1)

    _kernelize(model, "rotary_pos_emb", HubRotary)
    try:
        expected = stock_copy(model).generate(**CALL)
        assert not torch.equal(expected, before)
        if variant == "qwen3":
            assert "apply_rotary_pos_emb runs the Hub kernel" in _reason(model)
            hf_paged.disable(model)
            hf_paged.enable(model, strict=True)
        assert_native_parity(model, expected, **CALL)
    finally:
        del function.forward
    assert_native_parity(model, before, **CALL)


@pytest.mark.skipif(kernels is None, reason="needs the kernels package")
def test_a_function_that_kernels_wrapped_is_watched(monkeypatch):
    model = hf_paged.enable(tiny_model())
    engine = hf_paged.get_engine(model)
    function = modeling_qwen3.apply_rotary_pos_emb
    assert engine.unsupported_reason() is None
    with monkeypatch.context() as patch:
        patch.setattr(type(function), "forward", lambda self, *args: None)
        assert "is patched" in engine.unsupported_reason()
    with monkeypatch.context() as patch:
        patch.setattr(function, "forward", lambda *args: None)
        assert engine.unsupported_reason() == "the forward of apply_rotary_pos_emb is replaced on the instance"
    handle = function.register_forward_hook(lambda *args: None)
    assert engine.unsupported_reason() == "apply_rotary_pos_emb has a forward hook"
    handle.remove()
    assert engine.unsupported_reason() is None
