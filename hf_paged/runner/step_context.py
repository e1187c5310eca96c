"""A step as the model's layers see it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels.attention.backends import AttentionBackend
from hf_paged.kernels.attention.metadata import AttentionOptions, PagedMetadata
from hf_paged.runner.kv_cache import KVCache


class PagedStep(NamedTuple):
    """The `StepContext` of the runner. ``parts``: (first token, end, metadata) of rows that share a kernel."""

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cache: KVCache
    parts: list[tuple[int, int, PagedMetadata]]
    backend: AttentionBackend
    adapters: torch.Tensor | None = None

    def kv_cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.layers[layer]

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        k_cache, v_cache = self.cache.layers[layer]
        if len(self.parts) == 1:
            return self.backend.run(query, k_cache, v_cache, self.parts[0][2], options)
        mixed = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for first, last, meta in self.parts:
            self.backend.run(query[first:last], k_cache, v_cache, meta, options, mixed[first:last])
        return mixed
