"""The backend of CPUs: the reference in torch."""

from __future__ import annotations

import numpy as np
import torch

from hf_paged.attention.backend import AttentionBackend
from hf_paged.kernels.attention.reference import host_rows_of, paged_attention_reference
from hf_paged.kernels.attention.types import AttentionOptions, AttentionSpec, PagedMetadata


class TorchBackend(AttentionBackend):
    name = "torch"
    waits = True

    def plan(self, seq_lens: np.ndarray, slots: np.ndarray, spec: AttentionSpec) -> None:
        return None

    def read_once(self, meta: PagedMetadata, spec: AttentionSpec) -> PagedMetadata:
        return meta._replace(host_rows=host_rows_of(meta, spec.block_size, spec.num_kv_heads * spec.head_dim))

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata,
            options: AttentionOptions, out: torch.Tensor | None = None) -> torch.Tensor:
        return paged_attention_reference(q, k_cache, v_cache, meta, options, out=out)


BACKEND = TorchBackend()
