# ruff: noqa
# mypy: ignore-errors
"""A program's part of attention: some positions of a row for the query heads of a KV head; joining such parts."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from hf_paged.kernels.hopper.decoder_layers._products import rounded
from hf_paged.kernels.hopper.decoder_layers._shares import LANES, row_of, span, split_of
from hf_paged.kernels.hopper.decoder_layers._words import READ_PARTS, as_float, take, wide_word, word

_LOWEST = gl.constexpr(-3.0e38)  # finite: -inf would compute -inf - -inf

@gluon.jit
def _row_of_four(a, b, c, d):
    """Words [8, 16] that alternate, as fp32 [8, 64]."""
    return gl.reshape(gl.join(gl.join(as_float(a), as_float(c)), gl.join(as_float(b), as_float(d))), [8, 64])


@gluon.jit
def rope_of(cos, sin):
    """Halves of the row of a position, cosines, then sines."""
    lane = gl.arange(0, 64, gl.SliceLayout(0, gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])))
    return (gl.load(cos + lane).to(gl.float32)[None, :], gl.load(cos + 64 + lane).to(gl.float32)[None, :],
            gl.load(sin + lane).to(gl.float32)[None, :], gl.load(sin + 64 + lane).to(gl.float32)[None, :])


@gluon.jit
def take_heads(words, tag, memory, rope, q_norm, k_norm, k_new, v_new, stores, eps, S: gl.constexpr):
    """A group's query heads of a row, and for the last split the new key and value: normed, rotated, left in shared memory.

    A warp has a head. The last split also writes the new key and value to the cache.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    unit: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    GROUP: gl.constexpr = S.group
    HEADS: gl.constexpr = S.heads
    KV_HEADS: gl.constexpr = S.kv_heads
    SPLITS: gl.constexpr = S.splits
    QKV: gl.constexpr = S.qkv
    program = gl.program_id(0)
    kv_head = program % KV_HEADS
    is_last = split_of(program, S) == SPLITS - 1
    warp = gl.arange(0, 8, gl.SliceLayout(1, unit))
    # Heads beyond the group are the group's first again.
    head = gl.where(warp < GROUP, kv_head * GROUP + warp, kv_head * GROUP)
    head = gl.where(is_last & (warp == GROUP), HEADS + kv_head, head)
    head = gl.where(is_last & (warp == GROUP + 1), HEADS + KV_HEADS + kv_head, head)
    at = head[:, None] * 128 + gl.arange(0, 16, gl.SliceLayout(0, unit))[None, :] * 4
    lane = gl.arange(0, 64, gl.SliceLayout(0, layout))
    row = gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None]
    if S.has_head_norms:
        w1 = gl.where(row < GROUP, gl.load(q_norm + lane)[None, :], gl.load(k_norm + lane)[None, :]).to(gl.float32)
        w2 = gl.where(row < GROUP, gl.load(q_norm + 64 + lane)[None, :],
                      gl.load(k_norm + 64 + lane)[None, :]).to(gl.float32)
    taken = take(words + row_of(program, S) * QKV + at, 64, tag, 2)
    x1 = gl.convert_layout(_row_of_four(taken[0], taken[1], taken[2], taken[3]), layout)
    x2 = gl.convert_layout(_row_of_four(taken[4], taken[5], taken[6], taken[7]), layout)
    r1, r2 = x1, x2
    if S.has_head_norms:
        scale = gl.rsqrt(gl.sum(x1 * x1 + x2 * x2, 1) * (1.0 / 128) + eps)[:, None]
        r1 = rounded(w1 * rounded(x1 * scale))
        r2 = rounded(w2 * rounded(x2 * scale))
    cos1, cos2, sin1, sin2 = rope
    y1 = rounded(rounded(r1 * cos1) - rounded(r2 * sin1))
    y2 = rounded(rounded(r2 * cos2) + rounded(r1 * sin2))
    y1 = gl.where(row == GROUP + 1, x1, y1)
    y2 = gl.where(row == GROUP + 1, x2, y2)
    memory.rows.index(0).store(y1)
    memory.rows.index(1).store(y2)
    memory.heads.index(0).slice(0, 8).store(y1.to(gl.bfloat16))
    memory.heads.index(1).slice(0, 8).store(y2.to(gl.bfloat16))
    if stores & is_last:
        lanes = lane[None, :] + row * 0
        gl.store(k_new + lanes, y1.to(gl.bfloat16), mask=row == GROUP)
        gl.store(k_new + 64 + lanes, y2.to(gl.bfloat16), mask=row == GROUP)
        gl.store(v_new + lanes, y1.to(gl.bfloat16), mask=row == GROUP + 1)
        gl.store(v_new + 64 + lanes, y2.to(gl.bfloat16), mask=row == GROUP + 1)


