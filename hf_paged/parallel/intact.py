"""Is a sharded model still what loading made of it? If not, no forward of it is right, stock's included."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_paged.errors import Reason
from hf_paged.parallel.group import group_of
from hf_paged.parallel.layers import Sharded, is_sharded

_LOAD_AGAIN = "A layer was replaced or resized after loading. Change the checkpoint and load it again."


def broken_part(model: Any) -> Reason | None:
    """Which module makes this rank's part of a causal LM compute something else than a part, or None.

    A tuner's own matrices see a part of the columns, and their product misses the sum over ranks; a layer that is
    whole, or cut otherwise, does not fit its neighbours.
    """
    group = group_of(model)
    if not group.is_parallel:
        return None
    for name, module in model.named_modules():
        inner = getattr(module, "base_layer", None)
        if inner is not None and is_sharded(inner):
            return Reason("{} wraps a layer that is sharded over ranks, which its adapter is not: expected a "
                          "checkpoint that the adapter is merged into (merge_and_unload, then save_pretrained)", name,
                          remedy="Merge the adapter, save the model, and load that.")
        if isinstance(module, Sharded):
            if module.group is not group:
                return Reason("{} is sharded over other ranks than the model", name, remedy=_LOAD_AGAIN)
            for key, parameter in module._parameters.items():  # type: ignore[attr-defined]
                if parameter is not None and tuple(parameter.shape) != (part := module.shard_of(key).part_shape):
                    return Reason("{}.{} has shape {}: expected this rank's part, {}", name, key,
                                  tuple(parameter.shape), part, remedy=_LOAD_AGAIN)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            return Reason("{} is a whole {} in a model that is sharded over ranks", name, type(module).__name__,
                          remedy=_LOAD_AGAIN)
    return None
