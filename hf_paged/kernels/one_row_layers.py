# mypy: disallow-untyped-defs=False
"""All layers of a decoder for one row of one new token, in one launch.

A layer of a small model takes less time to read than its launches take to follow each other. So one program stays on
each multiprocessor for the whole step, and they hand each other what a layer's next part needs: six exchanges a layer.

The protocol. What is exchanged lies in memory as words that hold a value and a tag. Whoever needs values loads their
words again and again until all carry the tag of this exchange; so a value says by itself that it is there, and nothing
has to be signalled or fenced (the protocol of NCCL's LL). Tags of one buffer count layers, over all steps: a word of
the exchange before carries another tag, and older words are none left, since every word of a buffer is written in
every exchange. A buffer is written again a layer later, when all have read it: in between lies an exchange of which
every program needs words of all others. Programs wait for each other, so all have to be on the machine at once: the
launch is cooperative.

Weights do not depend on what is exchanged: a program loads those of a part into registers before it waits for the
values that they are multiplied with, and has its share of later parts brought into L2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hf_paged.kernels._triton import column_numbers, jit, on_device_of, prefetch_rows, require_triton, tl, triton
from hf_paged.kernels.add_rms_norm import normed_row
from hf_paged.kernels.silu_mul import silu_mul_tile

LOG2_E = 1.4426950408889634
# Programs: a power of two, no more than there are multiprocessors.
PROGRAMS = 128
# Columns of a weight's row that a warp takes at a time, eight a thread.
COLUMNS = 256


class LayerPointers(NamedTuple):
    """Columns of a table [layers, 10] int64: where a layer's weights, norms and caches begin."""

    qkv: Any  # [(Hq + 2 * Hkv) * D, hidden]
    o: Any  # [hidden, Hq * D]
    gate_up: Any  # [2 * inner, hidden], gates first
    down: Any  # [hidden, inner]
    input_norm: Any  # [hidden]
    post_norm: Any  # [hidden]
    q_norm: Any  # [D], or 0
    k_norm: Any  # [D], or 0
    k_cache: Any  # [num_blocks, block_size, Hkv, D]
    v_cache: Any


FIELDS = len(LayerPointers._fields)
QKV, O, GATE_UP, DOWN, INPUT_NORM, POST_NORM, Q_NORM, K_NORM, K_CACHE, V_CACHE = column_numbers(LayerPointers)


