# mypy: disallow-untyped-defs=False
"""What the kernels of attention share: what they are compiled for, arguments of a launch, and one tile on the device.

A tile gathers keys and values through the block table; softmax is online and in base 2, by the recurrence of
FlashAttention-2 (Dao 2023, arXiv 2307.08691, algorithm 1). Rows of one new token go through `attend_tile`. Prompts and
shared prefixes load keys and values ahead of their scores, so that the loads are pipelined, and look up one block where
it holds the whole tile.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from hf_paged.kernels._triton import jit, next_power_of_2, tl
from hf_paged.kernels.attention.types import AttentionOptions, PagedMetadata

LOG2_E = 1.4426950408889634


class KernelShape(NamedTuple):
    """What a kernel of attention is compiled for besides its tiles; its argument ``S``."""

    group: int  # query heads of a KV head
    group_pad: int  # as a power of two
    kv_heads: int
    head_dim: int  # of queries and keys
    head_pad: int  # lanes of a tile's head
    block_size: int
    value_dim: int
    value_pad: int
    has_window: bool  # positions ahead of a window, or of a chunk, are out of sight
    is_chunk: bool
    has_softcap: bool
    has_sinks: bool


def padded_head_dim(head_dim: int) -> int:
    """Lanes of a tile's head: a power of two that tl.dot takes."""
    return max(16, next_power_of_2(head_dim))


@lru_cache(maxsize=256)
def _shape_of(num_heads: int, block_size: int, kv_heads: int, head_dim: int, value_dim: int,
              *has: bool) -> KernelShape:
    group = num_heads // kv_heads
    return KernelShape(group, next_power_of_2(group), kv_heads, head_dim, padded_head_dim(head_dim), block_size,
                       value_dim, padded_head_dim(value_dim), *has)


def score_numbers(meta: PagedMetadata, options: AttentionOptions) -> tuple[float, ...]:
    """Return the stride of the block table, window or chunk, scale and softcap, of scores in base 2."""
    return (meta.block_table.stride(0), options.window or options.chunk or 0, options.scale * LOG2_E,
            (options.softcap or 0.0) * LOG2_E)


def launch_arguments(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata,
                     options: AttentionOptions) -> tuple[tuple[float, ...], KernelShape]:
    """Return a kernel's arguments of a call: strides of q's tokens and heads and `score_numbers`, and its shape.

    q ``[T, Hq, D]``, k_cache and v_cache ``[num_blocks, block_size, Hkv, D or Dv]``.
    """
    is_chunk = options.chunk is not None
    has = is_chunk or options.window is not None, is_chunk, options.softcap is not None, options.sinks is not None
    shape = _shape_of(q.shape[1], *k_cache.shape[1:], v_cache.shape[3], *has)
    return (q.stride(0), q.stride(1), *score_numbers(meta, options)), shape


def empty_result(q: torch.Tensor, v_cache: torch.Tensor) -> torch.Tensor:
    """Allocate the result [T, Hq, Dv] for q [T, Hq, D]."""
    return torch.empty(*q.shape[:2], v_cache.shape[3], dtype=q.dtype, device=q.device)


