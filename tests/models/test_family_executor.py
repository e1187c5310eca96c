"""Shapes that an executor reads off a decoder."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from family_models import VARIANTS, family_model
from support import tiny_model

from hf_paged.models import family_executor, find_executor

READ = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
        "head_dim": "head_dim", "hidden_size": "head_dim"}


def executor_of(model):
    return find_executor(model)(model)


@pytest.mark.parametrize("name", family_executor._SHAPES)
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


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_every_familys_config_has_these_fields_under_these_names(variant):
    model = family_model(variant)
    config = executor_of(model).config
    assert not {*family_executor._SHAPES} & config.attribute_map.keys()
    assert {*family_executor._SHAPES} - {"head_dim"} <= vars(config).keys()
    assert not any(isinstance(getattr(type(config), name, None), property) for name in family_executor._SHAPES)


def test_a_config_whose_layers_differ_is_noticed():
    """As by transformers, which refuses to say what holds for some layers."""
    model = tiny_model()
    if not hasattr(type(model.config), "per_layer_config"):
        pytest.skip("this version's configs know one value for all layers")
    executor = executor_of(model)
    executor.kv_spec()
    model.config.per_layer_config = {0: {"num_key_value_heads": 1}}
    with pytest.raises(Exception, match="is a per-layer attribute"):
        executor.kv_spec()


def test_the_spec_follows_the_number_of_ranks():
    model = tiny_model()
    executor = executor_of(model)
    whole = executor.kv_spec()
    model.parallel_group = SimpleNamespace(size=2)
    shared = executor.kv_spec()
    assert (2 * shared.num_heads, 2 * shared.num_kv_heads) == (whole.num_heads, whole.num_kv_heads)


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
