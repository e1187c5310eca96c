# mypy: disallow-untyped-defs=False
"""Partial results of attention: of positions that a tile of rows shares, and how a row's parts are joined.

A part is of one row, or one token, and of some of its positions: the weighted sum of values, the largest score (base 2)
and the sum of weights.
"""

from __future__ import annotations

import torch

from hf_paged.kernels._triton import after_previous_kernel, column_numbers, jit, on_device_of, pdl_options, tl
from hf_paged.kernels.attention._launch import head_sizes
from hf_paged.kernels.attention._pages import blocks_of_tile, load_keys, load_values
from hf_paged.kernels.attention.types import ROW_FIELDS, PartItem, RowEntry

ROWS, FIRST, SLOT, BEGIN, END, SPLIT, SPLITS, PART, LENGTH = column_numbers(PartItem)
ROW_PART, ROW_PIECES, MEMBER, MEMBER_PART, MEMBER_LENGTH = column_numbers(RowEntry)


@jit()
def cut_positions(begin, end, split, splits, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr):
    """Split number `split` of positions ``begin .. end - 1``, in whole tiles; none where it is empty."""
    first_tile = begin // BLOCK_N
    tiles = tl.maximum(tl.cdiv(tl.cdiv(end, BLOCK_N) - first_tile, splits), MIN_TILES)
    loop_begin = (first_tile + split * tiles) * BLOCK_N
    loop_end = tl.minimum(loop_begin + tiles * BLOCK_N, end)
    return loop_begin, tl.where(begin < end, loop_end, loop_begin)


@jit()
def store_part(
    acc, top, total, partial_acc, partial_sums, part, query_head, live, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
):
    lane = tl.arange(0, HEAD_DIM_PAD)
    place = part * HEADS + query_head
    inside = live[:, None] & (lane < HEAD_DIM)[None, :]
    tl.store(partial_acc + place[:, None] * HEAD_DIM + lane[None, :], acc, mask=inside)
    tl.store(partial_sums + place * 2, top, mask=live)
    tl.store(partial_sums + place * 2 + 1, total, mask=live)


@jit()
def store_nothing(partial_sums, part, query_head, live, HEADS: tl.constexpr):
    """A part out of sight: what it would have in `partial_acc` is not read."""
    place = part * HEADS + query_head
    zero = tl.zeros(place.shape, tl.float32)
    tl.store(partial_sums + place * 2, zero + float("-inf"), mask=live)
    tl.store(partial_sums + place * 2 + 1, zero, mask=live)


