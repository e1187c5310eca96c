"""The KV pool's memory: per layer one tensor for K and one for V, and how many blocks may be had."""

from __future__ import annotations

import torch

from hf_paged.models import KVSpec


class KVCache:
    """K and V of every layer, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, spec: KVSpec, block_size: int, num_blocks: int) -> None:
        self.spec = spec
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.version = 0  # counts moves of the memory
        self.layers = [(self._empty(num_blocks), self._empty(num_blocks)) for _ in range(spec.num_layers)]

    def grow(self, num_blocks: int) -> None:
        """Enlarge to `num_blocks`, content kept. One tensor at a time, so that the peak is one layer above the end."""
        self.version += 1
        for i in range(self.spec.num_layers):
            for j in range(2):
                old = self.layers[i][j]
                new = self._empty(num_blocks)
                new[: self.num_blocks] = old[: self.num_blocks]  # an earlier growth may have stopped half-way
                self.layers[i] = (new, self.layers[i][1]) if j == 0 else (self.layers[i][0], new)
                del old
        self.num_blocks = num_blocks

    def copy_blocks(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole blocks in every layer; no target may be a source. Both int64 [N]."""
        for tensors in self.layers:
            for tensor in tensors:
                tensor.index_copy_(0, targets, tensor.index_select(0, sources))

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.spec.block_bytes(self.block_size)

    def _empty(self, num_blocks: int) -> torch.Tensor:
        shape = (num_blocks, self.block_size, self.spec.num_kv_heads, self.spec.head_dim)
        return torch.empty(shape, dtype=self.spec.cache_dtype, device=self.spec.device)
