"""Shapes that an executor reads off a decoder."""

from __future__ import annotations

import pytest
import torch
from support import tiny_model

from hf_paged.models import decoder, find_executor

READ = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_dim", "hidden_size": "head_dim"}


def executor_of(model):
    return find_executor(model)(model)


@pytest.mark.parametrize("name", decoder._SHAPES)
def test_the_spec_follows_the_config(name):
    """Whichever field changes after it was read once."""
    model = tiny_model()
    if name == "hidden_size":  # it gives the size of heads where nothing else does
        vars(model.config)["head_dim"] = None
    executor = executor_of(model)
    before = executor.kv_spec()
    setattr(model.config, name, getattr(model.config, name) // 2)
    after = executor.kv_spec()
    assert getattr(after, READ[name]) < getattr(before, READ[name])


def test_the_spec_follows_a_field_by_its_other_name(monkeypatch):
    model = tiny_model()
    monkeypatch.setattr(type(model.config), "attribute_map", {"num_attention_heads": "n_head"})
    model.config.n_head = 8
    executor = executor_of(model)
    assert executor.kv_spec().num_heads == 8
    model.config.n_head = 4
    assert executor.kv_spec().num_heads == 4


def test_the_spec_follows_weights_layers_and_autocast():
    model = tiny_model()
    executor = executor_of(model)
    found = [executor.kv_spec()]
    model.to(torch.float64)
    found.append(executor.kv_spec())
    executor.autocast = torch.bfloat16
    found.append(executor.kv_spec())
    del model.model.layers[-1]
    found.append(executor.kv_spec())
    model.to("meta")
    found.append(executor.kv_spec())
    assert [spec.compute_dtype for spec in found] == [torch.float32, *[torch.float64] * 4]
    assert [spec.cache_dtype for spec in found[1:]] == [torch.float64, *[torch.bfloat16] * 3]
    assert found[3].num_layers == found[2].num_layers - 1 and found[4].device.type == "meta"
