"""Memory of the KV pool, one tensor for K and one for V per layer, and its size in blocks."""

from __future__ import annotations

import logging

import torch

from hf_paged.device import virtual_memory
from hf_paged.device.cuda_driver import DriverError
from hf_paged.device.virtual_memory import VirtualMemory
from hf_paged.models import KVSpec

logger = logging.getLogger(__name__)


class KVCache:
    """K and V of every layer, each [num_blocks, block_size, num_kv_heads, head_dim].

    Args:
                max_blocks: Maximum size; if the device supports virtual memory, addresses are reserved for it, so that
                    the cache grows without moving and can release and restore its memory. If None, or without virtual
                    memory, the tensors are torch's and move when they grow.

        Raises:
            torch.OutOfMemoryError: If too little memory is free.
    """

    def __init__(self, spec: KVSpec, block_size: int, num_blocks: int, max_blocks: int | None = None) -> None:
        self.spec = spec
        self.block_size = block_size
        self.num_blocks = 0
        self.version = 0  # number of moves of the memory
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._memory: VirtualMemory | None = None
        if max_blocks is not None:
            self._reserve(num_blocks, max_blocks)
        if self._memory is None:
            self.layers = [(self._empty(num_blocks), self._empty(num_blocks)) for _ in range(spec.num_layers)]
            self.num_blocks = num_blocks

    @property
    def keeps_addresses(self) -> bool:
        """Return whether the cache grows in place and returns to its addresses after `release`."""
        return self._memory is not None

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
                new = self._empty(num_blocks)
                new[: self.num_blocks] = old[: self.num_blocks]  # a failed growth may have enlarged some tensors
                self.layers[i] = (new, self.layers[i][1]) if j == 0 else (self.layers[i][0], new)
                del old
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
        self.layers, self.num_blocks = [], 0
        if self._memory is not None:
            self._memory.close()

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks in every layer; no target may be a source. Both int64 [N]."""
        for tensors in self.layers:
            for tensor in tensors:
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    @property
    def nbytes(self) -> int:
        """Return the number of bytes allocated."""
        if self._memory is not None:
            return self._memory.nbytes
        return self.num_blocks * self.spec.block_bytes(self.block_size)

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

    def _empty(self, num_blocks: int) -> torch.Tensor:
        shape = (num_blocks, self.block_size, self.spec.num_kv_heads, self.spec.head_dim)
        return torch.empty(shape, dtype=self.spec.cache_dtype, device=self.spec.device)


def blocks_within(spec: KVSpec, block_size: int, nbytes: int) -> int:
    """Return the number of blocks in a pool of `nbytes`, whose tensors each take whole pages of device memory."""
    unit = _granularity(spec)
    return max(0, nbytes) // (2 * spec.num_layers) // unit * unit // _tensor_block_bytes(spec, block_size)


def filled(spec: KVSpec, block_size: int, num_blocks: int) -> int:
    """Return the largest number of blocks that takes no more memory than `num_blocks`."""
    unit, block = _granularity(spec), _tensor_block_bytes(spec, block_size)
    return -(-num_blocks * block // unit) * unit // block


def _tensor_block_bytes(spec: KVSpec, block_size: int) -> int:
    return spec.block_bytes(block_size) // (2 * spec.num_layers)


def _granularity(spec: KVSpec) -> int:
    driver = virtual_memory.find_driver(spec.device)
    return 1 if driver is None else driver.granularity
