"""Whatever comes between two steps and changes what a layer's modules are, `ModuleSnapshot` notices."""

import pytest
from support import tiny_model
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from hf_paged.guards.module_snapshot import ModuleSnapshot


def hook(*_):
    pass


def layer(model):
    return model.model.layers[1]


def swap(model):
    layer(model).self_attn.o_proj = nn.Linear(64, 64)


def add(model):
    layer(model).mlp.more = nn.Identity()


CHANGES = {
    "hook": lambda model: layer(model).mlp.down_proj.register_forward_hook(hook),
    "pre-hook": lambda model: layer(model).self_attn.register_forward_pre_hook(hook),
    "forward": lambda model: setattr(layer(model).mlp.up_proj, "forward", hook),
    "another module": swap,
    "one more module": add,
    "no module": lambda model: setattr(layer(model).mlp, "up_proj", None),
    "another layer": lambda model: model.model.layers.__setitem__(0, model.model.layers[1]),
    "fewer layers": lambda model: model.model.layers.pop(-1),
    "another root": lambda model: setattr(model, "model", Qwen3Model(model.config)),
    "another norm": lambda model: setattr(model.model, "norm", nn.LayerNorm(64)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_noticed(change):
    model = tiny_model()
    watch = ModuleSnapshot(model.model)
    assert watch.holds(model.model)
    change(model)
    assert not watch.holds(model.model)
    assert ModuleSnapshot(model.model).holds(model.model)


def test_a_hook_that_went_is_noticed_and_one_that_came_and_went_is_none():
    model = tiny_model()
    handle = layer(model).mlp.register_forward_hook(hook)
    watch = ModuleSnapshot(model.model)
    other = layer(model).mlp.down_proj.register_forward_hook(hook)
    other.remove()
    assert watch.holds(model.model)
    handle.remove()
    assert not watch.holds(model.model)
