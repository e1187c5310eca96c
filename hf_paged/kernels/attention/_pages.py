# mypy: disallow-untyped-defs=False
"""Keys and values of a tile of positions, found through the block table: one look-up where a block holds the tile."""

from __future__ import annotations

from hf_paged.kernels._triton import jit, tl


@jit()
def blocks_of_tile(
    table_row, start, begin, end, n, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr
):
    """The block of each position ``start + n``, one for all where a block holds the tile.

    Table entries outside ``begin .. end - 1`` are not read and count as block 0.
    """
    entry = start // BLOCK_SIZE
    if BLOCK_SIZE < BLOCK_N:
        entry += n // BLOCK_SIZE
    used = entry < tl.cdiv(end, BLOCK_SIZE)
    if HAS_WINDOW:
        used &= entry >= begin // BLOCK_SIZE
    return tl.load(table_row + entry, mask=used, other=0)


@jit()
def _cache_offset(
    base, start, n, head, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """[N, D_PAD] element offsets of positions ``start + n``; inside a block int32 is enough."""
    lane = tl.arange(0, HEAD_DIM_PAD)
    ROW: tl.constexpr = STRIDE // BLOCK_SIZE
    if BLOCK_SIZE >= BLOCK_N:
        slot = start % BLOCK_SIZE + n
    else:
        slot = n % BLOCK_SIZE
        base = base[:, None]
    return base + ((slot * ROW)[:, None] + (head * HEAD_DIM + lane)[None, :])


@jit()
def load_keys(
    k_cache, base, start, n, head, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """Keys of unread slots come as they are, NaN or not: their scores are replaced before anything looks at them."""
    offset = _cache_offset(base, start, n, head, STRIDE, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, BLOCK_N)
    if HEAD_DIM == HEAD_DIM_PAD:
        keys = tl.load(k_cache + offset)
    else:
        inside = tl.broadcast_to((tl.arange(0, HEAD_DIM_PAD) < HEAD_DIM)[None, :], offset.shape)
        keys = tl.load(k_cache + offset, mask=inside, other=0.0)
    return keys


@jit()
def load_values(
    v_cache, base, start, begin, end, n, head, STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr,
):
    """Unread slots may hold NaN, and a weight of zero would not silence it: their values are loaded as zero."""
    offset = _cache_offset(base, start, n, head, STRIDE, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, BLOCK_N)
    readable = start + n < end
    if HAS_WINDOW:
        readable &= start + n >= begin
    inside = readable[:, None]
    if HEAD_DIM != HEAD_DIM_PAD:
        inside = inside & (tl.arange(0, HEAD_DIM_PAD) < HEAD_DIM)[None, :]
    return tl.load(v_cache + offset, mask=inside, other=0.0)