class LayersShape(NamedTuple):
    """Sizes of a decoder's layers."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    block_size: int


@jit()
def _pointer(table, layer, field, dtype: tl.constexpr, FIELDS: tl.constexpr):
    address = tl.load(table + layer * FIELDS + field)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@jit()
def _post(words, at, values, tag, mask):
    """Hand out half-precision values."""
    tl.store(words + at, (values.to(tl.int16, bitcast=True).to(tl.int32) << 16) | tag, mask=mask)


@jit()
def _received(words, at, tag, dtype: tl.constexpr, COMPILED: tl.constexpr):
    """The values at `at`, waited for, in float32."""
    found = tl.load(words + at, volatile=True)
    if COMPILED:
        missing = tl.max(((found & 0xFFFF) != tag).to(tl.int32))
        while missing != 0:
            found = tl.load(words + at, volatile=True)
            missing = tl.max(((found & 0xFFFF) != tag).to(tl.int32))
    return _value(found, dtype)


@jit()
def _value(word, dtype: tl.constexpr):
    return (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@jit()
def _weights(weight, first, count, K: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
             EVEN: tl.constexpr):
    """ROWS rows from `first` on as [CHUNKS, ROWS, COLUMNS]: a warp has rows of its own, and all of their columns."""
    row = tl.arange(0, ROWS)[None, :, None]
    column = tl.arange(0, CHUNKS)[:, None, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    at = (first + row) * K + column
    if EVEN and K == CHUNKS * COLUMNS:
        tile = tl.load(weight + at)
    else:
        tile = tl.load(weight + at, mask=(row < count) & (column < K), other=0.0)
    return tile


@jit()
def _spread(x, pointer, never, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPILED: tl.constexpr):
    """x [CHUNKS, 1, COLUMNS] as [CHUNKS, ROWS, COLUMNS] in the layout of what is loaded from `pointer` so.

    Of two layouts that meet in an operation the compiler takes that of the later load: here that of one which never
    takes place. Otherwise it would bring all weights into the layout of x, and reduce each row across all warps.
    """
    x = tl.broadcast_to(x, [x.shape[0], ROWS, COLUMNS])
    if COMPILED:
        at = tl.arange(0, ROWS)[None, :, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
        anchor = tl.load(pointer + at, mask=never & (at >= 0), other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [x.to(tl.int32, bitcast=True), tl.broadcast_to(anchor, x.shape)], tl.int32,
            is_pure=True, pack=1,
        ).to(tl.float32, bitcast=True)
    return x


@jit()
def _product(weights, x):
    """[CHUNKS, ROWS, COLUMNS] times [CHUNKS, 1, COLUMNS]: [ROWS]."""
    return tl.sum(tl.sum(weights.to(tl.float32) * x, 0), 1)


@jit()
def _row_received(words, tag, dtype: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
                  COMPILED: tl.constexpr):
    """All K values of a row as [CHUNKS, 1, COLUMNS], zeros behind them."""
    column = tl.arange(0, CHUNKS)[:, None, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    values = _received(words, tl.minimum(column, K - 1), tag, dtype, COMPILED)
    return values if K == CHUNKS * COLUMNS else tl.where(column < K, values, 0.0)


@jit()
def _normed(x, weight, eps, dtype: tl.constexpr, K: tl.constexpr):
    """RMSNorm of [CHUNKS, 1, COLUMNS], rounded as transformers' modules round."""
    variance = tl.sum(x * x) * (1.0 / K)
    return (weight.to(tl.float32) * (x * tl.rsqrt(variance + eps)).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@jit()
def _norm_weight(weight, K: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.arange(0, CHUNKS)[:, None, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
    return tl.load(weight + column, mask=column < K, other=0.0)


@jit()
def _prefetch(weight, first, count, K: tl.constexpr, PREFETCH: tl.constexpr):
    if PREFETCH:
        prefetch_rows(weight + first * K, count, K * 2, K * 2)


@jit(varying_ints=("first_layer", "last_layer"), varying_pointers=("position", "slot", "slot_mapping"))
def _layers_kernel(
    x,
    out,
    table,
    final_norm,
    cos,
    sin,
    position,
    slot,
    slot_mapping,
    block_table,
    hidden_words,
    qkv_words,
    mixed_words,
    middle_words,
    inner_words,
    part_words,
    sum_words,
    epochs,
    table_stride,
    cos_stride,
    sin_stride,
    scale_log2,
    eps,
    head_eps,
    first_layer,
    last_layer,
    LAYERS: tl.constexpr,
    HIDDEN: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INNER: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    QKV_TILE: tl.constexpr,
    HIDDEN_TILE: tl.constexpr,
    INNER_TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HIDDEN_CHUNKS: tl.constexpr,
    MIXED_CHUNKS: tl.constexpr,
    INNER_CHUNKS: tl.constexpr,
    FIELDS: tl.constexpr,
    PART: tl.constexpr,
    PREFETCH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """PART -1: everything, by programs that are all there at once. Else one part of one layer, a launch each."""
    COMPILED: tl.constexpr = not INTERPRETED
    dtype: tl.constexpr = x.dtype.element_ty
    program = tl.program_id(0)
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SPLITS: tl.constexpr = PROGRAMS // KV_HEADS
    HEAD_ROWS: tl.constexpr = 4 if GROUP <= 2 else (8 if GROUP <= 6 else 16)
    JOINED: tl.constexpr = GROUP * HEAD_DIM // SPLITS
    QKV_ROWS: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    QKV_EACH: tl.constexpr = (QKV_ROWS + PROGRAMS - 1) // PROGRAMS
    HIDDEN_EACH: tl.constexpr = (HIDDEN + PROGRAMS - 1) // PROGRAMS
    INNER_EACH: tl.constexpr = (INNER + PROGRAMS - 1) // PROGRAMS
    MIXED: tl.constexpr = HEADS * HEAD_DIM
    qkv_first, qkv_count = program * QKV_EACH, tl.minimum(QKV_ROWS - program * QKV_EACH, QKV_EACH)
    hidden_first, hidden_count = program * HIDDEN_EACH, tl.minimum(HIDDEN - program * HIDDEN_EACH, HIDDEN_EACH)
    inner_first, inner_count = program * INNER_EACH, tl.minimum(INNER - program * INNER_EACH, INNER_EACH)

    epoch = tl.load(epochs)
    never = last_layer < 0
    # What attention needs that is the same in all layers.
    kv_head, split = program // SPLITS, program % SPLITS
    length = tl.load(position).to(tl.int32)  # of what the cache holds
    place = tl.load(slot_mapping)
    table_row = block_table + tl.load(slot) * table_stride
    each = tl.cdiv(length, SPLITS)
    begin = split * each
    end = tl.minimum(begin + each, length)
    n = tl.arange(0, BLOCK_N)[None, :, None]
    d = tl.arange(0, HEAD_DIM)[None, None, :]
    head_row = tl.arange(0, HEAD_ROWS)[:, None, None]
    qkv_head = tl.where(head_row < GROUP, kv_head * GROUP + head_row,
                        HEADS + kv_head + (head_row > GROUP).to(tl.int32) * KV_HEADS)
    own_at = qkv_head * HEAD_DIM + d
    HALF: tl.constexpr = HEAD_DIM // 2
    turned = tl.where(d < HALF, d + HALF, d - HALF)
    turned_at = qkv_head * HEAD_DIM + turned
    cosine = tl.load(cos + length * cos_stride + d).to(tl.float32)
    sine = tl.load(sin + length * sin_stride + d).to(tl.float32)
    first_block = tl.load(table_row + (begin + n) // BLOCK_SIZE, mask=begin + n < end, other=0)

    if PART == -1 or PART == 0:
        for turn in tl.static_range((HIDDEN_EACH + HIDDEN_TILE - 1) // HIDDEN_TILE):
            begins = turn * HIDDEN_TILE + tl.arange(0, HIDDEN_TILE)
            given = tl.load(x + hidden_first + begins, mask=begins < hidden_count, other=0.0)
            _post(hidden_words, hidden_first + begins, given, epoch & 0xFFFF, begins < hidden_count)

    for layer in tl.range(first_layer, last_layer, num_stages=1):
        before = (epoch + layer) & 0xFFFF
        tag = (epoch + layer + 1) & 0xFFFF
        if PART == -1 or PART == 1:
            # Norm and q, k, v.
            weight = _pointer(table, layer, QKV, dtype, FIELDS)
            scale = _norm_weight(_pointer(table, layer, INPUT_NORM, dtype, FIELDS), HIDDEN, HIDDEN_CHUNKS, COLUMNS)
            tiles = ()
            for turn in tl.static_range((QKV_EACH + QKV_TILE - 1) // QKV_TILE):
                tiles = tiles + (_weights(weight, qkv_first + turn * QKV_TILE, qkv_count - turn * QKV_TILE, HIDDEN,
                                          HIDDEN_CHUNKS, QKV_TILE, COLUMNS,
                                          QKV_EACH % QKV_TILE == 0 and QKV_ROWS % PROGRAMS == 0),)
            _prefetch(_pointer(table, layer, O, dtype, FIELDS), hidden_first, hidden_count, MIXED, PREFETCH)
            _prefetch(_pointer(table, layer, GATE_UP, dtype, FIELDS), inner_first, inner_count, HIDDEN, PREFETCH)
            _prefetch(_pointer(table, layer, GATE_UP, dtype, FIELDS), INNER + inner_first, inner_count, HIDDEN,
                      PREFETCH)
            normed = _row_received(hidden_words, before, dtype, HIDDEN, HIDDEN_CHUNKS, COLUMNS, COMPILED)
            normed = _spread(_normed(normed, scale, eps, dtype, HIDDEN), weight, never, QKV_TILE, COLUMNS, COMPILED)
            for turn in tl.static_range((QKV_EACH + QKV_TILE - 1) // QKV_TILE):
                _post(qkv_words, qkv_first + turn * QKV_TILE + tl.arange(0, QKV_TILE), _product(tiles[turn], normed).to(dtype), tag,
                      turn * QKV_TILE + tl.arange(0, QKV_TILE) < qkv_count)
        if PART == -1 or PART == 2:
            # Head norms, RoPE, cache, and attention to a split of the positions.
            k_cache = _pointer(table, layer, K_CACHE, dtype, FIELDS) + kv_head * HEAD_DIM
            v_cache = _pointer(table, layer, V_CACHE, dtype, FIELDS) + kv_head * HEAD_DIM
            at = (first_block.to(tl.int64) * BLOCK_SIZE + (begin + n) % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + d
            k = tl.load(k_cache + at, mask=begin + n < end, other=0.0)
            v = tl.load(v_cache + at, mask=begin + n < end, other=0.0)
            if HAS_NORMS:
                q_norm = _pointer(table, layer, Q_NORM, dtype, FIELDS)
                k_norm = _pointer(table, layer, K_NORM, dtype, FIELDS)
                own_scale = tl.where(head_row < GROUP, tl.load(q_norm + d), tl.load(k_norm + d)).to(tl.float32)
                turned_scale = tl.where(head_row < GROUP, tl.load(q_norm + turned),
                                        tl.load(k_norm + turned)).to(tl.float32)
            _prefetch(_pointer(table, layer, DOWN, dtype, FIELDS), hidden_first, hidden_count, INNER, PREFETCH)
            if layer + 1 < LAYERS:
                _prefetch(_pointer(table, layer + 1, QKV, dtype, FIELDS), qkv_first, qkv_count, HIDDEN, PREFETCH)
            own, other = tl.load(qkv_words + own_at, volatile=True), tl.load(qkv_words + turned_at, volatile=True)
            if COMPILED:
                missing = tl.max((((own & 0xFFFF) != tag) | ((other & 0xFFFF) != tag)).to(tl.int32))
                while missing != 0:
                    own = tl.load(qkv_words + own_at, volatile=True)
                    other = tl.load(qkv_words + turned_at, volatile=True)
                    missing = tl.max((((own & 0xFFFF) != tag) | ((other & 0xFFFF) != tag)).to(tl.int32))
            plain = _value(own, dtype)
            straight, crossed = plain, _value(other, dtype)
            if HAS_NORMS:
                rms = tl.rsqrt(tl.sum(plain * plain, 2)[:, :, None] * (1.0 / HEAD_DIM) + head_eps)
                straight = (own_scale * (straight * rms).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
                crossed = (turned_scale * (crossed * rms).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            straight = (straight * cosine).to(dtype).to(tl.float32)
            crossed = (crossed * sine).to(dtype).to(tl.float32)
            query = tl.where(d < HALF, straight - crossed, straight + crossed).to(dtype).to(tl.float32)
            spread = _spread(query, k_cache, never, BLOCK_N, HEAD_DIM, COMPILED)
            new_k = tl.sum(tl.where(head_row == GROUP, query, 0.0), 0)[None, :, :]
            new_v = tl.sum(tl.where(head_row == GROUP + 1, plain, 0.0), 0)[None, :, :]
            if split == SPLITS - 1:
                if place >= 0:
                    tl.store(k_cache + place * (KV_HEADS * HEAD_DIM) + d, new_k.to(dtype))
                    tl.store(v_cache + place * (KV_HEADS * HEAD_DIM) + d, new_v.to(dtype))

            score = tl.sum(spread * k.to(tl.float32), 2) * scale_log2
            score = tl.where(begin + tl.arange(0, BLOCK_N)[None, :] < end, score, float("-inf"))
            new_score = tl.where(split == SPLITS - 1, tl.sum(query * new_k, 2) * scale_log2, float("-inf"))
            top = tl.maximum(tl.max(score, 1)[:, None], new_score)  # [heads, 1]
            shift = tl.where(top == float("-inf"), 0.0, top)
            weight = tl.exp2(score - shift)
            new_weight = tl.exp2(new_score - shift)
            total = tl.sum(weight, 1)[:, None] + new_weight
            acc = tl.sum(weight[:, :, None] * v.to(tl.float32), 1)[:, None, :] + new_weight[:, :, None] * new_v
            for start in tl.range(begin + BLOCK_N, end, BLOCK_N):
                inside = start + n < end
                block = tl.load(table_row + (start + n) // BLOCK_SIZE, mask=inside, other=0)
                at = (block.to(tl.int64) * BLOCK_SIZE + (start + n) % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM) + d
                k = tl.load(k_cache + at, mask=inside, other=0.0)
                v = tl.load(v_cache + at, mask=inside, other=0.0)
                score = tl.sum(spread * k.to(tl.float32), 2) * scale_log2
                score = tl.where(start + tl.arange(0, BLOCK_N)[None, :] < end, score, float("-inf"))
                new_top = tl.maximum(top, tl.max(score, 1)[:, None])
                rescale = tl.exp2(top - new_top)
                weight = tl.exp2(score - new_top)
                total = total * rescale + tl.sum(weight, 1)[:, None]
                acc = acc * rescale[:, :, None] + tl.sum(weight[:, :, None] * v.to(tl.float32), 1)[:, None, :]
                top = new_top
            live = head_row < GROUP
            part = (kv_head * SPLITS + split) * GROUP + head_row
            tag64 = tag.to(tl.int64)
            tl.store(part_words + part * HEAD_DIM + d, (acc.to(tl.int32, bitcast=True).to(tl.int64) << 32) | tag64,
                     mask=live)
            sums = part * 2 + tl.zeros([1, 1, 1], tl.int32)
            tl.store(sum_words + sums, (top[:, :, None].to(tl.int32, bitcast=True).to(tl.int64) << 32) | tag64,
                     mask=live)
            tl.store(sum_words + sums + 1, (total[:, :, None].to(tl.int32, bitcast=True).to(tl.int64) << 32) | tag64,
                     mask=live)
        if PART == -1 or PART == 3:
            # A share of the group's results is joined, first split first.
            each_split, value = tl.arange(0, SPLITS)[:, None], split * JOINED + tl.arange(0, JOINED)[None, :]
            part_at = (kv_head * SPLITS + each_split) * (GROUP * HEAD_DIM) + value
            sum_at = ((kv_head * SPLITS + each_split) * GROUP + value // HEAD_DIM) * 2
            tag64 = tag.to(tl.int64)
            acc = tl.load(part_words + part_at, volatile=True)
            top = tl.load(sum_words + sum_at, volatile=True)
            total = tl.load(sum_words + sum_at + 1, volatile=True)
            if COMPILED:
                wrong = ((acc ^ tag64) | (top ^ tag64) | (total ^ tag64)) & 0xFFFF
                missing = tl.max((wrong != 0).to(tl.int32))
                while missing != 0:
                    acc = tl.load(part_words + part_at, volatile=True)
                    top = tl.load(sum_words + sum_at, volatile=True)
                    total = tl.load(sum_words + sum_at + 1, volatile=True)
                    wrong = ((acc ^ tag64) | (top ^ tag64) | (total ^ tag64)) & 0xFFFF
                    missing = tl.max((wrong != 0).to(tl.int32))
            tops = (top >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            factor = tl.exp2(tops - tl.max(tops, 0)[None, :])
            summed = tl.sum((total >> 32).to(tl.int32).to(tl.float32, bitcast=True) * factor, 0)
            mixed = tl.sum((acc >> 32).to(tl.int32).to(tl.float32, bitcast=True) * factor, 0) / summed
            at = kv_head * (GROUP * HEAD_DIM) + split * JOINED + tl.arange(0, JOINED)
            _post(mixed_words, at, mixed.to(dtype), tag, at >= 0)
        if PART == -1 or PART == 4:
            # o and the residual.
            weight = _pointer(table, layer, O, dtype, FIELDS)
            tiles = ()
            for turn in tl.static_range((HIDDEN_EACH + HIDDEN_TILE - 1) // HIDDEN_TILE):
                tiles = tiles + (_weights(weight, hidden_first + turn * HIDDEN_TILE, hidden_count - turn * HIDDEN_TILE, MIXED,
                                          MIXED_CHUNKS, HIDDEN_TILE, COLUMNS,
                                          HIDDEN_EACH % HIDDEN_TILE == 0 and HIDDEN % PROGRAMS == 0),)
            mixed = _row_received(mixed_words, tag, dtype, MIXED, MIXED_CHUNKS, COLUMNS, COMPILED)
            mixed = _spread(mixed, weight, never, HIDDEN_TILE, COLUMNS, COMPILED)
            for turn in tl.static_range((HIDDEN_EACH + HIDDEN_TILE - 1) // HIDDEN_TILE):
                at, inside = hidden_first + turn * HIDDEN_TILE + tl.arange(0, HIDDEN_TILE), turn * HIDDEN_TILE + tl.arange(0, HIDDEN_TILE) < hidden_count
                residual = _value(tl.load(hidden_words + at, mask=inside, other=0, volatile=True), dtype)
                added = residual + _product(tiles[turn], mixed).to(dtype).to(tl.float32)
                _post(middle_words, at, added.to(dtype), tag, inside)
        if PART == -1 or PART == 5:
            # Norm, gate and up, silu.
            weight = _pointer(table, layer, GATE_UP, dtype, FIELDS)
            scale = _norm_weight(_pointer(table, layer, POST_NORM, dtype, FIELDS), HIDDEN, HIDDEN_CHUNKS, COLUMNS)
            gates, ups = (), ()
            for turn in tl.static_range((INNER_EACH + INNER_TILE - 1) // INNER_TILE):
                gates = gates + (_weights(weight, inner_first + turn * INNER_TILE, inner_count - turn * INNER_TILE, HIDDEN,
                                          HIDDEN_CHUNKS, INNER_TILE, COLUMNS,
                                          INNER_EACH % INNER_TILE == 0 and INNER % PROGRAMS == 0),)
                ups = ups + (_weights(weight, INNER + inner_first + turn * INNER_TILE, inner_count - turn * INNER_TILE, HIDDEN,
                                      HIDDEN_CHUNKS, INNER_TILE, COLUMNS,
                                      INNER_EACH % INNER_TILE == 0 and INNER % PROGRAMS == 0),)
            normed = _row_received(middle_words, tag, dtype, HIDDEN, HIDDEN_CHUNKS, COLUMNS, COMPILED)
            normed = _spread(_normed(normed, scale, eps, dtype, HIDDEN), weight, never, INNER_TILE, COLUMNS, COMPILED)
            for turn in tl.static_range((INNER_EACH + INNER_TILE - 1) // INNER_TILE):
                gate = _product(gates[turn], normed).to(dtype).to(tl.float32)
                up = _product(ups[turn], normed).to(dtype).to(tl.float32)
                _post(inner_words, inner_first + turn * INNER_TILE + tl.arange(0, INNER_TILE), silu_mul_tile(gate, up, dtype, INTERPRETED), tag,
                      turn * INNER_TILE + tl.arange(0, INNER_TILE) < inner_count)
        if PART == -1 or PART == 6:
            # down and the residual.
            weight = _pointer(table, layer, DOWN, dtype, FIELDS)
            tiles = ()
            for turn in tl.static_range((HIDDEN_EACH + HIDDEN_TILE - 1) // HIDDEN_TILE):
                tiles = tiles + (_weights(weight, hidden_first + turn * HIDDEN_TILE, hidden_count - turn * HIDDEN_TILE, INNER,
                                          INNER_CHUNKS, HIDDEN_TILE, COLUMNS,
                                          HIDDEN_EACH % HIDDEN_TILE == 0 and HIDDEN % PROGRAMS == 0),)
            inner = _row_received(inner_words, tag, dtype, INNER, INNER_CHUNKS, COLUMNS, COMPILED)
            inner = _spread(inner, weight, never, HIDDEN_TILE, COLUMNS, COMPILED)
            for turn in tl.static_range((HIDDEN_EACH + HIDDEN_TILE - 1) // HIDDEN_TILE):
                at, inside = hidden_first + turn * HIDDEN_TILE + tl.arange(0, HIDDEN_TILE), turn * HIDDEN_TILE + tl.arange(0, HIDDEN_TILE) < hidden_count
                residual = _value(tl.load(middle_words + at, mask=inside, other=0, volatile=True), dtype)
                added = residual + _product(tiles[turn], inner).to(dtype).to(tl.float32)
                _post(hidden_words, at, added.to(dtype), tag, inside)

    if PART == -1 or PART == 7:
        if program == 0:
            scale = _norm_weight(final_norm, HIDDEN, HIDDEN_CHUNKS, COLUMNS)
            last = _row_received(hidden_words, (epoch + LAYERS) & 0xFFFF, dtype, HIDDEN, HIDDEN_CHUNKS, COLUMNS,
                                 COMPILED)
            column = tl.arange(0, HIDDEN_CHUNKS)[:, None, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
            tl.store(out + column, _normed(last, scale, eps, dtype, HIDDEN).to(dtype), mask=column < HIDDEN)
            # All have read it: each posted values of the last layer.
            tl.store(epochs, epoch + LAYERS + 1)


class Workspace:
    """What programs of one launch exchange, and launches hand on to each other; of one stream."""

    def __init__(self, shape: LayersShape, device: torch.device, programs: int = PROGRAMS) -> None:
        heads, group = shape.heads + 2 * shape.kv_heads, shape.heads // shape.kv_heads
        sizes = shape.hidden, heads * shape.head_dim, shape.heads * shape.head_dim, shape.hidden, shape.inner
        self.words = [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]
        parts = programs * group * shape.head_dim, programs * group * 2
        self.parts = [torch.zeros(size, dtype=torch.int64, device=device) for size in parts]
        self.epochs = torch.ones(1, dtype=torch.int32, device=device)  # no word carries its tag
        self.programs = programs


def one_row_layers(
    x: torch.Tensor, shape: LayersShape, table: torch.Tensor, final_norm: torch.Tensor, eps: float,
    head_eps: float | None, cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, slot: torch.Tensor,
    slot_mapping: torch.Tensor, block_table: torch.Tensor, scale: float, workspace: Workspace,
) -> torch.Tensor:
    require_triton()
    out = torch.empty_like(x)
    interpreted, programs = triton.knobs.runtime.interpret, workspace.programs
    qkv, mixed = (shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.heads * shape.head_dim

    def tile(size: int) -> int:
        each = triton.cdiv(size, programs)
        return min(32, triton.next_power_of_2(each), max(8, each & -each))

    def chunks(width: int) -> int:
        return triton.next_power_of_2(triton.cdiv(width, COLUMNS))

    def launch(part: int, first: int, last: int) -> None:
        _layers_kernel[(programs,)](
            x, out, table, final_norm, cos, sin, position, slot, slot_mapping, block_table, *workspace.words,
            *workspace.parts, workspace.epochs, block_table.stride(0), cos.stride(0), sin.stride(0), scale * LOG2_E,
            eps, head_eps or 0.0, first, last,
            LAYERS=shape.num_layers,
            HIDDEN=shape.hidden,
            HEADS=shape.heads,
            KV_HEADS=shape.kv_heads,
            HEAD_DIM=shape.head_dim,
            INNER=shape.inner,
            BLOCK_SIZE=shape.block_size,
            HAS_NORMS=head_eps is not None,
            PROGRAMS=programs,
            QKV_TILE=tile(qkv),
            HIDDEN_TILE=tile(shape.hidden),
            INNER_TILE=min(8, tile(shape.inner)),
            COLUMNS=COLUMNS,
            BLOCK_N=32,
            HIDDEN_CHUNKS=chunks(shape.hidden),
            MIXED_CHUNKS=chunks(mixed),
            INNER_CHUNKS=chunks(shape.inner),
            FIELDS=FIELDS,
            PART=part,
            PREFETCH=not interpreted,
            INTERPRETED=interpreted,
            num_warps=8,
            **({} if interpreted else {"launch_cooperative_grid": True}),
        )

    with on_device_of(x):
        if not interpreted:
            launch(-1, 0, shape.num_layers)
        else:  # programs run one after the other: none may wait for another
            launch(0, 0, 0)
            for layer in range(shape.num_layers):
                for part in range(1, 7):
                    launch(part, layer, layer + 1)
            launch(7, 0, 0)
    return out
