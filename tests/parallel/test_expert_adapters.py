"""LoRA on experts' weights on one rank's part of a model: the part of PEFT's sums to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from exactness import assert_equal
from family_models import family_model
from lora_models import EXPERTS, lora_config, with_expert_adapter
from torch import nn

from hf_paged.models import find_executor
from hf_paged.models.eligibility import why_not_native
from hf_paged.models.expert_lora.folding import folded_weights
from hf_paged.models.expert_lora.updates import updates_of
from hf_paged.models.tuners import inside_wrappers
from hf_paged.parallel.adapters import activate, active_names, add_adapter, read_adapter, remove_adapter
from hf_paged.parallel.group import SINGLE, ParallelGroup
from hf_paged.parallel.layers import Shard, shard_of, sharded_class
from hf_paged.parallel.loading import load
from hf_paged.parallel.named_weights import NamedWeights, write

TARGETS = (EXPERTS, EXPERTS[:1], EXPERTS[1:])


def whole_model(dtype: torch.dtype, parameters: tuple[str, ...] = EXPERTS) -> Any:
    """PEFT's model, with two adapters; parts of its experts have 32 columns, and BLAS sums them as it sums the whole.
    """
    model: Any = family_model("qwen3-moe", moe_intermediate_size=64).to(dtype)
    for name, seed, r in (("red", 5, 4), ("blue", 6, 3)):
        model = with_expert_adapter(model, name, seed, parameters, ("q_proj", "o_proj"), r=r, scale=0.3)
    return model


def put(model: Any, wrapped: Any, name: str) -> None:
    """Write an adapter of PEFT's model into a rank's part of the model."""
    state = peft.get_peft_model_state_dict(wrapped, adapter_name=name)
    config, tensors = read_adapter(name, state, wrapped.peft_config[name])
    assert sorted(add_adapter(model, name, config)) == sorted(key for key, _ in tensors)
    weights = NamedWeights(model)
    for key, tensor in tensors:
        write(weights.place(key), tensor, SINGLE)


def experts_of(model: Any) -> Any:
    return model.get_submodule("model.layers.1.mlp.experts")


def assert_parts_of_sums(model: Any, wrapped: Any, names: list[str]) -> None:
    wrapped.base_model.set_adapter(names)
    activate(model, active_names(model, names))
    sums, parts = folded_weights(experts_of(wrapped.get_base_model())), folded_weights(experts_of(model))
    assert parts.keys() == sums.keys()
    for key, whole in sums.items():
        assert_equal(parts[key], shard_of(inside_wrappers(experts_of(model)), key).take(whole))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("parameters", TARGETS, ids=["both", "gate_up", "down"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_sums_are_the_part_of_pefts(dtype: torch.dtype, parameters: tuple[str, ...], rank: int, tmp_path: Path) -> None:
    """In each state of the adapters; a trained one, too."""
    wrapped = whole_model(dtype, parameters)
    family_model("qwen3-moe", moe_intermediate_size=64).to(dtype).save_pretrained(tmp_path)
    model = load(str(tmp_path), ParallelGroup(rank, 2), device="cpu")
    for name in ("red", "blue"):
        put(model, wrapped, name)
    assert folded_weights(experts_of(model)) == {}
    for names in (["red"], ["blue"], ["red", "blue"], ["blue", "red"]):
        assert_parts_of_sums(model, wrapped, names)
    assert why_not_native(find_executor(model)(model)) is None  # type: ignore[misc]
    for layer in wrapped.modules():
        if isinstance(layer, peft.tuners.lora.layer.ParamWrapper):
            for matrix in (layer.lora_A["blue"], layer.lora_B["blue"]):
                matrix.weight += 0.1
    remove_adapter(model, "blue")
    put(model, wrapped, "blue")
    assert_parts_of_sums(model, wrapped, ["blue"])
    experts = experts_of(model)
    updates = updates_of(experts)
    assert isinstance(updates, dict) and {f"experts.{key}" for key in updates} == set(parameters)
    for key, update in updates.items():
        weight = inside_wrappers(experts)._parameters[key]
        assert_equal(update.folded(weight, is_transposed=False), folded_weights(experts)[key])


@pytest.mark.parametrize("rank", [0, 1])
@torch.no_grad()
def test_merged_weights_are_the_part_of_pefts(rank: int, tmp_path: Path) -> None:
    wrapped = whole_model(torch.bfloat16)
    family_model("qwen3-moe", moe_intermediate_size=64).to(torch.bfloat16).save_pretrained(tmp_path)
    model = load(str(tmp_path), ParallelGroup(rank, 2), device="cpu")
    put(model, wrapped, "red")
    activate(model, ["red"])
    layer, whole = experts_of(model), experts_of(wrapped.get_base_model())
    while layer is not inside_wrappers(layer):
        layer.merge()
        whole.merge()
        layer, whole = layer.base_layer, whole.base_layer
    for key, weight in whole.named_parameters(recurse=False):
        assert_equal(getattr(layer, key).data, layer.shards[key].take(weight.data))
    assert why_not_native(find_executor(model)(model)) is None  # type: ignore[misc]


@pytest.mark.parametrize("rank", [0, 1])
@torch.no_grad()
def test_columns_of_weights_that_lie_the_other_way(rank: int) -> None:
    """As gpt-oss' experts, with gates and ups in turn; its class has no plan over ranks yet."""
    wrapped = with_expert_adapter(family_model("gpt-oss", intermediate_size=64), "red", scale=0.3)
    experts = experts_of(wrapped.get_base_model())
    inner = inside_wrappers(experts)
    part: Any = copy.deepcopy(inner)
    part.__class__, part.group = sharded_class(type(inner)), ParallelGroup(rank, 2)
    part.shards = {"gate_up_proj": Shard(tuple(inner.gate_up_proj.shape), 2, ((64 * rank, 64 * (rank + 1)),)),
                   "down_proj": Shard(tuple(inner.down_proj.shape), 1, ((32 * rank, 32 * (rank + 1)),))}
    for key, shard in part.shards.items():
        setattr(part, key, nn.Parameter(shard.take(getattr(inner, key))))
    model = family_model("gpt-oss", intermediate_size=64)
    model.set_submodule("model.layers.1.mlp.experts", part)
    put(model, wrapped, "red")
    activate(model, ["red"])
    sums, parts = folded_weights(experts), folded_weights(experts_of(model))
    assert parts.keys() == sums.keys() == part.shards.keys()
    for key, whole in sums.items():
        assert_equal(parts[key], part.shards[key].take(whole))