@gluon.jit
def attend(ring, step, length, words, memory, scale_log2, tag, S: gl.constexpr):
    """A program's positions for all query heads of its row and KV head, as rows of one tile."""
    GROUP: gl.constexpr = S.group
    HEADS: gl.constexpr = S.heads
    STAGES: gl.constexpr = S.stages
    KV_HEADS: gl.constexpr = S.kv_heads
    SPLITS: gl.constexpr = S.splits
    POSITIONS: gl.constexpr = S.positions
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 8], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, product)
    program = gl.program_id(0)
    kv_head = program % KV_HEADS
    split = split_of(program, S)
    begin, end = span(length, program, S)
    q1 = memory.heads.index(0).load(left)
    q2 = memory.heads.index(1).load(left)
    acc1 = gl.zeros([16, LANES], gl.float32, product)
    acc2 = gl.zeros([16, LANES], gl.float32, product)
    top = gl.full([16], _LOWEST, gl.float32, by_row)
    total = gl.zeros([16], gl.float32, by_row)
    place = gl.arange(0, POSITIONS, gl.SliceLayout(0, product))
    place_of_value = gl.arange(0, POSITIONS, gl.SliceLayout(1, right))
    for at in range(begin, end, POSITIONS):
        stage = step % STAGES
        mbarrier.wait(ring.full.index(stage), step // STAGES & 1)
        k1 = ring.halves.index(stage * 2).permute([1, 0]).load(right)
        k2 = ring.halves.index(stage * 2 + 1).permute([1, 0]).load(right)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        score = mma_v2(q2, k2, mma_v2(q1, k1, gl.zeros([16, POSITIONS], gl.float32, product)))
        score = gl.where((at + place < end)[None, :], score * scale_log2, float("-inf"))
        new_top = gl.maximum(top, gl.max(score, 1))
        weight = gl.exp2(score - new_top[:, None])
        rescale = gl.exp2(top - new_top)
        top = new_top
        total = total * rescale + gl.sum(weight, 1)
        weight = gl.convert_layout(weight.to(gl.bfloat16), left)
        stage = (step + 1) % STAGES
        mbarrier.wait(ring.full.index(stage), (step + 1) // STAGES & 1)
        v1 = ring.halves.index(stage * 2).load(right)
        v2 = ring.halves.index(stage * 2 + 1).load(right)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        seen = (at + place_of_value < end)[:, None]  # a weight of zero would not silence a NaN
        acc1 = mma_v2(weight, gl.where(seen, v1, gl.zeros_like(v1)), acc1 * rescale[:, None])
        acc2 = mma_v2(weight, gl.where(seen, v2, gl.zeros_like(v2)), acc2 * rescale[:, None])
        step += 2

    if split == SPLITS - 1:
        # The new token's key and value, which the cache does not hold yet.
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
        score = gl.zeros([16], gl.float32, gl.SliceLayout(1, rows))
        for half in gl.static_range(2):
            key = memory.new.index(half * 8 + GROUP).load(gl.SliceLayout(0, rows))
            score += gl.sum(memory.heads.index(half).load(rows).to(gl.float32) * key[None, :], 1)
        score = gl.convert_layout(score, by_row) * scale_log2
        new_top = gl.maximum(top, score)
        rescale = gl.exp2(top - new_top)
        weight = gl.exp2(score - new_top)
        top = new_top
        total = total * rescale + weight
        value1 = memory.new.index(GROUP + 1).load(gl.SliceLayout(0, product))
        value2 = memory.new.index(8 + GROUP + 1).load(gl.SliceLayout(0, product))
        acc1 = acc1 * rescale[:, None] + weight[:, None] * value1[None, :]
        acc2 = acc2 * rescale[:, None] + weight[:, None] * value2[None, :]

    row = gl.arange(0, 16, by_row)
    part = (row_of(program, S) * HEADS + kv_head * GROUP + row) * SPLITS + split
    lane = gl.arange(0, 64, gl.SliceLayout(0, product))
    at = words.parts + part[:, None] * 128 + lane[None, :]
    mine = row < GROUP
    gl.store(at, wide_word(acc1, tag), mask=mine[:, None], eviction_policy="evict_last")
    gl.store(at + 64, wide_word(acc2, tag), mask=mine[:, None], eviction_policy="evict_last")
    gl.store(words.sums + part * 2, wide_word(top, tag), mask=mine, eviction_policy="evict_last")
    gl.store(words.sums + part * 2 + 1, wide_word(total, tag), mask=mine, eviction_policy="evict_last")
    return step


@gluon.jit
def join(words, tag, short_tag, S: gl.constexpr):
    """Some lanes of all rows' heads: the splits' parts added up."""
    LANES: gl.constexpr = S.heads * S.rows  # rows * heads * 128 over 128 programs
    SPLITS: gl.constexpr = S.splits
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [SPLITS, 32 // SPLITS], [1, 8], [0, 1])
    first = gl.program_id(0) * LANES
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, layout))
    lane = first + gl.arange(0, LANES // 2, gl.SliceLayout(0, layout)) * 2
    part = (lane // 128)[None, :] * SPLITS + split[:, None]
    at = words.parts + part * 128 + (lane % 128)[None, :]
    a, b, top, total = gl.inline_asm_elementwise(
        READ_PARTS, "=&r,=&r,=&r,=&r,l,l,r",
        [at.to(gl.int64), (words.sums + part * 2).to(gl.int64), tag],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )
    top = top.to(gl.float32, bitcast=True)
    weight = gl.exp2(top - gl.max(top, 0)[None, :])
    total = gl.sum(total.to(gl.float32, bitcast=True) * weight, 0)
    a = gl.sum(a.to(gl.float32, bitcast=True) * weight, 0) / total
    b = gl.sum(b.to(gl.float32, bitcast=True) * weight, 0) / total
    both = gl.join(word(a, short_tag), word(b, short_tag))
    side = gl.arange(0, 2, gl.SliceLayout(0, both.type.layout))
    pair = gl.arange(0, LANES // 2, gl.SliceLayout(1, both.type.layout))
    gl.store(words.mixed + first + pair[:, None] * 2 + side[None, :], both, eviction_policy="evict_last")
