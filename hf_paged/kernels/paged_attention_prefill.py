# mypy: disallow-untyped-defs=False
"""Paged attention for rows of any number of new tokens: tiles over packed queries, FlashAttention-2 style."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels._attention_tile import LOG2_E, attend_tile, blocks_of
from hf_paged.kernels._triton import jit, on_device_of, require_triton, tl, triton
from hf_paged.kernels.metadata import PagedMetadata


class PrefillConfig(NamedTuple):
    """Tile shape and launch options: ``block_m`` queries times group heads, ``block_n`` positions."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By padded head_dim. Query tile plus K and V in flight stay under Ampere's 99 KiB of shared memory.
_HALF_CONFIGS = {
    32: PrefillConfig(128, 64, 4, 2),
    64: PrefillConfig(128, 64, 4, 2),
    128: PrefillConfig(128, 64, 8, 2),
    256: PrefillConfig(64, 32, 4, 2),
}
# An exact fp32 dot runs on the plain cores out of registers: larger tiles spill thousands of bytes a thread.
_FLOAT_CONFIGS = {
    32: PrefillConfig(64, 32, 8, 2),
    64: PrefillConfig(64, 32, 8, 2),
    128: PrefillConfig(32, 32, 8, 2),
    256: PrefillConfig(32, 16, 8, 2),
}


def prefill_config(head_dim_pad: int, itemsize: int, group: int, max_query_len: int) -> PrefillConfig:
    """Tiles for a head size; no more rows than the longest row of the step fills, no fewer than the group."""
    config = (_HALF_CONFIGS if itemsize == 2 else _FLOAT_CONFIGS)[max(32, head_dim_pad)]
    filled = triton.next_power_of_2(min(max_query_len, config.block_m) * group)
    block_m = max(16, triton.next_power_of_2(group), min(config.block_m, filled))
    if block_m < config.block_m and itemsize == 2:
        return config._replace(block_m=block_m, num_warps=4)
    return config._replace(block_m=block_m)


@jit()
def _row_of_tile(query_start, tile, num_rows, BLOCK_Q: tl.constexpr):
    """Largest row whose first tile, ``query_start[row] // BLOCK_Q + row``, is not after ``tile``."""
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@jit(varying_ints=("num_rows",), varying_pointers=("query_start", "seq_lens", "slots"))
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    query_start,
    seq_lens,
    block_table,
    slots,
    num_rows,
    q_stride_t,
    q_stride_h,
    table_stride,
    window,
    scale_log2,
    softcap_log2,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    row = _row_of_tile(query_start, tile, num_rows, BLOCK_Q)
    first_token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first_token
    seq_len = tl.load(seq_lens + row)
    tile = tile - (first_token // BLOCK_Q + row)
    num_tiles = tl.cdiv(count, BLOCK_Q)
    if tile >= num_tiles:
        return
    # The last tile of a row sees the most: it starts first.
    tile = num_tiles - 1 - tile

    # Tile row m is query m // GROUP of query head m % GROUP; a GROUP that does not divide BLOCK_M leaves rows over.
    m = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, HEAD_DIM_PAD)
    query = tile * BLOCK_Q + m // GROUP
    token = (first_token + query).to(tl.int64)
    query_head = head * GROUP + m % GROUP
    live = ((m < BLOCK_Q * GROUP) & (query < count))[:, None] & (lane < HEAD_DIM)[None, :]
    q_tile = tl.load(
        q + token[:, None] * q_stride_t + query_head[:, None] * q_stride_h + lane[None, :], mask=live, other=0.0
    )

    query_position = seq_len - count + query
    first_position = seq_len - count + tile * BLOCK_Q
    end = tl.minimum(first_position + BLOCK_Q, seq_len)
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0)
        masked_from = begin // BLOCK_N * BLOCK_N
    else:
        begin = 0
        masked_from = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N

    table_row = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PAD], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    n = tl.arange(0, BLOCK_N)
    if not HAS_WINDOW:
        # Positions that every query of the tile sees.
        for start in range(0, masked_from, BLOCK_N):
            block = tl.load(table_row + (start + n) // BLOCK_SIZE)
            acc, top, total = attend_tile(
                q_tile, acc, top, total, k_cache, v_cache, block, head, start + n, n >= 0, (n >= 0)[None, :],
                scale_log2, softcap_log2, False, HAS_SOFTCAP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE,
            )  # fmt: skip
    for start in range(masked_from, end, BLOCK_N):
        position = start + n
        visible = position[None, :] <= query_position[:, None]
        if HAS_WINDOW:
            visible &= position[None, :] > query_position[:, None] - window
        block = blocks_of(table_row, position, begin, end, BLOCK_SIZE)
        acc, top, total = attend_tile(
            q_tile, acc, top, total, k_cache, v_cache, block, head, position,
            (position >= begin) & (position < end), visible & (position < end)[None, :],
            scale_log2, softcap_log2, True, HAS_SOFTCAP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE,
        )  # fmt: skip

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_offset = (token[:, None] * (KV_HEADS * GROUP) + query_head[:, None]) * HEAD_DIM + lane[None, :]
    tl.store(out + out_offset, result.to(out.dtype.element_ty), mask=live)


def paged_attention_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: PagedMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """:func:`~hf_paged.kernels.paged_attention.paged_attention` for rows of any length, one Triton launch.

    fp16, bf16 or fp32; head_dim up to 256. Rows find their tiles on the device (a tile's row by binary search over
    ``query_start``, as in vLLM's unified kernel), so the grid needs only T and R.

    Args:
        out: ``[T, Hq, D]`` contiguous, q's dtype; every element is written. None: a new tensor.
        config: tile shape; None: by head size and ``meta.max_query_len``.
    """
    require_triton()
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_rows = meta.seq_lens.numel()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_tokens == 0:
        return out
    group = num_heads // num_kv_heads
    head_dim_pad = max(16, triton.next_power_of_2(head_dim))
    config = config or prefill_config(head_dim_pad, q.element_size(), group, meta.max_query_len)
    # A row of n tokens that starts anywhere needs at most n // BLOCK_Q + 1 tiles.
    num_tiles = num_tokens // (config.block_m // group) + num_rows
    with on_device_of(q):
        _prefill_kernel[(num_tiles * num_kv_heads,)](
            q,
            k_cache,
            v_cache,
            out,
            meta.query_start,
            meta.seq_lens,
            meta.block_table,
            meta.slots,
            num_rows,
            q.stride(0),
            q.stride(1),
            meta.block_table.stride(0),
            sliding_window or 0,
            scale * LOG2_E,
            (softcap or 0.0) * LOG2_E,
            HAS_WINDOW=sliding_window is not None,
            HAS_SOFTCAP=softcap is not None,
            GROUP=group,
            KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HEAD_DIM_PAD=head_dim_pad,
            BLOCK_SIZE=block_size,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
    return out