def part_of_a_model(path: Path) -> Any:
    family_model("qwen3-moe").save_pretrained(path)
    return load(str(path), ParallelGroup(1, 2), device="cpu")


WRONG = {
    "of a linear layer": ({"target_parameters": ["q_proj.weight"]}, "q_proj, a .*ParamWrapper over a ColumnParallel"),
    "of norms": ({"target_parameters": ["input_layernorm.weight"]}, "expected to be 2d or 3d|1 dimensional"),
    "of others": ({"target_parameters": [EXPERTS[0]]}, "same set of parameters"),
}


@pytest.mark.parametrize("case", WRONG)
def test_parameters_that_are_refused(case: str, tmp_path: Path) -> None:
    """The model is as before."""
    model, (options, why) = part_of_a_model(tmp_path), WRONG[case]
    if case == "of others":
        add_adapter(model, "red", lora_config(("q_proj",), target_parameters=list(EXPERTS)))
    before = [(path, type(module)) for path, module in model.named_modules()]
    with pytest.raises(ValueError, match=why):
        add_adapter(model, "blue", lora_config(("o_proj",), **options))
    assert [(path, type(module)) for path, module in model.named_modules()] == before
    assert not any(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize("parameter", EXPERTS)
def test_matrices_that_are_cut_otherwise_go_nowhere(parameter: str, tmp_path: Path) -> None:
    """PEFT makes them for a rank's part of a weight as if it were the whole."""
    model = part_of_a_model(tmp_path)
    peft.inject_adapter_in_model(lora_config((), target_parameters=[parameter]), model)
    reason = why_not_native(find_executor(model)(model))  # type: ignore[misc]
    assert "experts wraps a layer that is sharded over ranks, which its adapter is not" in str(reason)


def test_adapters_that_can_be_active(tmp_path: Path) -> None:
    model = part_of_a_model(tmp_path)
    assert active_names(model, None) == active_names(model, []) == ()
    with pytest.raises(ValueError, match=r"names='red': expected adapters of the model \(it has none\), got 'red'"):
        active_names(model, "red")
    add_adapter(model, "red", lora_config(("q_proj",), target_parameters=list(EXPERTS)))
    add_adapter(model, "blue", lora_config(("o_proj",)))
    assert active_names(model, "red") == ("red",) and active_names(model, ["blue", "red", "blue"]) == ("blue", "red")
    for wrong in (3, ["red", 3], {"red"}):
        with pytest.raises(TypeError, match=r"names=.*: expected the name of an adapter, a list of names, or None"):
            active_names(model, wrong)
    with pytest.raises(ValueError, match=r"expected adapters of the model \(blue, red\), got 'green'"):
        active_names(model, ["red", "green"])
    activate(model, ["blue", "red"])
    assert not any(parameter.requires_grad for name, parameter in model.named_parameters() if "lora" in name)
    remove_adapter(model, "blue")
    assert {tuple(layer.active_adapters) for layer in model.modules() if "lora_A" in layer._modules} == {("red",)}
    remove_adapter(model, "red")
    assert not any("lora_A" in layer._modules for layer in model.modules()) and not hasattr(model, "peft_config")
    saved = peft.get_peft_model(family_model("llama"), lora_config(("q_proj",), modules_to_save=["lm_head"]))
    with pytest.raises(ValueError, match="expected `set_adapter` of the PeftModel"):
        active_names(saved.get_base_model(), "default")
