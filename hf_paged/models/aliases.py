"""Tensors that keep memory allocated which is read by its address, whoever re-points a parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def aliases(tensors: Sequence[torch.Tensor], held: list[torch.Tensor]) -> list[torch.Tensor]:
    """Aliases of all `tensors`: those that were `held` before, if they still are."""
    # By storage: one that was resized may have lent its address to another, which nobody holds.
    is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]
    are_held = len(held) == len(tensors) and all(map(is_alias, held, tensors))
    return held if are_held else [tensor.detach() for tensor in tensors]
