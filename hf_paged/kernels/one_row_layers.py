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
import torch.nn.functional as F

from hf_paged.kernels._checks import Expected, check_tensors
from hf_paged.kernels._device import num_multiprocessors
from hf_paged.kernels._triton import (
    column_numbers,
    jit,
    on_device_of,
    pdl_supported,
    prefetch_rows,
    require_triton,
    tl,
    triton,
)
from hf_paged.kernels.add_rms_norm import add_rms_norm_reference
from hf_paged.kernels.attention.metadata import AttentionOptions, PagedMetadata
from hf_paged.kernels.attention.reference import paged_attention_reference
from hf_paged.kernels.qk_norm_rope_store import qk_norm_rope_store_reference
from hf_paged.kernels.silu_mul import silu_mul_reference, silu_mul_tile

LOG2_E = 1.4426950408889634
# Programs: a power of two, no more than there are multiprocessors.
PROGRAMS = 128
NUM_WARPS = 8
# Columns of a weight's row that a warp takes at a time, eight a thread.
COLUMNS = 256
# Elements of a tile of a weight, 32 registers a thread, and how many a program holds at the same time.
TILE, DEPTH = 16384, 3


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
(AT_QKV, AT_O, AT_GATE_UP, AT_DOWN, AT_INPUT_NORM, AT_POST_NORM, AT_Q_NORM, AT_K_NORM, AT_K_CACHE,
 AT_V_CACHE) = column_numbers(LayerPointers)


class LayersShape(NamedTuple):
    """Sizes of a decoder's layers."""

    num_layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    block_size: int


class Product(NamedTuple):
    """How a program computes its share of a weight's rows: some at a time, each by as many warps as it is long.

    A tile is [chunks, rows, columns]; a warp holds 256 columns of it, eight neighbouring ones a thread.
    """

    width: int  # of a weight's row
    columns: int  # that lie side by side over the warps
    chunks: int  # of them in a row, padded
    rows: int  # of a tile
    turns: int  # tiles of a program


