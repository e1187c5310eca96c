# mypy: disallow-untyped-defs=False
"""One tile of paged attention on the device: gather K and V through the block table, online softmax in base 2.

The recurrence is FlashAttention-2's (Dao 2023, arXiv 2307.08691, algorithm 1). Decode's: prefill pipelines its own.
"""

from __future__ import annotations

from hf_paged.kernels._triton import jit, next_power_of_2, tl

LOG2_E = 1.4426950408889634


def padded_head_dim(head_dim: int) -> int:
    """Lanes of a tile's head: a power of two that tl.dot takes."""
    return max(16, next_power_of_2(head_dim))


@jit()
def blocks_of(table_row, position, begin, end, BLOCK_SIZE: tl.constexpr):
    """Block ids of the positions, 0 outside ``begin .. end - 1``."""
    return tl.load(table_row + position // BLOCK_SIZE, mask=(position >= begin) & (position < end), other=0)


@jit()
def attend_tile(
    q,  # [M, D_PAD]
    acc,  # [M, D_PAD] fp32, sum of weights times values so far
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
    HAS_SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    """Returns (acc, top, total) after this tile."""
    lane = tl.arange(0, HEAD_DIM_PAD)
    # In int64: a cache may hold more than 2**31 elements.
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    offset = (slot * KV_HEADS + head)[:, None] * HEAD_DIM + lane[None, :]
    # Unread slots may hold NaN, and a weight of zero would not silence it: they are loaded as zero.
    inside = readable[:, None] & (lane < HEAD_DIM)[None, :]
    k = tl.load(k_cache + offset, mask=inside, other=0.0)
    v = tl.load(v_cache + offset, mask=inside, other=0.0)

    score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
    if HAS_SOFTCAP:
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
