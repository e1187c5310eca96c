"""Sharding of a stock model on the meta device to one rank's part, by transformers' own tensor-parallel plan.

`broken_part` finds what was changed in a sharded model since: every forward of it is wrong then, also stock's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_paged.errors import Reason, UnsupportedModelError
from hf_paged.parallel.adapters import is_cut_like_its_layer, needs_cut
from hf_paged.parallel.group import ParallelGroup, group_of
from hf_paged.parallel.layers import (
    ColumnParallelLinear,
    GatheringLinear,
    ReplicatedLinear,
    RowParallelLinear,
    Sharded,
    SplittingLinear,
    VocabParallelHead,
    even_range,
    kv_head_range,
    local_kv_heads,
    shard_embedding,
    shard_experts,
)

# By style of transformers' plan: the class of a linear layer's part, and whether it is cut by rows of the weight.
_CUTS: dict[str, tuple[Any, bool]] = {
    "colwise": (ColumnParallelLinear, True), "rowwise": (RowParallelLinear, False),
    "colwise_gather_output": (GatheringLinear, True), "rowwise_split_input": (SplittingLinear, False),
}
# Styles of modules that each rank holds whole; the styles differ in their gradients.
_WHOLE = (None, "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
_EXPERTS = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
_ACCEPTED = f"linear layers of style {', '.join(_CUTS)} or replicated..., and experts of style moe_tp_experts"
_LOAD_AGAIN = "A layer was replaced or resized after loading. Change the checkpoint and load it again."


def parallelize(model: PreTrainedModel, group: ParallelGroup) -> None:
    """Replace a causal LM's layers in place by this rank's parts of them; parameters keep their names.

    Over several ranks the model can neither be saved nor resized from then on. A plan does not say whether the forward
    of a class computes the same over ranks: it is known of fused families, and has to be proved of other classes.

    Args:
        model: a stock model, with parameters on the meta device.
        group: the ranks that hold the model together.

    Raises:
        UnsupportedModelError: a layer or a style of the plan cannot be sharded; the message names it.
        ValueError: heads or an inner size do not divide, named; parameters are not on the meta device.
    """
    if (device := next(model.parameters()).device).type != "meta":
        raise ValueError(f"a model on device {device}: expected one on the meta device, whose weights are loaded after")
    cut(model, group)


def cut(model: PreTrainedModel, group: ParallelGroup) -> None:
    """Do the same as `parallelize` to a model on any device; parameters of the new layers have no values yet."""
    plan, config = _plan_of(model), model.config.get_text_config(decoder=True)
    vocabulary = _vocabulary_of(model)
    styled = [(name, module, plan.get(_generic(name))) for name, module in model.named_modules()
              if module not in vocabulary.values()]
    for name, module, style in styled:
        _check(name, module, style, plan)
    even_range(config.num_attention_heads, 0, group.size, "num_attention_heads")
    for name, module, style in styled:
        if style == "moe_tp_experts":
            inner = module.down_proj.shape[2]
            shard_experts(module, group, even_range(inner, group.rank, group.size, f"the inner size of {name}"))
        elif isinstance(module, nn.Linear):
            model.set_submodule(name, _part_of(module, name, style, config, group))
    owners = {name.rpartition(".")[0]: None for name, _, style in styled if style == "colwise"}
    _count_own_heads([model.get_submodule(name) for name in owners], config, group)
    (_, tokens), (name, head) = vocabulary.items()
    shard_embedding(tokens, group)
    model.set_submodule(name, VocabParallelHead(head, group))
    if model.config.tie_word_embeddings:
        model.get_output_embeddings().weight = tokens.weight
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
    if not any(".*." in name for name in plan):
        raise _refused(model, "transformers has no tensor-parallel plan for its layers (config.base_model_tp_plan)")
    return plan


def _vocabulary_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return embedding and head, by their paths."""
    found: dict[str, Any] = {}
    for module, kind in ((model.get_input_embeddings(), nn.Embedding), (model.get_output_embeddings(), nn.Linear)):
        name = next((name for name, one in model.named_modules() if one is module), "")
        if type(module) is not kind and not (kind is nn.Embedding and isinstance(module, kind)):
            raise _refused(module, f"expected a torch.nn.{kind.__name__} in its place", name)
        found[name] = module
    return found