def product_of(outputs: int, width: int, programs: int, *, pairs: bool = False) -> Product:
    """For `outputs` rows of `width`. `pairs`: there are two weights, of which a tile takes as many rows each."""
    padded = max(COLUMNS, triton.next_power_of_2(width))
    columns = min(max(COLUMNS, padded // 8), COLUMNS * NUM_WARPS)
    # 32 registers a thread; at least a row for every warp that takes one.
    rows = max(TILE // padded, NUM_WARPS * COLUMNS // columns)
    each = triton.cdiv(outputs, programs)
    rows = max(1 + pairs, min(rows, triton.next_power_of_2(each) * (1 + pairs)))
    return Product(width, columns, padded // columns, rows, triton.cdiv(each, rows // (1 + pairs)))


@jit()
def _pointer(table, layer, field, dtype: tl.constexpr, FIELDS: tl.constexpr):
    address = tl.load(table + layer * FIELDS + field)
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@jit()
def _post(words, at, values, tag, mask):
    """Hand out half-precision values."""
    tl.store(words + at, (values.to(tl.int16, bitcast=True).to(tl.int32) << 16) | tag, mask=mask)


@jit()
def _value(word, dtype: tl.constexpr):
    return (word >> 16).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@jit()
def _post_float(words, at, values, tag, mask):
    """Hand out float32 values, in words of 64 bits."""
    tl.store(words + at, (values.to(tl.int32, bitcast=True).to(tl.int64) << 32) | tag.to(tl.int64), mask=mask)


@jit()
def _float_value(word):
    return (word >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@jit()
def _columns_of(CHUNKS: tl.constexpr, COLUMNS: tl.constexpr):
    """[CHUNKS, 1, COLUMNS]"""
    return tl.arange(0, CHUNKS)[:, None, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]


@jit()
def _row_received(words, tag, dtype: tl.constexpr, K: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
                  COMPILED: tl.constexpr):
    """All K values of a row as float32 [CHUNKS, 1, COLUMNS], zeros behind them; waits for them."""
    column = _columns_of(CHUNKS, COLUMNS)
    found = tl.load(words + column, mask=column < K, other=tag, volatile=True)
    if COMPILED:
        missing = tl.max(((found & 0xFFFF) != tag).to(tl.int32))
        while missing != 0:
            found = tl.load(words + column, mask=column < K, other=tag, volatile=True)
            missing = tl.max(((found & 0xFFFF) != tag).to(tl.int32))
    return _value(found, dtype)


@jit()
def _normed(x, weight, eps, dtype: tl.constexpr, K: tl.constexpr):
    """RMSNorm of [CHUNKS, 1, COLUMNS], rounded as transformers' modules round."""
    variance = tl.sum(x * x) * (1.0 / K)
    return (weight.to(tl.float32) * (x * tl.rsqrt(variance + eps)).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@jit()
def _vector(weight, K: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr):
    column = _columns_of(CHUNKS, COLUMNS)
    return tl.load(weight + column, mask=column < K, other=0.0)


@jit()
def _spread(x, pointer, never, ROWS: tl.constexpr, COLUMNS: tl.constexpr, COMPILED: tl.constexpr):
    """x [CHUNKS, 1, COLUMNS] as [CHUNKS, ROWS, COLUMNS] in the layout of what is loaded from `pointer` so.

    Of two layouts that meet in an operation the compiler takes that of the later load: here that of one which never
    takes place. Otherwise it would bring all weights into the layout of x, and reduce each row across all warps.
    """
    x = tl.broadcast_to(x, [x.shape[0], ROWS, COLUMNS])
    if COMPILED:
        at = tl.arange(0, ROWS)[None, :, None] * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
        place = tl.max_contiguous(pointer + at, [1, 2, COLUMNS])  # see `_tile`
        anchor = tl.load(place, mask=never & (at >= 0), other=0.0).to(tl.int16, bitcast=True).to(tl.int32)
        x = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r,r", [x.to(tl.int32, bitcast=True), tl.broadcast_to(anchor, x.shape)], tl.int32,
            is_pure=True, pack=1,
        ).to(tl.float32, bitcast=True)
    return x


@jit()
def _tile(weight, first, count, turn, K: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr,
          ROWS: tl.constexpr, UPS: tl.constexpr):
    """ROWS of a program's `count` rows from `first` on; with UPS half of them, and as many that lie UPS rows behind."""
    EACH: tl.constexpr = ROWS if UPS == 0 else ROWS // 2
    row = tl.arange(0, ROWS)[None, :, None]
    place = turn * EACH + row % EACH
    column = _columns_of(CHUNKS, COLUMNS)
    # The hint is not true of the rows. It makes the compiler spread warps over them before it does over chunks; it is
    # lost where the pointers are a function's argument.
    at = tl.max_contiguous(weight + (first + place + row // EACH * UPS) * K + column, [1, 2, COLUMNS])
    return tl.load(at, mask=(place < count) & (column < K), other=0.0)


@jit()
def _first_tiles(weight, first, count, K: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr,
                 ROWS: tl.constexpr, TURNS: tl.constexpr, DEPTH: tl.constexpr, UPS: tl.constexpr):
    tiles = ()
    for turn in tl.static_range(TURNS if TURNS < DEPTH else DEPTH):
        tile = _tile(weight, first, count, turn, K, COLUMNS, CHUNKS, ROWS, UPS)
        tiles = tiles + (tile,)  # type: ignore[assignment]
    return tiles


@jit()
def _products(tiles, x, weight, first, count, K: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr,
              ROWS: tl.constexpr, TURNS: tl.constexpr, TURNS_PAD: tl.constexpr, DEPTH: tl.constexpr,
              UPS: tl.constexpr):
    """A program's rows times x: [ROWS, TURNS_PAD]. The first tiles are there, further ones are loaded DEPTH ahead."""
    at = tl.arange(0, TURNS_PAD)[None, :]
    sums = tl.zeros([ROWS, TURNS_PAD], tl.float32)
    if TURNS <= DEPTH:
        for turn in tl.static_range(TURNS):
            sums = tl.where(at == turn, tl.sum(tl.sum(tiles[turn].to(tl.float32) * x, 0), 1)[:, None], sums)
    else:
        tl.static_assert(DEPTH == 3 or DEPTH == 2)
        current, second, third = tiles[0], tiles[1], tiles[DEPTH - 1]
        for turn in tl.range(0, TURNS, num_stages=1):
            sums = tl.where(at == turn, tl.sum(tl.sum(current.to(tl.float32) * x, 0), 1)[:, None], sums)
            current = second
            second = third
            third = _tile(weight, first, count, turn + DEPTH, K, COLUMNS, CHUNKS, ROWS, UPS)
            if DEPTH == 2:
                second = third
    return sums


@jit()
def _places(ROWS: tl.constexpr, TURNS_PAD: tl.constexpr):
    """Which of a program's rows the sums of `_products` are of."""
    return tl.arange(0, TURNS_PAD)[None, :] * ROWS + tl.arange(0, ROWS)[:, None]


@jit()
def _prefetch(weight, first, count, K: tl.constexpr, SIZE: tl.constexpr, MOST: tl.constexpr, PREFETCH: tl.constexpr):
    """The beginning of a program's rows into L2, MOST bytes."""
    if PREFETCH:
        prefetch_rows(weight + first * K, tl.minimum(count, MOST // (K * SIZE)), K * SIZE, K * SIZE)


@jit()
def _norm_and_product(words, tag, weight, norm, eps, first, count, never, dtype: tl.constexpr, K: tl.constexpr,
                      COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr,
                      TURNS_PAD: tl.constexpr, DEPTH: tl.constexpr, UPS: tl.constexpr, COMPILED: tl.constexpr):
    tiles = _first_tiles(weight, first, count, K, COLUMNS, CHUNKS, ROWS, TURNS, DEPTH, UPS)
    scale = _vector(norm, K, CHUNKS, COLUMNS)
    x = _normed(_row_received(words, tag, dtype, K, CHUNKS, COLUMNS, COMPILED), scale, eps, dtype, K)
    x = _spread(x, weight, never, ROWS, COLUMNS, COMPILED)
    return _products(tiles, x, weight, first, count, K, COLUMNS, CHUNKS, ROWS, TURNS, TURNS_PAD, DEPTH, UPS)


@jit()
def _product_and_residual(words, tag, weight, residual_words, out_words, first, count, never, dtype: tl.constexpr,
                          K: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
                          TURNS: tl.constexpr, TURNS_PAD: tl.constexpr, DEPTH: tl.constexpr, COMPILED: tl.constexpr):
    """The residual's values are this program's own, which it has seen before."""
    tiles = _first_tiles(weight, first, count, K, COLUMNS, CHUNKS, ROWS, TURNS, DEPTH, 0)
    place = _places(ROWS, TURNS_PAD)
    residual = _value(tl.load(residual_words + first + place, mask=place < count, other=0, volatile=True), dtype)
    x = _row_received(words, tag, dtype, K, CHUNKS, COLUMNS, COMPILED)
    x = _spread(x, weight, never, ROWS, COLUMNS, COMPILED)
    sums = _products(tiles, x, weight, first, count, K, COLUMNS, CHUNKS, ROWS, TURNS, TURNS_PAD, DEPTH, 0)
    added = residual + sums.to(dtype).to(tl.float32)
    _post(out_words, first + place, added.to(dtype), tag, place < count)


@jit()
def _turned(x, other, cosine, sine, d, dtype: tl.constexpr, HEAD_DIM: tl.constexpr):
    """transformers' `apply_rotary_pos_emb`, of heads and of their halves in the other order."""
    straight = (x * cosine).to(dtype).to(tl.float32)
    crossed = (other * sine).to(dtype).to(tl.float32)
    return tl.where(d < HEAD_DIM // 2, straight - crossed, straight + crossed).to(dtype).to(tl.float32)


@jit()
def _attended(query, k, v, inside, acc, top, total, scale_log2):
    """Online softmax over positions [1, N]: acc [heads, 1, D], top and total [heads, 1] after k and v [1, N, D]."""
    score = tl.where(inside, tl.sum(query * k.to(tl.float32), 2) * scale_log2, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1)[:, None])
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight, rescale = tl.exp2(score - shift), tl.exp2(top - shift)
    total = total * rescale + tl.sum(weight, 1)[:, None]
    acc = acc * rescale[:, :, None] + tl.sum(weight[:, :, None] * v.to(tl.float32), 1)[:, None, :]
    return acc, new_top, total


@jit()
def _positions(table_row, start, end, n, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where positions ``start + n`` lie in a cache; those from `end` on count as block 0."""
    block = tl.load(table_row + (start + n) // BLOCK_SIZE, mask=start + n < end, other=0)
    return (block.to(tl.int64) * BLOCK_SIZE + (start + n) % BLOCK_SIZE) * (KV_HEADS * HEAD_DIM)


@jit()
def _attention(
    qkv_words, part_words, sum_words, tag, k_cache, v_cache, q_norm, k_norm, table_row, first_at, begin, end, place,
    cosine, sine, kv_head, split, head_eps, scale_log2, never, dtype: tl.constexpr, HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, HEAD_ROWS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HAS_NORMS: tl.constexpr,
    COMPILED: tl.constexpr,
):
    """Head norms, RoPE, the new token's key and value, and a KV head's attention to a split of the positions.

    The last split has the new token, which it writes to the cache. HEAD_ROWS are the group's query heads, the key, the
    value, and padding that is like the value.
    """
    n = tl.arange(0, BLOCK_N)[None, :, None]
    d = tl.arange(0, HEAD_DIM)[None, None, :]
    inside = begin + n < end
    k = tl.load(tl.max_contiguous(k_cache + first_at + d, [1, 2, HEAD_DIM]), mask=inside, other=0.0)
    v = tl.load(tl.max_contiguous(v_cache + first_at + d, [1, 2, HEAD_DIM]), mask=inside, other=0.0)
    head = tl.arange(0, HEAD_ROWS)[:, None, None]
    row = tl.where(head < GROUP, kv_head * GROUP + head, HEADS + kv_head + (head > GROUP).to(tl.int32) * KV_HEADS)
    other_d = tl.where(d < HEAD_DIM // 2, d + HEAD_DIM // 2, d - HEAD_DIM // 2)
    at, other_at = row * HEAD_DIM + d, row * HEAD_DIM + other_d
    if HAS_NORMS:
        scale = tl.where(head < GROUP, tl.load(q_norm + d), tl.load(k_norm + d)).to(tl.float32)
        other_scale = tl.where(head < GROUP, tl.load(q_norm + other_d), tl.load(k_norm + other_d)).to(tl.float32)
    found, other_found = tl.load(qkv_words + at, volatile=True), tl.load(qkv_words + other_at, volatile=True)
    if COMPILED:
        missing = tl.max((((found ^ tag) | (other_found ^ tag)) & 0xFFFF != 0).to(tl.int32))
        while missing != 0:
            found, other_found = tl.load(qkv_words + at, volatile=True), tl.load(qkv_words + other_at, volatile=True)
            missing = tl.max((((found ^ tag) | (other_found ^ tag)) & 0xFFFF != 0).to(tl.int32))
    plain = _value(found, dtype)
    x, other = plain, _value(other_found, dtype)
    if HAS_NORMS:
        rms = tl.rsqrt(tl.sum(plain * plain, 2)[:, :, None] * (1.0 / HEAD_DIM) + head_eps)
        x = (scale * (x * rms).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        other = (other_scale * (other * rms).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    query = _turned(x, other, cosine, sine, d, dtype, HEAD_DIM)
    new_k = tl.sum(tl.where(head == GROUP, query, 0.0), 0)[None, :, :]
    new_v = tl.sum(tl.where(head == GROUP + 1, plain, 0.0), 0)[None, :, :]
    has_new = split == SPLITS - 1
    if has_new & (place >= 0):
        tl.store(k_cache + place * (KV_HEADS * HEAD_DIM) + d, new_k.to(dtype))
        tl.store(v_cache + place * (KV_HEADS * HEAD_DIM) + d, new_v.to(dtype))

    top = tl.where(has_new, tl.sum(query * new_k, 2) * scale_log2, float("-inf"))
    total = tl.where(has_new, 1.0, 0.0) + tl.zeros([HEAD_ROWS, 1], tl.float32)
    acc = total[:, :, None] * new_v
    spread = _spread(query, k_cache, never, BLOCK_N, HEAD_DIM, COMPILED)
    across = tl.arange(0, BLOCK_N)[None, :]
    acc, top, total = _attended(spread, k, v, begin + across < end, acc, top, total, scale_log2)
    for start in tl.range(begin + BLOCK_N, end, BLOCK_N):
        position = _positions(table_row, start, end, n, KV_HEADS, HEAD_DIM, BLOCK_SIZE) + d
        k = tl.load(tl.max_contiguous(k_cache + position, [1, 2, HEAD_DIM]), mask=start + n < end, other=0.0)
        v = tl.load(tl.max_contiguous(v_cache + position, [1, 2, HEAD_DIM]), mask=start + n < end, other=0.0)
        acc, top, total = _attended(spread, k, v, start + across < end, acc, top, total, scale_log2)
    part = (kv_head * SPLITS + split) * GROUP + head
    _post_float(part_words, part * HEAD_DIM + d, acc, tag, head < GROUP)
    _post_float(sum_words, part * 2, top[:, :, None], tag, head < GROUP)
    _post_float(sum_words, part * 2 + 1, total[:, :, None], tag, head < GROUP)


@jit()
def _join(part_words, sum_words, mixed_words, tag, kv_head, split, dtype: tl.constexpr, HEAD_DIM: tl.constexpr,
          GROUP: tl.constexpr, SPLITS: tl.constexpr, COMPILED: tl.constexpr):
    """A share of a group's results, added up over its splits."""
    EACH: tl.constexpr = GROUP * HEAD_DIM // SPLITS
    part, value = kv_head * SPLITS + tl.arange(0, SPLITS)[:, None], split * EACH + tl.arange(0, EACH)[None, :]
    part_at, sum_at = part * (GROUP * HEAD_DIM) + value, (part * GROUP + value // HEAD_DIM) * 2
    acc, top = tl.load(part_words + part_at, volatile=True), tl.load(sum_words + sum_at, volatile=True)
    total = tl.load(sum_words + sum_at + 1, volatile=True)
    if COMPILED:
        known = tag.to(tl.int64)
        missing = tl.max((((acc ^ known) | (top ^ known) | (total ^ known)) & 0xFFFF != 0).to(tl.int32))
        while missing != 0:
            acc, top = tl.load(part_words + part_at, volatile=True), tl.load(sum_words + sum_at, volatile=True)
            total = tl.load(sum_words + sum_at + 1, volatile=True)
            missing = tl.max((((acc ^ known) | (top ^ known) | (total ^ known)) & 0xFFFF != 0).to(tl.int32))
    tops = _float_value(top)
    factor = tl.exp2(tops - tl.max(tops, 0)[None, :])
    mixed = tl.sum(_float_value(acc) * factor, 0) / tl.sum(_float_value(total) * factor, 0)
    at = kv_head * (GROUP * HEAD_DIM) + split * EACH + tl.arange(0, EACH)
    _post(mixed_words, at, mixed.to(dtype), tag, at >= 0)


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
    BLOCK_N: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
    HIDDEN_COLUMNS: tl.constexpr,
    HIDDEN_CHUNKS: tl.constexpr,
    MIXED_COLUMNS: tl.constexpr,
    MIXED_CHUNKS: tl.constexpr,
    INNER_COLUMNS: tl.constexpr,
    INNER_CHUNKS: tl.constexpr,
    QKV_TILE: tl.constexpr,
    QKV_TURNS: tl.constexpr,
    QKV_PAD: tl.constexpr,
    O_TILE: tl.constexpr,
    O_TURNS: tl.constexpr,
    O_PAD: tl.constexpr,
    GATE_UP_TILE: tl.constexpr,
    GATE_UP_TURNS: tl.constexpr,
    GATE_UP_PAD: tl.constexpr,
    DOWN_TILE: tl.constexpr,
    DOWN_TURNS: tl.constexpr,
    DOWN_PAD: tl.constexpr,
    DEPTH: tl.constexpr,
    FIELDS: tl.constexpr,
    PART: tl.constexpr,
    PREFETCH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """PART -1: everything, by programs that are all there at once. Else one part of one layer, a launch each."""
    COMPILED: tl.constexpr = not INTERPRETED
    dtype: tl.constexpr = x.dtype.element_ty
    SIZE: tl.constexpr = dtype.primitive_bitwidth // 8
    MOST: tl.constexpr = 96 << 10
    GROUP: tl.constexpr = HEADS // KV_HEADS
    SPLITS: tl.constexpr = PROGRAMS // KV_HEADS
    QKV: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    MIXED: tl.constexpr = HEADS * HEAD_DIM
    QKV_EACH: tl.constexpr = (QKV + PROGRAMS - 1) // PROGRAMS
    HIDDEN_EACH: tl.constexpr = (HIDDEN + PROGRAMS - 1) // PROGRAMS
    INNER_EACH: tl.constexpr = (INNER + PROGRAMS - 1) // PROGRAMS
    program = tl.program_id(0)
    never = last_layer < 0
    epoch = tl.load(epochs)
    qkv_first, qkv_count = program * QKV_EACH, tl.minimum(QKV - program * QKV_EACH, QKV_EACH)
    hidden_first, hidden_count = program * HIDDEN_EACH, tl.minimum(HIDDEN - program * HIDDEN_EACH, HIDDEN_EACH)
    inner_first, inner_count = program * INNER_EACH, tl.minimum(INNER - program * INNER_EACH, INNER_EACH)
    # What attention needs is the same in all layers.
    kv_head, split = program // SPLITS, program % SPLITS
    length = tl.load(position).to(tl.int32)  # of what the cache holds
    place = tl.load(slot_mapping)
    table_row = block_table + tl.load(slot) * table_stride
    share = tl.cdiv(length, SPLITS)
    begin = split * share
    end = tl.minimum(begin + share, length)
    first_at = _positions(table_row, begin, end, tl.arange(0, BLOCK_N)[None, :, None], KV_HEADS, HEAD_DIM, BLOCK_SIZE)
    lane = tl.arange(0, HEAD_DIM)[None, None, :]
    cosine = tl.load(cos + length * cos_stride + lane).to(tl.float32)
    sine = tl.load(sin + length * sin_stride + lane).to(tl.float32)

    if PART == -1 or PART == 0:
        own = _places(O_TILE, O_PAD)
        given = tl.load(x + hidden_first + own, mask=own < hidden_count, other=0.0)
        _post(hidden_words, hidden_first + own, given, epoch & 0xFFFF, own < hidden_count)

    for layer in tl.range(first_layer, last_layer, num_stages=1):
        before, tag = (epoch + layer) & 0xFFFF, (epoch + layer + 1) & 0xFFFF
        o, gate_up = _pointer(table, layer, AT_O, dtype, FIELDS), _pointer(table, layer, AT_GATE_UP, dtype, FIELDS)
        down = _pointer(table, layer, AT_DOWN, dtype, FIELDS)
        if PART == -1 or PART == 1:
            _prefetch(o, hidden_first, hidden_count, MIXED, SIZE, MOST, PREFETCH)
            _prefetch(gate_up, inner_first, inner_count, HIDDEN, SIZE, MOST // 2, PREFETCH)
            _prefetch(gate_up, INNER + inner_first, inner_count, HIDDEN, SIZE, MOST // 2, PREFETCH)
            sums = _norm_and_product(
                hidden_words, before, _pointer(table, layer, AT_QKV, dtype, FIELDS),
                _pointer(table, layer, AT_INPUT_NORM, dtype, FIELDS), eps, qkv_first, qkv_count, never, dtype, HIDDEN,
                HIDDEN_COLUMNS, HIDDEN_CHUNKS, QKV_TILE, QKV_TURNS, QKV_PAD, DEPTH, 0,
                COMPILED,
            )
            mine = _places(QKV_TILE, QKV_PAD)
            _post(qkv_words, qkv_first + mine, sums.to(dtype), tag, mine < qkv_count)
        if PART == -1 or PART == 2:
            _prefetch(down, hidden_first, hidden_count, INNER, SIZE, MOST, PREFETCH)
            if layer + 1 < LAYERS:
                _prefetch(_pointer(table, layer + 1, AT_QKV, dtype, FIELDS), qkv_first, qkv_count, HIDDEN, SIZE, MOST,
                          PREFETCH)
            k_cache = _pointer(table, layer, AT_K_CACHE, dtype, FIELDS) + kv_head * HEAD_DIM
            v_cache = _pointer(table, layer, AT_V_CACHE, dtype, FIELDS) + kv_head * HEAD_DIM
            _attention(
                qkv_words, part_words, sum_words, tag, k_cache, v_cache,
                _pointer(table, layer, AT_Q_NORM, dtype, FIELDS), _pointer(table, layer, AT_K_NORM, dtype, FIELDS),
                table_row, first_at, begin, end, place, cosine, sine, kv_head, split, head_eps, scale_log2, never,
                dtype, HEADS, KV_HEADS, HEAD_DIM, GROUP, HEAD_ROWS, SPLITS, BLOCK_SIZE, BLOCK_N, HAS_NORMS, COMPILED,
            )
        if PART == -1 or PART == 3:
            _join(part_words, sum_words, mixed_words, tag, kv_head, split, dtype, HEAD_DIM, GROUP, SPLITS, COMPILED)
        if PART == -1 or PART == 4:
            _product_and_residual(
                mixed_words, tag, o, hidden_words, middle_words, hidden_first, hidden_count, never, dtype, MIXED,
                MIXED_COLUMNS, MIXED_CHUNKS, O_TILE, O_TURNS, O_PAD, DEPTH, COMPILED,
            )
        if PART == -1 or PART == 5:
            both = _norm_and_product(
                middle_words, tag, gate_up, _pointer(table, layer, AT_POST_NORM, dtype, FIELDS), eps, inner_first,
                inner_count, never, dtype, HIDDEN, HIDDEN_COLUMNS, HIDDEN_CHUNKS, GATE_UP_TILE, GATE_UP_TURNS,
                GATE_UP_PAD, DEPTH, INNER, COMPILED,
            ).to(dtype).to(tl.float32)
            both = tl.reshape(both, [2, GATE_UP_TILE // 2, GATE_UP_PAD])
            is_up = tl.arange(0, 2)[:, None, None] == 1
            gate, up = tl.sum(tl.where(is_up, 0.0, both), 0), tl.sum(tl.where(is_up, both, 0.0), 0)
            pair = _places(GATE_UP_TILE // 2, GATE_UP_PAD)
            _post(inner_words, inner_first + pair, silu_mul_tile(gate, up, dtype, INTERPRETED), tag,
                  pair < inner_count)
        if PART == -1 or PART == 6:
            _product_and_residual(
                inner_words, tag, down, middle_words, hidden_words, hidden_first, hidden_count, never, dtype, INNER,
                INNER_COLUMNS, INNER_CHUNKS, DOWN_TILE, DOWN_TURNS, DOWN_PAD, DEPTH,
                COMPILED,
            )

    if PART == -1 or PART == 7:  # noqa: SIM102  (decided when it is compiled)
        if program == 0:
            last = _row_received(hidden_words, (epoch + LAYERS) & 0xFFFF, dtype, HIDDEN, HIDDEN_CHUNKS, HIDDEN_COLUMNS,
                                 COMPILED)
            column = _columns_of(HIDDEN_CHUNKS, HIDDEN_COLUMNS)
            normed = _normed(last, _vector(final_norm, HIDDEN, HIDDEN_CHUNKS, HIDDEN_COLUMNS), eps, dtype, HIDDEN)
            tl.store(out + column, normed.to(dtype), mask=column < HIDDEN)
            # All have read it: each posted values of the last layer.
            tl.store(epochs, epoch + LAYERS + 1)


class Workspace:
    """What programs of a launch exchange, and launches hand on to each other, all of them on one stream."""

    def __init__(self, shape: LayersShape, device: torch.device, programs: int = PROGRAMS) -> None:
        """`programs`: a power of two, at least the number of KV heads."""
        heads, group = shape.heads + 2 * shape.kv_heads, shape.heads // shape.kv_heads
        sizes = shape.hidden, heads * shape.head_dim, shape.heads * shape.head_dim, shape.hidden, shape.inner
        self.words = [torch.zeros(size, dtype=torch.int32, device=device) for size in sizes]
        parts = programs * group * shape.head_dim, programs * group * 2
        self.parts = [torch.zeros(size, dtype=torch.int64, device=device) for size in parts]
        self.epochs = torch.ones(1, dtype=torch.int32, device=device)  # no word carries its tag
        self.programs = programs


def takes(shape: LayersShape, dtype: torch.dtype, device: torch.device) -> bool:
    """Can :func:`one_row_layers` run these layers there? Hopper and later, like early launches."""
    if not pdl_supported(device) or num_multiprocessors(device) < PROGRAMS:
        return False
    return dtype in (torch.float16, torch.bfloat16) and can_be_shared(shape, PROGRAMS)


def can_be_shared(shape: LayersShape, programs: int) -> bool:
    """Do sizes divide as the kernel divides them among programs?"""
    group, splits = shape.heads // shape.kv_heads, programs // shape.kv_heads
    powers = shape.kv_heads, shape.head_dim, group
    if any(size < 1 or size & (size - 1) for size in powers) or shape.heads % shape.kv_heads or splits < 1:
        return False
    each = group * shape.head_dim // splits  # values of a group that a program joins: of one head
    widths = shape.hidden, shape.inner, shape.heads * shape.head_dim
    return 1 <= each <= shape.head_dim and shape.head_dim >= 16 and all(w % 8 == 0 and w <= 16384 for w in widths)


def one_row_layers(
    x: torch.Tensor, shape: LayersShape, table: torch.Tensor, final_norm: torch.Tensor, eps: float,
    head_eps: float | None, cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, slot: torch.Tensor,
    slot_mapping: torch.Tensor, block_table: torch.Tensor, scale: float, workspace: Workspace,
) -> torch.Tensor:
    """All layers of a decoder, and its final norm, for one token whose predecessors are in the cache.

    A layer adds to the residual what :func:`~hf_paged.kernels.add_rms_norm.add_rms_norm`,
    :func:`~hf_paged.kernels.linear.linear`, :func:`~hf_paged.kernels.qk_norm_rope_store.qk_norm_rope_store`, attention
    and :func:`~hf_paged.kernels.silu_mul.silu_mul` give, rounded where those round; weights of attention are float32.

    Args:
        x: ``[1, hidden]`` fp16 or bf16, contiguous, the embedding.
        shape: of all layers, see `can_be_shared`.
        table: ``[layers, 10]`` int64, see `LayerPointers`; tensors are contiguous, of x's dtype, 16-byte aligned.
        final_norm: ``[hidden]``, x's dtype.
        eps, head_eps: of the norms of rows and of heads; None: heads have none.
        cos, sin: ``[P, D]``, x's dtype, a row per position; rows may be strided.
        position: ``[1]`` int64, the token's place in its sequence.
        slot: ``[1]`` integer, its line of the block table.
        slot_mapping: ``[1]`` int64, where its key and value go; -1: nowhere.
        block_table: ``[S, max_blocks]`` int32.
        scale: factor of the scores.
        workspace: of these layers' shape.

    Returns:
        ``[1, hidden]``, x's dtype: the final norm's result.

    Raises:
        ValueError: a shape that cannot be shared, or tensors that are not as above. What the table points to is not
            looked at.
    """
    if not can_be_shared(shape, workspace.programs):
        raise ValueError(f"shape={shape}: expected sizes that {workspace.programs} programs can share")
    hidden, head_dim, dtype = shape.hidden, shape.head_dim, x.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x: {dtype}; expected fp16 or bf16")
    check_tensors(
        Expected("x", x, (1, hidden), dtype, contiguous=True),
        Expected("table", table, (shape.num_layers, FIELDS), torch.int64, contiguous=True),
        Expected("final_norm", final_norm, (hidden,), dtype, contiguous=True),
        Expected("cos", cos, (None, head_dim), dtype),
        Expected("sin", sin, tuple(cos.shape), dtype),
        Expected("position", position, (1,), torch.int64),
        Expected("slot_mapping", slot_mapping, (1,), torch.int64),
        Expected("block_table", block_table, (None, None), torch.int32),
    )
    return one_row_layers_unchecked(x, shape, table, final_norm, eps, head_eps, cos, sin, position, slot, slot_mapping,
                                    block_table, scale, workspace)


def one_row_layers_reference(
    x: torch.Tensor, layers: list[LayerPointers], final_norm: torch.Tensor, eps: float, head_eps: float | None,
    cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, slot: torch.Tensor, slot_mapping: torch.Tensor,
    block_table: torch.Tensor, scale: float,
) -> torch.Tensor:
    """:func:`one_row_layers` in plain torch, over tensors in place of a table of pointers."""
    residual: torch.Tensor | None = None
    delta, length = x, (position + 1).to(torch.int32)
    starts = torch.arange(2, dtype=torch.int32, device=x.device)
    meta = PagedMetadata(starts, length, block_table, slot.to(torch.int32), slot_mapping, 1, int(length))
    for layer in layers:
        normed, residual = add_rms_norm_reference(delta, residual, layer.input_norm, eps)
        query = qk_norm_rope_store_reference(
            F.linear(normed, layer.qkv), layer.q_norm, layer.k_norm, head_eps or 0.0, cos, sin, position,
            slot_mapping, layer.k_cache, layer.v_cache,
        )
        mixed = paged_attention_reference(query, layer.k_cache, layer.v_cache, meta, AttentionOptions(scale))
        normed, residual = add_rms_norm_reference(F.linear(mixed.flatten(1), layer.o), residual, layer.post_norm, eps)
        delta = F.linear(silu_mul_reference(F.linear(normed, layer.gate_up)), layer.down)
    return add_rms_norm_reference(delta, residual, final_norm, eps)[0]


def one_row_layers_unchecked(
    x: torch.Tensor, shape: LayersShape, table: torch.Tensor, final_norm: torch.Tensor, eps: float,
    head_eps: float | None, cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor, slot: torch.Tensor,
    slot_mapping: torch.Tensor, block_table: torch.Tensor, scale: float, workspace: Workspace,
) -> torch.Tensor:
    """:func:`one_row_layers` for tensors that are known to be as it says."""
    require_triton()
    out = torch.empty_like(x)
    interpreted, programs = triton.knobs.runtime.interpret, workspace.programs
    heads, mixed = shape.heads + 2 * shape.kv_heads, shape.heads * shape.head_dim
    qkv = product_of(heads * shape.head_dim, shape.hidden, programs)
    o = product_of(shape.hidden, mixed, programs)
    gate_up = product_of(shape.inner, shape.hidden, programs, pairs=True)
    down = product_of(shape.hidden, shape.inner, programs)

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
            BLOCK_N=32,
            HEAD_ROWS=triton.next_power_of_2(shape.heads // shape.kv_heads + 2),
            HIDDEN_COLUMNS=qkv.columns,
            HIDDEN_CHUNKS=qkv.chunks,
            MIXED_COLUMNS=o.columns,
            MIXED_CHUNKS=o.chunks,
            INNER_COLUMNS=down.columns,
            INNER_CHUNKS=down.chunks,
            QKV_TILE=qkv.rows,
            QKV_TURNS=qkv.turns,
            QKV_PAD=triton.next_power_of_2(qkv.turns),
            O_TILE=o.rows,
            O_TURNS=o.turns,
            O_PAD=triton.next_power_of_2(o.turns),
            GATE_UP_TILE=gate_up.rows,
            GATE_UP_TURNS=gate_up.turns,
            GATE_UP_PAD=triton.next_power_of_2(gate_up.turns),
            DOWN_TILE=down.rows,
            DOWN_TURNS=down.turns,
            DOWN_PAD=triton.next_power_of_2(down.turns),
            DEPTH=DEPTH,
            FIELDS=FIELDS,
            PART=part,
            PREFETCH=not interpreted,
            INTERPRETED=interpreted,
            num_warps=NUM_WARPS,
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
