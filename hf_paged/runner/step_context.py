"""A step as the model's layers see it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels.attention.metadata import PagedMetadata
from hf_paged.kernels.attention.paged_attention import paged_attention
from hf_paged.runner.kv_cache import KVCache


class PagedStep(NamedTuple):
    """The `StepContext` of the runner. ``parts``: (first token, end, metadata) of rows that share a kernel."""

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cache: KVCache
    parts: list[tuple[int, int, PagedMetadata]]
    backend: str

    def kv_cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.layers[layer]

    def attend(self, layer: int, query: torch.Tensor, *, scale: float, sliding_window: int | None,
               softcap: float | None = None, sinks: torch.Tensor | None = None) -> torch.Tensor:  # fmt: skip
        k_cache, v_cache = self.cache.layers[layer]
        if len(self.parts) == 1:
            return paged_attention(query, k_cache, v_cache, self.parts[0][2], scale=scale,
                                   sliding_window=sliding_window, softcap=softcap, sinks=sinks,
                                   backend=self.backend)  # fmt: skip
        mixed = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for first, last, meta in self.parts:
            paged_attention(query[first:last], k_cache, v_cache, meta, scale=scale, sliding_window=sliding_window,
                            softcap=softcap, sinks=sinks, backend=self.backend, out=mixed[first:last])  # fmt: skip
        return mixed
