"""Which layers compute each token alone: the tables, asked without the packages that they name."""

from __future__ import annotations

import ast
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import assert_falls_back, assert_native_parity, batch, tiny_model
from torch import nn

import hf_paged
from hf_paged.guards.quantized import is_known_forward, is_quantized_forward
from hf_paged.guards.tokenwise import (
    BATCH_DEPENDENT,
    UNKNOWN,
    quantization_state,
    row_mixing_of_class,
    row_mixing_of_scheme,
)

INPUTS = batch([40, 33, 7])
OPTIONS = {"max_new_tokens": 8}


def _class(name):
    module, _, qualname = name.rpartition(".")
    return type(qualname, (nn.Module,), {"__module__": module})


@pytest.mark.parametrize("key", BATCH_DEPENDENT)
def test_classes_that_look_at_all_rows(key):
    name = f"bitsandbytes.nn.modules{key}" if key.startswith(".") else f"{key}modules.linear.Linear"
    assert row_mixing_of_class(_class(name)) == BATCH_DEPENDENT[key]


@pytest.mark.parametrize(("name", "does"), [
    ("bitsandbytes.nn.modules.Linear4bit", None), ("optimum.quanto.nn.qlinear.QLinear", None),
    ("torch.nn.modules.linear.Linear", None), ("torch.nn.modules.linearly.Linear", UNKNOWN),
    ("optimum.quanto.nn.qconv2d.QConv2d", UNKNOWN), ("somebody.Linear", UNKNOWN),
])
def test_other_classes(name, does):
    assert row_mixing_of_class(_class(name)) == does


def test_nothing_is_imported():
    """A package that is not installed, or not used, costs nothing."""
    imported = set()
    for path in Path(hf_paged.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported |= {name.split(".")[0] for name in (*names, getattr(node, "module", None) or "")}
    assert "transformers" in imported
    assert imported.isdisjoint({"torchao", "optimum", "compressed_tensors", "bitsandbytes", "repeng", "nnsight"})


def _args(strategy, dynamic):
    return SimpleNamespace(strategy=strategy, dynamic=dynamic)


@pytest.mark.parametrize(("given", "handed_on", "does"), [
    (None, None, None), (_args("token", True), None, None), (_args("group", True), None, None),
    (_args("tensor", False), None, None), (_args("tensor_group", "local"), None, None),
    (_args("tensor", True), None, "scales activations by the largest of all rows"),
    (None, _args("tensor", True), "scales activations by the largest of all rows"),
    (_args("attn_head", False), None, UNKNOWN), (_args("block", True), None, UNKNOWN),
])
def test_schemes_of_compressed_tensors(given, handed_on, does):
    linear = nn.Linear(2, 2)
    linear.quantization_scheme = SimpleNamespace(input_activations=given, output_activations=handed_on)
    reason = row_mixing_of_scheme(linear)
    assert reason is None if does is None else reason.startswith(f"{does} (compressed-tensors, strategy")


@pytest.fixture
def lifecycle(monkeypatch):
    """A stand-in for the module in which compressed-tensors makes forwards: it halves what the layer is given."""
    source = """
def set_forward_quantized(module):
    def quantized_forward(self, input):
        return self.__class__.forward(self, input / self.divisor)

    module.forward = quantized_forward.__get__(module)
"""
    name = "compressed_tensors.quantization.lifecycle.forward"
    made = types.ModuleType(name)
    exec(source, made.__dict__)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def _rounding(lifecycle):
    model = tiny_model()
    for layer in model.model.layers:
        layer.mlp.up_proj.divisor = 2.0
        lifecycle.set_forward_quantized(layer.mlp.up_proj)
    return model


def test_a_known_forward_on_an_instance_is_called(lifecycle):
    model = _rounding(lifecycle)
    expected = model.generate(**INPUTS, **OPTIONS)
    assert not torch.equal(expected, tiny_model().generate(**INPUTS, **OPTIONS))
    assert_native_parity(hf_paged.enable(model, strict=True), expected, **INPUTS, **OPTIONS)


def test_another_forward_on_an_instance_is_not(lifecycle):
    model = _rounding(lifecycle)
    linear = model.model.layers[1].mlp.up_proj
    assert is_quantized_forward(linear) and is_known_forward(linear)
    other = model.model.layers[0].mlp.up_proj
    linear.forward = other.forward  # bound to another instance
    assert not is_known_forward(linear)
    linear.forward = types.MethodType(lambda self, hidden: nn.Linear.forward(self, hidden) * 2, linear)
    assert not is_known_forward(linear)
    reason = r"the forward of model\.layers\.1\.mlp\.up_proj is replaced on the instance by \S+lambda"
    assert_falls_back(model, reason, **INPUTS, **OPTIONS)
    linear.forward = types.MethodType(nn.Linear.forward, linear)
    assert is_known_forward(linear) and not is_quantized_forward(linear)


def test_settings_are_part_of_the_state():
    linear = nn.Linear(2, 2)
    assert quantization_state([("a", linear)]) == []
    linear.quantization_enabled = False
    assert quantization_state([("a", linear)]) == [("a", "quantization_enabled", False)]
