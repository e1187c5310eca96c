# mypy: disallow-untyped-defs=False
"""What `lora_shrink` made, times b.T, added to the layers' product; alone or with the silu(gate) * up behind it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels._lora_tile import FIELDS, entry_of_rows, lora_dot, pointer_to, table_options
from hf_paged.kernels._triton import (
    after_previous_kernel,
    jit,
    on_device_of,
    prefetch_rows,
    require_triton,
    tl,
    triton,
)
from hf_paged.kernels.lora_shrink import check_row_entries
from hf_paged.kernels.lora_table import LoraTable
from hf_paged.kernels.silu_mul import silu_mul_reference, silu_mul_tile


class ExpandConfig(NamedTuple):
    """Rows and columns of the product in a tile, float32 products, launch option."""

    block_m: int
    block_n: int
    precision: str
    num_warps: int


def lora_expand(product: torch.Tensor, shrunk: torch.Tensor, table: LoraTable,
                row_entries: torch.Tensor | None) -> torch.Tensor:
    """``product + shrunk @ b.T + bias * scaling``, in place, added up in float32 and rounded once.

    Args:
        product: ``[T, N]``, rows contiguous; the table's `columns` say where each member's are.
        shrunk: of `lora_shrink` with the same table and entries; rounded to the table's `compute_dtype`.
        table: whose b are ``[n, r]``.
        row_entries: as given there.

    Returns:
        ``product``.

    Raises:
        ValueError: shapes or dtypes that are not as above.
    """
    _check(product, shrunk, table, row_entries)
    return lora_expand_unchecked(product, shrunk, table, row_entries)


def lora_expand_unchecked(product: torch.Tensor, shrunk: torch.Tensor, table: LoraTable,
                          row_entries: torch.Tensor | None) -> torch.Tensor:
    """:func:`lora_expand` for tensors that are known to be as it says."""
    if not product.is_cuda:
        return lora_expand_reference(product, shrunk, table, row_entries)
    return lora_expand_triton(product, shrunk, table, row_entries, expand_config(len(product), table))


def lora_expand_reference(product: torch.Tensor, shrunk: torch.Tensor, table: LoraTable,
                          row_entries: torch.Tensor | None) -> torch.Tensor:
    """:func:`lora_expand` in plain torch."""
    total, sums = product.float(), shrunk.sum(0).to(table.compute_dtype).float()
    for e, entry in enumerate(table.entries[: 1 if row_entries is None else None]):
        rows = (torch.arange(len(product), device=product.device) if row_entries is None
                else (row_entries == e).nonzero()[:, 0])
        for p, part in enumerate(entry):
            for j, adapter in enumerate(part):
                if adapter is None:
                    continue
                first, size = table.columns[j]
                delta = sums[rows, p, j, : len(adapter.a)] @ adapter.b.to(table.compute_dtype).float().t()
                if adapter.bias is not None:
                    delta += adapter.bias.to(table.compute_dtype).float() * adapter.scaling
                total[rows, first : first + size] += delta
    return product.copy_(total)


def lora_expand_silu_mul_unchecked(product: torch.Tensor, shrunk: torch.Tensor, table: LoraTable,
                                   row_entries: torch.Tensor | None) -> torch.Tensor:
    """``silu_mul(lora_expand(product, ...))`` of gates and ups ``[T, 2 * I]``, the members: ``[T, I]``.

    Unchecked; `product` may be written.
    """
    if not product.is_cuda:
        return silu_mul_reference(lora_expand_reference(product, shrunk, table, row_entries))
    return lora_expand_silu_mul_triton(product, shrunk, table, row_entries, expand_config(len(product), table))


@jit()
def _entry_delta(acc, shrunk_rows, split_stride, places, scales, entry, mine, member, n, n_inside,
                 PARTS: tl.constexpr, MEMBERS: tl.constexpr, RANK: tl.constexpr, RANK_TILE: tl.constexpr,
                 RANK_DIVISOR: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr, LOW: tl.constexpr,
                 PRECISION: tl.constexpr, ALIGNED: tl.constexpr, HAS_BIAS: tl.constexpr, SPLITS: tl.constexpr):
    """acc [rows, columns] and what the entry's adapters of a member add to the rows that are `mine`."""
    for part in tl.static_range(PARTS):
        slot = (entry * PARTS + part) * MEMBERS + member
        rank = tl.multiple_of(tl.load(places + slot * FIELDS + 3).to(tl.int32), RANK_DIVISOR)
        b = pointer_to(tl.load(places + slot * FIELDS + 1), KIND, ALIGNED)
        for tile in tl.static_range(RANK // RANK_TILE):
            column = tile * RANK_TILE + tl.arange(0, RANK_TILE)
            inside = column < rank
            b_tile = tl.load(b + n[:, None] * rank + column[None, :], mask=n_inside[:, None] & inside[None, :],
                             other=0.0)
            at = shrunk_rows[:, None] + (part * MEMBERS + member) * RANK + column[None, :]
            total = tl.zeros([shrunk_rows.shape[0], RANK_TILE], tl.float32)
            for split in tl.static_range(SPLITS):
                total += tl.load(at + split * split_stride, mask=mine[:, None] & inside[None, :], other=0.0)
            acc = lora_dot(total.to(COMPUTE), tl.trans(b_tile.to(COMPUTE)), acc, LOW, PRECISION, False)
        if HAS_BIAS:
            address = tl.load(places + slot * FIELDS + 2)
            if address != 0:
                bias = tl.load(pointer_to(address, KIND, False) + n, mask=n_inside, other=0.0)
                added = bias.to(COMPUTE).to(tl.float32) * tl.load(scales + slot)
                acc += tl.where(mine[:, None], added[None, :], 0.0)
    return acc


@jit(varying_ints=("num_rows",))
def _expand_kernel(
    product,
    shrunk,
    places,
    scales,
    row_entries,
    out,
    num_rows,
    first_0,
    first_1,
    first_2,
    size_0,
    size_1,
    size_2,
    product_stride,
    out_stride,
    HAS_ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    MEMBERS: tl.constexpr,
    RANK: tl.constexpr,
    RANK_TILE: tl.constexpr,
    RANK_DIVISOR: tl.constexpr,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [num_rows, N] may be product. SILU: the members are gates and ups, a program takes as many of both."""
    tile = tl.program_id(1)
    member = 0
    begin = first_0
    size = size_0
    if not SILU and MEMBERS > 1:
        tiles = tl.cdiv(size_0, BLOCK_N)
        beyond = tile >= tiles
        member = tl.where(beyond, 1, 0)
        tile = tl.where(beyond, tile - tiles, tile)
        begin = tl.where(beyond, first_1, first_0)
        size = tl.where(beyond, size_1, size_0)
    if not SILU and MEMBERS > 2:
        tiles = tl.cdiv(size_1, BLOCK_N)
        beyond = (member == 1) & (tile >= tiles)
        member = tl.where(beyond, 2, member)
        tile = tl.where(beyond, tile - tiles, tile)
        begin = tl.where(beyond, first_2, begin)
        size = tl.where(beyond, size_2, size)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = n < size
    if PREFETCH:
        bytes_each: tl.constexpr = KIND.primitive_bitwidth // 8
        rank = tl.load(places + member * FIELDS + 3).to(tl.int32)
        b = pointer_to(tl.load(places + member * FIELDS + 1), KIND, ALIGNED)
        count = tl.where(rank > 0, tl.minimum(size - tile * BLOCK_N, BLOCK_N), 0)
        prefetch_rows(b + tile * BLOCK_N * rank, count, rank * bytes_each, rank * bytes_each)
    after_previous_kernel(PDL)

    dtype = out.dtype.element_ty
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < num_rows
    entry_of_row = entry_of_rows(row_entries, row, inside, HAS_ROWS)
    mask = inside[:, None] & n_inside[None, :]
    product_at = product + row.to(tl.int64)[:, None] * product_stride + n[None, :]
    base = tl.load(product_at + begin, mask=mask, other=0.0).to(tl.float32)
    base_up = base
    if SILU:
        base_up = tl.load(product_at + first_1, mask=mask, other=0.0).to(tl.float32)
    shrunk_rows = shrunk + row.to(tl.int64) * (PARTS * MEMBERS * RANK)
    split_stride = num_rows.to(tl.int64) * (PARTS * MEMBERS * RANK)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    if HAS_ROWS:  # one after the other, of those that are there
        lowest = tl.min(tl.where(entry_of_row < 0, 1 << 30, entry_of_row), 0)
        for entry in range(lowest, tl.max(entry_of_row, 0) + 1):
            mine = entry_of_row == entry
            if tl.max(mine.to(tl.int32), 0) > 0:
                acc = _entry_delta(acc, shrunk_rows, split_stride, places, scales, entry, mine, member, n, n_inside,
                                   PARTS, MEMBERS, RANK, RANK_TILE, RANK_DIVISOR, KIND, COMPUTE, LOW, PRECISION,
                                   ALIGNED, HAS_BIAS, SPLITS)
                if SILU:
                    acc_up = _entry_delta(acc_up, shrunk_rows, split_stride, places, scales, entry, mine, 1, n,
                                          n_inside, PARTS, MEMBERS, RANK, RANK_TILE, RANK_DIVISOR, KIND, COMPUTE, LOW,
                                          PRECISION, ALIGNED, HAS_BIAS, SPLITS)
    else:
        acc = _entry_delta(acc, shrunk_rows, split_stride, places, scales, 0, inside, member, n, n_inside, PARTS,
                           MEMBERS, RANK, RANK_TILE, RANK_DIVISOR, KIND, COMPUTE, LOW, PRECISION, ALIGNED, HAS_BIAS,
                           SPLITS)
        if SILU:
            acc_up = _entry_delta(acc_up, shrunk_rows, split_stride, places, scales, 0, inside, 1, n, n_inside, PARTS,
                                  MEMBERS, RANK, RANK_TILE, RANK_DIVISOR, KIND, COMPUTE, LOW, PRECISION, ALIGNED,
                                  HAS_BIAS, SPLITS)
    result = (base + acc).to(dtype)
    if SILU:
        up = (base_up + acc_up).to(dtype).to(tl.float32)
        result = silu_mul_tile(result.to(tl.float32), up, dtype, INTERPRETED)
        begin = 0
    tl.store(out + row.to(tl.int64)[:, None] * out_stride + (begin + n)[None, :], result, mask=mask)


def expand_config(num_rows: int, table: LoraTable) -> ExpandConfig:
    """What is fastest on an H200."""
    block_m = 16 if num_rows <= 16 else 32 if num_rows <= 128 else 64
    return ExpandConfig(block_m, 128, "tf32x3", 4)


def lora_expand_triton(product: torch.Tensor, shrunk: torch.Tensor, table: LoraTable,
                       row_entries: torch.Tensor | None, config: ExpandConfig) -> torch.Tensor:
    """:func:`lora_expand` as one Triton launch."""
    tiles = sum(triton.cdiv(size, config.block_n) for _, size in table.columns)
    _launch(product, shrunk, table, row_entries, product, tiles, config, silu=False)
    return product


def lora_expand_silu_mul_triton(product: torch.Tensor, shrunk: torch.Tensor, table: LoraTable,
                                row_entries: torch.Tensor | None, config: ExpandConfig) -> torch.Tensor:
    """:func:`lora_expand_silu_mul_unchecked` as one Triton launch."""
    inner = product.shape[1] // 2
    out = torch.empty(len(product), inner, dtype=product.dtype, device=product.device)
    _launch(product, shrunk, table, row_entries, out, triton.cdiv(inner, config.block_n), config, silu=True)
    return out


def _launch(product: torch.Tensor, shrunk: torch.Tensor, table: LoraTable, row_entries: torch.Tensor | None,
            out: torch.Tensor, tiles: int, config: ExpandConfig, *, silu: bool) -> None:
    require_triton()
    if not product.numel():
        return
    firsts, sizes = zip(*(*table.columns, (0, 0), (0, 0)), strict=True)
    options = table_options(table, product, config.precision)
    fits = table.rank_divisor * table.dtype.itemsize % 16 == 0 and config.block_n <= 32 * config.num_warps
    with on_device_of(product):
        _expand_kernel[(triton.cdiv(len(product), config.block_m), tiles)](
            product, shrunk, table.places, table.scales, row_entries, out, len(product), *firsts[:3], *sizes[:3],
            product.stride(0), out.stride(0),
            HAS_ROWS=row_entries is not None,
            RANK_DIVISOR=table.rank_divisor,
            HAS_BIAS=table.has_bias,
            SPLITS=len(shrunk),
            SILU=silu,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            INTERPRETED=triton.knobs.runtime.interpret,
            PREFETCH=options["PDL"] and table.aligned and row_entries is None and fits,
            num_warps=config.num_warps,
            **options,
        )


def _check(product: torch.Tensor, shrunk: torch.Tensor, table: LoraTable, row_entries: torch.Tensor | None) -> None:
    last = max(first + size for first, size in table.columns)
    if product.dim() != 2 or product.stride(1) != 1 or product.shape[1] < last:
        raise ValueError(f"product must be [T, N] with contiguous rows, N at least {last}, got {tuple(product.shape)} "
                         f"with strides {product.stride()}")
    wanted = len(product), table.num_parts, table.num_members, table.rank
    if shrunk.dtype != torch.float32 or shrunk.shape[1:] != wanted or not shrunk.is_contiguous():
        raise ValueError(f"shrunk must be contiguous float32 [splits, {', '.join(map(str, wanted))}], "
                         f"got {shrunk.dtype} {tuple(shrunk.shape)}")
    check_row_entries(row_entries, len(product))
