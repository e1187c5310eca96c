"""Copies of a dense decoder's linear layers in the dtype of autocast, those with one input side by side."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_paged.models.cuda_driver import DriverError
from hf_paged.models.plain_linear import is_plain_linear
from hf_paged.models.shadow import Shadow
from hf_paged.models.virtual_memory import reserve
from hf_paged.parallel.group import SINGLE, ParallelGroup

logger = logging.getLogger(__name__)

_ALIGNMENT = 512  # bytes

Groups = Mapping[str, tuple[Any, ...]]  # of linear layers with one input, by name


class CopiedLinears(NamedTuple):
    """What linear layers with one input multiply with in place of their own: [sum n_i, k], and [sum n_i] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, hidden: torch.Tensor,
                 linear: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ParallelGroup]:
        """As `RowProduct`."""
        return linear(hidden, self.weight, self.bias), SINGLE


class _Place(NamedTuple):
    """Where a group's copies lie: ``sizes`` rows each of this shape, and biases after them or not."""

    name: str
    sizes: list[int]
    row: torch.Size
    has_bias: bool

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        rows = sum(self.sizes)
        return [(rows, *self.row), (rows,)] if self.has_bias else [(rows, *self.row)]


class CopiedWeights:
    """Copies for the groups in which a parameter has another dtype; the others' own parameters are as they have to be.

    The memory stays where it is, since CUDA graphs read from it. Where the device can map memory, it goes (`give_back`)
    and comes back (`take_back`) while its addresses stay.

    Args:
        groups: of plain layers, those with equal inputs together, whose biases are there for all or for none.
        dtype: of the copies.

    Raises:
        torch.OutOfMemoryError: too little memory is free.
    """

    def __init__(self, groups: Groups, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.by_name: dict[str, CopiedLinears] = {}
        self._layout = _layout(groups, dtype)
        self._shadow = Shadow([])
        self._places: list[_Place] = []
        self._device = torch.device("cpu")
        for name, linears in _to_copy(groups, dtype):
            weights = [linear.weight for linear in linears]
            sizes = [len(weight) for weight in weights]
            self._places.append(_Place(name, sizes, weights[0].shape[1:], linears[0].bias is not None))
            self._device = weights[0].device
        self._num_bytes = sum(_whole(shape, dtype) for place in self._places for shape in place.shapes)
        self._memory = reserve(self, self._device, 1, self._num_bytes) if self._places else None
        self.take_back()

    def take_back(self) -> None:
        """Have memory again, where there is none; what is in it has to be made anew (`refresh`).

        Raises:
            torch.OutOfMemoryError: too little memory is free; nothing changed.
        """
        if self.is_here:
            return
        with torch.inference_mode(False), torch.no_grad():
            tensors = self._tensors()
            targets: list[torch.Tensor] = []
            by_name: dict[str, CopiedLinears] = {}
            for place in self._places:
                weight, bias = next(tensors), next(tensors) if place.has_bias else None
                by_name[place.name] = CopiedLinears(weight, bias)
                targets += [part for one in (weight, bias) if one is not None for part in one.split(place.sizes)]
        self._shadow = Shadow(targets)
        self.by_name = by_name  # last: it says that all is here

    def give_back(self) -> bool:
        """Give the memory back and keep its addresses; False where that cannot be: then it goes with this object."""
        if self._memory is None:
            return False
        self.by_name, self._shadow = {}, Shadow([])
        try:
            self._memory.release()
        except DriverError:
            return False
        return True

    @property
    def is_here(self) -> bool:
        """Is there memory for all copies?"""
        return len(self.by_name) == len(self._places)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Of every shape in turn."""
        shapes = [shape for place in self._places for shape in place.shapes]
        pieces: Iterator[torch.Tensor] | None = None
        if self._memory is not None:
            try:
                self._memory.back(self._num_bytes)
            except DriverError as error:
                logger.warning("hf_paged: copies of weights lie in torch's memory: %s", error)
                self._memory.close()
                self._memory = None
            else:
                sizes = [_whole(shape, self.dtype) for shape in shapes]
                pieces = iter(self._memory.tensors(self._num_bytes)[0].split(sizes))
        if pieces is None:
            return iter([torch.empty(shape, dtype=self.dtype, device=self._device) for shape in shapes])
        return iter([next(pieces).view(self.dtype)[: math.prod(shape)].view(shape) for shape in shapes])

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


def _whole(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of a tensor's place, so that the next one is aligned as torch's allocator would align it."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


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
