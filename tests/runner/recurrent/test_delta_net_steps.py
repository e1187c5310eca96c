"""Decode steps of gated delta nets by the kernel: stock's tokens, without a copy of states, and why a layer's own
module runs. Without a GPU the kernel's reference runs."""

from __future__ import annotations

import pytest
import torch
from recurrent_models import outlined, recurrent_model, with_idiom
from runner.test_graphs import uncaptured
from support import assert_native_parity, batch
from torch import nn

import hf_paged
from hf_paged.kernels.build.compiling import is_dry
from hf_paged.kernels.recurrent.delta_net import DeltaNetStates
from hf_paged.models import find_executor
from hf_paged.models.derivation import recurrent_executor
from hf_paged.models.recurrent import delta_net
from hf_paged.models.recurrent.view import StateView

pytestmark = with_idiom
CPU = torch.device("cpu")
OPTIONS = {"max_num_batched_tokens": 32, "max_num_seqs": 5}


@pytest.fixture
def rows(monkeypatch):
    """Rows of each call of the operation; the layers' states must not be gathered in these steps."""
    seen, own, read = [], delta_net.delta_net_unchecked, StateView._read

    def counted(inputs, weights, states, *args):
        seen.append(len(inputs.query))
        if is_dry():  # which launches no kernel
            states = DeltaNetStates(*(state.clone() for state in states))
        return own(inputs, weights, states, *args)

    def checked(self, key):
        assert self._is_new or self._lengths is None, "a decode step gathers states"
        return read(self, key)

    monkeypatch.setattr(recurrent_executor, "why_not_on", lambda device: None)
    monkeypatch.setattr(delta_net, "delta_net_unchecked", counted)
    monkeypatch.setattr(StateView, "_read", checked)
    uncaptured(monkeypatch)  # which plans decode rows as on a GPU
    return seen


@pytest.mark.parametrize("name", ["Qwen3Next", "Qwen3_5", pytest.param("Qwen3_5Moe", marks=pytest.mark.slow)])
def test_tokens_are_stocks(name, rows):
    model = hf_paged.enable(outlined(recurrent_model(name)), strict=True, **OPTIONS)
    assert_native_parity(model, **batch([30, 17, 40]), max_new_tokens=9)
    assert rows.count(4) >= 2 * 7  # three rows in a graph of four, in two layers
    layer = model.model.layers[0].linear_attn
    assert "forward" not in vars(layer) and type(model.model.layers) is nn.ModuleList


def test_a_layer_that_changes_runs_by_its_own_module_from_then_on(rows):
    model = hf_paged.enable(outlined(recurrent_model("Qwen3_5")), strict=True, **OPTIONS)
    engine = hf_paged.get_engine(model)
    assert_native_parity(model, **batch([9]), max_new_tokens=4)
    executor = engine._executor
    assert [path for path, why in executor._why_not_kernels(CPU).items() if why is None] == [
        "layers.0.linear_attn", "layers.2.linear_attn"]
    assert executor.why_not_kernels(CPU) is None
    hook = model.model.layers[2].linear_attn.conv1d.register_forward_hook(lambda *args: None)
    assert "layers.2.linear_attn: hooks" in executor.why_not_kernels(CPU)
    hook.remove()
    assert executor._decoder_of_rows() is not model.model
    model.model.layers[0].linear_attn.conv1d.register_forward_hook(lambda *args: None)
    view = executor._decoder_of_rows()
    assert view.layers[0].linear_attn is model.model.layers[0].linear_attn
    assert view.layers[2].linear_attn is not model.model.layers[2].linear_attn


@pytest.mark.parametrize(("change", "message"), [
    (lambda layer: setattr(layer, "activation", "gelu"), "silu"),
    (lambda layer: setattr(layer.norm, "activation", "gelu"), "silu"),
    (lambda layer: setattr(layer.conv1d, "bias", nn.Parameter(torch.zeros(192))), "biases"),
    (lambda layer: setattr(layer.norm, "weight", nn.Parameter(layer.norm.weight.half())), "in norm no plain"),
    (lambda layer: setattr(layer, "A_log", nn.Parameter(torch.zeros(8))[::2]), "in A_log no plain"),
    (lambda layer: layer.register_forward_pre_hook(lambda *args: None), "hooks"),
    (lambda layer: setattr(layer, "forward", lambda *args: None), "hooks"),
    (lambda layer: setattr(layer, "head_v_dim", 24), "heads of"),
    (lambda layer: setattr(layer, "layer_idx", 1), "other states"),
], ids=["activation", "norm", "bias", "dtype", "parameter", "hook", "forward", "size", "states"])
def test_why_a_layers_own_module_runs(change, message):
    model = outlined(recurrent_model("Qwen3_5"))
    executor, layer = find_executor(model)(model), model.model.layers[0].linear_attn
    assert delta_net.misfit(layer, executor.outline.states, torch.float32) is None
    if message == "in A_log no plain":
        del layer.A_log
    change(layer)
    assert message in delta_net.misfit(layer, executor.outline.states, torch.float32)


def test_where_there_are_no_kernels(monkeypatch):
    model = outlined(recurrent_model("Qwen3_5"))
    executor = find_executor(model)(model)
    assert "NVIDIA GPU" in executor.why_not_kernels(CPU)
    assert "fused_kernels=False" in find_executor(model)(model, fused_kernels=False).why_not_kernels(CPU)
    other = outlined(recurrent_model("Lfm2"))
    assert "gated delta nets of" in find_executor(other)(other).why_not_kernels(CPU)
    executor.autocast = torch.bfloat16
    monkeypatch.setattr(recurrent_executor, "why_not_on", lambda device: None)
    assert "autocast" in executor.why_not_kernels(CPU)
