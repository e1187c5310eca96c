"""Several linear layers' weights side by side in memory and read as one, while each stays a parameter of its own.

Every weight has an ordinary storage of its own. A view of one merged tensor would share its storage, which accelerate
and safetensors answer by dropping or refusing keys, and which offloading could not resize.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from hf_paged.device.adjacent import AdjacentMemory, are_adjacent
from hf_paged.models.plain_linear import is_plain_product

_STORAGE, _NBYTES = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes
_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


class MergedWeight:
    """The weights [n_i, k] of linear layers as one [sum n_i, k], for one GEMM in place of several.

    Keeps the parameters (`weights`), but none of the memory that they are moved away from.
    """

    def __init__(self, weights: Sequence[nn.Parameter], pieces: Sequence[torch.Tensor], memory: AdjacentMemory) -> None:
        """Move `weights` to `pieces`, which are adjacent, and may be where they are."""
        self.weights = tuple(weights)
        self._places = places(pieces)
        # Under inference mode the memory could not be written by an optimizer later.
        with torch.inference_mode(False), torch.no_grad():
            self._merged = memory.read_together(pieces)
            for weight, piece in zip(weights, pieces, strict=True):
                if weight.data_ptr() != piece.data_ptr():
                    piece.copy_(weight.data)
                    weight.data = piece

    def current(self) -> torch.Tensor | None:
        """The merged tensor, or None once one of the weights has other memory, or less than it needs.

        It owns nothing: whoever reads it keeps the memory of its `weights` meanwhile.
        """
        return self._merged if places(self.weights) == self._places else None

    def lies_in(self, parameters: Set[int]) -> bool:
        """Are all of the weights among a model's parameters, given by their ids? If not, they were replaced."""
        return all(id(weight) in parameters for weight in self.weights)

    def belongs_to(self, linears: Sequence[nn.Module]) -> bool:
        """True while `linears` are plain layers that hold the very parameters that were merged."""
        pairs = zip(linears, self.weights, strict=True)
        return all(is_plain_product(linear) and linear.weight is weight for linear, weight in pairs)


def merge(groups: Sequence[Sequence[nn.Module]], memory: AdjacentMemory) -> list[MergedWeight | None]:
    """Merge the weights of each group of linear layers; all that have to move are placed at once, which wastes least.

    None for a group with a layer that is not plain, whose weight is not alone with its memory, or that found no place.
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


def places(tensors: Sequence[torch.Tensor]) -> list[list]:
    """Where tensors lie, and as what; column by column: rows of a few hundred tensors take longer to make."""
    return [
        list(map(torch.Tensor.data_ptr, tensors)), list(map(torch.Tensor.stride, tensors)),
        list(map(_SHAPE, tensors)), list(map(_DTYPE, tensors)), list(map(_NBYTES, map(_STORAGE, tensors))),
    ]


def _adjacent_places(groups: list[list[nn.Parameter]], memory: AdjacentMemory) -> list[list[torch.Tensor] | None]:
    together = memory.place([weight for weights in groups for weight in weights])
    if together is None:
        return [memory.place(weights) for weights in groups]
    pieces = iter(together)
    return [[next(pieces) for _ in weights] for weights in groups]


def _mergeable(linears: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The weights, or none where one is not a plain layer's, is unlike the others or shares its memory."""
    if not all(map(is_plain_product, linears)):
        return []
    weights: list[Any] = [linear.weight for linear in linears]
    first = weights[0]
    alike = all((w.dtype, w.device, w.shape[1:]) == (first.dtype, first.device, first.shape[1:]) for w in weights)
    if not alike or not all(map(_fills_its_storage, weights)):
        return []
    # One with an alias has to stay, or whoever holds the alias would go on writing to the old place.
    return weights if are_adjacent(weights) or not any(map(_has_alias, weights)) else []


def _has_alias(tensor: torch.Tensor) -> bool:
    """Does anybody else (a state_dict, a `.data`, a numpy array) hold this tensor's storage?"""
    fresh = torch.empty(1, dtype=torch.uint8, device="cpu")
    users, alone = (torch._C._storage_Use_Count(t.untyped_storage()._cdata) for t in (tensor, fresh))
    return users > alone


def _fills_its_storage(weight: torch.Tensor) -> bool:
    """An ordinary parameter with a storage of exactly its size: no part of a flat buffer, nor other processes'."""
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
