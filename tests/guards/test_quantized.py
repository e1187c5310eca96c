"""Weights that hold their values in other tensors: a change of any of those is a change of the weight."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support import assert_falls_back, assert_native_parity, batch, tiny_model
from torch import nn

import hf_paged
from hf_paged.guards.quantized import inner_tensors, made_of, watched
from hf_paged.guards.snapshot import ModelSnapshot

INPUTS = batch([40, 33, 7])
OPTIONS = {"max_new_tokens": 8}


class Wrapper(torch.Tensor):
    """int8 values times a scale per row; its own memory is none. Built as torchao's and quanto's weights are."""

    @staticmethod
    def __new__(cls, values, scale, act_quant_kwargs=None):
        shape = values.shape
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values, scale, act_quant_kwargs=None):
        self.values, self.scale, self.act_quant_kwargs = values, scale, act_quant_kwargs

    def __tensor_flatten__(self):
        return ["values", "scale"], {"act_quant_kwargs": self.act_quant_kwargs}

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            hidden, weight = args[:2]
            return nn.functional.linear(hidden, weight.values.to(hidden.dtype) * weight.scale)
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        assert function is torch.ops.aten.detach.default, function
        return cls(args[0].values, args[0].scale, args[0].act_quant_kwargs)


# The name and package by which it is known to compute each row alone.
Int8Tensor = type("Int8Tensor", (Wrapper,), {"__module__": "torchao.standing.in"})


@dataclass
class PerTensor:
    pass


@dataclass
class PerRow:
    dim: int = -1


@dataclass
class Kwargs:
    granularity: object


Kwargs.__module__ = "torchao.standing.in"


def _wrapped(linear, kind=Int8Tensor, **settings):
    weight = linear.weight.detach()
    scale = weight.abs().amax(1, keepdim=True) / 127
    return nn.Parameter(kind((weight / scale).round().to(torch.int8), scale, **settings), requires_grad=False)


def _model(seed=0, **settings):
    model = tiny_model(seed)
    for layer in model.model.layers:
        for module in (module for module in layer.modules() if isinstance(module, nn.Linear)):
            module.weight = _wrapped(module, **settings)
    return model


def _weight(model):
    return model.model.layers[0].mlp.up_proj.weight


def test_a_plain_tensor_is_its_own():
    plain, parameter = torch.ones(2), nn.Parameter(torch.ones(2))
    assert watched([plain, parameter])[0] is plain and inner_tensors(parameter)[0] is parameter
    assert made_of(parameter) is None


def test_wrappers_inside_of_wrappers():
    outer = Int8Tensor(Int8Tensor(torch.ones(2, 2), torch.ones(2, 1)), torch.zeros(2, 1))
    inner = inner_tensors(outer)
    assert [id(t) for t in inner] == [id(outer.values.values), id(outer.values.scale), id(outer.scale)]
    assert [id(t) for t in watched([outer])] == [id(t) for t in inner]


def test_what_does_not_say_what_it_holds():
    class Silent(torch.Tensor):
        pass

    silent = torch.ones(2, 2).as_subclass(Silent)
    assert inner_tensors(silent) is None
    assert inner_tensors(Int8Tensor(silent, torch.ones(2, 1))) is None
    assert watched([silent])[0] is silent


def _bytes(model):
    _weight(model).values.neg_()


def _data(model):
    _weight(model).scale.data.mul_(-1)


def _swap(model):
    _weight(model).values = -_weight(model).values


def _parameter(model):
    model.model.layers[0].mlp.up_proj.weight = _weight(_model(7))


@pytest.mark.parametrize("change", [_bytes, _data, _swap, _parameter], ids=["bytes", "data", "swap", "parameter"])
def test_the_prefix_cache_is_dropped(change):
    model = _model()
    first = model.generate(**INPUTS, **OPTIONS)
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, first, **INPUTS, **OPTIONS)
    assert_native_parity(model, first, **INPUTS, **OPTIONS)
    engine = hf_paged.get_engine(model)
    hits = engine.stats().prefix_cache_hits
    assert hits == 32 + 32
    change(model)
    actual = model.generate(**INPUTS, **OPTIONS)
    assert engine.stats().prefix_cache_hits == hits
    hf_paged.disable(model)
    changed = model.generate(**INPUTS, **OPTIONS)
    assert torch.equal(actual, changed) and not torch.equal(changed, first)


@pytest.mark.parametrize("change", [
    _swap, lambda m: setattr(_weight(m), "act_quant_kwargs", Kwargs(PerRow())),
    lambda m: setattr(_weight(m), "values", _weight(m).values.float()),
], ids=["swap", "setting", "dtype"])
def test_a_look_notices(change):
    model = _model()
    facts = ModelSnapshot(model)
    assert facts.hold(model)
    change(model)
    assert not facts.hold(model)


def test_settings_changed_in_place():
    kwargs = Kwargs(PerRow())
    model = hf_paged.enable(_model(act_quant_kwargs=kwargs), strict=True)
    model.generate(**INPUTS, **OPTIONS)
    kwargs.granularity = PerTensor()
    with pytest.raises(hf_paged.FallbackError, match="scales activations by the largest of all rows"):
        model.generate(**INPUTS, **OPTIONS)


@pytest.mark.parametrize(("settings", "reason"), [
    ({"act_quant_kwargs": Kwargs(PerTensor())}, r"Int8Tensor: .* scales activations by the largest of all rows"),
    ({"act_quant_kwargs": Kwargs(PerRow(0))}, r"Int8Tensor: .* may look at batch rows \(torchao, PerRow\(dim=0\)\)"),
    ({"kind": Wrapper}, r"q_proj\.weight is a \S+\.Wrapper: .* may look at batch rows"),
])
def test_rows_that_are_not_computed_alone(settings, reason):
    assert_falls_back(_model(**settings), reason, **INPUTS, **OPTIONS)


def test_in_a_module_that_our_code_stands_in_for():
    model = tiny_model()
    norm = model.model.norm
    norm.weight = nn.Parameter(Int8Tensor(norm.weight.detach(), torch.ones(64)), requires_grad=False)
    engine = hf_paged.get_engine(hf_paged.enable(model))
    from hf_paged.models.eligibility import why_not_native

    reason = why_not_native(engine._executor)
    assert reason == "model.norm.weight is a torchao.standing.in.Int8Tensor: expected a plain tensor in Qwen3RMSNorm"
