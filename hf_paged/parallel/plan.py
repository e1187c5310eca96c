"""Sharding of a stock model on the meta device to one rank's part, by transformers' own tensor-parallel plan.

`broken_part` finds what was changed in a sharded model since: every forward of it is wrong then, also stock's.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_paged.errors import Reason, UnsupportedModelError
from hf_paged.parallel.adapters import is_cut_like_its_layer
from hf_paged.parallel.group import ParallelGroup, group_of
from hf_paged.parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    Sharded,
    VocabParallelEmbedding,
    VocabParallelHead,
    even_range,
    is_sharded,
    kv_head_range,
    local_kv_heads,
    shard_experts,
)

# Models whose forwards read sizes only from their weights and from attributes that `parallelize` makes local.
SUPPORTED = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
_VOCABULARY: dict[str, type[nn.Module]] = {"model.embed_tokens": nn.Embedding, "lm_head": nn.Linear}
_EXPERTS = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
_ACCEPTED = "linear layers of style colwise, rowwise or replicated..., and experts of style moe_tp_experts"
_LOAD_AGAIN = "A layer was replaced or resized after loading. Change the checkpoint and load it again."


def parallelize(model: PreTrainedModel, group: ParallelGroup) -> None:
    """Replace a causal LM's layers in place by this rank's parts of them; parameters keep their names.

    Over several ranks the model can neither be saved nor resized from then on.

    Args:
        model: a stock model, with parameters on the meta device.
        group: the ranks that hold the model together.

    Raises:
        UnsupportedModelError: a class, a layer or a style of the plan cannot be sharded; the message names it.
        ValueError: heads or an inner size do not divide, named; parameters are not on the meta device.
    """
    plan = _plan_of(model)
    styled = [(name, module, plan.get(_generic(name))) for name, module in model.named_modules()]
    for name, module, style in styled:
        _check(name, module, style, plan)
    if type(model).__name__ not in SUPPORTED:
        raise _refused(model, "its class is another")
    if (device := model.lm_head.weight.device).type != "meta":
        raise ValueError(f"a model on device {device}: expected one on the meta device, whose weights are loaded after")
    even_range(model.config.num_attention_heads, 0, group.size, "num_attention_heads")
    for name, module, style in styled:
        if style == "moe_tp_experts":
            inner = module.down_proj.shape[2]
            shard_experts(module, group, even_range(inner, group.rank, group.size, f"the inner size of {name}"))
        elif style in ("colwise", "rowwise") and name not in _VOCABULARY:
            owner, _, key = name.rpartition(".")
            setattr(model.get_submodule(owner), key, _part_of(module, name, style, model.config, group))
    kv_heads = local_kv_heads(model.config.num_key_value_heads, group.size)
    for layer in model.model.layers:
        layer.self_attn.num_key_value_groups = model.config.num_attention_heads // group.size // kv_heads
    model.model.embed_tokens = VocabParallelEmbedding(model.model.embed_tokens, group)
    model.lm_head = VocabParallelHead(model.lm_head, group)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    marked: Any = model
    marked.parallel_group = group
    if group.is_parallel:
        marked.resize_token_embeddings = _refuse_resizing


def _refuse_resizing(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "resize_token_embeddings on a model that is sharded over several ranks: expected a checkpoint that was resized "
        "before (tensor_parallel_size=1, or transformers' from_pretrained)"
    )


def _generic(name: str) -> str:
    """Return the name that a plan has for a module: one for all layers."""
    return re.sub(r"\b\d+\b", "*", name)


def _plan_of(model: PreTrainedModel) -> dict[str, str]:
    """Return the plan that transformers' `post_init` merged: the class's for the head, the config's for the layers."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    if not any("layers." in name for name in plan):
        raise _refused(model, "transformers has no tensor-parallel plan for its layers (config.base_model_tp_plan)")
    return plan


def _check(name: str, module: nn.Module, style: str | None, plan: dict[str, str]) -> None:
    if name in _VOCABULARY:
        if type(module) is not _VOCABULARY[name]:
            raise _refused(module, f"expected a torch.nn.{_VOCABULARY[name].__name__} in its place", name)
    elif style in ("colwise", "rowwise"):
        if type(module) is not nn.Linear:
            raise _refused(module, f"style {style!r} of a layer that is no torch.nn.Linear", name)
    elif style == "moe_tp_experts":
        found = {key: plan.get(f"{_generic(name)}.{key}") for key, _ in module.named_parameters()}
        if found != _EXPERTS:
            raise _refused(module, f"experts whose parameters have the styles {found}", name)
    elif style is not None and not style.startswith("replicated"):
        raise _refused(module, f"style {style!r} of transformers' plan", name)
    elif style is None and isinstance(module, nn.Linear):
        raise _refused(module, "transformers' plan leaves it out", name)


def _refused(module: nn.Module, why: str, name: str = "") -> UnsupportedModelError:
    where = f"{name} ({type(module).__name__})" if name else type(module).__name__
    return UnsupportedModelError(
        f"{where} cannot be sharded over several ranks: {why}. Expected one of {', '.join(SUPPORTED)}, "
        f"with {_ACCEPTED}; or tensor_parallel_size=1"
    )


def _part_of(linear: Any, name: str, style: str, config: Any, group: ParallelGroup) -> nn.Linear:
    if style == "rowwise":
        columns = even_range(linear.in_features, group.rank, group.size, f"in_features of {name}")
        return RowParallelLinear(linear, group, columns)
    if name.endswith(("self_attn.k_proj", "self_attn.v_proj")):
        head_dim = linear.out_features // config.num_key_value_heads
        first, last = kv_head_range(config.num_key_value_heads, group.rank, group.size)
        return ColumnParallelLinear(linear, group, (first * head_dim, last * head_dim))
    rows = even_range(linear.out_features, group.rank, group.size, f"out_features of {name}")
    return ColumnParallelLinear(linear, group, rows)


def broken_part(model: Any) -> Reason | None:
    """Return which module of this rank's part of a causal LM breaks the sharding, or None.

    A tuner's matrices that are not cut like their layer read only a part of the columns, and their product lacks the
    sum over ranks; a layer that is whole, or cut otherwise, does not fit its neighbours.
    """
    group = group_of(model)
    if not group.is_parallel:
        return None
    matrices: set[int] = set()  # of adapters that are cut right, where one matrix is whole
    for name, module in model.named_modules():
        inner = getattr(module, "base_layer", None)
        if inner is not None and is_sharded(inner):
            if not is_cut_like_its_layer(module):
                return Reason("{} wraps a layer that is sharded over ranks, which its adapter is not", name,
                              remedy="Load the adapter by `load_adapter` of the PagedGenerator or Engine, or merge it "
                                     "and load the merged model.")
            matrices |= {id(matrix) for key in ("lora_A", "lora_B") for matrix in getattr(module, key).values()}
        if isinstance(module, Sharded):
            if module.group is not group:
                return Reason("{} is sharded over other ranks than the model", name, remedy=_LOAD_AGAIN)
            for key, parameter in module._parameters.items():  # type: ignore[attr-defined]
                if parameter is not None and tuple(parameter.shape) != (part := module.shards[key].part_shape):
                    return Reason("{}.{} has shape {}: expected this rank's part, {}", name, key,
                                  tuple(parameter.shape), part, remedy=_LOAD_AGAIN)
        elif isinstance(module, (nn.Linear, nn.Embedding)) and id(module) not in matrices:
            return Reason("{} is a whole {} in a model that is sharded over ranks", name, type(module).__name__,
                          remedy=_LOAD_AGAIN)
    return None
