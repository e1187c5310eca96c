"""Context of a step for the model's layers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.attention.backend import AttentionBackend
from hf_paged.kernels.attention.types import AttentionOptions, GroupedWork, PagedMetadata
from hf_paged.runner.kv_cache import KVCache

Parts = list[tuple[int, int, PagedMetadata]]


class LastTokens(NamedTuple):
    """The last token of each row: ``tokens`` [R] int64, indices in the step, and their `PagedStep.parts`."""

    tokens: torch.Tensor
    parts: Parts


class PagedStep(NamedTuple):
    """The `StepContext` of the runner. ``parts``: (first token, end, metadata) of rows that share a kernel.

    ``ends``: The tokens whose result of the last layer is used; None if all tokens are.

    ``one_launch``: One launch may compute all layers: no row reads KV that another row writes, and there are few enough
    rows for it to be faster.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    cache: KVCache
    parts: Parts
    backend: AttentionBackend
    adapters: torch.Tensor | None = None
    one_launch: bool = False
    ends: LastTokens | None = None

    @property
    def decode_rows(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not self.one_launch or len(self.parts) != 1:
            return None
        meta = self.parts[0][2]
        if isinstance(meta.work, GroupedWork):
            return None
        return meta.slots, meta.block_table

    def kv_cache(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cache.layers[layer]

    @property
    def wanted(self) -> torch.Tensor | None:
        return None if self.ends is None else self.ends.tokens

    def last_token_step(self) -> PagedStep:
        assert self.ends is not None
        return self._replace(parts=self.ends.parts, ends=None)

    def attend(self, layer: int, query: torch.Tensor, options: AttentionOptions) -> torch.Tensor:
        k_cache, v_cache = self.cache.layers[layer]
        if len(self.parts) == 1:
            return self.backend.run(query, k_cache, v_cache, self.parts[0][2], options)
        mixed = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for first, last, meta in self.parts:
            self.backend.run(query[first:last], k_cache, v_cache, meta, options, mixed[first:last])
        return mixed
