# mypy: disallow-untyped-defs=False
"""`qk_norm_rope_store` of a packed qkv projection to which LoRA's part is still to be added."""

from __future__ import annotations

import torch

from hf_paged.kernels._triton import (
    after_previous_kernel,
    constants,
    jit,
    next_power_of_2,
    prefetch_vector,
    tl,
)
from hf_paged.kernels.layer.qk_norm_rope_store import (
    HeadsToCache,
    halves,
    launch_over_heads,
    normed_and_rotated,
    qk_norm_rope_store,
    store_heads,
)
from hf_paged.kernels.lora._lora_tile import (
    add_bias,
    add_delta,
    early_options,
    member_arguments,
    places_of,
    plus_delta,
    precision_of,
    rows_of_tile,
    shape_of,
    tiles_of_rows,
)
from hf_paged.kernels.lora.lora_expand import Delta, lora_expand
from hf_paged.kernels.lora.lora_order import MANY_ROWS, tile_of

_MOST_ROWS = MANY_ROWS


def lora_qk_norm_rope_store(qkv: torch.Tensor, delta: Delta, heads: HeadsToCache) -> torch.Tensor:
    """Compute `qk_norm_rope_store` of ``lora_expand(qkv, *delta)``; `qkv` may be written.

    Exact as the two one after the other, but for the order in which a head's squares are added.
    """
    if qkv.is_cuda and heads.positions is not None and _is_one_launch(qkv, delta, heads.k_cache):
        return lora_qk_norm_rope_store_triton(qkv, delta, heads)
    return qk_norm_rope_store(lora_expand(qkv, *delta), heads)


def _is_one_launch(qkv: torch.Tensor, delta: Delta, k_cache: torch.Tensor) -> bool:
    """Return whether the rows are few, and all adapters on whole heads."""
    numbers = [number for columns in delta.table.columns for number in columns]
    return len(qkv) < _MOST_ROWS and not any(number % k_cache.shape[3] for number in numbers)


@jit(varying_ints=("num_rows",), varying_pointers=("positions", "slot_mapping"))
def _lora_qk_norm_rope_store_kernel(
    qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, query, eps, shrunk, places, scales,
    rows, tile_entries, num_rows, first_0, first_1, first_2, size_0, size_1, size_2, qkv_stride, cos_stride,
    sin_stride, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr,
    HAS_NORMS: tl.constexpr, HAS_ROWS: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, PDL: tl.constexpr,
    L: tl.constexpr,
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
    if L.members > 1:
        other = (begin >= first_1) & (begin < first_1 + size_1)
        member = tl.where(other, 1, member)
        column = tl.where(other, begin - first_1, column)
        has_adapters = has_adapters | other
    if L.members > 2:
        other = (begin >= first_2) & (begin < first_2 + size_2)
        member = tl.where(other, 2, member)
        column = tl.where(other, begin - first_2, column)
        has_adapters = has_adapters | other
    places, scales = places_of(places, scales, entry, L)
    entry = tl.where(has_adapters, entry, -1)

    # All loads are issued at once; the heads of v have no use for some of the values.
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

    shrunk_rows = shrunk + at * (L.parts * L.members * L.rank)
    split_stride = num_rows.to(tl.int64) * (L.parts * L.members * L.rank)
    n1 = column + lane
    n2 = n1 + HALF
    acc = tl.zeros([BLOCK_M, HALF_PAD], tl.float32)
    acc1 = add_delta(acc, shrunk_rows, split_stride, places, entry, inside, member, n1, live, SPLITS, L)
    acc2 = add_delta(acc, shrunk_rows, split_stride, places, entry, inside, member, n2, live, SPLITS, L)
    if L.has_bias:
        acc1 = add_bias(acc1, places, scales, entry, member, n1, live, L)
        acc2 = add_bias(acc2, places, scales, entry, member, n2, live, L)
    first = plus_delta(first.to(tl.float32), acc1, qkv.dtype.element_ty, L)
    second = plus_delta(second.to(tl.float32), acc2, qkv.dtype.element_ty, L)

    if head < HEADS + KV_HEADS:
        first, second = normed_and_rotated(first, second, w1, w2, cos1, cos2, sin1, sin2, eps, HAS_NORMS, HEAD_DIM)
    if head < HEADS:
        to = at[:, None] * (HEADS * HEAD_DIM) + begin + lane[None, :]
        store_heads(query, to, first, second, mask, HALF)
    else:
        mask = (slot >= 0)[:, None] & live[None, :]
        kv_head = (head - HEADS) % KV_HEADS
        to = slot[:, None] * (KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + lane[None, :]
        if head < HEADS + KV_HEADS:
            store_heads(k_cache, to, first, second, mask, HALF)
        else:
            store_heads(v_cache, to, first, second, mask, HALF)


def lora_qk_norm_rope_store_triton(qkv: torch.Tensor, delta: Delta, heads: HeadsToCache) -> torch.Tensor:
    """:func:`lora_qk_norm_rope_store` as one Triton launch, a program for a head of some rows."""
    num_rows, table, head_dim = len(qkv), delta.table, heads.k_cache.shape[3]
    row_tiles, row_arguments = tiles_of_rows(num_rows, tile_of(num_rows), delta.order)
    shape = shape_of(table, precision_of(qkv.dtype))
    return launch_over_heads(
        _lora_qk_norm_rope_store_kernel, (row_tiles, qkv.shape[1] // head_dim), qkv, heads, delta.sums, table.places,
        table.scales, row_arguments.pop("rows"), row_arguments.pop("tile_entries"), num_rows, *member_arguments(table),
        HALF_PAD=max(16, next_power_of_2(head_dim // 2)), SPLITS=len(delta.sums), L=constants(shape),
        num_warps=4, **row_arguments, **early_options(qkv),
    )
