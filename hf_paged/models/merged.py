"""Weights of several linear layers side by side in memory, read as one, while each stays a parameter of its own.

Every weight has an ordinary storage of its own. A view of one merged tensor would share its storage: accelerate and
safetensors drop or refuse keys of shared storages, and offloading cannot resize them.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import nn

from hf_paged.device.adjacent import AdjacentMemory, are_adjacent
from hf_paged.guards.model_watch import place_columns
from hf_paged.models.layer_ops import is_plain_linear


class MergedWeight:
    """Weights [n_i, k] of linear layers as one [sum n_i, k], for one GEMM in place of several.

    Keeps the parameters (`weights`) alive, but none of the memory that they are moved away from.
    """

    def __init__(self, weights: Sequence[nn.Parameter], pieces: Sequence[torch.Tensor], memory: AdjacentMemory) -> None:
        """Move `weights` to the adjacent `pieces`, where they may lie already."""
        self.weights = tuple(weights)
        self._places = place_columns(pieces)
        # Memory made under inference mode could not be written by an optimizer later.
        with torch.inference_mode(False), torch.no_grad():
            self._merged = memory.read_together(pieces)
            for weight, piece in zip(weights, pieces, strict=True):
                if weight.data_ptr() != piece.data_ptr():
                    piece.copy_(weight.data)
                    weight.data = piece

    def current(self) -> torch.Tensor | None:
        """Return the merged tensor; None if one of the weights has other memory now, or less than it needs.

        The tensor owns no memory: its readers have to keep that of its `weights` alive.
        """
        return self._merged if place_columns(self.weights) == self._places else None

    def lies_in(self, parameters: Set[int]) -> bool:
        """Return whether all weights are among a model's parameters, given by their ids; if not, they were replaced."""
        return all(id(weight) in parameters for weight in self.weights)

    def belongs_to(self, linears: Sequence[nn.Module]) -> bool:
        """Return whether `linears` are plain layers that hold the very parameters that were merged."""
        pairs = zip(linears, self.weights, strict=True)
        return all(_is_plain_product(linear) and linear.weight is weight for linear, weight in pairs)


def merge(groups: Sequence[Sequence[nn.Module]], memory: AdjacentMemory) -> list[MergedWeight | None]:
    """Merge the weights of each group of linear layers; moving weights are placed in one go, which wastes least memory.

    None for a group with a layer that is not plain, with a weight that shares its memory, or without free memory.
    """
    groups_of_weights = [_mergeable(linears) for linears in groups]
    moving = [weights for weights in groups_of_weights if weights and not are_adjacent(weights)]
    with torch.inference_mode(False), torch.no_grad():
        found = iter(_adjacent_places(moving, memory))
    merged: list[MergedWeight | None] = []
    for weights in groups_of_weights:
        pieces = None
        if weights:
            pieces = [weight.data for weight in weights] if are_adjacent(weights) else next(found)
        merged.append(MergedWeight(weights, pieces, memory) if pieces else None)
    return merged


def _adjacent_places(groups: list[list[nn.Parameter]], memory: AdjacentMemory) -> list[list[torch.Tensor] | None]:
    together = memory.place([weight for weights in groups for weight in weights])
    if together is None:
        return [memory.place(weights) for weights in groups]
    pieces = iter(together)
    return [[next(pieces) for _ in weights] for weights in groups]


def _is_plain_product(linear: nn.Module) -> bool:
    return is_plain_linear(linear) and linear.bias is None


def _mergeable(linears: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the weights; none if one is not a plain layer's, is unlike the others or shares its memory."""
    if not all(map(_is_plain_product, linears)):
        return []
    weights: list[Any] = [linear.weight for linear in linears]
    first = weights[0]
    alike = all((w.dtype, w.device, w.shape[1:]) == (first.dtype, first.device, first.shape[1:]) for w in weights)
    if not alike or not all(map(_fills_its_storage, weights)):
        return []
    # A weight with an alias must not move: writes through the alias would go to the old memory.
    return weights if are_adjacent(weights) or not any(map(_has_alias, weights)) else []


def _has_alias(tensor: torch.Tensor) -> bool:
    """Return whether another object (a state_dict, a `.data`, a numpy array) holds this tensor's storage."""
    fresh = torch.empty(1, dtype=torch.uint8, device="cpu")
    users, alone = (torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (tensor, fresh))
    return users > alone


def _fills_its_storage(weight: torch.Tensor) -> bool:
    """Return whether a parameter has a storage of exactly its size: no part of a flat buffer, not shared memory."""
    return (
        type(weight) is nn.Parameter
        and weight.numel() > 0
        and weight.is_contiguous()
        and weight.storage_offset() == 0
        and weight.untyped_storage().nbytes() == weight.numel() * weight.element_size()
        and weight.device.type != "meta"
        and not (weight.device.type == "cpu" and weight.is_shared())
        and not weight.is_inference()
    )


def keep_alive(tensors: Sequence[torch.Tensor], held: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return aliases of all `tensors`: the `held` tensors if they still are aliases, else new ones."""
    # Compare storages: after a resize, another storage that nothing keeps alive may have the old address.
    is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]
    are_held = len(held) == len(tensors) and all(map(is_alias, held, tensors))
    return held if are_held else [tensor.detach() for tensor in tensors]
