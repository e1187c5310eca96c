"""Check that a sharded model is still as loading made it; otherwise every forward of it is wrong, also stock's."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_paged.errors import Reason
from hf_paged.parallel.adapters import is_cut_like_its_layer
from hf_paged.parallel.group import group_of
from hf_paged.parallel.layers import Sharded, is_sharded

_LOAD_AGAIN = "A layer was replaced or resized after loading. Change the checkpoint and load it again."


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
                if parameter is not None and tuple(parameter.shape) != (part := module.shard_of(key).part_shape):
                    return Reason("{}.{} has shape {}: expected this rank's part, {}", name, key,
                                  tuple(parameter.shape), part, remedy=_LOAD_AGAIN)
        elif isinstance(module, (nn.Linear, nn.Embedding)) and id(module) not in matrices:
            return Reason("{} is a whole {} in a model that is sharded over ranks", name, type(module).__name__,
                          remedy=_LOAD_AGAIN)
    return None
