"""Memory of the KV pool, one tensor for K and one for V per layer, and its size in blocks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from hf_paged.device import virtual_memory
from hf_paged.device.virtual_memory import DriverError, VirtualMemory
from hf_paged.models import KVSpec
from hf_paged.models.base import position_elements

logger = logging.getLogger(__name__)


class KVCache:
    """K and V of every layer, each [num_blocks, block_size, num_kv_heads, head_dim], or as `KVSpec.pools` says.

    ``routes``: [num_blocks, block_size, *`KVSpec.routes`], the experts of each token; None if none are kept.

    Args:
        max_blocks: Maximum size; if the device supports virtual memory, addresses are reserved for it, so that the
            cache grows without moving and can release and restore its memory. If None, without virtual memory, or for
            pools that are not alike, the tensors are torch's and move when they grow.

    Raises:
        torch.OutOfMemoryError: If too little memory is free.
    """

    def __init__(self, spec: KVSpec, block_size: int, num_blocks: int, max_blocks: int | None = None) -> None:
        self.spec = spec
        self.block_size = block_size
        self.num_blocks = 0
        self.version = 0  # number of moves of the memory
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.routes: torch.Tensor | None = None
        self.states: Any = None  # the `StatePool` beside the pages, of a model with recurrent states
        self._memory: VirtualMemory | None = None
        if max_blocks is not None and spec.are_tensors_alike:
            self._reserve(num_blocks, max_blocks)
        if self._memory is None:
            self.layers = [(self._empty(num_blocks, shape.num_kv_heads, shape.head_dim),
                            self._empty(num_blocks, shape.num_kv_heads, shape.value_dim))
                           for shape in spec.pool_shapes()]
            self.routes = self._no_routes(num_blocks)
            self.num_blocks = num_blocks

    @property
    def keeps_addresses(self) -> bool:
        """Return whether the cache grows in place and returns to its addresses after `release`, as states do not."""
        return self._memory is not None and self.states is None

    def grow(self, num_blocks: int) -> None:
        """Enlarge to `num_blocks` and keep the content, in place or tensor by tensor (the peak is one tensor more).

        Raises:
            torch.OutOfMemoryError: If too little memory is free; the cache is unchanged.
            DriverError: If the driver refuses.
        """
        if self._memory is not None:
            self._back(self._memory, num_blocks)
            return
        self.version += 1
        for i in range(self.spec.num_layers):
            for j in range(2):
                old = self.layers[i][j]
                new = self._empty(num_blocks, *old.shape[2:])
                new[: self.num_blocks] = old[: self.num_blocks]  # a failed growth may have enlarged some tensors
                self.layers[i] = (new, self.layers[i][1]) if j == 0 else (self.layers[i][0], new)
                del old
        if self.routes is not None and (grown := self._no_routes(num_blocks)) is not None:
            grown[: self.num_blocks] = self.routes[: self.num_blocks]
            self.routes = grown
        self.num_blocks = num_blocks

    def release(self) -> None:
        """Release the memory but keep the addresses, which `grow` backs with memory again; the content is lost.

        Raises:
            DriverError: If the driver did not release all of it.
        """
        assert self._memory is not None, "only what keeps its addresses can come back to them"
        self.layers, self.num_blocks = [], 0
        self._memory.release()

    def close(self) -> None:
        """Release memory and addresses."""
        self.layers, self.routes, self.num_blocks = [], None, 0
        if self.states is not None:
            self.states.close()
        if self._memory is not None:
            self._memory.close()

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks in every layer; no target may be a source. Both int64 [N]."""
        for tensors in self.layers:
            for tensor in tensors:
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))
        if self.routes is not None:
            self.routes.index_copy_(0, targets, self.routes.index_select(0, sources))

    def routes_of(self, blocks: list[int], num_tokens: int) -> torch.Tensor:
        """Return the routes [num_tokens, layers, k] of the first tokens in these blocks, int16 on the host."""
        assert self.routes is not None
        index = torch.tensor(blocks, dtype=torch.int64, device=self.routes.device)
        return self.routes[index].flatten(0, 1)[:num_tokens].to("cpu", torch.int16)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes allocated."""
        if self._memory is not None:
            return self._memory.nbytes + self.states_nbytes
        return self.num_blocks * self.spec.block_bytes(self.block_size) + self.states_nbytes

    @property
    def states_nbytes(self) -> int:
        """Return the bytes of states and their snapshots."""
        return 0 if self.states is None else self.states.nbytes

    def _reserve(self, num_blocks: int, max_blocks: int) -> None:
        tensor_bytes = max(num_blocks, max_blocks) * _tensor_block_bytes(self.spec, self.block_size)
        memory = virtual_memory.reserve(self, self.spec.device, 2 * self.spec.num_layers, tensor_bytes)
        if memory is None:
            return
        try:
            self._back(memory, num_blocks)
        except DriverError as error:
            logger.warning("hf_paged: the KV pool lies in torch's memory: %s", error)
            memory.close()
            return
        self._memory = memory

    def _back(self, memory: VirtualMemory, num_blocks: int) -> None:
        spec = self.spec
        nbytes = num_blocks * _tensor_block_bytes(spec, self.block_size)
        memory.back(nbytes)
        shape = (num_blocks, self.block_size, spec.num_kv_heads, spec.head_dim)
        tensors = [tensor.view(spec.cache_dtype).view(shape) for tensor in memory.tensors(nbytes)]
        self.layers = list(zip(tensors[::2], tensors[1::2], strict=True))
        self.num_blocks = num_blocks

    def _no_routes(self, num_blocks: int) -> torch.Tensor | None:
        shape = self.spec.routes
        return None if shape is None else torch.zeros((num_blocks, self.block_size, *shape[:2]), dtype=shape.dtype,
                                                      device=self.spec.device)

    def _empty(self, num_blocks: int, num_heads: int, dim: int) -> torch.Tensor:
        shape = (num_blocks, self.block_size, num_heads, dim)
        return torch.empty(shape, dtype=self.spec.cache_dtype, device=self.spec.device)


def blocks_within(spec: KVSpec, block_size: int, nbytes: int) -> int:
    """Return the number of blocks in a pool of `nbytes`, whose tensors each take whole pages of device memory."""
    if not spec.are_tensors_alike:
        return max(0, nbytes) // max(spec.block_bytes(block_size), 1)
    unit = _granularity(spec)
    return max(0, nbytes) // (2 * spec.num_layers) // unit * unit // _tensor_block_bytes(spec, block_size)


def filled(spec: KVSpec, block_size: int, num_blocks: int) -> int:
    """Return the largest number of blocks that takes no more memory than `num_blocks`."""
    if not spec.are_tensors_alike:
        return num_blocks
    unit, block = _granularity(spec), _tensor_block_bytes(spec, block_size)
    return -(-num_blocks * block // unit) * unit // block


def _tensor_block_bytes(spec: KVSpec, block_size: int) -> int:
    return spec.block_bytes(block_size) // (2 * spec.num_layers)


def _granularity(spec: KVSpec) -> int:
    driver = virtual_memory.find_driver(spec.device)
    return 1 if driver is None else driver.granularity


class KVReads:
    """Bytes of K and V over all layers of this rank, counted per step; the counts continue with a new pool.

    Attributes:
        num_bytes: Bytes that attention read. A row counts each position that it attends to once per layer, in a layer
            with a sliding window only positions inside the window; a prompt counts as if it read each position once.
        num_saved_bytes: Bytes that were read once for several rows of a group; layers with a window are not counted.
    """

    def __init__(self) -> None:
        self.num_bytes = self.num_saved_bytes = 0
        self._position_bytes: dict[int | None, int] = {}  # of all layers with a window

    def use(self, spec: KVSpec, windows: Iterable[int | None]) -> None:
        """Set the shape of the model and the sliding windows of its layers (None: all positions)."""
        by_window: Counter[int | None] = Counter()
        for window, shape in zip(windows, spec.pool_shapes(), strict=False):  # other layers get another pool first
            by_window[window] += position_elements(shape) * spec.cache_dtype.itemsize
        self._position_bytes = dict(by_window)

    def count(self, start: np.ndarray, num_new: np.ndarray, saved_positions: int) -> None:
        """Add the rows of a launched step.

        Args:
            start: int32 [R], positions of their first new tokens.
            num_new: int32 [R], numbers of new tokens.
            saved_positions: Positions that groups saved, in one layer without a window.
        """
        num_tokens = int(np.add.reduce(num_new, dtype=np.int64))
        for window, position_bytes in self._position_bytes.items():
            seen = start if window is None else np.minimum(start, window - 1)
            self.num_bytes += position_bytes * (int(np.add.reduce(seen, dtype=np.int64)) + num_tokens)
        num_saved = saved_positions * self._position_bytes.get(None, 0)
        self.num_bytes -= num_saved
        self.num_saved_bytes += num_saved
