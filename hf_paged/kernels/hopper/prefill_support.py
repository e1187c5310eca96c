"""Devices on which the prefill kernel for Hopper runs, and calls that it takes; the kernel is only imported there."""

from __future__ import annotations

from functools import lru_cache

import torch

from hf_paged.kernels import hopper
from hf_paged.kernels.attention.types import PagedMetadata

# Largest head size at which it was timed (benchmarks/prefill_tuning.py). It is right up to 256.
MEASURED_HEAD_DIM = 128
BLOCK_M = 128  # queries times packed heads of a tile: 64 for each of two warpgroups
POSITIONS = 128  # of a tile of keys, with heads of up to 128


def packed_heads(group: int) -> int:
    """Query heads of a KV head that a tile holds, of `group`: a power of two, so that TMA brings them together."""
    return min(group & -group, 16)


def tile_tokens(group: int) -> int:
    """New tokens of a tile, with `group` query heads of a KV head."""
    return BLOCK_M // packed_heads(group)


@lru_cache(maxsize=64)
def why_not_on(device: torch.device) -> str | None:
    """Return why the kernel cannot run on `device`, or None."""
    return hopper.why_not_on(device, _refusal)


def _refusal(major: int, minor: int) -> str | None:
    return None if major == 9 else f"does not run on compute capability {major}.x"


def why_not_of(dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Return why the kernel cannot compute a model's attention, or None."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"takes fp16 and bf16, not {dtype}"
    if not 64 <= head_dim <= 256 or head_dim % 8:
        return f"takes a head_dim from 64 to 256 that is a multiple of 8, not {head_dim}"
    if block_size < 16 or block_size & block_size - 1:
        return f"takes a block_size that is a power of two from 16 on, not {block_size}"
    return None


def takes_rows(dtype: torch.dtype, head_dim: int, max_query_len: int, group: int) -> bool:
    """Return whether the kernel takes rows of up to that many new tokens, if the tensors are aligned."""
    return why_not_of(dtype, head_dim, 16) is None and max_query_len >= tile_tokens(group)


def takes(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata) -> bool:
    """Return whether the kernel can compute this call, and the rows fill its tiles."""
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    return (
        why_not_of(q.dtype, head_dim, block_size) is None
        and k_cache.shape == v_cache.shape
        and meta.max_query_len >= tile_tokens(q.shape[1] // num_kv_heads)
        # What TMA asks of addresses and strides (those of the caches are multiples of head_dim), and int32 slots.
        and not (q.data_ptr() | 2 * q.stride(0) | 2 * q.stride(1) | k_cache.data_ptr() | v_cache.data_ptr()) % 16
        and num_blocks * block_size < 2**31
    )