def partial_results(num_parts: int, q: torch.Tensor, value_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate parts of results: weighted sums of values [N, Hq, Dv], largest scores, sums of weights [N, Hq, 2]."""
    acc = torch.empty(num_parts, q.shape[1], value_dim, dtype=torch.float32, device=q.device)
    return acc, torch.empty(num_parts, q.shape[1], 2, dtype=torch.float32, device=q.device)


@jit()
def first_visible(position, window, S: tl.constexpr):
    """The first position that a token at ``position`` sees, of its window or chunk; may be below 0."""
    if S.is_chunk:
        first = position - position % window
    else:
        first = position - window + 1
    return first


@jit()
def blocks_of(table_row, position, begin, end, S: tl.constexpr):
    """Block ids of the positions, 0 outside ``begin .. end - 1``."""
    return tl.load(table_row + position // S.block_size, mask=(position >= begin) & (position < end), other=0)


@jit()
def attend_tile(
    q,  # [M, D_PAD]
    acc,  # [M, DV_PAD] fp32, sum of weights times values so far
    top,  # [M] fp32, largest score so far (base 2)
    total,  # [M] fp32, sum of weights so far
    k_cache,
    v_cache,
    block,  # [N] int32: the positions' blocks
    head,
    position,  # [N] int32
    readable,  # [N] bool: positions that may be read, and count
    scale_log2,
    softcap_log2,
    S: tl.constexpr,
):
    """Returns (acc, top, total) after this tile."""
    lane = tl.arange(0, S.head_pad)
    value_lane = tl.arange(0, S.value_pad)
    # In int64: a cache may hold more than 2**31 elements.
    slot = block.to(tl.int64) * S.block_size + position % S.block_size
    place = (slot * S.kv_heads + head)[:, None]
    # Unread slots may hold NaN, and a weight of zero would not silence it: they are loaded as zero.
    k = tl.load(k_cache + place * S.head_dim + lane[None, :],
                mask=readable[:, None] & (lane < S.head_dim)[None, :], other=0.0)
    v = tl.load(v_cache + place * S.value_dim + value_lane[None, :],
                mask=readable[:, None] & (value_lane < S.value_dim)[None, :], other=0.0)

    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if S.has_softcap:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), exact at both infinities; 2.885... is 2 log2(e).
        score = softcap_log2 * (1.0 - 2.0 / (tl.exp2(score / softcap_log2 * 2.8853900817779268) + 1.0))
    score = tl.where(readable[None, :], score, float("-inf"))
    new_top = tl.maximum(top, tl.max(score, 1))
    # Before its first visible position a row's maximum is -inf, and -inf - -inf is NaN.
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - shift[:, None])
    rescale = tl.exp2(top - shift)
    total = total * rescale + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_top, total


@jit()
def attend_row(
    q, k_cache, v_cache, sinks, table_row, q_stride_t, q_stride_h, scale_log2, softcap_log2, head, row, block, begin,
    loop_begin, loop_end, counts_sink, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    S: tl.constexpr,
):
    """(acc, top, total) of one new token's positions ``loop_begin .. loop_end - 1``, of the query heads of a KV head.

    The heads are the rows of one tile, padded to what tl.dot takes. ``block``: those of the first tile of positions.
    """
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    lane = tl.arange(0, S.head_pad)
    query_head = head * S.group + m
    inside = (m < S.group)[:, None] & (lane < S.head_dim)[None, :]
    q_tile = tl.load(q + row * q_stride_t + query_head[:, None] * q_stride_h + lane[None, :], mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, S.value_pad], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if S.has_sinks:
        # A score without a value, of weight 1 at its own height, in base 2 by log2(e).
        sink = tl.load(sinks + query_head, mask=m < S.group, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(counts_sink, tl.maximum(sink, -3.0e38), top)
        total = tl.where(counts_sink, 1.0, total)
    for start in tl.range(loop_begin, loop_end, BLOCK_N, num_stages=STAGES):
        position = start + n
        next_block = blocks_of(table_row, position + BLOCK_N, begin, loop_end, S)
        readable = (position >= begin) & (position < loop_end)
        acc, top, total = attend_tile(
            q_tile, acc, top, total, k_cache, v_cache, block, head, position, readable, scale_log2, softcap_log2, S,
        )
        block = next_block
    return acc, top, total


@jit()
def store_result(out, acc, total, row, query_head, live, S: tl.constexpr):
    """Write the result of a row's query heads that are ``live``; of one that has seen nothing it is 0."""
    lane = tl.arange(0, S.value_pad)
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    offset = (row * (S.kv_heads * S.group) + query_head)[:, None] * S.value_dim + lane[None, :]
    tl.store(out + offset, result.to(out.dtype.element_ty), mask=live[:, None] & (lane < S.value_dim)[None, :])


@jit()
def store_part(acc, top, total, partial_acc, partial_sums, part, query_head, live, S: tl.constexpr):
    """Write part number ``part`` of a result, of the query heads that are ``live``."""
    lane = tl.arange(0, S.value_pad)
    place = part * (S.kv_heads * S.group) + query_head
    inside = live[:, None] & (lane < S.value_dim)[None, :]
    tl.store(partial_acc + place[:, None] * S.value_dim + lane[None, :], acc, mask=inside)
    tl.store(partial_sums + place * 2, top, mask=live)
    tl.store(partial_sums + place * 2 + 1, total, mask=live)


@jit()
def blocks_of_tile(table_row, start, begin, end, n, BLOCK_N: tl.constexpr, HAS_BEGIN: tl.constexpr, S: tl.constexpr):
    """The block of each position ``start + n``, one for all where a block holds the tile.

    Table entries outside ``begin .. end - 1`` (without HAS_BEGIN: outside ``0 .. end - 1``) are not read and count as
    block 0.
    """
    entry = start // S.block_size
    if S.block_size < BLOCK_N:
        entry += n // S.block_size
    used = entry < tl.cdiv(end, S.block_size)
    if HAS_BEGIN:
        used &= entry >= begin // S.block_size
    return tl.load(table_row + entry, mask=used, other=0)


@jit()
def _cache_offset(blocks, start, n, head, DIM: tl.constexpr, PAD: tl.constexpr, BLOCK_N: tl.constexpr,
                  S: tl.constexpr):
    """[N, PAD] element offsets of positions ``start + n`` with heads of DIM; inside a block int32 is enough."""
    lane = tl.arange(0, PAD)
    # int64: a cache may hold more than 2**31 elements.
    base = blocks.to(tl.int64) * (S.block_size * S.kv_heads * DIM)
    if S.block_size >= BLOCK_N:
        slot = start % S.block_size + n
    else:
        slot = n % S.block_size
        base = base[:, None]
    return base + ((slot * (S.kv_heads * DIM))[:, None] + (head * DIM + lane)[None, :])


@jit()
def load_keys(k_cache, blocks, start, n, head, BLOCK_N: tl.constexpr, S: tl.constexpr):
    """Keys of unread slots come as they are, NaN or not: their scores are replaced before anything looks at them."""
    offset = _cache_offset(blocks, start, n, head, S.head_dim, S.head_pad, BLOCK_N, S)
    if S.head_dim == S.head_pad:
        keys = tl.load(k_cache + offset)
    else:
        inside = tl.broadcast_to((tl.arange(0, S.head_pad) < S.head_dim)[None, :], offset.shape)
        keys = tl.load(k_cache + offset, mask=inside, other=0.0)
    return keys


@jit()
def load_values(v_cache, blocks, start, begin, end, n, head, BLOCK_N: tl.constexpr, HAS_BEGIN: tl.constexpr,
                S: tl.constexpr):
    """Unread slots may hold NaN, and a weight of zero would not silence it: their values are loaded as zero."""
    offset = _cache_offset(blocks, start, n, head, S.value_dim, S.value_pad, BLOCK_N, S)
    readable = start + n < end
    if HAS_BEGIN:
        readable &= start + n >= begin
    inside = readable[:, None]
    if S.value_dim != S.value_pad:
        inside = inside & (tl.arange(0, S.value_pad) < S.value_dim)[None, :]
    return tl.load(v_cache + offset, mask=inside, other=0.0)


@jit()
def scores_of(q, k, scale_log2, softcap_log2, S: tl.constexpr):
    """Scores [M, N], and the factor that turns them to base 2."""
    score = tl.dot(q, tl.trans(k), input_precision="ieee")
    scale = scale_log2
    if S.has_softcap:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), exact at both infinities; 2.885... is 2 log2(e).
        score *= scale_log2 / softcap_log2 * 2.8853900817779268
        score = softcap_log2 * (1.0 - 2.0 / (tl.exp2(score) + 1.0))
        scale = 1.0
    return score, scale


@jit()
def add_scores(acc, top, total, score, scale, v):
    """Returns (acc, top, total) after a tile of scores, those out of sight being -inf. `top` must be finite."""
    new_top = tl.maximum(top, tl.max(score, 1) * scale)
    weight = tl.exp2(score * scale - new_top[:, None])
    rescale = tl.exp2(top - new_top)
    total = total * rescale + tl.sum(weight, 1)
    acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return acc, new_top, total