@jit()
def shared_part(
    q, k_cache, v_cache, partial_acc, partial_sums, table, block_table, q_stride_t, q_stride_h, table_stride, window,
    scale_log2, softcap_log2, head, rows, first, slot, begin, end, split, splits, piece, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, MIN_TILES: tl.constexpr, ROW_FIELDS: tl.constexpr,
):
    """A split of what a tile of rows shares. Tile row m is query head m % GROUP of the tile's row m // GROUP."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    STRIDE: tl.constexpr = BLOCK_SIZE * KV_HEADS * HEAD_DIM
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    lane = tl.arange(0, HEAD_DIM_PAD)
    member = m // GROUP
    live = member < rows
    entry = table + (first + member) * ROW_FIELDS
    row = tl.load(entry + MEMBER, mask=live, other=0).to(tl.int64)
    part = tl.load(entry + MEMBER_PART, mask=live, other=0).to(tl.int64) + piece
    query_head = head * GROUP + m % GROUP
    row_begin = begin
    if HAS_WINDOW:
        row_begin = tl.maximum(tl.load(entry + MEMBER_LENGTH, mask=live, other=0) - window, 0)
        begin = tl.maximum(begin, tl.min(tl.where(live, row_begin, end), 0))
    loop_begin, loop_end = cut_positions(begin, end, split, splits, BLOCK_N, MIN_TILES)
    if loop_begin < loop_end:
        table_row = block_table + slot * table_stride
        inside = live[:, None] & (lane < HEAD_DIM)[None, :]
        q_tile = tl.load(q + row[:, None] * q_stride_t + query_head[:, None] * q_stride_h + lane[None, :],
                         mask=inside, other=0.0)
        acc = tl.zeros([BLOCK_M, HEAD_DIM_PAD], tl.float32)
        # Finite and below every score: with -inf a row that has seen nothing yet would compute -inf - -inf.
        top = tl.full([BLOCK_M], -3.0e38, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        # Each tile's blocks are looked up one tile ahead, so that its loads need not wait for the lookup.
        blocks = blocks_of_tile(table_row, loop_begin, begin, loop_end, n, BLOCK_SIZE, BLOCK_N, True)
        for start in tl.range(loop_begin, loop_end, BLOCK_N, num_stages=STAGES):
            # int64: a cache may hold more than 2**31 elements.
            base = blocks.to(tl.int64) * STRIDE
            k = load_keys(k_cache, base, start, n, head, STRIDE, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, BLOCK_N)
            v = load_values(v_cache, base, start, begin, loop_end, n, head, STRIDE, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE,
                            BLOCK_N, True)
            blocks = blocks_of_tile(table_row, start + BLOCK_N, begin, loop_end, n, BLOCK_SIZE, BLOCK_N, True)

            score = tl.dot(q_tile, tl.trans(k), input_precision="ieee")
            scale = scale_log2
            if HAS_SOFTCAP:
                # tanh(x) = 1 - 2 / (exp(2 x) + 1), exact at both infinities; 2.885... is 2 log2(e).
                score *= scale_log2 / softcap_log2 * 2.8853900817779268
                score = softcap_log2 * (1.0 - 2.0 / (tl.exp2(score) + 1.0))
                scale = 1.0
            position = start + n
            readable = ((position >= begin) & (position < loop_end))[None, :]
            if HAS_WINDOW:
                readable = readable & (position[None, :] >= row_begin[:, None])
            score = tl.where(readable, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1) * scale)
            weight = tl.exp2(score * scale - new_top[:, None])
            rescale = tl.exp2(top - new_top)
            total = total * rescale + tl.sum(weight, 1)
            top = new_top
            acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        store_part(acc, top, total, partial_acc, partial_sums, part, query_head, live, HEADS, HEAD_DIM, HEAD_DIM_PAD)
    else:
        store_nothing(partial_sums, part, query_head, live, HEADS)


@jit(varying_pointers=("table",))
def _join_kernel(
    out,
    partial_acc,
    partial_sums,
    table,
    sinks,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    ROW_FIELDS: tl.constexpr,
    PIECES: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's pieces in order, `PIECES` at a time, for the query heads of one KV head."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    part = tl.load(table + row * ROW_FIELDS + ROW_PART).to(tl.int64)
    pieces = tl.load(table + row * ROW_FIELDS + ROW_PIECES)
    # The plan comes from copies, which end every PDL chain: it is read ahead of the wait.
    after_previous_kernel(PDL)
    if pieces == 1:
        return
    group = tl.arange(0, GROUP_PAD)
    lane = tl.arange(0, HEAD_DIM_PAD)
    query_head = head * GROUP + group
    live = group < GROUP
    acc = tl.zeros([GROUP_PAD, HEAD_DIM_PAD], tl.float32)
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    if HAS_SINKS:
        # A score without a value, of weight 1 at its own height, in base 2 by log2(e).
        sink = tl.load(sinks + query_head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(sink, -3.0e38)
        total += 1.0
    for start in range(0, pieces, PIECES):
        piece = start + tl.arange(0, PIECES)
        place = (part + piece)[:, None] * HEADS + query_head[None, :]
        inside = (piece < pieces)[:, None] & live[None, :]
        tops = tl.load(partial_sums + place * 2, mask=inside, other=float("-inf"))
        totals = tl.load(partial_sums + place * 2 + 1, mask=inside, other=0.0)
        values = tl.load(
            partial_acc + place[:, :, None] * HEAD_DIM + lane[None, None, :],
            mask=inside[:, :, None] & (lane < HEAD_DIM)[None, None, :], other=0.0,
        )
        new_top = tl.maximum(top, tl.max(tops, 0))
        # A row that has seen nothing yet: every weight is 0.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(tops - shift[None, :])
        rescale = tl.exp2(top - shift)
        total = total * rescale + tl.sum(totals * weight, 0)
        # What a piece out of sight did not write may be NaN.
        values = tl.where((tops > float("-inf"))[:, :, None], values, 0.0)
        acc = acc * rescale[:, None] + tl.sum(values * weight[:, :, None], 0)
        top = new_top
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    offset = (row * HEADS + query_head)[:, None] * HEAD_DIM + lane[None, :]
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=live[:, None] & (lane < HEAD_DIM)[None, :])


def join_parts(out: torch.Tensor, acc: torch.Tensor, sums: torch.Tensor, rows: torch.Tensor,
               sinks: torch.Tensor | None, num_kv_heads: int) -> None:
    """Fill the lines of ``out`` [R, Hq, D] that have several parts.

    Args:
        acc, sums: ``[num_parts, Hq, D]`` and ``[num_parts, Hq, 2]``, float32.
        rows: ``[R, ROW_FIELDS]`` int32, see :class:`~hf_paged.kernels.attention.types.RowEntry`.
    """
    num_rows, num_heads, head_dim = out.shape
    sizes, group_pad = head_sizes(num_heads, num_kv_heads, head_dim)
    with on_device_of(out):
        _join_kernel[(num_kv_heads, num_rows)](
            out, acc, sums, rows, sinks, sinks is not None, sizes.GROUP, group_pad, num_kv_heads, head_dim,
            sizes.HEAD_DIM_PAD,
            ROW_FIELDS=ROW_FIELDS,
            # 32 elements a thread of two warps.
            PIECES=min(8, max(1, 2048 // (group_pad * sizes.HEAD_DIM_PAD))),
            num_warps=2,
            **pdl_options(out),
        )
