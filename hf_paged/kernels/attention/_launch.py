"""The arguments that all kernels of attention share."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from hf_paged.kernels._triton import next_power_of_2
from hf_paged.kernels.attention._tile import LOG2_E, padded_head_dim
from hf_paged.kernels.attention.types import AttentionOptions, PagedMetadata


class HeadSizes(NamedTuple):
    """Constants of kernels, named as there."""

    GROUP: int  # query heads of a KV head
    KV_HEADS: int
    HEAD_DIM: int
    HEAD_DIM_PAD: int


class LaunchArguments(NamedTuple):
    """Arguments of a launch besides its tensors, tiles and options."""

    numbers: tuple[float, ...]  # strides of q's tokens and heads, then `score_numbers`
    constants: dict[str, int]
    sizes: HeadSizes
    group_pad: int


@lru_cache(maxsize=256)
def head_sizes(num_heads: int, num_kv_heads: int, head_dim: int) -> tuple[HeadSizes, int]:
    """The constants of these heads, and their group as a power of two."""
    group = num_heads // num_kv_heads
    sizes = HeadSizes(group, num_kv_heads, head_dim, padded_head_dim(head_dim))
    return sizes, next_power_of_2(group)


@lru_cache(maxsize=256)
def _constants(sizes: HeadSizes, block_size: int, has_window: bool, has_softcap: bool) -> dict[str, int]:
    """The dictionary is kept: callers unpack it, and change nothing."""
    return {**sizes._asdict(), "BLOCK_SIZE": block_size, "HAS_WINDOW": has_window, "HAS_SOFTCAP": has_softcap}


def score_numbers(meta: PagedMetadata, options: AttentionOptions) -> tuple[float, ...]:
    """Stride of the block table, window, scale and softcap, of scores in base 2."""
    return (meta.block_table.stride(0), options.window or 0, options.scale * LOG2_E,
            (options.softcap or 0.0) * LOG2_E)


def launch_arguments(q: torch.Tensor, k_cache: torch.Tensor, meta: PagedMetadata,
                     options: AttentionOptions) -> LaunchArguments:
    """What a kernel is given of a call: q ``[T, Hq, D]``, k_cache ``[num_blocks, block_size, Hkv, D]``."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    sizes, group_pad = head_sizes(q.shape[1], num_kv_heads, head_dim)
    numbers = q.stride(0), q.stride(1), *score_numbers(meta, options)
    constants = _constants(sizes, block_size, options.window is not None, options.softcap is not None)
    return LaunchArguments(numbers, constants, sizes, group_pad)


def partial_results(num_parts: int, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for parts of results: weighted sums of values [N, Hq, D]; largest scores and sums of weights [N, Hq, 2].
    """
    _, num_heads, head_dim = q.shape
    acc = torch.empty(num_parts, num_heads, head_dim, dtype=torch.float32, device=q.device)
    return acc, torch.empty(num_parts, num_heads, 2, dtype=torch.float32, device=q.device)
