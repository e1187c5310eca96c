# mypy: disallow-untyped-defs=False
"""Paged attention for rows of many new tokens on Hopper, in Gluon: warps that load, warpgroups that take turns.

The method is FlashAttention-3's (Shah et al. 2024, arXiv 2407.08608), over pages. Two warps load, one the queries and
keys and one the values, a page at a time by TMA. Two warpgroups each have half of a tile's queries; one computes its
softmax while the tensor cores work for the other one, and the scores of a tile while the values of the one before are
summed up. Every program computes many tiles, so that loads go on while a result is written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from hf_paged.device.cuda import num_multiprocessors
from hf_paged.kernels._triton import next_power_of_2, on_device_of, row_of_tile
from hf_paged.kernels.attention._tile import score_numbers
from hf_paged.kernels.attention.types import AttentionOptions, PagedMetadata, TileQueue, positively_scaled
from hf_paged.kernels.build.compiling import noted
from hf_paged.kernels.hopper._gluon import barrier, load_box, reinterpret
from hf_paged.kernels.hopper.prefill_support import BLOCK_M, POSITIONS, packed_heads

_BLOCK_M = gl.constexpr(BLOCK_M)
_LANES = gl.constexpr(64)  # of a column of shared memory, the widest that TMA swizzles
_SLOTS = 2**31 - 1  # more than any cache has: a descriptor then says nothing of the pool's size
_OUTSIDE = gl.constexpr(-(2**20))  # a slot outside of every cache, of which TMA makes zeros


@dataclass(frozen=True)
class HopperShape:
    """What a kernel is compiled for."""

    query_heads: int
    kv_heads: int
    packed: int  # query heads of one KV head in a tile
    head_dim: int
    block_size: int
    block_n: int  # positions of a tile
    stages: int  # tiles of K, and of V, in shared memory
    programs: int
    has_window: bool
    has_softcap: bool
    has_sinks: bool

    @property
    def head_pad(self) -> int:
        return max(_LANES.value, next_power_of_2(self.head_dim))

    @property
    def chunks(self) -> int:
        return self.head_pad // _LANES.value

    @property
    def page(self) -> int:
        """Positions that one TMA copy brings."""
        return min(self.block_size, self.block_n)

    @property
    def pages(self) -> int:
        return self.block_n // self.page

    @property
    def block_q(self) -> int:
        return BLOCK_M // self.packed

    @property
    def half(self) -> int:
        """Queries of a warpgroup."""
        return self.block_q // 2

    @property
    def bundles(self) -> int:
        """Groups of heads that are packed together."""
        return self.query_heads // self.packed

    @property
    def bundles_per_head(self) -> int:
        return self.bundles // self.kv_heads


class _Rows(NamedTuple):
    """The step's layout on the device, as in `PagedMetadata`, and what else does not change from tile to tile."""

    query_start: Any
    seq_lens: Any
    block_table: Any
    slots: Any
    queue: Any  # `TileQueue.counters`, read where has_queue is not 0
    has_queue: Any
    num_rows: Any
    num_items: Any  # at least the number of all tiles
    table_stride: Any
    window: Any


class _Ring(NamedTuple):
    """Tiles of K or V in shared memory."""

    tiles: Any  # [stages, block_n, head_pad]
    pages: Any  # the same as [stages * chunks * pages, page, 1, lanes]
    full: Any  # barriers: loaded
    empty: Any  # read by both warpgroups


class _Handover(NamedTuple):
    """What passes between the warps once a tile."""

    q_tiles: Any  # [2, 64, head_pad]
    q_parts: Any  # the same as [2 * chunks, 64 // packed, packed, lanes]
    q_full: Any
    q_empty: Any
    places: Any  # [2, 8] int32: first token, its position, queries from there to the row's end, bundle, row
    place_full: Any
    place_empty: Any
    turns: Any  # of the two warpgroups at the tensor cores


_row_of_tile = gluon.jit(row_of_tile.fn)  # as Gluon takes functions of Triton's own library


