# mypy: disallow-untyped-defs=False
"""`qk_norm_rope_store` of a packed qkv projection to which LoRA's part is still to be added."""

from __future__ import annotations

import torch

from hf_paged.kernels._triton import (
    after_previous_kernel,
    jit,
    next_power_of_2,
    on_device_of,
    prefetch_vector,
    require_triton,
    tl,
)
from hf_paged.kernels.layer._qk_norm_rope_tile import halves, normed_and_rotated
from hf_paged.kernels.layer.heads_to_cache import HeadsToCache
from hf_paged.kernels.layer.qk_norm_rope_store import qk_norm_rope_store_unchecked
from hf_paged.kernels.lora._lora_tile import (
    add_bias,
    add_delta,
    places_of,
    precision_of,
    rows_of_tile,
    table_options,
    tiles_of_rows,
)
from hf_paged.kernels.lora.lora_expand import Delta, lora_expand_unchecked
from hf_paged.kernels.lora.lora_order import MANY_ROWS, tile_of

_MOST_ROWS = MANY_ROWS


def lora_qk_norm_rope_store_unchecked(qkv: torch.Tensor, delta: Delta, heads: HeadsToCache) -> torch.Tensor:
    """`qk_norm_rope_store` of ``lora_expand(qkv, *delta)``, which see; `qkv` may be written.

    Unchecked, and exact as the two one after the other, but for the order in which a head's squares are added.
    """
    if qkv.is_cuda and heads.positions is not None and _is_one_launch(qkv, delta, heads.k_cache):
        return lora_qk_norm_rope_store_triton(qkv, delta, heads)
    return qk_norm_rope_store_unchecked(lora_expand_unchecked(qkv, *delta), heads)


def _is_one_launch(qkv: torch.Tensor, delta: Delta, k_cache: torch.Tensor) -> bool:
    """Are the rows few, and all adapters on whole heads?"""
    numbers = [number for columns in delta.table.columns for number in columns]
    return len(qkv) < _MOST_ROWS and not any(number % k_cache.shape[3] for number in numbers)


