"""Weights that are plain attributes of modules, neither parameters nor buffers, are watched like all others."""

from __future__ import annotations

import pytest
import torch
from family_models import family_model
from support import assert_falls_back, assert_native_parity, batch, tiny_model
from torch import nn

import hf_paged


def _plain(module, name):
    """Makes a parameter or buffer a plain tensor attribute."""
    value = getattr(module, name).detach().clone()
    delattr(module, name)
    setattr(module, name, value)


PLACES = {
    "fused, a projection": ("qwen3", "model.layers.0.mlp.down_proj", "weight"),
    "fused, a norm of heads": ("qwen3", "model.layers.1.self_attn.q_norm", "weight"),
    "fused, frequencies": ("qwen3", "model.rotary_emb", "inv_freq"),
    "generic, a projection": ("mistral", "model.layers.0.mlp.down_proj", "weight"),
    "generic, frequencies": ("mistral", "model.rotary_emb", "inv_freq"),
    "generic, a norm": ("gemma3", "model.layers.1.self_attn.q_norm", "weight"),
    "generic, the embedding's scale": ("gemma3", "model.embed_tokens", "embed_scale"),
}


def plain_of(executor):
    return executor.watch.plain_tensors(executor.model)


@pytest.mark.parametrize("place", PLACES)
def test_changed_in_place_and_replaced(place):
    """The prompt is cached before each change; what comes out right after it is stock's."""
    variant, path, name = PLACES[place]
    model, inputs = tiny_model() if variant == "qwen3" else family_model(variant), batch([40, 40])
    module = model.get_submodule(path)
    _plain(module, name)
    hf_paged.enable(model, strict=True)
    outputs = [assert_native_parity(model, **inputs, max_new_tokens=6)]
    getattr(module, name).data.mul_(1.7)
    outputs.append(assert_native_parity(model, **inputs, max_new_tokens=6))
    setattr(module, name, getattr(module, name) * 0.3)
    outputs.append(assert_native_parity(model, **inputs, max_new_tokens=6))
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])
    assert any(t is getattr(module, name) for t in plain_of(hf_paged.get_engine(model)._executor))


@pytest.mark.parametrize("make", [lambda t: [t], lambda t: (1, {"scale": t}), lambda t: {"a": [t]}])
def test_in_lists_tuples_and_dicts(make):
    model = tiny_model()
    tensor = torch.ones(3)
    model.model.layers[1].kept = make(tensor)
    executor = hf_paged.get_engine(hf_paged.enable(model, strict=True))._executor
    assert [t is tensor for t in plain_of(executor)] == [True]
    assert_native_parity(model, **batch([20]), max_new_tokens=4)
    other = torch.zeros(3)
    model.model.layers[1].kept = make(other)
    assert [t is other for t in plain_of(executor)] == [True]


class _Odd(torch.Tensor):
    pass


@pytest.mark.parametrize(("tensor", "reason"), [
    (torch.ones(3).as_subclass(_Odd), "model.layers.1.kept is a _Odd"),
    (torch.ones(3, device="meta"), "model.layers.1.kept is on meta"),
    (torch.eye(3).to_sparse(), "model.layers.1.kept is no dense tensor"),
])
def test_what_cannot_be_watched(tensor, reason):
    model = tiny_model()
    model.model.layers[1].kept = tensor
    assert_falls_back(model, reason, **batch([20]), max_new_tokens=4)


def test_a_tensor_that_is_added_while_enabled():
    model = hf_paged.enable(tiny_model(), strict=True)
    executor = hf_paged.get_engine(model)._executor
    assert_native_parity(model, **batch([20]), max_new_tokens=4)
    assert plain_of(executor) == []
    module = model.model.norm
    module.kept = nn.Parameter(torch.ones(2)).detach()
    assert [t is module.kept for t in plain_of(executor)] == [True]
