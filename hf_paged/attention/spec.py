"""The sizes of one model's attention on one device, for backends and planners."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionSpec(NamedTuple):
    """Sizes of a model's attention; heads are a rank's."""

    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of queries and caches
    device: torch.device
    block_size: int

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.num_kv_heads