@gluon.jit
def _item(rows, turn, S: gl.constexpr):
    """What the program computes in its turn-th turn."""
    PROGRAMS: gl.constexpr = S.programs
    program = gl.program_id(0)
    # Dealt back and forth, so that every program gets long and short ones, or taken from the queue from turn 1 on.
    item = turn * PROGRAMS + gl.where(turn % 2 == 0, program, PROGRAMS - 1 - program)
    if (rows.has_queue != 0) & (turn > 0):
        item = PROGRAMS + gl.atomic_add(rows.queue, 1, sem="relaxed")  # any other empties L1
    return item


@gluon.jit
def _leave_queue(queue, S: gl.constexpr):
    """The last program leaves it as it was, for the next launch.

    Every program comes here with the value of its last addition to the queue, which therefore has taken place.
    """
    if gl.atomic_add(queue + 1, 1, sem="relaxed") == S.programs - 1:
        gl.store(queue, 0)
        gl.store(queue + 1, 0)


@gluon.jit
def _place(rows, item, S: gl.constexpr):
    """A tile: row, first token, its position, queries up to the row's end (<= 0: none), bundle."""
    BLOCK_Q: gl.constexpr = S.block_q
    BUNDLES: gl.constexpr = S.bundles
    tile = item // BUNDLES
    row = _row_of_tile(rows.query_start, tile, rows.num_rows, BLOCK_Q)
    first_token = gl.load(rows.query_start + row)
    count = gl.load(rows.query_start + row + 1) - first_token
    # The last tile of a row sees the most: it comes first.
    before = (gl.cdiv(count, BLOCK_Q) - 1 - (tile - (first_token // BLOCK_Q + row))) * BLOCK_Q
    left = gl.where((before >= 0) & (item < rows.num_items), count - before, 0)
    return row, first_token + before, gl.load(rows.seq_lens + row) - count + before, left, item % BUNDLES


@gluon.jit
def _next_place(rows, turn, S: gl.constexpr):
    """The program's next tile with queries from its turn-th turn on, as `_place`, and the turn after that."""
    item = _item(rows, turn, S)
    row, token, position, left, bundle = _place(rows, item, S)
    while (left <= 0) & (item < rows.num_items):
        turn += 1
        item = _item(rows, turn, S)
        row, token, position, left, bundle = _place(rows, item, S)
    return turn + 1, row, token, position, left, bundle


@gluon.jit
def _announce(handover, tiles, row, token, position, left, bundle):
    """Say which one is the tiles-th tile; `left` <= 0: there is none."""
    field = gl.arange(0, 8, gl.BlockedLayout([8], [32], [1], [0]))
    mbarrier.wait(handover.place_empty.index(tiles % 2), (tiles // 2 & 1) ^ 1)
    place = gl.where(field == 0, token, gl.where(field == 1, position, gl.where(field == 2, left, bundle)))
    handover.places.index(tiles % 2).store(gl.where(field == 4, row, place))
    mbarrier.arrive(handover.place_full.index(tiles % 2), count=1)


@gluon.jit
def _span(position, left, window, S: gl.constexpr):
    """First position in sight, the end of those in sight, start of the last tile of keys, number of tiles."""
    BLOCK_N: gl.constexpr = S.block_n
    BLOCK_Q: gl.constexpr = S.block_q
    begin = position * 0
    if S.has_window:
        begin = gl.maximum(position - window + 1, 0)
    end = position + gl.minimum(left, BLOCK_Q)
    last = gl.maximum((end - 1) // BLOCK_N * BLOCK_N, 0)
    return begin, end, last, (last - begin // BLOCK_N * BLOCK_N) // BLOCK_N + 1


@gluon.jit
def _load_tile(cache, ring, step, table_row, start, begin, end, kv_head, S: gl.constexpr):
    """Start loading a tile of K or V page by page; pages out of sight become zeros and are not read."""
    STAGES: gl.constexpr = S.stages
    CHUNKS: gl.constexpr = S.chunks
    PAGE: gl.constexpr = S.page
    PAGES: gl.constexpr = S.pages
    BLOCK_SIZE: gl.constexpr = S.block_size
    BYTES: gl.constexpr = S.block_n * S.head_pad * 2
    stage = step % STAGES
    full = ring.full.index(stage)
    mbarrier.wait(ring.empty.index(stage), (step // STAGES & 1) ^ 1)
    mbarrier.expect(full, BYTES)
    for page in gl.static_range(PAGES):
        position = start + page * PAGE
        seen = (position < end) & (position + PAGE > begin)
        block = gl.load(table_row + position // BLOCK_SIZE, mask=seen, other=0)
        slot = gl.where(seen, block * BLOCK_SIZE + position % BLOCK_SIZE, _OUTSIDE)
        for chunk in gl.static_range(CHUNKS):
            part = ring.pages.index((stage * CHUNKS + chunk) * PAGES + page)
            load_box(cache, [slot, kv_head, chunk * _LANES], full, part)


@gluon.jit
def _load_keys(q, k_cache, rows, ring, handover, S: gl.constexpr):
    """One warp: says which tile comes next, loads its queries and all its keys."""
    BLOCK_N: gl.constexpr = S.block_n
    CHUNKS: gl.constexpr = S.chunks
    PACKED: gl.constexpr = S.packed
    HALF: gl.constexpr = S.half
    BUNDLES_PER_HEAD: gl.constexpr = S.bundles_per_head
    Q_BYTES: gl.constexpr = _BLOCK_M * S.head_pad * 2
    step = 0
    tiles = 0
    turn, row, token, position, left, bundle = _next_place(rows, gl.to_tensor(0), S)
    _announce(handover, 0, row, token, position, left, bundle)
    while left > 0:
        begin, end, last, count = _span(position, left, rows.window, S)
        table_row = rows.block_table + gl.load(rows.slots + row).to(gl.int64) * rows.table_stride
        head = bundle // BUNDLES_PER_HEAD
        for j in range(count):
            _load_tile(k_cache, ring, step, table_row, last - j * BLOCK_N, begin, end, head, S)
            if j == 0:
                mbarrier.wait(handover.q_empty, (tiles & 1) ^ 1)
                mbarrier.expect(handover.q_full, Q_BYTES)
                for part in gl.static_range(2 * CHUNKS):
                    begins = [token + part // CHUNKS * HALF, bundle * PACKED, part % CHUNKS * _LANES]
                    load_box(q, begins, handover.q_full, handover.q_parts.index(part))
            step += 1
        tiles += 1
        turn, row, token, position, left, bundle = _next_place(rows, turn, S)
        _announce(handover, tiles, row, token, position, left, bundle)
    if rows.has_queue != 0:
        _leave_queue(rows.queue, S)


@gluon.jit
def _taken(handover, tiles, layout: gl.constexpr):
    """Return the place of the tiles-th tile, to be read once."""
    mbarrier.wait(handover.place_full.index(tiles % 2), tiles // 2 & 1)
    place = handover.places.index(tiles % 2).load(layout)
    mbarrier.arrive(handover.place_empty.index(tiles % 2), count=1)
    return place


@gluon.jit
def _field(place, NUMBER: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, 8, place.type.layout) == NUMBER, place, 0), 0)


@gluon.jit
def _load_values(v_cache, rows, ring, handover, S: gl.constexpr):
    """One warp: loads the values of the same tiles."""
    BLOCK_N: gl.constexpr = S.block_n
    BUNDLES_PER_HEAD: gl.constexpr = S.bundles_per_head
    layout: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    step = 0
    tiles = 0
    place = _taken(handover, 0, layout)
    left = _field(place, 2)
    while left > 0:
        begin, end, last, count = _span(_field(place, 1), left, rows.window, S)
        table_row = rows.block_table + gl.load(rows.slots + _field(place, 4)).to(gl.int64) * rows.table_stride
        head = _field(place, 3) // BUNDLES_PER_HEAD
        for j in range(count):
            _load_tile(v_cache, ring, step, table_row, last - j * BLOCK_N, begin, end, head, S)
            step += 1
        tiles += 1
        place = _taken(handover, tiles, layout)
        left = _field(place, 2)


@gluon.jit
def _silence(pages, stage, position, low, high, S: gl.constexpr):
    """Zero what lies outside of slots low .. high - 1 in the page of a tile that holds its position-th value."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 1, 8], [4, 1, 1], [2, 1, 0])
    CHUNKS: gl.constexpr = S.chunks
    PAGE: gl.constexpr = S.page
    PAGES: gl.constexpr = S.pages
    slot = gl.arange(0, PAGE, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    keep = ((slot >= low) & (slot < high))[:, None][:, :, None]
    for chunk in gl.static_range(CHUNKS):
        page = pages.index((stage * CHUNKS + chunk) * PAGES + position // PAGE)
        value = page.load(layout)
        page.store(gl.where(keep, value, gl.zeros_like(value)))


@gluon.jit
def _silence_unseen(ring, step, start, begin, seq_len, S: gl.constexpr):
    """A weight of zero would not silence a NaN: values that no query may read become zero before they are used.

    Both warpgroups do so for themselves, and write the same.
    """
    BLOCK_N: gl.constexpr = S.block_n
    STAGES: gl.constexpr = S.stages
    PAGE: gl.constexpr = S.page
    ends = (start + BLOCK_N > seq_len) & (seq_len % PAGE != 0)
    begins = ends & False
    if S.has_window:
        begins = (start < begin) & (begin % PAGE != 0)
    if ends | begins:
        stage = step % STAGES
        mbarrier.wait(ring.full.index(stage), step // STAGES & 1)
        if ends:
            _silence(ring.pages, stage, seq_len - start, 0, seq_len % PAGE, S)
        if begins:
            _silence(ring.pages, stage, begin - start, begin % PAGE, PAGE, S)
        fence_async_shared()
        barrier()


@gluon.jit
def _weigh(score, top, total, position, start, window, scale_log2, softcap_log2, MASKED: gl.constexpr,
           S: gl.constexpr):
    """Online softmax in base 2: a tile's weights, the new maximum and sum, and the factor of what came before."""
    BLOCK_N: gl.constexpr = S.block_n
    scale = scale_log2
    if S.has_softcap:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), exact at both infinities; 2.885... is 2 log2(e).
        score = gl.exp2(score * (scale_log2 / softcap_log2 * 2.8853900817779268))
        score = softcap_log2 * (1.0 - 2.0 / (score + 1.0))
        scale = 1.0
    if MASKED:
        n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, score.type.layout))
        last = position - start
        visible = n[None, :] <= last[:, None]
        if S.has_window:
            visible &= n[None, :] > (last - window)[:, None]
        score = gl.where(visible, score, float("-inf"))
    new_top = gl.maximum(top, gl.max(score, 1) * scale)
    weight = gl.exp2(score * scale - new_top[:, None])
    rescale = gl.exp2(top - new_top)
    return weight, new_top, total * rescale + gl.sum(weight, 1), rescale


@gluon.jit
def _ordered(total):
    """Whatever waits next waits until the sums are known; ptxas would move the wait ahead of the softmax.

    A sum is never negative, so no program sleeps.
    """
    return gl.inline_asm_elementwise(
        """{ .reg .pred p; .reg .f32 t;
        add.f32 t, $2, $3; setp.lt.f32 p, t, 0f00000000; @p nanosleep.u32 0;
        mov.b32 $0, $2; mov.b32 $1, $3; }""", "=f,=f,f,f", [total], dtype=gl.float32, is_pure=False, pack=2,
    )


@gluon.jit
def _steps(first_j, end_j, state, tile, limits, q, keys, values, mine, theirs, FIRST: gl.constexpr,
           MASKED: gl.constexpr, S: gl.constexpr):
    """Tiles first_j to end_j - 1: scores of each while the values of the one before are summed up."""
    BLOCK_N: gl.constexpr = S.block_n
    HEAD_PAD: gl.constexpr = S.head_pad
    STAGES: gl.constexpr = S.stages
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_PAD, 16])
    acc, top, total, weight, step, order = state
    position, last, begin, seq_len = tile
    window, scale_log2, softcap_log2 = limits
    for j in range(first_j, end_j):
        start = last - j * BLOCK_N
        k_stage = step % STAGES
        v_stage = (step - 1) % STAGES
        mbarrier.wait(keys.full.index(k_stage), step // STAGES & 1)
        mbarrier.wait(mine, (order & 1) ^ FIRST)
        order += 1
        zero = gl.zeros([64, BLOCK_N], gl.float32, score_layout)
        score = warpgroup_mma(q, keys.tiles.index(k_stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        # Weights go from tile to tile in fp32: halves of registers would be shuffled at every turn of the loop.
        operand = gl.convert_layout(weight.to(q.dtype), gl.DotOperandLayout(0, acc_layout, 2))
        mbarrier.wait(values.full.index(v_stage), (step - 1) // STAGES & 1)
        acc = warpgroup_mma(operand, values.tiles.index(v_stage), acc, is_async=True)
        mbarrier.arrive(theirs, count=1)
        score = warpgroup_mma_wait(1, deps=[score])
        mbarrier.arrive(keys.empty.index(k_stage), count=1)
        weight, top, total, rescale = _weigh(score, top, total, position, start, window, scale_log2, softcap_log2,
                                             MASKED, S)
        total = _ordered(total)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(values.empty.index(v_stage), count=1)
        acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, acc_layout))[:, None]
        if MASKED:
            _silence_unseen(values, step, start, begin, seq_len, S)
        step += 1
    return acc, top, total, weight, step, order


@gluon.jit
def _consume(out, sinks, keys, values, handover, limits, HALF: gl.constexpr, S: gl.constexpr):
    """A warpgroup: one half of the queries of every tile."""
    BLOCK_N: gl.constexpr = S.block_n
    QUERIES: gl.constexpr = S.half
    HEAD_PAD: gl.constexpr = S.head_pad
    PACKED: gl.constexpr = S.packed
    STAGES: gl.constexpr = S.stages
    FIRST: gl.constexpr = 1 - HALF
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_PAD, 16])
    place_layout: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    mine = handover.turns.index(HALF)
    theirs = handover.turns.index(FIRST)
    q = handover.q_tiles.index(HALF)
    window, scale_log2, softcap_log2 = limits

    step = 0  # tiles of keys so far
    tiles = 0
    order = 0  # turns so far
    place = _taken(handover, 0, place_layout)
    left = _field(place, 2)
    while left > 0:
        token = _field(place, 0)
        tile_position = _field(place, 1)
        bundle = _field(place, 3)
        seq_len = tile_position + left
        begin, _end, last, count = _span(tile_position, left, window, S)

        m = gl.arange(0, 64, gl.SliceLayout(1, score_layout))
        first_position = tile_position + HALF * QUERIES
        position = first_position + m // PACKED
        # Finite and below every score: with -inf a row that has seen nothing yet would compute -inf - -inf.
        top = gl.full([64], -3.0e38, gl.float32, gl.SliceLayout(1, score_layout))
        total = gl.zeros([64], gl.float32, gl.SliceLayout(1, score_layout))
        if S.has_sinks:
            # A score without a value, of weight 1 at its own height; log2(e) turns it to base 2.
            sink = gl.load(sinks + bundle * PACKED + m % PACKED).to(gl.float32) * 1.4426950408889634
            top = gl.maximum(sink, top)
            total += 1.0

        mbarrier.wait(handover.q_full, tiles & 1)
        k_stage = step % STAGES
        mbarrier.wait(keys.full.index(k_stage), step // STAGES & 1)
        zero = gl.zeros([64, BLOCK_N], gl.float32, score_layout)
        score = warpgroup_mma(q, keys.tiles.index(k_stage).permute([1, 0]), zero, use_acc=False, is_async=True)
        score = warpgroup_mma_wait(0, deps=[score])
        mbarrier.arrive(keys.empty.index(k_stage), count=1)
        weight, top, total, _rescale = _weigh(score, top, total, position, last, window, scale_log2, softcap_log2, True,
                                              S)
        _silence_unseen(values, step, last, begin, seq_len, S)
        step += 1

        # Tiles from whole_end on are not seen whole by every query, nor, under a window, are tiles before left_end.
        whole_end = gl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, begin // BLOCK_N * BLOCK_N)
        masked = gl.minimum(gl.maximum((last - whole_end) // BLOCK_N + 1, 1), count)
        whole = count
        if S.has_window:
            left_end = gl.minimum(first_position + QUERIES, seq_len) - window
            whole = gl.minimum(gl.maximum((last - left_end + BLOCK_N) // BLOCK_N, masked), count)
        tile = (position, last, begin, seq_len)
        state = (gl.zeros([64, HEAD_PAD], gl.float32, acc_layout), top, total, weight, step, order)
        state = _steps(1, masked, state, tile, limits, q, keys, values, mine, theirs, FIRST, True, S)
        state = _steps(masked, whole, state, tile, limits, q, keys, values, mine, theirs, FIRST, False, S)
        if S.has_window:
            state = _steps(whole, count, state, tile, limits, q, keys, values, mine, theirs, FIRST, True, S)
        acc, top, total, weight, step, order = state

        mbarrier.arrive(handover.q_empty, count=1)
        v_stage = (step - 1) % STAGES
        mbarrier.wait(values.full.index(v_stage), (step - 1) // STAGES & 1)
        operand = gl.convert_layout(weight.to(q.dtype), gl.DotOperandLayout(0, acc_layout, 2))
        acc = warpgroup_mma(operand, values.tiles.index(v_stage), acc, is_async=True)
        # Meanwhile: which tile comes next.
        tiles += 1
        place = _taken(handover, tiles, place_layout)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(values.empty.index(v_stage), count=1)

        total = gl.convert_layout(total, gl.SliceLayout(1, acc_layout))
        result = (acc / gl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty)
        _store(out, result, token + HALF * QUERIES, left - HALF * QUERIES, bundle, S)
        left = _field(place, 2)


@gluon.jit
def _store(out, result, token, left, bundle, S: gl.constexpr):
    HEAD_PAD: gl.constexpr = S.head_pad
    PACKED: gl.constexpr = S.packed
    # A thread's 8 adjacent lanes are 16 bytes; rows stay with their warp.
    wide: gl.constexpr = [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]]
    layout: gl.constexpr = gl.DistributedLinearLayout(
        wide[: 5 if HEAD_PAD == 64 else 6 if HEAD_PAD == 128 else 7],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, HEAD_PAD],
    )
    result = gl.convert_layout(result, layout)
    m = gl.arange(0, 64, gl.SliceLayout(1, layout))
    lane = gl.arange(0, HEAD_PAD, gl.SliceLayout(0, layout))
    row = (token + m // PACKED).to(gl.int64) * S.query_heads + bundle * PACKED + m % PACKED
    keep = (m // PACKED < left)[:, None] & (lane < S.head_dim)[None, :]
    gl.store(out + row[:, None] * S.head_dim + lane[None, :], result, mask=keep)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def _ring(dtype: gl.constexpr, S: gl.constexpr):
    # A tile lies in shared memory as columns of 64 lanes, in which the slots of a page follow each other.
    tiles = gl.allocate_shared_memory(dtype, [S.stages, S.block_n, S.head_pad], gl.NVMMASharedLayout(128, 16, 2))
    pages = reinterpret(tiles, dtype, [S.stages * S.chunks * S.pages, S.page, 1, _LANES],
                         gl.NVMMASharedLayout(128, 16, 3))
    return _Ring(tiles, pages, _barriers(S.stages, 1), _barriers(S.stages, 2))


@noted
@gluon.jit(do_not_specialize=["has_queue", "num_rows", "num_items", "table_stride", "window"],
           do_not_specialize_on_alignment=["query_start", "seq_lens", "slots", "queue"])
def _hopper_prefill_kernel(
    q, k_cache, v_cache, out, query_start, seq_lens, block_table, slots, queue, has_queue, sinks, num_rows, num_items,
    table_stride, window, scale_log2, softcap_log2, S: gl.constexpr,
):
    dtype: gl.constexpr = out.dtype.element_ty
    keys = _ring(dtype, S)
    values = _ring(dtype, S)
    q_tiles = gl.allocate_shared_memory(dtype, [2, 64, S.head_pad], gl.NVMMASharedLayout(128, 16, 2))
    q_parts = reinterpret(q_tiles, dtype, [2 * S.chunks, 64 // S.packed, S.packed, _LANES],
                           gl.NVMMASharedLayout(128, 16, 3))
    places = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    handover = _Handover(q_tiles, q_parts, _barriers(1, 1).index(0), _barriers(1, 2).index(0), places, _barriers(2, 1),
                         _barriers(2, 3), _barriers(2, 1))
    fence_async_shared()
    barrier()
    rows = _Rows(query_start, seq_lens, block_table, slots, queue, has_queue, num_rows, num_items, table_stride,
                 window)
    limits = (window, scale_log2, softcap_log2)
    gl.warp_specialize([
        (_consume, (out, sinks, keys, values, handover, limits, 0, S)),
        (_consume, (out, sinks, keys, values, handover, limits, 1, S)),
        (_load_keys, (q, k_cache, rows, keys, handover, S)),
        (_load_values, (v_cache, rows, values, handover, S)),
    ], [4, 1, 1], [240, 24, 24])


class HopperConfig(NamedTuple):
    """Positions of a tile, and how many tiles of K, and of V, shared memory holds."""

    block_n: int
    stages: int


# By padded head_dim.
_CONFIGS = {64: HopperConfig(POSITIONS, 3), 128: HopperConfig(POSITIONS, 2), 256: HopperConfig(64, 2)}


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
    """:func:`~hf_paged.attention.registry.paged_attention` for what `prefill_support.takes`, one launch.

    Args:
        out: ``[T, Hq, D]`` contiguous, q's dtype; every element is written. None: a new tensor.
        config: tile shape; None: by head size.
    """
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_rows = meta.seq_lens.numel()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_tokens == 0:
        return out
    q, options = positively_scaled(q, options)
    config = config or _CONFIGS[max(64, next_power_of_2(head_dim))]
    # Whether there is a queue is no constant of the kernel, which takes seconds to compile: its place is never empty.
    has_queue = isinstance(meta.work, TileQueue)
    queue = meta.work.counters if isinstance(meta.work, TileQueue) else meta.seq_lens
    shape = HopperShape(
        query_heads=num_heads, kv_heads=num_kv_heads, packed=packed_heads(num_heads // num_kv_heads),
        head_dim=head_dim, block_size=block_size, block_n=config.block_n, stages=config.stages,
        programs=num_multiprocessors(q.device), has_window=options.window is not None,
        has_softcap=options.softcap is not None, has_sinks=options.sinks is not None,
    )
    box = gl.NVMMASharedLayout(128, 16, 3)
    sizes, strides = [_SLOTS, num_kv_heads, head_dim], [num_kv_heads * head_dim, head_dim, 1]
    keys, values = (TensorDescriptor(c, sizes, strides, [shape.page, 1, _LANES.value], box) for c in (k_cache, v_cache))
    queries = TensorDescriptor(
        q, list(q.shape), list(q.stride()), [shape.half, shape.packed, _LANES.value], box
    )
    # A row of n tokens that starts anywhere needs at most n // block_q + 1 tiles.
    num_items = (num_tokens // shape.block_q + num_rows) * shape.bundles
    with on_device_of(q):
        _hopper_prefill_kernel[(shape.programs,)](
            queries, keys, values, out, meta.query_start, meta.seq_lens, meta.block_table, meta.slots, queue,
            int(has_queue), options.sinks, num_rows, num_items, *score_numbers(meta, options), shape, num_warps=4,
            maxnreg=168,
        )
    return out
