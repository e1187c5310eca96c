"""Copies of a dense decoder's linear layers in the dtype of autocast, layers with one input side by side."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from itertools import compress
from typing import Any, NamedTuple

import torch

from hf_paged.device.cuda_driver import DriverError
from hf_paged.device.virtual_memory import reserve
from hf_paged.kernels.lora.lora_expand import Delta
from hf_paged.models.adapted_layers import AdaptedLayers
from hf_paged.models.linear_groups import LinearGroups
from hf_paged.models.lora_rows import AdapterRows
from hf_paged.models.plain_linear import product_and_delta
from hf_paged.models.shadow import Shadow
from hf_paged.parallel.group import SINGLE, ParallelGroup

logger = logging.getLogger(__name__)

_ALIGNMENT = 512  # bytes


class CopiedLinears(NamedTuple):
    """Merged copies that linear layers with one input multiply with: weight [sum n_i, k], bias [sum n_i] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    lora: AdaptedLayers | None = None

    def __call__(self, hidden: torch.Tensor, linear: Callable[..., torch.Tensor],
                 rows: AdapterRows | None = None,
                 shrunk: torch.Tensor | None = None) -> tuple[torch.Tensor, ParallelGroup, Delta | None]:
        """Compute the layers' product as `RowProduct` does."""
        product, delta = product_and_delta(self.lora, hidden, self.weight, self.bias, linear, rows, shrunk)
        return product, SINGLE, delta


class _Place(NamedTuple):
    """Layout of a group's copies: for each layer ``sizes`` rows of shape ``row``; then biases, if it has them."""

    name: str
    sizes: list[int]
    row: torch.Size
    has_bias: bool

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        rows = sum(self.sizes)
        return [(rows, *self.row), (rows,)] if self.has_bias else [(rows, *self.row)]


class CopiedWeights:
    """Copies for the groups in which a parameter has another dtype; other groups use their own parameters.

    The copies' addresses do not change, since CUDA graphs read from them. Where the device can map memory, `unmap`
    releases it and `restore` allocates it at the same addresses.

    Args:
        groups: plain layers, grouped by equal inputs; in a group all layers have biases or none has.
        dtype: dtype of the copies.

    Raises:
        torch.OutOfMemoryError: too little memory is free.
    """

    def __init__(self, groups: LinearGroups, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._fitting: tuple | None = None  # sizes and tensors that `fit` last accepted
        self._selected: tuple[tuple, list[bool]] | None = None  # dtypes, and which tensors are copied then
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
        self.restore()

    def restore(self) -> None:
        """Allocate the memory again after `unmap`; `refresh` has to fill it.

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
        self.by_name = by_name  # last: `is_here` reads it

    def unmap(self) -> bool:
        """Release the memory and keep its addresses; returns False if only the end of this object can free it."""
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
        """Whether there is memory for all copies."""
        return len(self.by_name) == len(self._places)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Allocate a tensor of every shape in turn."""
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

    def fit(self, groups: LinearGroups, dtype: torch.dtype) -> bool:
        """Return whether these are the copies that such layers need."""
        return dtype == self.dtype and self._fit(groups, groups.tensors())

    def refresh(self, groups: LinearGroups, checksum: torch.Tensor | None) -> None:
        """Renew the copies, as `Shadow.refresh` does, from the parameters that the layers have now."""
        if self.by_name:
            self._shadow.refresh(self._sources(groups, groups.tensors()), checksum)

    def are_stale(self, groups: LinearGroups) -> bool:
        """Return whether the copies do not fit the layers any more, or are stale (`Shadow.is_stale`)."""
        tensors = groups.tensors()
        return not self._fit(groups, tensors) or self._shadow.is_stale(self._sources(groups, tensors))

    def _fit(self, groups: LinearGroups, tensors: list[torch.Tensor | None]) -> bool:
        """Return whether the layout fits; compares it only if a dtype, shape or device changed since it last fitted."""
        read = groups.sizes, [None if t is None else (t.dtype, t.shape, t.device) for t in tensors]
        if read != self._fitting:
            if self._layout != _layout(groups, self.dtype):
                return False
            self._fitting = read
        return True

    def _sources(self, groups: LinearGroups, tensors: list[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the tensors of `_to_copy`, which is called again only if a tensor's dtype changed."""
        dtypes = groups.sizes, [None if t is None else t.dtype for t in tensors]
        if self._selected is None or self._selected[0] != dtypes:
            names = {name for name, _ in _to_copy(groups, self.dtype)}
            copied = (name in names for name, size in groups.sizes for _ in range(size))
            self._selected = dtypes, [yes and tensor is not None for yes, tensor in zip(copied, tensors, strict=True)]
        found: list[Any] = list(compress(tensors, self._selected[1]))
        return found

    def tensors(self) -> list[torch.Tensor]:
        """Return all copies, merged."""
        return [t for copied in self.by_name.values() for t in (copied.weight, copied.bias) if t is not None]

    @property
    def nbytes(self) -> int:
        return self._shadow.nbytes


def _whole(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return a tensor's bytes, rounded up so that the next tensor is aligned as torch's allocator would align it."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def copied_bytes(groups: LinearGroups, dtype: torch.dtype) -> int:
    """Return the bytes that `CopiedWeights` would take."""
    return sum(t.numel() for _, linears in _to_copy(groups, dtype) for t in _tensors(linears)) * dtype.itemsize


def _to_copy(groups: LinearGroups, dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name, linears in groups.by_name.items():
        if any(tensor.dtype != dtype for tensor in _tensors(linears)):
            yield name, linears


def _tensors(linears: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return weights, then biases."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return [*(linear.weight for linear in linears), *biases]


def _layout(groups: LinearGroups, dtype: torch.dtype) -> list[tuple]:
    return [(name, [(t.shape, t.device) for t in _tensors(linears)]) for name, linears in _to_copy(groups, dtype)]
