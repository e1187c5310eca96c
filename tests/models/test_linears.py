"""Linear layers that were read once: steps multiply with what the layers hold now, and copies are renewed from it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support import tiny_model
from torch import nn

from hf_paged.models import find_executor
from hf_paged.models.linears import DecoderLinears


def prepared(**config):
    model = tiny_model(**config)
    make = find_executor(model)
    assert make is not None
    executor = make(model)
    executor.autocast = torch.bfloat16
    executor.prepare(64)
    executor.refresh(None)
    return model, executor


def assert_copies(executor, model):
    """Of the parameters that the model has now, found by their names."""
    copies = executor._linears.copied.by_name
    for i, layer in enumerate(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        of = {"qkv": (attention.q_proj, attention.k_proj, attention.v_proj), "o_proj": (attention.o_proj,),
              "mlp": (mlp.gate_proj, mlp.up_proj), "down_proj": (mlp.down_proj,)}
        for key, linears in of.items():
            assert torch.equal(copies[f"{i}.{key}"].weight, torch.cat([x.weight for x in linears]).bfloat16())
    assert torch.equal(copies["lm_head"].weight, model.lm_head.weight.bfloat16())


def other_parameter(model):
    old = model.model.layers[1].self_attn.k_proj.weight
    model.model.layers[1].self_attn.k_proj.weight = nn.Parameter(torch.randn_like(old))


def other_memory(model):
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = torch.randn_like(weight)


def other_strides(model):
    """At the same address, under the same version."""
    weight = model.model.layers[0].self_attn.o_proj.weight
    wide = torch.randn(2 * weight.shape[0], weight.shape[1])
    weight.data = wide[: weight.shape[0]]
    model.prepared_again()
    before = weight.data_ptr(), weight._version
    weight.data = wide[::2]
    assert (weight.data_ptr(), weight._version) == before


def other_module(model):
    """Of the same kind and size, so that nothing but its identity tells."""
    old = model.model.layers[1].mlp.gate_proj
    model.model.layers[1].mlp.gate_proj = nn.Linear(old.in_features, old.out_features, bias=False)


def exchanged_modules(model):
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def other_layer(model):
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


def other_head(model):
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features, bias=False)


@pytest.mark.parametrize("change", [other_parameter, other_memory, other_strides, other_module, exchanged_modules,
                                    other_layer, other_head])
def test_copies_are_renewed_from_what_the_model_holds_now(change):
    model, executor = prepared()
    model.__dict__["prepared_again"] = lambda: executor.refresh(None)
    assert_copies(executor, model)
    assert not executor.copies_are_stale()
    change(model)
    if change is not other_strides:  # it leaves neither address nor version: only the checksum shows it
        assert executor.copies_are_stale()
    executor.refresh(None)
    assert_copies(executor, model)
    assert not executor.copies_are_stale()


def test_another_dtype_needs_other_copies_and_a_shape_too():
    model, executor = prepared()
    weight = model.model.layers[0].mlp.up_proj.weight
    whole = weight.data
    weight.data = whole.view(torch.bfloat16)[:, : whole.shape[1]]  # the same address
    assert weight.data_ptr() == whole.data_ptr()
    executor.refresh(None)  # the group is copied because of gate_proj
    assert torch.equal(executor._linears.copied.by_name["0.mlp"].weight[-len(weight):].view(torch.int16),
                       weight.detach().contiguous().view(torch.int16))
    model.model.layers[0].mlp.gate_proj.weight.data = weight.data.clone()
    assert executor.copies_are_stale()  # now it needs none
    executor.prepare(64)
    executor.refresh(None)
    assert "0.mlp" not in executor._linears.copied.by_name
    assert not executor.copies_are_stale()


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_layer_that_is_plain_no_more_is_noticed(hook):
    model, executor = prepared()
    for _ in range(2):
        assert executor._castable()
        handle = getattr(model.model.layers[1].self_attn.v_proj, hook)(lambda *args: None)
        assert not executor._castable()
        handle.remove()
    assert executor._castable()
    model.lm_head.forward = lambda hidden: hidden
    assert not executor._castable()
    del model.lm_head.forward
    assert executor._castable()
    projection = model.model.layers[0].self_attn.k_proj
    projection.bias = nn.Parameter(torch.zeros(len(projection.weight)))
    assert not executor._castable()


def test_fewer_layers_are_other_groups():
    model, executor = prepared()
    assert "1.qkv" in executor._linears.bases()
    model.config.num_hidden_layers = 1
    executor.prepare(64)
    assert "1.qkv" not in executor._linears.bases()


def test_nothing_is_read_twice_and_nothing_kept_after_letting_go(monkeypatch):
    model, executor = prepared()
    parts, kept = executor._layer_parts, weakref.ref(model.model.layers[0].mlp.up_proj)
    monkeypatch.setattr(DecoderLinears, "read", lambda *args, **kwargs: pytest.fail("read again"))
    executor.prepare(64)
    executor.refresh(None)
    assert executor._layer_parts is parts
    monkeypatch.undo()
    executor.drop_references()
    del parts, model.model.layers[0].mlp.up_proj
    gc.collect()
    assert kept() is None
    model.model.layers[0].mlp.up_proj = nn.Linear(64, 96, bias=False)
    executor.prepare(64)
    executor.refresh(None)
    assert_copies(executor, model)


def test_a_change_while_the_layers_are_read_is_read_by_the_next_call(monkeypatch):
    """Another thread's: what was read belongs to the model as it was compared before."""
    model, executor = prepared()
    read = DecoderLinears.read

    def reads_and_changes(self, *args, **kwargs):
        read(self, *args, **kwargs)
        monkeypatch.undo()
        other_module(model)

    monkeypatch.setattr(DecoderLinears, "read", reads_and_changes)
    other_head(model)
    executor.prepare(64)
    executor.prepare(64)
    executor.refresh(None)
    assert_copies(executor, model)


@pytest.mark.parametrize("change", [other_parameter, other_memory, other_module, exchanged_modules, other_layer])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_what_steps_compute_with_is_current_until_a_layer_is_another(change, autocast):
    """Whatever else changed. Weights that are not merged are read in every step."""
    model, executor = prepared()
    executor.autocast = autocast
    executor.prepare(64)
    model.kept = 1
    assert executor.is_current()
    change(model)
    assert executor.is_current() == (change in (other_parameter, other_memory))
    executor.prepare(64)
    assert executor.is_current()
