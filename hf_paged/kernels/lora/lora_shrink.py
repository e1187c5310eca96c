# mypy: disallow-untyped-defs=False
"""x @ a.T * scaling of all LoRA adapters of the layers that read x, each row by its own adapters, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.device.cuda import shared_memory
from hf_paged.kernels._triton import (
    after_previous_kernel,
    cdiv,
    constants,
    jit,
    next_power_of_2,
    on_device_of,
    require_triton,
    tl,
)
from hf_paged.kernels.lora._lora_tile import (
    FIELDS,
    early_options,
    lora_dot,
    pointer_to,
    precision_of,
    prefetch_b,
    prefetches,
    rows_of_tile,
    shape_of,
    tiles_of_rows,
)
from hf_paged.kernels.lora.lora_order import MANY_ROWS, RowOrder
from hf_paged.kernels.lora.lora_table import LoraTable

_HOPPER_SHARED_MEMORY = 200 << 10  # bytes a block may have there, at the least


class ShrinkConfig(NamedTuple):
    """Rows, rank columns and columns of x in a tile, programs that share a row's columns, float32 products, launch.

    Where rows have entries of their own, their order says how many are in a tile.
    """

    block_m: int
    block_r: int
    block_k: int
    split_k: int
    precision: str
    num_warps: int
    num_stages: int


def lora_shrink(x: torch.Tensor, table: LoraTable, order: RowOrder | None) -> torch.Tensor:
    """``x @ a.T * scaling``, added up in float32, in a fixed order.

    Args:
        x: ``[T, K]``, rows contiguous; converted to the table's `compute_dtype`, as the adapters are.
        table: whose a are ``[r, K]``.
        order: which entry each row has; None: the first for all.

    Returns:
        ``[splits, T, P, J, rank]`` float32, partial sums for `lora_expand`. Undefined for rows without an entry and
        beyond the adapter's rank.
    """
    if not x.is_cuda:
        return lora_shrink_reference(x, table, order)
    return lora_shrink_triton(x, table, order, shrink_config(x, table, order))


def lora_shrink_reference(x: torch.Tensor, table: LoraTable, order: RowOrder | None) -> torch.Tensor:
    """:func:`lora_shrink` in plain torch, zero where that is undefined."""
    out = x.new_zeros((1, len(x), table.num_parts, table.num_members, table.rank), dtype=torch.float32)
    x = x.to(table.compute_dtype).float()
    for e, entry in enumerate(table.entries[: 1 if order is None else None]):
        rows = slice(None) if order is None else (order.entries == e).nonzero()[:, 0]
        for p, part in enumerate(entry):
            for j, adapter in enumerate(part):
                if adapter is not None:
                    a = adapter.a.to(table.compute_dtype).float()
                    out[0, rows, p, j, : len(a)] = x[rows] @ a.t() * adapter.scaling
    return out


@jit(varying_ints=("num_rows",))
def _shrink_kernel(
    x, places, scales, rows, tile_entries, out, num_rows, K, k_per_split, x_stride, HAS_ROWS: tl.constexpr,
    X_IS_EXACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, SPLITS: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr, L: tl.constexpr,
):
    """out [splits, num_rows, slots, rank]; a program has BLOCK_R of an entry's ranks, rows and a part of K."""
    SLOTS: tl.constexpr = L.parts * L.members
    if HAS_ROWS:
        after_previous_kernel(PDL)
    row, inside, entry = rows_of_tile(rows, tile_entries, num_rows, HAS_ROWS, BLOCK_M)
    places += tl.maximum(entry, 0) * (SLOTS * FIELDS)
    scales += tl.maximum(entry, 0) * SLOTS
    begin = tl.program_id(1) * BLOCK_R
    split = tl.program_id(2)
    k_begin = split * k_per_split
    k_end = tl.minimum(k_begin + k_per_split, K)
    column = begin + tl.arange(0, BLOCK_R)
    slot = column // L.rank
    index = column % L.rank  # within the adapter
    known = slot < SLOTS
    rank = tl.load(places + slot * FIELDS + 3, mask=known, other=0)
    column_inside = index < rank
    a = pointer_to(tl.load(places + slot * FIELDS, mask=known, other=0), L.kind, L.aligned)
    if PREFETCH and (((tl.program_id(0) == 0) | HAS_ROWS) & (tl.program_id(1) == 0)):  # what the expansion will read
        prefetch_b(places, split, SPLITS, L)
    if not HAS_ROWS:
        after_previous_kernel(PDL)

    if entry >= 0:
        scale = tl.load(scales + slot, mask=known, other=0.0)
        k = tl.arange(0, BLOCK_K)
        x_at = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
        a_at = a[:, None] + index[:, None] * K + k[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
        for start in range(k_begin, k_end, BLOCK_K):
            k_inside = (start + k < k_end) | EVEN_K
            x_tile = tl.load(x_at + start, mask=inside[:, None] & k_inside[None, :], other=0.0)
            a_tile = tl.load(a_at + start, mask=column_inside[:, None] & k_inside[None, :], other=0.0)
            if L.low or not X_IS_EXACT:
                x_tile = x_tile.to(L.compute)
            acc = lora_dot(x_tile, tl.trans(a_tile.to(L.compute)), acc, X_IS_EXACT, L)
        at = (split * num_rows + row).to(tl.int64)[:, None] * (SLOTS * L.rank) + column[None, :]
        tl.store(out + at, acc * scale[None, :], mask=inside[:, None] & column_inside[None, :])


def shrink_config(x: torch.Tensor, table: LoraTable, order: RowOrder | None) -> ShrinkConfig:
    """What is fastest on an H200 (lora_speed.py)."""
    rows, width = x.shape
    precision = precision_of(x.dtype)
    columns = table.num_slots * table.rank
    if rows >= MANY_ROWS:  # each x is read once for most tables
        # Where products of three parts come out of registers, as before Hopper, tiles as wide as there spill.
        in_parts = precision == "tf32x3" and table.compute_dtype == torch.float32
        block_k = 32 if in_parts and shared_memory(x.device) < _HOPPER_SHARED_MEMORY else 64
        return ShrinkConfig(64, min(64, next_power_of_2(columns)), block_k, 1, precision, 4, 3)
    block_m = (16 if rows <= 16 else 32 if rows <= 32 else 64) if order is None else order.tile
    block_r = table.rank_tile
    split_k = max(1, min(16, width // 128))  # whatever the rows: kernels that add them up are compiled for a number
    block_k = 128 if block_r <= 32 and width >= 128 * split_k else 64
    return ShrinkConfig(block_m, block_r, block_k, split_k, precision, 4, 3)


def lora_shrink_triton(x: torch.Tensor, table: LoraTable, order: RowOrder | None, config: ShrinkConfig) -> torch.Tensor:
    """:func:`lora_shrink` as one Triton launch."""
    require_triton()
    num_rows, width = x.shape
    per_split = cdiv(cdiv(width, config.split_k), config.block_k) * config.block_k
    splits = cdiv(width, per_split)
    out = torch.empty(splits, num_rows, table.num_parts, table.num_members, table.rank, dtype=torch.float32,
                      device=x.device)
    if not num_rows:
        return out
    columns = cdiv(table.num_slots * table.rank, config.block_r)
    # This kernel does not read these two: tables that differ in them need no kernels of their own.
    shape = shape_of(table, config.precision)._replace(rank_divisor=1, has_bias=False)
    row_tiles, row_arguments = tiles_of_rows(num_rows, config.block_m, order)
    with on_device_of(x):
        _shrink_kernel[(row_tiles, columns, splits)](
            x, table.places, table.scales, out=out, num_rows=num_rows, K=width, k_per_split=per_split,
            x_stride=x.stride(0), L=constants(shape), X_IS_EXACT=x.dtype == torch.bfloat16, BLOCK_R=config.block_r,
            BLOCK_K=config.block_k, EVEN_K=width % config.block_k == 0, SPLITS=splits, PREFETCH=prefetches(table, x),
            num_warps=config.num_warps, num_stages=config.num_stages, **row_arguments, **early_options(x),
        )
    return out
