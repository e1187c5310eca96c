"""What `parallelize` makes of a model on the meta device, and which models it refuses, naming the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from accelerate import init_empty_weights
from derived_models import EXPERTS, LLAMA4
from family_models import SHAPE, VARIANTS
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_paged.errors import UnsupportedModelError
from hf_paged.models import find_executor
from hf_paged.models.derivation.executor import DerivedExecutor
from hf_paged.models.fused import FusedExecutor
from hf_paged.parallel.group import SINGLE, ParallelGroup, group_of
from hf_paged.parallel.layers import (
    ColumnParallelLinear,
    GatheringLinear,
    ReplicatedLinear,
    RowParallelLinear,
    ShardedEmbedding,
    ShardedExperts,
    SplittingLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
    shard_of,
)
from hf_paged.parallel.plan import broken_part, parallelize

SUPPORTED = ["llama", "llama-3", "mistral", "qwen2", "qwen3-moe", "qwen3-moe-mixed"]


def meta_model(variant: str, **overrides: Any) -> PreTrainedModel:
    name, settings = VARIANTS[variant]
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(getattr(transformers, name)(**(SHAPE | settings | overrides)))


@pytest.mark.each_value
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("variant", SUPPORTED)
def test_every_layer_has_its_parts_shape_and_stocks_name(variant: str, size: int) -> None:
    stock = meta_model(variant)
    model = meta_model(variant)
    parallelize(model, ParallelGroup(size - 1, size))
    names = [[name for name, _ in one.named_parameters(remove_duplicate=False)] for one in (model, stock)]
    assert names[0] == names[1]
    for name, parameter in model.named_parameters():
        owner, _, key = name.rpartition(".")
        assert shard_of(model.get_submodule(owner), key).take(stock.get_parameter(name)).shape == parameter.shape, name
    assert {type(module) for module in model.modules() if isinstance(module, (nn.Linear, nn.Embedding))} == {
        ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, VocabParallelHead,
    }
    assert any(isinstance(m, ShardedExperts) for m in model.modules()) == variant.startswith("qwen3-moe")
    # Gate and up of a dense layer are not the experts', whose inner size is another.
    if variant != "qwen3-moe":
        mlp, inner = model.model.layers[0].mlp, 96 // size
        assert (mlp.gate_proj.out_features, mlp.down_proj.in_features) == (inner, inner)
    assert group_of(model).size == size


@pytest.mark.parametrize(("size", "heads", "groups"), [(1, 2, 2), (2, 1, 2), (4, 1, 1)])
def test_kv_heads_fewer_than_ranks_are_held_by_several(size: int, heads: int, groups: int) -> None:
    for rank in range(size):
        model = meta_model("llama")
        parallelize(model, ParallelGroup(rank, size))
        attention = model.model.layers[0].self_attn
        first = rank * 2 // size
        assert attention.k_proj.shards["weight"].ranges == ((first * 16, (first + heads) * 16),)
        assert attention.v_proj.shards["weight"] == attention.k_proj.shards["weight"]
        assert attention.num_key_value_groups == groups
        assert attention.q_proj.out_features == 64 // size


def test_tied_embedding_and_head_are_one_parameter() -> None:
    model = meta_model("qwen2", tie_word_embeddings=True, vocab_size=250)
    parallelize(model, ParallelGroup(1, 2))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.shards["weight"] == model.model.embed_tokens.shards["weight"]


def derived_meta_model(name: str, settings: dict[str, Any]) -> PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**(SHAPE | settings))
    with init_empty_weights():
        return getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")(config)


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("GptOss", {}, r"GptOssForCausalLM cannot.*no tensor-parallel plan"),
    ("StableLm", {}, r"StableLmForCausalLM cannot.*no tensor-parallel plan"),
    ("Llama4Text", LLAMA4, r"model\.layers\.1\.feed_forward\.experts \(Llama4TextExperts\) cannot.*styles {'gate_up"),
    ("GraniteSWA", {}, r"model\.layers\.0\.self_attn \(GraniteSWAAttention\) cannot.*style 'colwise' of its sinks"),
])
def test_classes_that_cannot_be_sharded(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message) as error:
        parallelize(derived_meta_model(name, settings), ParallelGroup(0, 2))
    assert "or tensor_parallel_size=1" in str(error.value)


@pytest.mark.parametrize("change", [
    lambda layer: layer.add_module("extra", nn.modules.linear.NonDynamicallyQuantizableLinear(2, 2, device="meta")),
    lambda layer: layer.mlp.add_module("up_proj", nn.Bilinear(2, 2, 2, device="meta")),
])
def test_layers_whose_part_is_not_known(change: Any) -> None:
    model = meta_model("llama")
    change(model.model.layers[1])
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\..*(leaves it out|that is no torch.nn.Linear)"):
        parallelize(model, ParallelGroup(0, 2))


def test_layers_that_each_rank_holds_whole_or_whose_heads_are_gathered() -> None:
    model = derived_meta_model("Olmoe", EXPERTS)
    model.model.layers[1].extra = nn.Linear(6, 3, device="meta")
    model.model.layers[1].places = nn.Embedding(6, 3, device="meta")
    parallelize(model, ParallelGroup(1, 2))
    layer = model.model.layers[1]
    assert type(layer.places) is nn.Embedding and layer.places.weight.shape == (6, 3) and broken_part(model) is None
    assert type(layer.extra) is ReplicatedLinear and layer.extra.weight.shape == (3, 6)
    assert type(layer.self_attn.q_proj) is GatheringLinear and layer.self_attn.q_proj.weight.shape == (32, 64)
    assert type(layer.self_attn.o_proj) is SplittingLinear and layer.self_attn.o_proj.weight.shape == (64, 32)
    assert layer.self_attn.num_key_value_groups == 2  # every rank attends by all heads


def test_embeddings_of_other_classes_keep_what_they_scale_by() -> None:
    model = meta_model("gemma2", vocab_size=250)
    parallelize(model, ParallelGroup(1, 2))
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, ShardedEmbedding) and embedding.scalar_embed_scale == 8.0
    assert (embedding.vocab_size, embedding.first, embedding.weight.shape) == (250, 128, (128, 64))


def test_numbers_of_heads_that_modules_keep_are_the_ranks() -> None:
    model = derived_meta_model("GPTJ", {"rotary_dim": 8})
    parallelize(model, ParallelGroup(1, 2))
    assert model.transformer.h[0].attn.num_attention_heads == 2


def test_a_known_plan_of_an_unknown_class() -> None:
    class Other(transformers.LlamaForCausalLM):
        pass

    for kind, executor in ((Other, DerivedExecutor), (transformers.LlamaForCausalLM, FusedExecutor)):
        with init_empty_weights():
            model = kind(transformers.LlamaConfig(**SHAPE))
        parallelize(model, ParallelGroup(0, 2))
        assert find_executor(model).func is executor  # type: ignore[union-attr]


@pytest.mark.parametrize(("variant", "size", "overrides", "message"), [
    ("llama", 3, {}, "num_attention_heads=4 does not divide by tensor_parallel_size=3"),
    ("llama", 4, {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3}, "num_key_value_heads=3"),
    ("llama", 4, {"intermediate_size": 98}, r"mlp\.gate_proj=98 does not divide by tensor_parallel_size=4"),
    ("qwen3-moe", 4, {"moe_intermediate_size": 30}, r"mlp\.experts=30 does not divide by tensor_parallel_size=4"),
])
def test_numbers_that_do_not_divide_are_named(variant: str, size: int, overrides: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parallelize(meta_model(variant, **overrides), ParallelGroup(0, size))


def test_weights_that_are_there_already() -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    before = model.lm_head.weight
    with pytest.raises(ValueError, match="on device cpu: expected one on the meta device"):
        parallelize(model, SINGLE)
    assert model.lm_head.weight is before and isinstance(before, torch.Tensor)
