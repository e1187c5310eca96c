"""The memory of a simulated GPU, which knows which bytes are tensors' and who wrote and read each."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

from .ptx import Fault

Array = np.ndarray[Any, Any]
_GAP = 4096  # bytes between tensors


def _bytes_of(storage: torch.UntypedStorage) -> Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()))


def span(addresses: Array, width: int) -> Array:
    """Return [N, width], each address and those behind it."""
    return addresses[:, None] + np.arange(width)


class GlobalMemory:
    """Tensors of a launch, each at an address of its own, as aligned as on a GPU, with gaps between them."""

    def __init__(self) -> None:
        self._placed: dict[int, tuple[int, torch.UntypedStorage]] = {}
        self._size = _GAP

    def place(self, tensor: torch.Tensor) -> int:
        """Return the address of a tensor; tensors of one storage share it."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self._placed:
            self._placed[key] = self._size, storage
            self._size = -(-(self._size + storage.nbytes() + _GAP) // 256) * 256
        return self._placed[key][0] + tensor.data_ptr() - key

    def begin(self) -> None:
        """Copy all tensors in."""
        self._bytes, self._is_there = np.zeros(self._size, np.uint8), np.zeros(self._size, bool)
        self._writer, self._reader = np.zeros((2, self._size), np.int32)
        for at, storage in self._placed.values():
            self._bytes[at:at + storage.nbytes()] = _bytes_of(storage)
            self._is_there[at:at + storage.nbytes()] = True

    def end(self) -> None:
        """Copy all tensors back."""
        for at, storage in self._placed.values():
            _bytes_of(storage)[:] = self._bytes[at:at + storage.nbytes()]

    def _check(self, addresses: Array, width: int) -> Array:
        if (addresses % width).any():
            raise Fault(f"{width} bytes at an address that is no multiple of it")
        if (addresses < 0).any() or (addresses + width > self._size).any():
            raise Fault("an address of no tensor")
        at = span(addresses, width)
        if not self._is_there[at].all():
            raise Fault("an address of no tensor")
        return at

    def load(self, addresses: Array, width: int, block: int) -> Array:
        """Return [N, width] bytes for a block, whose number counts from 1."""
        at = self._check(addresses, width)
        if ((self._writer[at] != 0) & (self._writer[at] != block)).any():
            raise Fault("a block reads what another one writes")
        self._reader[at] = np.where((self._reader[at] == 0) | (self._reader[at] == block), block, -1)
        return self._bytes[at]

    def store(self, addresses: Array, values: Array, block: int) -> None:
        """Write [N, width] bytes."""
        at = self._check(addresses, values.shape[1])
        others = (self._writer[at] != 0) & (self._writer[at] != block)
        if (others & (self._bytes[at] != values)).any():
            raise Fault("two blocks write other values to a place")
        if ((self._reader[at] != 0) & (self._reader[at] != block)).any():
            raise Fault("a block writes what another one reads")
        self._bytes[at], self._writer[at] = values, block

    def exchange(self, addresses: Array, values: Array, combine: Any) -> Array:
        """Write one after another what `combine` makes of what is there and a value, [N, width] bytes; return the
        former bytes. Other blocks may do so, too, and what was read or written before it may be changed afterwards."""
        at = self._check(addresses, values.shape[1])
        before = np.empty_like(values)
        for i, place in enumerate(at):
            before[i] = self._bytes[place]
            self._bytes[place] = combine(before[i], values[i])
        self._writer[:] = self._reader[:] = 0
        return before


class SharedMemory:
    """A block's. Each thread has a warp, and what a warp writes others read behind a barrier alone."""

    def __init__(self, size: int) -> None:
        self._bytes, self.is_written = np.zeros(size, np.uint8), np.zeros(size, bool)
        self._writer, self._readers = np.zeros(size, np.uint8), np.zeros(size, np.uint32)
        self._is_fenced = np.ones(size, bool)

    def _check(self, addresses: Array, width: int) -> Array:
        if (addresses % width).any() or (addresses < 0).any() or (addresses + width > len(self._bytes)).any():
            raise Fault(f"shared memory of {len(self._bytes)} bytes has no {width} at {addresses.max()}")
        return span(addresses, width)

    def load(self, addresses: Array, width: int, warps: Array) -> Array:
        """Return [N, width] bytes for threads of these warps, which count from 1."""
        at, warp = self._check(addresses, width), warps[:, None].astype(np.uint8)
        if not self.is_written[at].all():
            raise Fault("shared memory is read before it is written")
        if ((self._writer[at] != 0) & (self._writer[at] != warp)).any():
            raise Fault("a warp reads what another one writes, without a barrier")
        np.bitwise_or.at(self._readers, at, np.broadcast_to(np.uint32(1) << warp.astype(np.uint32), at.shape))
        return self._bytes[at]

    def store(self, addresses: Array, values: Array, warps: Array) -> None:
        """Write [N, width] bytes."""
        at, warp = self._check(addresses, values.shape[1]), warps[:, None].astype(np.uint8)
        changes = ~self.is_written[at] | (self._bytes[at] != values)
        others = (self._writer[at] != 0) & (self._writer[at] != warp)
        read = (self._readers[at] & ~(np.uint32(1) << warp.astype(np.uint32))) != 0
        if (changes & (others | read)).any():
            raise Fault("a warp writes what another one reads or writes, without a barrier")
        self._bytes[at], self.is_written[at], self._writer[at], self._is_fenced[at] = values, True, warp, False

    def of_matrix(self, addresses: Array, width: int) -> Array:
        """Return the bytes [..., width] that all warps read by a product of matrices, beside the threads."""
        at = addresses[..., None] + np.arange(width)
        if at.max() >= len(self._bytes) or not self.is_written[at].all():
            raise Fault("a product reads shared memory before it is written")
        if self._writer[at].any():
            raise Fault("a product reads what a warp writes, without a barrier")
        if not self._is_fenced[at].all():
            raise Fault("a product reads what was written without a fence of the proxy")
        self._readers[at] = np.uint32(0xFFFFFFFF)
        return self._bytes[at]

    def barrier(self) -> None:
        self._writer[:] = 0
        self._readers[:] = 0

    def fence(self) -> None:
        self._is_fenced[:] = True