@jit(varying_ints=("num_rows",), varying_pointers=("positions", "slot_mapping"))
def _lora_qk_norm_rope_store_kernel(
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    slot_mapping,
    k_cache,
    v_cache,
    query,
    eps,
    shrunk,
    places,
    scales,
    rows,
    tile_entries,
    num_rows,
    first_0,
    first_1,
    first_2,
    size_0,
    size_1,
    size_2,
    qkv_stride,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RANK_DIVISOR: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has one head of some rows; first_j and size_j are columns of qkv that have adapters."""
    if PDL and HAS_NORMS:
        prefetch_vector(q_weight, HEAD_DIM * q_weight.dtype.element_ty.primitive_bitwidth // 8)
        prefetch_vector(k_weight, HEAD_DIM * k_weight.dtype.element_ty.primitive_bitwidth // 8)
    after_previous_kernel(PDL)
    HALF: tl.constexpr = HEAD_DIM // 2
    row, inside, entry = rows_of_tile(rows, tile_entries, num_rows, HAS_ROWS, BLOCK_M)
    head = tl.program_id(1)
    begin = head * HEAD_DIM
    member = 0
    column = begin - first_0
    has_adapters = (column >= 0) & (column < size_0)
    if MEMBERS > 1:
        other = (begin >= first_1) & (begin < first_1 + size_1)
        member = tl.where(other, 1, member)
        column = tl.where(other, begin - first_1, column)
        has_adapters = has_adapters | other
    if MEMBERS > 2:
        other = (begin >= first_2) & (begin < first_2 + size_2)
        member = tl.where(other, 2, member)
        column = tl.where(other, begin - first_2, column)
        has_adapters = has_adapters | other
    places, scales = places_of(places, scales, entry, PARTS * MEMBERS)
    entry = tl.where(has_adapters, entry, -1)

    # All that is read is asked for at once; the heads of v have no use for some of it.
    at = row.to(tl.int64)
    lane = tl.arange(0, HALF_PAD)
    live = lane < HALF
    mask = inside[:, None] & live[None, :]
    position = tl.load(positions + row, mask=inside, other=0)[:, None]
    slot = tl.load(slot_mapping + row, mask=inside, other=-1)  # int64: a cache may hold more than 2**31 elements
    offset = at[:, None] * qkv_stride + begin + lane[None, :]
    first = tl.load(qkv + offset, mask=mask, other=0.0)
    second = tl.load(qkv + HALF + offset, mask=mask, other=0.0)
    cos_at = cos + position * cos_stride + lane[None, :]
    sin_at = sin + position * sin_stride + lane[None, :]
    cos1 = tl.load(cos_at, mask=mask, other=0.0)
    cos2 = tl.load(cos_at + HALF, mask=mask, other=0.0)
    sin1 = tl.load(sin_at, mask=mask, other=0.0)
    sin2 = tl.load(sin_at + HALF, mask=mask, other=0.0)
    w1, w2 = cos1, cos2
    if HAS_NORMS:
        q1, q2 = halves(q_weight, lane, live, HALF)
        k1, k2 = halves(k_weight, lane, live, HALF)
        w1, w2 = tl.where(head < HEADS, q1, k1), tl.where(head < HEADS, q2, k2)

    shrunk_rows = shrunk + at * (PARTS * MEMBERS * RANK)
    split_stride = num_rows.to(tl.int64) * (PARTS * MEMBERS * RANK)
    n1 = column + lane
    n2 = n1 + HALF
    acc = tl.zeros([BLOCK_M, HALF_PAD], tl.float32)
    acc1 = add_delta(acc, shrunk_rows, split_stride, places, entry, inside, member, n1, live, PARTS, MEMBERS, RANK,
                     BLOCK_R, RANK_DIVISOR, KIND, COMPUTE, LOW, PRECISION, ALIGNED, SPLITS)
    acc2 = add_delta(acc, shrunk_rows, split_stride, places, entry, inside, member, n2, live, PARTS, MEMBERS, RANK,
                     BLOCK_R, RANK_DIVISOR, KIND, COMPUTE, LOW, PRECISION, ALIGNED, SPLITS)
    if HAS_BIAS:
        acc1 = add_bias(acc1, places, scales, entry, member, n1, live, PARTS, MEMBERS, KIND, COMPUTE)
        acc2 = add_bias(acc2, places, scales, entry, member, n2, live, PARTS, MEMBERS, KIND, COMPUTE)
    first = (first.to(tl.float32) + acc1).to(qkv.dtype.element_ty)
    second = (second.to(tl.float32) + acc2).to(qkv.dtype.element_ty)

    if head < HEADS + KV_HEADS:
        first, second = normed_and_rotated(first, second, w1, w2, cos1, cos2, sin1, sin2, eps, HAS_NORMS, HEAD_DIM)
    if head < HEADS:
        to = at[:, None] * (HEADS * HEAD_DIM) + begin + lane[None, :]
        tl.store(query + to, first, mask=mask)
        tl.store(query + HALF + to, second, mask=mask)
    else:
        mask = (slot >= 0)[:, None] & live[None, :]
        kv_head = (head - HEADS) % KV_HEADS
        to = slot[:, None] * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + lane[None, :]
        if head < HEADS + KV_HEADS:
            tl.store(k_cache + to, first, mask=mask)
            tl.store(k_cache + HALF + to, second, mask=mask)
        else:
            tl.store(v_cache + to, first, mask=mask)
            tl.store(v_cache + HALF + to, second, mask=mask)


def lora_qk_norm_rope_store_triton(qkv: torch.Tensor, delta: Delta, heads: HeadsToCache) -> torch.Tensor:
    """:func:`lora_qk_norm_rope_store_unchecked` as one Triton launch, a program for a head of some rows."""
    require_triton()
    q_weight, k_weight, eps, cos, sin, positions, slot_mapping, k_cache, v_cache = heads
    num_rows, table = len(qkv), delta.table
    kv_heads, head_dim = k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    query = torch.empty(num_rows, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return query
    firsts, sizes = zip(*(*table.columns, (0, 0), (0, 0)), strict=True)
    row_tiles, row_arguments = tiles_of_rows(num_rows, tile_of(num_rows), delta.order)
    with on_device_of(qkv):
        _lora_qk_norm_rope_store_kernel[(row_tiles, num_heads + 2 * kv_heads)](
            qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, query, eps, delta.sums,
            table.places, table.scales, row_arguments.pop("rows"), row_arguments.pop("tile_entries"), num_rows,
            *firsts[:3], *sizes[:3], qkv.stride(0), cos.stride(0), sin.stride(0),
            HEADS=num_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HALF_PAD=max(16, next_power_of_2(head_dim // 2)),
            HAS_NORMS=q_weight is not None,
            BLOCK_R=table.rank_tile,
            RANK_DIVISOR=table.rank_divisor,
            SPLITS=len(delta.sums),
            HAS_BIAS=table.has_bias,
            num_warps=4,
            enable_fp_fusion=False,
            **row_arguments,
            **table_options(table, qkv, precision_of(qkv.dtype)),
        )
    return query