def _check(name: str, module: Any, style: str | None, plan: dict[str, str]) -> None:
    of_parameters = {key: plan.get(f"{_generic(name)}.{key}") for key, _ in module.named_parameters(recurse=False)}
    if style == "moe_tp_experts":
        if of_parameters != _EXPERTS or module.gate_up_proj.shape[1] != 2 * module.down_proj.shape[2]:
            raise _refused(module, f"experts whose parameters have the styles {of_parameters}", name)
    elif key := next((key for key, of_it in of_parameters.items() if of_it is not None), None):
        raise _refused(module, f"style {of_parameters[key]!r} of its {key}", name)
    elif style in _CUTS and type(module) is not nn.Linear:
        raise _refused(module, f"style {style!r} of a layer that is no torch.nn.Linear", name)
    elif style not in _WHOLE and style not in _CUTS:
        raise _refused(module, f"style {style!r} of transformers' plan", name)
    elif isinstance(module, nn.Linear) and type(module) is not nn.Linear:
        raise _refused(module, "transformers' plan leaves it out", name)


def _refused(module: nn.Module, why: str, name: str = "") -> UnsupportedModelError:
    where = f"{name} ({type(module).__name__})" if name else type(module).__name__
    return UnsupportedModelError(f"{where} cannot be sharded over several ranks: {why}. Expected a class with a plan "
                                 f"of {_ACCEPTED}; or tensor_parallel_size=1")


def _part_of(linear: nn.Linear, name: str, style: str | None, config: Any, group: ParallelGroup) -> nn.Linear:
    if style is None or style not in _CUTS:
        return ReplicatedLinear(linear, group)
    kind, is_by_rows = _CUTS[style]
    heads = getattr(config, "num_key_value_heads", None) or 0
    if style == "colwise" and name.endswith((".k_proj", ".v_proj")) and heads and linear.out_features % heads == 0:
        size = linear.out_features // heads
        first, last = kv_head_range(heads, group.rank, group.size)
        part: nn.Linear = kind(linear, group, (first * size, last * size))
        return part
    total, what = (linear.out_features, "out_features") if is_by_rows else (linear.in_features, "in_features")
    part = kind(linear, group, even_range(total, group.rank, group.size, f"{what} of {name}"))
    return part


def _count_own_heads(modules: Iterable[nn.Module], config: Any, group: ParallelGroup) -> None:
    """Set the numbers of heads that modules keep to those of this rank's heads."""
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    local = {"num_heads": (heads, heads // group.size), "num_attention_heads": (heads, heads // group.size)}
    if kv_heads is not None:
        own = local_kv_heads(kv_heads, group.size)
        local["num_key_value_heads"] = kv_heads, own
        local["num_key_value_groups"] = heads // kv_heads, heads // group.size // own
    for module in modules:
        for name, (whole, part) in local.items():
            if vars(module).get(name) == whole:
                setattr(module, name, part)


def broken_part(model: Any) -> Reason | None:
    """Return which module of this rank's part of a causal LM breaks the sharding, or None.

    A tuner's matrices that are not cut like their layer read only a part of the columns, and their product lacks the
    sum over ranks; a layer that is whole, or cut otherwise, does not fit its neighbours.
    """
    group = group_of(model)
    if not group.is_parallel:
        return None
    tokens = model.get_input_embeddings()
    matrices: set[int] = set()  # of adapters that are cut right, where one matrix is whole
    for name, module in model.named_modules():
        if needs_cut(module):
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
        elif (isinstance(module, nn.Linear) and id(module) not in matrices) or module is tokens:
            return Reason("{} is a whole {} in a model that is sharded over ranks", name, type(module).__name__,
                          remedy=_LOAD_AGAIN)
    return None
