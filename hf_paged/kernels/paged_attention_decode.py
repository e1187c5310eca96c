# mypy: disallow-untyped-defs=False
"""Paged attention for rows of one new token: split-KV (flash-decoding), then a pass that joins the splits.

Source of the method: Dao et al., "Flash-Decoding for long-context inference" (2023). The grid depends only on what the
host knows, so that one CUDA graph serves every step; how a row is cut follows its length on the device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from hf_paged.kernels._attention_tile import LOG2_E, attend_tile
from hf_paged.kernels._triton import after_previous_kernel, jit, on_device_of, pdl_options, require_triton, tl, triton
from hf_paged.kernels.metadata import PagedMetadata

MAX_SPLITS = 64
# A split shorter than this costs more in its launch and its part of the joining pass than it gains.
_MIN_SPLIT_POSITIONS = 64
# Programs per multiprocessor up to which a row is split. Measured on an H200 (docs/performance.md): from some 48 rows
# of 8 KV heads on, ragged batches read fastest unsplit.
_PROGRAMS_PER_SM = 4
# Shared memory a block needs for the deep configurations; smaller GPUs (sm_86, sm_89: 99 KiB) take the shallow ones.
_DEEP_SHARED_MEMORY = 160 << 10


class DecodeConfig(NamedTuple):
    """Positions per tile and launch options."""

    block_n: int
    num_warps: int
    num_stages: int


# By bytes of one head's key (padded): (many programs, few programs). Few need more loads in flight each.
_DEEP = {
    64: (DecodeConfig(64, 2, 2), DecodeConfig(64, 2, 4)),
    128: (DecodeConfig(32, 2, 2), DecodeConfig(64, 4, 4)),
    256: (DecodeConfig(64, 4, 3), DecodeConfig(64, 4, 4)),
    512: (DecodeConfig(16, 2, 2), DecodeConfig(32, 4, 3)),
    1024: (DecodeConfig(16, 4, 2), DecodeConfig(16, 4, 2)),
}
_SHALLOW = {
    64: DecodeConfig(64, 2, 2),
    128: DecodeConfig(32, 2, 2),
    256: DecodeConfig(32, 2, 2),
    512: DecodeConfig(16, 2, 2),
    1024: DecodeConfig(16, 4, 2),
}


def decode_config(head_dim_pad: int, itemsize: int, num_splits: int, shared_memory: int) -> DecodeConfig:
    """Tiles for a head size; a step that has to be split has few programs. `shared_memory`: bytes a block may have."""
    size = max(64, head_dim_pad * itemsize)
    return _DEEP[size][num_splits > 1] if shared_memory >= _DEEP_SHARED_MEMORY else _SHALLOW[size]


@lru_cache(maxsize=64)
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return _DEEP_SHARED_MEMORY
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


@lru_cache(maxsize=64)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def choose_num_splits(num_rows: int, num_kv_heads: int, max_positions: int, multiprocessors: int) -> int:
    """Splits per row so that rows * heads * splits fill the device, at most one per 64 positions of the longest row."""
    wanted = round(_PROGRAMS_PER_SM * multiprocessors / max(1, num_rows * num_kv_heads))
    return max(1, min(wanted, -(-max_positions // _MIN_SPLIT_POSITIONS), MAX_SPLITS))


@jit()
def _split_of_row(begin, end, num_splits, BLOCK_N: tl.constexpr, MIN_POSITIONS: tl.constexpr):
    """(first tile, tiles per split, splits in use) of a row that reads positions ``begin .. end - 1``."""
    first_tile = begin // BLOCK_N
    num_tiles = tl.cdiv(end, BLOCK_N) - first_tile
    tiles = tl.maximum(tl.cdiv(num_tiles, num_splits), (MIN_POSITIONS + BLOCK_N - 1) // BLOCK_N)
    return first_tile, tiles, tl.cdiv(num_tiles, tiles)


@jit(varying_ints=("num_splits",), varying_pointers=("seq_lens", "slots"))
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    partial_acc,
    partial_sums,
    seq_lens,
    block_table,
    slots,
    num_splits,
    q_stride_t,
    q_stride_h,
    table_stride,
    window,
    scale_log2,
    softcap_log2,
    SPLIT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_POSITIONS: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous_kernel(PDL)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    end = tl.load(seq_lens + row)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(end - window, 0)
    if SPLIT:
        split = tl.program_id(2)
        first_tile, tiles, used = _split_of_row(begin, end, num_splits, BLOCK_N, MIN_POSITIONS)
        if split >= used:
            return
        loop_begin = (first_tile + split * tiles) * BLOCK_N
        loop_end = tl.minimum(loop_begin + tiles * BLOCK_N, end)
    else:
        loop_begin = begin // BLOCK_N * BLOCK_N
        loop_end = end

    # The group's heads are the rows of one tile, padded to what tl.dot takes.
    m = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, HEAD_DIM_PAD)
    query_head = head * GROUP + m
    live = (m < GROUP)[:, None] & (lane < HEAD_DIM)[None, :]
    q_tile = tl.load(q + row * q_stride_t + query_head[:, None] * q_stride_h + lane[None, :], mask=live, other=0.0)

    table_row = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PAD], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    n = tl.arange(0, BLOCK_N)
    for start in range(loop_begin, loop_end, BLOCK_N):
        position = start + n
        readable = (position >= begin) & (position < loop_end)
        acc, top, total = attend_tile(
            q_tile, acc, top, total, k_cache, v_cache, table_row, head, position, readable, readable[None, :],
            scale_log2, softcap_log2, True, HAS_SOFTCAP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE,
        )  # fmt: skip

    if SPLIT:
        part = (row * (KV_HEADS * GROUP) + query_head) * num_splits + split
        tl.store(partial_acc + part[:, None] * HEAD_DIM + lane[None, :], acc, mask=live)
        tl.store(partial_sums + part * 2, top, mask=m < GROUP)
        tl.store(partial_sums + part * 2 + 1, total, mask=m < GROUP)
    else:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        offset = (row * (KV_HEADS * GROUP) + query_head)[:, None] * HEAD_DIM + lane[None, :]
        tl.store(out + offset, result.to(out.dtype.element_ty), mask=live)


@jit(varying_ints=("num_splits",), varying_pointers=("seq_lens",))
def _combine_kernel(
    out,
    partial_acc,
    partial_sums,
    seq_lens,
    num_splits,
    window,
    HAS_WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MIN_POSITIONS: tl.constexpr,
    ALL_SPLITS: tl.constexpr,
    TILE_SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous_kernel(PDL)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    end = tl.load(seq_lens + row)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(end - window, 0)
    _, _, used = _split_of_row(begin, end, num_splits, BLOCK_N, MIN_POSITIONS)

    part = (row * HEADS + head) * num_splits
    split = tl.arange(0, ALL_SPLITS)
    # A row of length 0 uses no split: every weight is 0 and so is the result.
    tops = tl.load(partial_sums + (part + split) * 2, mask=split < used, other=float("-inf"))
    top = tl.max(tops, 0)
    top = tl.where(top == float("-inf"), 0.0, top)
    totals = tl.load(partial_sums + (part + split) * 2 + 1, mask=split < used, other=0.0)
    total = tl.sum(totals * tl.exp2(tops - top), 0)

    lane = tl.arange(0, HEAD_DIM_PAD)
    acc = tl.zeros([HEAD_DIM_PAD], tl.float32)
    for start in range(0, used, TILE_SPLITS):
        split_tile = start + tl.arange(0, TILE_SPLITS)
        inside = split_tile < used
        weight = tl.exp2(tl.load(partial_sums + (part + split_tile) * 2, mask=inside, other=float("-inf")) - top)
        parts = tl.load(
            partial_acc + (part + split_tile)[:, None] * HEAD_DIM + lane[None, :],
            mask=inside[:, None] & (lane < HEAD_DIM)[None, :],
            other=0.0,
        )
        acc += tl.sum(parts * weight[:, None], 0)
    result = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (row * HEADS + head) * HEAD_DIM + lane, result.to(out.dtype.element_ty), mask=lane < HEAD_DIM)


def paged_attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: PagedMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    out: torch.Tensor | None = None,
    num_splits: int | None = None,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """:func:`~hf_paged.kernels.paged_attention.paged_attention` where every row has exactly one new token.

    fp16, bf16 or fp32; head_dim up to 256. One Triton launch, two where rows are split. ``meta.max_seq_len`` only
    bounds the number of splits: a graph captured with a large bound stays right and fast for short rows.

    Args:
        out: ``[T, Hq, D]`` contiguous, q's dtype; every element is written. None: a new tensor.
        num_splits: at most 64; None: by the number of rows and heads and the device's size.
        config: tile shape; None: by head size and number of splits.
    """
    require_triton()
    num_rows, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_rows == 0:
        return out
    if num_splits is None:
        positions = meta.max_seq_len if sliding_window is None else min(meta.max_seq_len, sliding_window)
        num_splits = choose_num_splits(num_rows, num_kv_heads, positions, _multiprocessors(q.device))
    group = num_heads // num_kv_heads
    head_dim_pad = max(16, triton.next_power_of_2(head_dim))
    config = config or decode_config(head_dim_pad, q.element_size(), num_splits, _shared_memory(q.device))
    split = num_splits > 1
    parts = (num_rows, num_heads, num_splits) if split else (1,)
    acc = torch.empty((*parts, head_dim), dtype=torch.float32, device=q.device)
    sums = torch.empty((*parts, 2), dtype=torch.float32, device=q.device)
    with on_device_of(q):
        _decode_kernel[(num_kv_heads, num_rows, num_splits)](
            q,
            k_cache,
            v_cache,
            out,
            acc,
            sums,
            meta.seq_lens,
            meta.block_table,
            meta.slots,
            num_splits,
            q.stride(0),
            q.stride(1),
            meta.block_table.stride(0),
            sliding_window or 0,
            scale * LOG2_E,
            (softcap or 0.0) * LOG2_E,
            SPLIT=split,
            HAS_WINDOW=sliding_window is not None,
            HAS_SOFTCAP=softcap is not None,
            GROUP=group,
            KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HEAD_DIM_PAD=head_dim_pad,
            BLOCK_SIZE=block_size,
            BLOCK_M=max(16, triton.next_power_of_2(group)),
            BLOCK_N=config.block_n,
            MIN_POSITIONS=_MIN_SPLIT_POSITIONS,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **pdl_options(q),
        )
        if split:
            _combine_kernel[(num_heads, num_rows)](
                out,
                acc,
                sums,
                meta.seq_lens,
                num_splits,
                sliding_window or 0,
                HAS_WINDOW=sliding_window is not None,
                HEADS=num_heads,
                HEAD_DIM=head_dim,
                HEAD_DIM_PAD=head_dim_pad,
                BLOCK_N=config.block_n,
                MIN_POSITIONS=_MIN_SPLIT_POSITIONS,
                ALL_SPLITS=MAX_SPLITS,
                TILE_SPLITS=16,
                **pdl_options(q),
            )
    return out
