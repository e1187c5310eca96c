"""Copies of a dense decoder's linear layers in the dtype of autocast, those with one input side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_paged.models.plain_linear import is_plain_linear
from hf_paged.models.shadow import Shadow, side_by_side
from hf_paged.parallel.group import SINGLE, ParallelGroup

Groups = Mapping[str, tuple[Any, ...]]  # of linear layers with one input, by name


class CopiedLinears(NamedTuple):
    """What linear layers with one input multiply with in place of their own: [sum n_i, k], and [sum n_i] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, hidden: torch.Tensor,
                 linear: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ParallelGroup]:
        """As `RowProduct`."""
        return linear(hidden, self.weight, self.bias), SINGLE


class CopiedWeights:
    """Copies for the groups in which a parameter has another dtype; the others' own parameters are as they have to be.

    The memory stays where it is, since CUDA graphs read from it.

    Args:
        groups: of plain layers, those with equal inputs together, whose biases are there for all or for none.
        dtype: of the copies.
    """

    def __init__(self, groups: Groups, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.by_name: dict[str, CopiedLinears] = {}
        self._layout = _layout(groups, dtype)
        targets: list[torch.Tensor] = []
        with torch.inference_mode(False), torch.no_grad():
            for name, linears in _to_copy(groups, dtype):
                weight, parts = side_by_side([linear.weight for linear in linears], dtype)
                bias = None
                targets += parts
                if linears[0].bias is not None:
                    bias, parts = side_by_side([linear.bias for linear in linears], dtype)
                    targets += parts
                self.by_name[name] = CopiedLinears(weight, bias)
        self._shadow = Shadow(targets)

    def fit(self, groups: Groups, dtype: torch.dtype) -> bool:
        """Are these the copies that such layers need?"""
        return self._layout == _layout(groups, dtype)

    def refresh(self, groups: Groups, checksum: torch.Tensor | None) -> None:
        """As `Shadow.refresh`, from the parameters that the layers have now."""
        if self.by_name:
            self._shadow.refresh(_sources(groups, self.dtype), checksum)

    def are_stale(self, groups: Groups) -> bool:
        """As `Shadow.is_stale`."""
        return not self.fit(groups, self.dtype) or self._shadow.is_stale(_sources(groups, self.dtype))

    def tensors(self) -> list[torch.Tensor]:
        """All copies, merged."""
        return [tensor for copied in self.by_name.values() for tensor in copied if tensor is not None]

    @property
    def nbytes(self) -> int:
        return self._shadow.nbytes


def can_be_copied(linears: tuple[nn.Module, ...]) -> bool:
    """Are these plain layers of one GPU's whole model, with biases in all of them or in none?"""
    plain = all(type(linear) is nn.Linear and is_plain_linear(linear) for linear in linears)
    return plain and len({linear.bias is None for linear in linears}) == 1


def copied_bytes(groups: Groups, dtype: torch.dtype) -> int:
    """Memory that `CopiedWeights` would take."""
    return sum(source.numel() for source in _sources(groups, dtype)) * dtype.itemsize


def _to_copy(groups: Groups, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, linears in groups.items():
        if any(tensor.dtype != dtype for tensor in _tensors(linears)):
            yield name, linears


def _sources(groups: Groups, dtype: torch.dtype) -> list[torch.Tensor]:
    return [tensor for _, linears in _to_copy(groups, dtype) for tensor in _tensors(linears)]


def _tensors(linears: tuple[Any, ...]) -> list[torch.Tensor]:
    """Weights, then biases."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return [*(linear.weight for linear in linears), *biases]


def _layout(groups: Groups, dtype: torch.dtype) -> tuple:
    return dtype, [(name, [(t.shape, t.device) for t in _tensors(linears)]) for name, linears in
                   _to_copy(groups, dtype)]
