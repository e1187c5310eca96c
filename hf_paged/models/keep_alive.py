"""Aliases of tensors: they keep memory that kernels read by address allocated, even if a parameter is re-pointed."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def keep_alive(tensors: Sequence[torch.Tensor], held: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return aliases of all `tensors`: the `held` tensors if they still are aliases, else new ones."""
    # Compare storages: after a resize, another storage that nothing keeps alive may have the old address.
    is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]
    are_held = len(held) == len(tensors) and all(map(is_alias, held, tensors))
    return held if are_held else [tensor.detach() for tensor in tensors]
