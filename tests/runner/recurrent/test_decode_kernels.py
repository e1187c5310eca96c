"""Decode steps of gated delta nets and Mamba-2 by kernels: stock's tokens, without a copy of states, and why a layer's
own module runs. Without a GPU the kernels' references run."""

from __future__ import annotations

import pytest
import torch
from recurrent_models import outlined, recurrent_model, with_idiom
from runner.test_graphs import uncaptured
from support import assert_native_parity, batch
from torch import nn

import hf_paged
from hf_paged.kernels.build.compiling import is_dry
from hf_paged.kernels.recurrent._convolution import LayerStates
from hf_paged.models import find_executor
from hf_paged.models.derivation import recurrent_executor
from hf_paged.models.recurrent import delta_net, mamba2
from hf_paged.models.recurrent.view import StateView

pytestmark = with_idiom
CPU = torch.device("cpu")
OPTIONS = {"max_num_batched_tokens": 32, "max_num_seqs": 5}


@pytest.fixture
def rows(monkeypatch):
    """Rows of each call of the operation; the layers' states must not be gathered in these steps."""
    seen, read = [], StateView._read
    of_delta_net, of_mamba2 = delta_net.delta_net, mamba2.mamba2

    def changeable(states):
        """Other ones in dry runs, which launch no kernel."""
        return LayerStates(*(state.clone() for state in states)) if is_dry() else states

    def count_delta_net(inputs, weights, states, *args):
        seen.append(len(inputs.query))
        return of_delta_net(inputs, weights, changeable(states), *args)

    def count_mamba2(mixed, dt, weights, states, *args):
        seen.append(len(mixed))
        return of_mamba2(mixed, dt, weights, changeable(states), *args)

    def checked(self, key):
        assert self._is_new or self._lengths is None, "a decode step gathers states"
        return read(self, key)

    monkeypatch.setattr(recurrent_executor, "why_not_on", lambda device: None)
    monkeypatch.setattr(delta_net, "delta_net", count_delta_net)
    monkeypatch.setattr(mamba2, "mamba2", count_mamba2)
    monkeypatch.setattr(StateView, "_read", checked)
    uncaptured(monkeypatch)  # which plans decode rows as on a GPU
    return seen


@pytest.mark.parametrize("name", ["Qwen3Next", "Qwen3_5", "Mamba2", "NemotronH", "Bamba", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("Qwen3_5Moe", "GraniteMoeHybrid"))])
def test_tokens_are_stocks(name, rows):
    model = hf_paged.enable(outlined(recurrent_model(name)), strict=True, **OPTIONS)
    assert_native_parity(model, **batch([30, 17, 40]), max_new_tokens=9)
    assert rows.count(4) >= 7  # three rows in a graph of four
    executor = hf_paged.get_engine(model)._executor
    assert executor.why_not_kernels(CPU) is None
    layers = [executor.decoder.get_submodule(path) for path in executor._why_not_kernels(CPU)]
    assert layers and not any("forward" in vars(layer) for layer in layers)


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
    paths = ["layers.0.linear_attn", "layers.2.linear_attn"]
    assert list(executor._forwards_by(lambda kind: kind.decode)) == paths
    model.model.layers[0].linear_attn.conv1d.register_forward_hook(lambda *args: None)
    assert list(executor._forwards_by(lambda kind: kind.decode)) == paths[1:]


@pytest.mark.parametrize(("change", "message"), [
    (lambda layer: setattr(layer, "activation", "gelu"), "silu"),
    (lambda layer: setattr(layer.norm, "activation", "gelu"), "silu"),
    (lambda layer: setattr(layer.conv1d, "bias", nn.Parameter(torch.zeros(192))), "biases"),
    (lambda layer: setattr(layer.norm, "weight", nn.Parameter(layer.norm.weight.half())), "in norm no plain"),
    (lambda layer: layer._parameters.update(A_log=torch.zeros(8)[::2]), "in A_log no plain"),
    (lambda layer: layer.register_forward_pre_hook(lambda *args: None), "hooks"),
    (lambda layer: setattr(layer, "forward", lambda *args: None), "hooks"),
    (lambda layer: setattr(layer, "head_v_dim", 24), "heads of"),
    (lambda layer: setattr(layer, "layer_idx", 1), "other states"),
], ids=["activation", "norm", "bias", "dtype", "parameter", "hook", "forward", "size", "states"])
def test_why_a_delta_nets_own_module_runs(change, message):
    model = outlined(recurrent_model("Qwen3_5"))
    states, layer = find_executor(model)(model).outline.states, model.model.layers[0].linear_attn
    assert delta_net.misfit(layer, states, torch.float32) is None
    change(layer)
    assert message in delta_net.misfit(layer, states, torch.float32)


@pytest.mark.parametrize(("change", "message"), [
    (lambda layer: setattr(layer, "activation", "gelu"), "silu"),
    (lambda layer: setattr(layer, "D", nn.Parameter(layer.D.half())), "in D no plain"),
    (lambda layer: layer.conv1d.register_forward_hook(lambda *args: None), "hooks"),
    (lambda layer: setattr(layer, "head_dim", 24), "heads of 24"),
    (lambda layer: setattr(layer, "layer_idx", 1), "other states"),
], ids=["activation", "dtype", "hook", "size", "states"])
def test_why_a_mamba2_layers_own_module_runs(change, message):
    model = outlined(recurrent_model("NemotronH"))
    states, layer = find_executor(model)(model).outline.states, model.model.layers[0].mixer
    assert mamba2.misfit(layer, states, torch.float32) is None
    change(layer)
    assert message in mamba2.misfit(layer, states, torch.float32)


def test_where_there_are_no_kernels(monkeypatch):
    model = outlined(recurrent_model("Qwen3_5"))
    executor = find_executor(model)(model)
    assert "NVIDIA GPU" in executor.why_not_kernels(CPU)
    assert "fused_kernels=False" in find_executor(model)(model, fused_kernels=False).why_not_kernels(CPU)
    other = outlined(recurrent_model("Lfm2"))
    assert "delta nets of" in find_executor(other)(other).why_not_kernels(CPU)
    executor.autocast = torch.bfloat16
    monkeypatch.setattr(recurrent_executor, "why_not_on", lambda device: None)
    assert "autocast" in executor.why_not_kernels(CPU)
