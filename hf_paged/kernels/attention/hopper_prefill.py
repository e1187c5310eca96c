# mypy: disallow-untyped-defs=False
"""Prefill attention for Hopper in Gluon: warps that load, and two warpgroups that take turns at the tensor cores."""

from __future__ import annotations

from typing import NamedTuple

import torch

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hf_paged.kernels._device import num_multiprocessors
from hf_paged.kernels._triton import on_device_of, require_triton, triton
from hf_paged.kernels.attention._tile import LOG2_E
from hf_paged.kernels.attention.metadata import AttentionOptions, PagedMetadata

# Names that differ between versions of Triton.
_load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_view = gl.shared_memory_descriptor
_reinterpret = getattr(_view, "reinterpret", None) or _view._reinterpret


class HopperConfig(NamedTuple):
    block_n: int
    stages: int
    turns: bool = True
    ordered: bool = True


@gluon.jit
def _row_of_tile(query_start, tile, num_rows, BLOCK_Q: gl.constexpr):
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(query_start + middle) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@gluon.jit
def _place_of(item, query_start, seq_lens, num_rows, BUNDLES: gl.constexpr, BLOCK_Q: gl.constexpr):
    """Of the item-th tile: row, first token, its position, live queries (0 or less: none), bundle of heads."""
    tile = item // BUNDLES
    row = _row_of_tile(query_start, tile, num_rows, BLOCK_Q)
    first_token = gl.load(query_start + row)
    count = gl.load(query_start + row + 1) - first_token
    # The last tile of a row sees the most: it comes first.
    before = (gl.cdiv(count, BLOCK_Q) - 1 - (tile - (first_token // BLOCK_Q + row))) * BLOCK_Q
    live = gl.where(before >= 0, count - before, 0)
    return row, first_token + before, gl.load(seq_lens + row) - count + before, live, item % BUNDLES


@gluon.jit
def _span(position, live, window, HAS_WINDOW: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr):
    """First visible position, the end of the visible ones, start of the last tile of keys, number of tiles."""
    begin = position * 0
    if HAS_WINDOW:
        begin = gl.maximum(position - window + 1, 0)
    end = position + gl.minimum(live, BLOCK_Q)
    last = gl.maximum((end - 1) // BLOCK_N * BLOCK_N, 0)
    return begin, end, last, (last - begin // BLOCK_N * BLOCK_N) // BLOCK_N + 1


@gluon.jit
def _item_of(turn, PROGRAMS: gl.constexpr):
    """Tiles are dealt back and forth, so that each program gets long and short ones."""
    program = gl.program_id(0)
    return turn * PROGRAMS + gl.where(turn % 2 == 0, program, PROGRAMS - 1 - program)


@gluon.jit
def _load_tile(
    cache, pages, full, stage, table_row, start, begin, end, kv_head, BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr, CHUNKS: gl.constexpr, TILE_BYTES: gl.constexpr,
):
    """A tile of keys or values, page by page; pages that nobody sees come as zeros (they lie outside of the cache)."""
    PAGES: gl.constexpr = BLOCK_N // PAGE
    mbarrier.expect(full.index(stage), TILE_BYTES)
    for page in gl.static_range(PAGES):
        position = start + page * PAGE
        seen = (position < end) & (position + PAGE > begin)
        block = gl.load(table_row + position // BLOCK_SIZE, mask=seen, other=0)
        slot = gl.where(seen, block * BLOCK_SIZE + position % BLOCK_SIZE, -PAGE)
        for chunk in gl.static_range(CHUNKS):
            part = pages.index((stage * CHUNKS + chunk) * PAGES + page)
            _load_box(cache, [slot, kv_head, chunk * 64], full.index(stage), part)


@gluon.jit
def _load_keys(
    q, k_cache, q_parts, pages, info, full, empty, q_full, q_empty, info_full, info_empty, query_start, seq_lens,
    block_table, slots, num_rows, num_items, table_stride, window, HAS_WINDOW: gl.constexpr, BUNDLES: gl.constexpr,
    PACKED: gl.constexpr, BUNDLES_PER_HEAD: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HEAD_PAD: gl.constexpr, STAGES: gl.constexpr,
    PROGRAMS: gl.constexpr,
):
    """One warp: says which tile comes next, loads its queries and all its keys."""
    BLOCK_Q: gl.constexpr = BLOCK_M // PACKED
    CHUNKS: gl.constexpr = HEAD_PAD // 64
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    field = gl.arange(0, 4, layout)
    step = 0
    tiles = 0
    for turn in range(gl.cdiv(num_items, PROGRAMS)):
        item = _item_of(turn, PROGRAMS)
        if item < num_items:
            row, token, position, live, bundle = _place_of(item, query_start, seq_lens, num_rows, BUNDLES, BLOCK_Q)
            if live > 0:
                # What the consumers have to know.
                mbarrier.wait(info_empty.index(tiles % 2), (tiles // 2 & 1) ^ 1)
                known = gl.where(field == 0, token, gl.where(field == 1, position, gl.where(field == 2, live, bundle)))
                info.index(tiles % 2).store(known)
                mbarrier.arrive(info_full.index(tiles % 2), count=1)

                begin, end, last, count = _span(position, live, window, HAS_WINDOW, BLOCK_Q, BLOCK_N)
                table_row = block_table + gl.load(slots + row).to(gl.int64) * table_stride
                kv_head = bundle // BUNDLES_PER_HEAD
                for j in range(count):
                    stage = step % STAGES
                    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                    _load_tile(k_cache, pages, full, stage, table_row, last - j * BLOCK_N, begin, end, kv_head,
                               BLOCK_SIZE, PAGE, BLOCK_N, CHUNKS, BLOCK_N * HEAD_PAD * 2)
                    if j == 0:
                        mbarrier.wait(q_empty, (tiles & 1) ^ 1)
                        mbarrier.expect(q_full, BLOCK_M * HEAD_PAD * 2)
                        for part in gl.static_range(2 * CHUNKS):
                            _load_box(
                                q, [token + part // CHUNKS * (BLOCK_Q // 2), bundle * PACKED, part % CHUNKS * 64], q_full,
                                q_parts.index(part),
                            )
                    step += 1
                tiles += 1
    mbarrier.wait(info_empty.index(tiles % 2), (tiles // 2 & 1) ^ 1)
    info.index(tiles % 2).store(gl.full([4], -1, gl.int32, layout))
    mbarrier.arrive(info_full.index(tiles % 2), count=1)


@gluon.jit
def _load_values(
    v_cache, pages, full, empty, query_start, seq_lens, block_table, slots, num_rows, num_items, table_stride, window,
    HAS_WINDOW: gl.constexpr, BUNDLES: gl.constexpr, PACKED: gl.constexpr, BUNDLES_PER_HEAD: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    HEAD_PAD: gl.constexpr, STAGES: gl.constexpr, PROGRAMS: gl.constexpr,
):
    """One warp: loads the values of the same tiles."""
    BLOCK_Q: gl.constexpr = BLOCK_M // PACKED
    step = 0
    for turn in range(gl.cdiv(num_items, PROGRAMS)):
        item = _item_of(turn, PROGRAMS)
        if item < num_items:
            row, token, position, live, bundle = _place_of(item, query_start, seq_lens, num_rows, BUNDLES, BLOCK_Q)
            if live > 0:
                begin, end, last, count = _span(position, live, window, HAS_WINDOW, BLOCK_Q, BLOCK_N)
                table_row = block_table + gl.load(slots + row).to(gl.int64) * table_stride
                for j in range(count):
                    stage = step % STAGES
                    mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
                    _load_tile(v_cache, pages, full, stage, table_row, last - j * BLOCK_N, begin, end,
                               bundle // BUNDLES_PER_HEAD, BLOCK_SIZE, PAGE, BLOCK_N, HEAD_PAD // 64,
                               BLOCK_N * HEAD_PAD * 2)
                    step += 1


@gluon.jit
def _silence(pages, stage, position, low, high, PAGE: gl.constexpr, PAGES: gl.constexpr, CHUNKS: gl.constexpr):
    """Zero the values of page `position // PAGE` of a tile whose slots are not in low .. high - 1."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 1, 8], [4, 1, 1], [2, 1, 0])
    slot = gl.arange(0, PAGE, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    keep = ((slot >= low) & (slot < high))[:, None][:, :, None]
    for chunk in gl.static_range(CHUNKS):
        page = pages.index((stage * CHUNKS + chunk) * PAGES + position // PAGE)
        value = page.load(layout)
        page.store(gl.where(keep, value, gl.zeros_like(value)))


@gluon.jit
def _silence_unseen(
    pages, full, step, start, begin, seq_len, HAS_WINDOW: gl.constexpr, STAGES: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr, CHUNKS: gl.constexpr,
):
    """A weight of zero would not silence a NaN: values that no query may read become zero before they are used."""
    PAGES: gl.constexpr = BLOCK_N // PAGE
    cut = (start + BLOCK_N > seq_len) & (seq_len % PAGE != 0)
    if HAS_WINDOW:
        cut |= (start < begin) & (begin % PAGE != 0)
    if cut:
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        if (start + BLOCK_N > seq_len) & (seq_len % PAGE != 0):
            _silence(pages, stage, seq_len - start, 0, seq_len % PAGE, PAGE, PAGES, CHUNKS)
        if HAS_WINDOW:
            if (start < begin) & (begin % PAGE != 0):
                _silence(pages, stage, begin - start, begin % PAGE, PAGE, PAGE, PAGES, CHUNKS)
        fence_async_shared()
        _barrier()


@gluon.jit
def _weigh(
    score, top, total, position, start, window, scale_log2, softcap_log2, MASKED: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr,
):
    """Online softmax in base 2: weights of a tile, the new maximum and sum, and the factor of what came before."""
    scale = scale_log2
    if HAS_SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), exact at both infinities; 2.885... is 2 log2(e).
        score = gl.exp2(score * (scale_log2 / softcap_log2 * 2.8853900817779268))
        score = softcap_log2 * (1.0 - 2.0 / (score + 1.0))
        scale = 1.0
    if MASKED:
        n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, score.type.layout))
        last = position - start
        visible = n[None, :] <= last[:, None]
        if HAS_WINDOW:
            visible &= n[None, :] > (last - window)[:, None]
        score = gl.where(visible, score, float("-inf"))
    new_top = gl.maximum(top, gl.max(score, 1) * scale)
    weight = gl.exp2(score * scale - new_top[:, None])
    rescale = gl.exp2(top - new_top)
    return weight, new_top, total * rescale + gl.sum(weight, 1), rescale


@gluon.jit
def _ordered(total):
    """Whatever waits next waits after this sum is known: ptxas would move the wait ahead of the softmax."""
    return gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .f32 t;
        add.f32 t, $2, $3; setp.lt.f32 p, t, 0f00000000; @p nanosleep.u32 0;
        mov.b32 $0, $2; mov.b32 $1, $3; }""", "=f,=f,f,f", [total], dtype=gl.float32, is_pure=False, pack=2,
    )


@gluon.jit
def _steps(
    first_j, end_j, acc, top, total, weight, last, position, begin, seq_len, window, scale_log2, softcap_log2, step,
    order, q, k, v, v_pages, k_full, k_empty, v_full, v_empty, mine, theirs, FIRST: gl.constexpr, MASKED: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, TURNS: gl.constexpr, ORDERED: gl.constexpr, PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr, CHUNKS: gl.constexpr, STAGES: gl.constexpr,
):
    """Tiles first_j to end_j - 1: scores of one while the values of the one before are acc up."""
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNKS * 64, 16])
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    for j in range(first_j, end_j):
        start = last - j * BLOCK_N
        k_stage = step % STAGES
        v_step = step - 1
        v_stage = v_step % STAGES
        mbarrier.wait(k_full.index(k_stage), step // STAGES & 1)
        if TURNS:
            mbarrier.wait(mine, (order & 1) ^ FIRST)
            order += 1
        zero = gl.zeros([64, BLOCK_N], gl.float32, score_layout)
        score = warpgroup_mma(q, k.index(k_stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        operand = gl.convert_layout(weight.to(q.dtype), weight_layout)
        mbarrier.wait(v_full.index(v_stage), v_step // STAGES & 1)
        acc = warpgroup_mma(operand, v.index(v_stage), acc, is_async=True)
        if TURNS:
            mbarrier.arrive(theirs, count=1)
        score = warpgroup_mma_wait(1, deps=[score])
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        weight, top, total, rescale = _weigh(
            score, top, total, position, start, window, scale_log2, softcap_log2, MASKED, HAS_WINDOW, HAS_SOFTCAP,
            BLOCK_N,
        )
        if ORDERED:
            total = _ordered(total)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(v_stage), count=1)
        acc = acc * gl.convert_layout(rescale, row)[:, None]
        if MASKED:
            _silence_unseen(v_pages, v_full, step, start, begin, seq_len, HAS_WINDOW, STAGES, PAGE, BLOCK_N, CHUNKS)
        step += 1
    return acc, top, total, weight, step, order


@gluon.jit
def _consume(
    out, sinks, q_tiles, k, v, v_pages, info, k_full, k_empty, v_full, v_empty, q_full, q_empty, info_full, info_empty,
    turns, window, scale_log2, softcap_log2, HALF: gl.constexpr, HAS_WINDOW: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, TURNS: gl.constexpr, ORDERED: gl.constexpr, QUERY_HEADS: gl.constexpr,
    PACKED: gl.constexpr, PAGE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr, HEAD_PAD: gl.constexpr, STAGES: gl.constexpr,
):
    """A warpgroup: one half of the queries of every tile."""
    BLOCK_Q: gl.constexpr = BLOCK_M // PACKED
    CHUNKS: gl.constexpr = HEAD_PAD // 64
    FIRST: gl.constexpr = 1 - HALF
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_PAD, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    info_layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    field = gl.arange(0, 4, info_layout)
    mine = turns.index(HALF)
    theirs = turns.index(FIRST)
    q = q_tiles.index(HALF)

    step = 0
    tiles = 0
    order = 0
    mbarrier.wait(info_full.index(0), 0)
    known = info.index(0).load(info_layout)
    mbarrier.arrive(info_empty.index(0), count=1)
    live = gl.sum(gl.where(field == 2, known, 0), 0)
    while live > 0:
        token = gl.sum(gl.where(field == 0, known, 0), 0)
        tile_position = gl.sum(gl.where(field == 1, known, 0), 0)
        bundle = gl.sum(gl.where(field == 3, known, 0), 0)
        seq_len = tile_position + live
        begin, end, last, count = _span(tile_position, live, window, HAS_WINDOW, BLOCK_Q, BLOCK_N)

        m = gl.arange(0, 64, gl.SliceLayout(1, score_layout))
        first_position = tile_position + HALF * (BLOCK_Q // 2)
        position = first_position + m // PACKED
        top = gl.full([64], -3.0e38, gl.float32, gl.SliceLayout(1, score_layout))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, score_layout))
        if HAS_SINKS:
            # A score without a value, of weight 1 at its own height; log2(e) turns it to base 2.
            sink = gl.load(sinks + bundle * PACKED + m % PACKED).to(gl.float32) * 1.4426950408889634
            top = gl.maximum(sink, top)
            total += 1.0

        mbarrier.wait(q_full, tiles & 1)
        k_stage = step % STAGES
        mbarrier.wait(k_full.index(k_stage), step // STAGES & 1)
        zero = gl.zeros([64, BLOCK_N], gl.float32, score_layout)
        score = warpgroup_mma(q, k.index(k_stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=[score])
        mbarrier.arrive(k_empty.index(k_stage), count=1)
        weight, top, total, rescale = _weigh(score, top, total, position, last, window, scale_log2, softcap_log2, True,
                                             HAS_WINDOW, HAS_SOFTCAP, BLOCK_N)
        _silence_unseen(v_pages, v_full, step, last, begin, seq_len, HAS_WINDOW, STAGES, PAGE, BLOCK_N, CHUNKS)
        step += 1

        acc = gl.zeros([64, HEAD_PAD], gl.float32, acc_layout)
        # Tiles from whole_end on are not seen whole by every query, nor, under a window, are tiles before left_end.
        whole_end = gl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, begin // BLOCK_N * BLOCK_N)
        masked = gl.minimum(gl.maximum((last - whole_end) // BLOCK_N + 1, 1), count)
        whole = count
        if HAS_WINDOW:
            left_end = gl.minimum(first_position + BLOCK_Q // 2, seq_len) - window
            whole = gl.minimum(gl.maximum((last - left_end + BLOCK_N) // BLOCK_N, masked), count)
        acc, top, total, weight, step, order = _steps(
            1, masked, acc, top, total, weight, last, position, begin, seq_len, window, scale_log2, softcap_log2, step,
            order, q, k, v, v_pages, k_full, k_empty, v_full, v_empty, mine, theirs, FIRST, True, HAS_WINDOW,
            HAS_SOFTCAP, TURNS, ORDERED, PAGE, BLOCK_N, CHUNKS, STAGES,
        )
        acc, top, total, weight, step, order = _steps(
            masked, whole, acc, top, total, weight, last, position, begin, seq_len, window, scale_log2, softcap_log2,
            step, order, q, k, v, v_pages, k_full, k_empty, v_full, v_empty, mine, theirs, FIRST, False, HAS_WINDOW,
            HAS_SOFTCAP, TURNS, ORDERED, PAGE, BLOCK_N, CHUNKS, STAGES,
        )
        if HAS_WINDOW:
            acc, top, total, weight, step, order = _steps(
                whole, count, acc, top, total, weight, last, position, begin, seq_len, window, scale_log2,
                softcap_log2, step, order, q, k, v, v_pages, k_full, k_empty, v_full, v_empty, mine, theirs, FIRST,
                True, HAS_WINDOW, HAS_SOFTCAP, TURNS, ORDERED, PAGE, BLOCK_N, CHUNKS, STAGES,
            )
        mbarrier.arrive(q_empty, count=1)
        v_stage = (step - 1) % STAGES
        mbarrier.wait(v_full.index(v_stage), (step - 1) // STAGES & 1)
        operand = gl.convert_layout(weight.to(q.dtype), weight_layout)
        acc = warpgroup_mma(operand, v.index(v_stage), acc, is_async=True)
        # Meanwhile: which tile comes next.
        tiles += 1
        mbarrier.wait(info_full.index(tiles % 2), tiles // 2 & 1)
        known = info.index(tiles % 2).load(info_layout)
        mbarrier.arrive(info_empty.index(tiles % 2), count=1)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(v_stage), count=1)

        total = gl.convert_layout(total, gl.SliceLayout(1, acc_layout))
        result = (acc / gl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty)
        _store(out, result, token + HALF * (BLOCK_Q // 2), live - HALF * (BLOCK_Q // 2), bundle, QUERY_HEADS, PACKED,
               HEAD_DIM, HEAD_PAD)
        live = gl.sum(gl.where(field == 2, known, 0), 0)


@gluon.jit
def _store(
    out, result, token, live, bundle, QUERY_HEADS: gl.constexpr, PACKED: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_PAD: gl.constexpr,
):
    # A thread's 8 adjacent lanes are 16 bytes; rows stay with their warp, so that only shuffles are needed.
    wide: gl.constexpr = [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]]
    layout: gl.constexpr = gl.DistributedLinearLayout(
        wide + ([[0, 64]] if HEAD_PAD > 64 else []) + ([[0, 128]] if HEAD_PAD > 128 else []),
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, HEAD_PAD],
    )
    result = gl.convert_layout(result, layout)
    m = gl.arange(0, 64, gl.SliceLayout(1, layout))
    lane = gl.arange(0, HEAD_PAD, gl.SliceLayout(0, layout))
    row = (token + m // PACKED).to(gl.int64) * QUERY_HEADS + bundle * PACKED + m % PACKED
    keep = (m // PACKED < live)[:, None] & (lane < HEAD_DIM)[None, :]
    gl.store(out + row[:, None] * HEAD_DIM + lane[None, :], result, mask=keep)


@gluon.jit(do_not_specialize=["num_rows", "num_items"],
           do_not_specialize_on_alignment=["query_start", "seq_lens", "slots"])
def _hopper_prefill_kernel(
    q, k_cache, v_cache, out, query_start, seq_lens, block_table, slots, sinks, num_rows, num_items, table_stride,
    window, scale_log2, softcap_log2, HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr,
    QUERY_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PACKED: gl.constexpr, HEAD_DIM: gl.constexpr,
    HEAD_PAD: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, ORDERED: gl.constexpr, PROGRAMS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
):
    BUNDLES: gl.constexpr = QUERY_HEADS // PACKED
    BUNDLES_PER_HEAD: gl.constexpr = BUNDLES // KV_HEADS
    CHUNKS: gl.constexpr = HEAD_PAD // 64
    dtype: gl.constexpr = out.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, 3)
    # A tile lies in shared memory as columns of 64 lanes, in which the slots of a page follow each other.
    q_tiles = gl.allocate_shared_memory(dtype, [2, 64, HEAD_PAD], tile)
    k = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_PAD], tile)
    v = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HEAD_PAD], tile)
    q_parts = _reinterpret(q_tiles, dtype, [2 * CHUNKS, 64 // PACKED, PACKED, 64], box)
    k_pages = _reinterpret(k, dtype, [STAGES * CHUNKS * (BLOCK_N // PAGE), PAGE, 1, 64], box)
    v_pages = _reinterpret(v, dtype, [STAGES * CHUNKS * (BLOCK_N // PAGE), PAGE, 1, 64], box)
    info = gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    info_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    info_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(info_full.index(i), count=1)
        mbarrier.init(info_empty.index(i), count=2)
        mbarrier.init(turns.index(i), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    fence_async_shared()
    _barrier()

    gl.warp_specialize([
        (_consume, (out, sinks, q_tiles, k, v, v_pages, info, k_full, k_empty, v_full, v_empty, q_full, q_empty,
                    info_full, info_empty, turns, window, scale_log2, softcap_log2, 0, HAS_WINDOW, HAS_SOFTCAP,
                    HAS_SINKS, TURNS, ORDERED, QUERY_HEADS, PACKED, PAGE, BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_PAD, STAGES)),
        (_consume, (out, sinks, q_tiles, k, v, v_pages, info, k_full, k_empty, v_full, v_empty, q_full, q_empty,
                    info_full, info_empty, turns, window, scale_log2, softcap_log2, 1, HAS_WINDOW, HAS_SOFTCAP,
                    HAS_SINKS, TURNS, ORDERED, QUERY_HEADS, PACKED, PAGE, BLOCK_M, BLOCK_N, HEAD_DIM, HEAD_PAD, STAGES)),
        (_load_keys, (q, k_cache, q_parts, k_pages, info, k_full, k_empty, q_full, q_empty, info_full, info_empty,
                      query_start, seq_lens, block_table, slots, num_rows, num_items, table_stride, window, HAS_WINDOW,
                      BUNDLES, PACKED, BUNDLES_PER_HEAD, BLOCK_SIZE, PAGE, BLOCK_M, BLOCK_N, HEAD_PAD, STAGES,
                      PROGRAMS)),
        (_load_values, (v_cache, v_pages, v_full, v_empty, query_start, seq_lens, block_table, slots, num_rows,
                        num_items, table_stride, window, HAS_WINDOW, BUNDLES, PACKED, BUNDLES_PER_HEAD, BLOCK_SIZE,
                        PAGE, BLOCK_M, BLOCK_N, HEAD_PAD, STAGES, PROGRAMS)),
    ], [4, 1, 1], [CONSUMER_REGISTERS, 24, 24])


_BOX = gl.NVMMASharedLayout(128, 16, 3)
_SLOTS = 2**31 - 1
BLOCK_M = 128


def paged_attention_hopper(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: PagedMetadata,
    options: AttentionOptions,
    *,
    out: torch.Tensor | None = None,
    config: HopperConfig | None = None,
) -> torch.Tensor:
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_rows = meta.seq_lens.numel()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_tokens == 0:
        return out
    if config is None:
        config = HopperConfig(128, 2)
    scale = options.scale
    if scale <= 0.0:  # the kernel takes the largest score before it scales
        q, scale = (-q, -scale) if scale else (torch.zeros_like(q), 1.0)
    group = num_heads // num_kv_heads
    packed = min(group & -group, 16)
    head_pad = max(64, triton.next_power_of_2(head_dim))
    page = min(block_size, config.block_n)
    programs = num_multiprocessors(q.device)
    strides = [num_kv_heads * head_dim, head_dim, 1]
    shape = [_SLOTS, num_kv_heads, head_dim]
    keys, values = (TensorDescriptor(cache, shape, strides, [page, 1, 64], _BOX) for cache in (k_cache, v_cache))
    queries = TensorDescriptor(q, list(q.shape), list(q.stride()), [64 // packed, packed, 64], _BOX)
    num_items = (num_tokens // (BLOCK_M // packed) + num_rows) * (num_heads // packed)
    with on_device_of(q):
        _hopper_prefill_kernel[(programs,)](
            queries, keys, values, out, meta.query_start, meta.seq_lens, meta.block_table, meta.slots, options.sinks,
            num_rows, num_items, meta.block_table.stride(0), options.window or 0, scale * LOG2_E,
            (options.softcap or 0.0) * LOG2_E, HAS_WINDOW=options.window is not None,
            HAS_SOFTCAP=options.softcap is not None, HAS_SINKS=options.sinks is not None, QUERY_HEADS=num_heads,
            KV_HEADS=num_kv_heads, PACKED=packed, HEAD_DIM=head_dim, HEAD_PAD=head_pad, BLOCK_SIZE=block_size,
            PAGE=page, BLOCK_M=BLOCK_M, BLOCK_N=config.block_n, STAGES=config.stages, TURNS=config.turns,
            ORDERED=config.ordered, PROGRAMS=programs, CONSUMER_REGISTERS=240, num_warps=4, maxnreg=168,
        )
    return out
