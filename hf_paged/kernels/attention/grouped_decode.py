# mypy: disallow-untyped-defs=False
"""Paged attention for rows of one new token that share prefixes: what a group shares is read once for a tile of rows.

One launch over planned parts (`grouped_work`). A tile of a group's queries is one operand of the tensor cores, as in
Hydragen (Juravsky et al. 2024, arXiv 2402.05099), ChunkAttention (Ye et al. 2024, arXiv 2402.15220, whose prefix tree
nests as groups do) and FlashInfer's cascade inference (Ye et al. 2025, arXiv 2501.01005, which joins partial results by
their sums of weights, too); here the parts of all levels run beside each other in one grid, and the program that
finishes a row's last piece joins them all.
"""

from __future__ import annotations

import torch

from hf_paged.kernels._device import num_multiprocessors, shared_memory
from hf_paged.kernels._triton import column_numbers, jit, on_device_of, require_triton, tl, triton
from hf_paged.kernels.attention._pages import blocks_of_tile, load_keys, load_values
from hf_paged.kernels.attention._tile import LOG2_E, attend_tile, blocks_of, padded_head_dim
from hf_paged.kernels.attention.decode_work import MIN_SPLIT
from hf_paged.kernels.attention.grouped_work import MIN_GROUP_SPLIT, MIN_SAVED, Kernel
from hf_paged.kernels.attention.metadata import (
    MEMBER_FIELDS,
    PART_FIELDS,
    AttentionOptions,
    GroupedConfig,
    GroupedWork,
    Member,
    PagedMetadata,
    PartItem,
)

ROWS, FIRST, SLOT, BEGIN, END, SPLIT, SPLITS, PIECE, PIECES, PART, LENGTH = column_numbers(PartItem)
MEMBER_ROW, MEMBER_PART, MEMBER_PIECES, MEMBER_LENGTH = column_numbers(Member)


# By bytes of one head's key (padded), for a group of at most 64 queries times heads, and for larger ones.
_G = GroupedConfig
_DEEP = {
    64: (_G(64, 64, 3, 64, 3, 4, 3, 168), _G(128, 64, 3, 64, 3, 8, 2, 128)),
    128: (_G(64, 64, 3, 64, 3, 4, 3, 168), _G(128, 64, 3, 64, 3, 8, 2, 128)),
    256: (_G(64, 32, 3, 64, 3, 4, 3, 168), _G(128, 32, 3, 64, 3, 8, 2, 128)),
    512: (_G(64, 32, 2, 32, 3, 4, 2), _G(64, 32, 2, 32, 3, 4, 2)),
    1024: (_G(16, 16, 2, 16, 2, 4, 4), _G(16, 16, 2, 16, 2, 4, 4)),
}
_SHALLOW = {
    64: _G(64, 64, 2, 64, 2, 4, 3),
    128: _G(64, 64, 2, 64, 2, 4, 2),
    256: _G(64, 32, 2, 32, 2, 4, 2),
    512: _G(32, 16, 2, 16, 2, 4, 2),
    1024: _G(16, 16, 2, 16, 2, 4, 2),
}
# An exact fp32 dot runs on the plain cores out of registers, where larger tiles spill.
_FLOAT = _G(16, 32, 2, 32, 2, 4, 2)
# Shared memory a block needs for the deep configurations: Hopper and later have it, Ampere and Ada do not.
_DEEP_SHARED_MEMORY = 160 << 10


def grouped_config(head_dim_pad: int, itemsize: int, group: int, most_rows: int, shared_memory: int) -> GroupedConfig:
    """Tiles for a head size, query heads of a KV head, and rows of the largest group.

    `shared_memory`: bytes a block may have.
    """
    size = max(64, head_dim_pad * itemsize)
    if itemsize == 4 and size < 1024:
        config = _FLOAT
    elif shared_memory < _DEEP_SHARED_MEMORY:
        config = _SHALLOW[size]
    else:
        small, large = _DEEP[size]
        config = small if most_rows * group <= small.block_m else large
    return config._replace(block_m=max(config.block_m, triton.next_power_of_2(group)))


def grouped_kernel_of(most_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
                      device: torch.device) -> Kernel:
    """What :func:`paged_attention_grouped` is on `device` where the largest group has `most_rows` rows."""
    group, head_dim_pad = num_heads // num_kv_heads, padded_head_dim(head_dim)
    config = grouped_config(head_dim_pad, dtype.itemsize, group, most_rows, shared_memory(device))
    multiprocessors = num_multiprocessors(device)
    return Kernel(
        config, tile_rows=config.block_m // group,
        cta_slots=max(1, config.programs_per_sm * multiprocessors // num_kv_heads),
        positions_worth_it=MIN_SAVED * 256 / (head_dim_pad * dtype.itemsize) * multiprocessors / num_kv_heads,
    )


@jit()
def _cut(begin, end, split, splits, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr):
    """Split number `split` of positions ``begin .. end - 1``, in whole tiles; none where it is empty."""
    first_tile = begin // BLOCK_N
    tiles = tl.maximum(tl.cdiv(tl.cdiv(end, BLOCK_N) - first_tile, splits), MIN_TILES)
    loop_begin = (first_tile + split * tiles) * BLOCK_N
    loop_end = tl.minimum(loop_begin + tiles * BLOCK_N, end)
    return loop_begin, tl.where(begin < end, loop_end, loop_begin)


@jit()
def _store_part(
    acc, top, total, partial_acc, partial_sums, part, query_head, live, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
):
    lane = tl.arange(0, HEAD_DIM_PAD)
    place = part * HEADS + query_head
    inside = live[:, None] & (lane < HEAD_DIM)[None, :]
    tl.store(partial_acc + place[:, None] * HEAD_DIM + lane[None, :], acc, mask=inside)
    # What has seen nothing must not raise the largest score of the whole.
    tl.store(partial_sums + place * 2, tl.where(total == 0.0, float("-inf"), top), mask=live)
    tl.store(partial_sums + place * 2 + 1, total, mask=live)


@jit()
def _store_nothing(partial_sums, part, query_head, live, HEADS: tl.constexpr):
    """A part out of sight: what it would have in `partial_acc` is not read."""
    place = part * HEADS + query_head
    zero = tl.zeros(place.shape, tl.float32)
    tl.store(partial_sums + place * 2, zero + float("-inf"), mask=live)
    tl.store(partial_sums + place * 2 + 1, zero, mask=live)


@jit()
def _join(
    out, partial_acc, partial_sums, sinks, row, part, pieces, query_head, live, HAS_SINKS: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, CHUNK: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Per lane a row and a query head. Always piece after piece, whoever came last: the result depends on the plan.

    Written by other multiprocessors: .cg reads past this one's own cache.
    """
    most = tl.max(tl.where(live, pieces, 0), 0)
    first = part.to(tl.int64) * HEADS + query_head
    sink = tl.full(first.shape, float("-inf"), tl.float32)
    if HAS_SINKS:
        # A score without a value, of weight 1 at its own height, in base 2 by log2(e).
        sink = tl.load(sinks + query_head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        sink = tl.maximum(sink, -3.0e38)
    some = tl.arange(0, 8)
    tops = tl.broadcast_to(sink[:, None], [first.shape[0], 8])
    for start in range(0, most, 8):
        piece = start + some
        inside = live[:, None] & (piece[None, :] < pieces[:, None])
        place = first[:, None] + (piece * HEADS)[None, :]
        here = tl.load(partial_sums + place * 2, mask=inside, other=float("-inf"), cache_modifier=".cg")
        tops = tl.maximum(tops, here)
    top = tl.max(tops, 1)
    # A row that sees nothing: every weight is 0 and so is the result.
    top = tl.where(top == float("-inf"), 0.0, top)
    for chunk in range(0, HEAD_DIM_PAD, CHUNK):
        lane = chunk + tl.arange(0, CHUNK)
        acc = tl.zeros([first.shape[0], CHUNK], tl.float32)
        total = tl.exp2(sink - top)
        for start in range(0, most, UNROLL):
            for i in tl.static_range(UNROLL):
                inside = live & (start + i < pieces)
                place = first + (start + i) * HEADS
                part_top = tl.load(partial_sums + place * 2, mask=inside, other=float("-inf"), cache_modifier=".cg")
                part_total = tl.load(partial_sums + place * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
                seen = inside & (part_top > float("-inf"))
                values = tl.load(
                    partial_acc + place[:, None] * HEAD_DIM + lane[None, :],
                    mask=seen[:, None] & (lane < HEAD_DIM)[None, :], other=0.0, cache_modifier=".cg",
                )
                weight = tl.exp2(part_top - top)
                # One rounding in every instance of this function, so that it does not matter which one joins.
                total = tl.fma(part_total, weight, total)
                acc = tl.fma(values, tl.broadcast_to(weight[:, None], acc.shape), acc)
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        offset = (row.to(tl.int64) * HEADS + query_head)[:, None] * HEAD_DIM + lane[None, :]
        tl.store(out + offset, result.to(out.dtype.element_ty), mask=live[:, None] & (lane < HEAD_DIM)[None, :])


@jit()
def _group_part(
    q, k_cache, v_cache, out, partial_acc, partial_sums, columns, members, arrivals, block_table, sinks, q_stride_t,
    q_stride_h, table_stride, window, scale_log2, softcap_log2, head, rows, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MIN_TILES: tl.constexpr, CHUNK: tl.constexpr,
    MEMBER_FIELDS: tl.constexpr, THREADS: tl.constexpr,
):
    """A split of what a tile of rows shares. Tile row m is query head m % GROUP of the tile's row m // GROUP."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    STRIDE: tl.constexpr = BLOCK_SIZE * KV_HEADS * HEAD_DIM
    first = tl.load(columns + FIRST)
    slot = tl.load(columns + SLOT).to(tl.int64)
    begin = tl.load(columns + BEGIN)
    end = tl.load(columns + END)
    piece = tl.load(columns + PIECE)
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    lane = tl.arange(0, HEAD_DIM_PAD)
    member = m // GROUP
    live = member < rows
    entry = members + (first + member) * MEMBER_FIELDS
    row = tl.load(entry + MEMBER_ROW, mask=live, other=0).to(tl.int64)
    part = tl.load(entry + MEMBER_PART, mask=live, other=0).to(tl.int64)
    query_head = head * GROUP + m % GROUP
    row_begin = begin
    if HAS_WINDOW:
        row_begin = tl.maximum(tl.load(entry + MEMBER_LENGTH, mask=live, other=0) - window, 0)
        begin = tl.maximum(begin, tl.min(tl.where(live, row_begin, end), 0))
    loop_begin, loop_end = _cut(
        begin, end, tl.load(columns + SPLIT), tl.load(columns + SPLITS), BLOCK_N, MIN_TILES
    )
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
        _store_part(acc, top, total, partial_acc, partial_sums, part + piece, query_head, live, HEADS, HEAD_DIM,
                    HEAD_DIM_PAD)
    else:
        _store_nothing(partial_sums, part + piece, query_head, live, HEADS)

    # Every thread's parts are written before an arrival is counted, and seen by whoever counts the last.
    tl.debug_barrier()
    # Counted by row. A lane a thread: nothing is counted by two threads, and none has to hear of another's count.
    nth = tl.arange(0, THREADS)
    entry = members + (first + nth) * MEMBER_FIELDS
    counted = nth < rows
    counter = arrivals + tl.load(entry + MEMBER_ROW, mask=counted, other=0) * KV_HEADS + head
    all_pieces = tl.load(entry + MEMBER_PIECES, mask=counted, other=0)
    arrived = tl.atomic_add(counter, 1, mask=counted, sem="acq_rel")
    last = counted & (arrived == all_pieces - 1)
    if tl.max(last.to(tl.int32), 0) > 0:
        tl.store(counter, 0, mask=last)
        complete = tl.max(((member[:, None] == nth[None, :]) & last[None, :]).to(tl.int32), 1) > 0
        pieces = tl.load(members + (first + member) * MEMBER_FIELDS + MEMBER_PIECES, mask=live, other=0)
        tl.debug_barrier()
        _join(out, partial_acc, partial_sums, sinks, row, part, pieces, query_head, live & complete, HAS_SINKS, HEADS,
              HEAD_DIM, HEAD_DIM_PAD, CHUNK, 2)


@jit()
def _own_part(
    q, k_cache, v_cache, out, partial_acc, partial_sums, columns, arrivals, block_table, sinks, q_stride_t, q_stride_h,
    table_stride, window, scale_log2, softcap_log2, head, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, MIN_TILES: tl.constexpr,
):
    """A split of a row's own positions. The group's heads are the rows of one tile, padded to what tl.dot takes."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    row = tl.load(columns + FIRST).to(tl.int64)
    slot = tl.load(columns + SLOT).to(tl.int64)
    begin = tl.load(columns + BEGIN)
    end = tl.load(columns + END)
    pieces = tl.load(columns + PIECES)
    part = tl.load(columns + PART).to(tl.int64)
    piece = tl.load(columns + PIECE)
    if HAS_WINDOW:
        begin = tl.maximum(begin, tl.load(columns + LENGTH) - window)
    loop_begin, loop_end = _cut(
        begin, end, tl.load(columns + SPLIT), tl.load(columns + SPLITS), BLOCK_N, MIN_TILES
    )
    table_row = block_table + slot * table_stride
    n = tl.arange(0, BLOCK_N)
    # The next tile's block ids come a tile ahead, so that its loads of K and V need not wait for them.
    block = blocks_of(table_row, loop_begin + n, begin, loop_end, BLOCK_SIZE)
    m = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, HEAD_DIM_PAD)
    query_head = head * GROUP + m
    live = m < GROUP
    inside = live[:, None] & (lane < HEAD_DIM)[None, :]
    q_tile = tl.load(q + row * q_stride_t + query_head[:, None] * q_stride_h + lane[None, :], mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PAD], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        # Of several pieces, the joining counts it.
        sink = tl.load(sinks + query_head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(pieces == 1, tl.maximum(sink, -3.0e38), top)
        total = tl.where(pieces == 1, 1.0, total)
    for start in tl.range(loop_begin, loop_end, BLOCK_N, num_stages=STAGES):
        position = start + n
        next_block = blocks_of(table_row, position + BLOCK_N, begin, loop_end, BLOCK_SIZE)
        readable = (position >= begin) & (position < loop_end)
        acc, top, total = attend_tile(
            q_tile, acc, top, total, k_cache, v_cache, block, head, position, readable,
            scale_log2, softcap_log2, HAS_SOFTCAP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE,
        )
        block = next_block

    if pieces == 1:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        offset = (row * HEADS + query_head)[:, None] * HEAD_DIM + lane[None, :]
        tl.store(out + offset, result.to(out.dtype.element_ty), mask=inside)
    else:
        if loop_begin < loop_end:
            _store_part(acc, top, total, partial_acc, partial_sums, part + piece, query_head, live, HEADS, HEAD_DIM,
                        HEAD_DIM_PAD)
        else:
            _store_nothing(partial_sums, part + piece, query_head, live, HEADS)
        tl.debug_barrier()
        counter = arrivals + row * KV_HEADS + head
        if tl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
            tl.store(counter, 0)
            zero = tl.zeros([BLOCK_M], tl.int32)
            _join(out, partial_acc, partial_sums, sinks, row + zero, part + zero, pieces + zero, query_head, live,
                  HAS_SINKS, HEADS, HEAD_DIM, HEAD_DIM_PAD, HEAD_DIM_PAD, 4)


@jit(varying_pointers=("items", "members"))
def _grouped_kernel(
    q,
    k_cache,
    v_cache,
    out,
    partial_acc,
    partial_sums,
    items,
    members,
    arrivals,
    block_table,
    sinks,
    q_stride_t,
    q_stride_h,
    table_stride,
    window,
    scale_log2,
    softcap_log2,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    MIN_TILES: tl.constexpr,
    CHUNK: tl.constexpr,
    OWN_BLOCK_M: tl.constexpr,
    OWN_BLOCK_N: tl.constexpr,
    OWN_STAGES: tl.constexpr,
    OWN_MIN_TILES: tl.constexpr,
    PART_FIELDS: tl.constexpr,
    MEMBER_FIELDS: tl.constexpr,
    THREADS: tl.constexpr,
):
    head = tl.program_id(0)
    columns = items + tl.program_id(1) * PART_FIELDS
    rows = tl.load(columns + ROWS)
    if rows > 0:
        _group_part(
            q, k_cache, v_cache, out, partial_acc, partial_sums, columns, members, arrivals, block_table, sinks,
            q_stride_t, q_stride_h, table_stride, window, scale_log2, softcap_log2, head, rows, HAS_WINDOW,
            HAS_SOFTCAP, HAS_SINKS, GROUP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_N, STAGES,
            MIN_TILES, CHUNK, MEMBER_FIELDS, THREADS,
        )
    elif rows == 0:
        _own_part(
            q, k_cache, v_cache, out, partial_acc, partial_sums, columns, arrivals, block_table, sinks, q_stride_t,
            q_stride_h, table_stride, window, scale_log2, softcap_log2, head, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS,
            GROUP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, OWN_BLOCK_M, OWN_BLOCK_N, OWN_STAGES, OWN_MIN_TILES,
        )


def paged_attention_grouped(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: PagedMetadata,
    options: AttentionOptions,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`~hf_paged.kernels.attention.paged_attention.paged_attention` of one new token a row, over ``meta.work``.

    fp16, bf16 or fp32; head_dim up to 256. The grid and the memory for parts depend on the shapes of the plan alone: a
    CUDA graph serves every plan of the same shapes and tile.

    Args:
        meta: its ``work`` is a :class:`~hf_paged.kernels.attention.metadata.GroupedWork`.
        out: ``[T, Hq, D]`` contiguous, q's dtype; every element is written. None: a new tensor.
    """
    require_triton()
    work = meta.work
    assert isinstance(work, GroupedWork), "the plan of a grouped step"
    _, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    config = work.config
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    scale = options.scale
    if scale <= 0.0:  # the kernel takes the largest score of a group's tile before it scales
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    acc = torch.empty(work.num_parts, num_heads, head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(work.num_parts, num_heads, 2, dtype=torch.float32, device=q.device)
    group_pad, head_dim_pad = triton.next_power_of_2(group), padded_head_dim(head_dim)
    with on_device_of(q):
        _grouped_kernel[(num_kv_heads, len(work.items))](
            q,
            k_cache,
            v_cache,
            out,
            acc,
            sums,
            work.items,
            work.members,
            work.arrivals,
            meta.block_table,
            options.sinks,
            q.stride(0),
            q.stride(1),
            meta.block_table.stride(0),
            options.window or 0,
            scale * LOG2_E,
            (options.softcap or 0.0) * LOG2_E,
            HAS_WINDOW=options.window is not None,
            HAS_SOFTCAP=options.softcap is not None,
            HAS_SINKS=options.sinks is not None,
            GROUP=group,
            KV_HEADS=num_kv_heads,
            HEAD_DIM=head_dim,
            HEAD_DIM_PAD=head_dim_pad,
            BLOCK_SIZE=block_size,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            STAGES=config.num_stages,
            MIN_TILES=-(-MIN_GROUP_SPLIT // config.block_n),
            CHUNK=min(32, head_dim_pad),
            OWN_BLOCK_M=max(16, group_pad),
            OWN_BLOCK_N=config.own_block_n,
            OWN_STAGES=config.own_stages,
            OWN_MIN_TILES=-(-MIN_SPLIT // config.own_block_n),
            PART_FIELDS=PART_FIELDS,
            MEMBER_FIELDS=MEMBER_FIELDS,
            THREADS=32 * config.num_warps,
            num_warps=config.num_warps,
            **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
        )
    return out
