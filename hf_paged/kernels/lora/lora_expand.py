# mypy: disallow-untyped-defs=False
"""The result of `lora_shrink` times b.T, added to the layers' product; alone or with silu(gate) * up behind it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels._triton import (
    after_previous_kernel,
    cdiv,
    constants,
    jit,
    on_device_of,
    require_triton,
    tl,
    triton,
)
from hf_paged.kernels.layer.silu_mul import silu_mul, silu_mul_reference, silu_mul_tile
from hf_paged.kernels.lora._lora_tile import (
    add_bias,
    add_delta,
    columns_of,
    early_options,
    member_arguments,
    places_of,
    plus_delta,
    precision_of,
    prefetch_b,
    prefetches,
    rows_of_tile,
    shape_of,
    shrink_chunk,
    store_shrunk,
    tiles_of_rows,
)
from hf_paged.kernels.lora.lora_order import MANY_ROWS, RowOrder, tile_of
from hf_paged.kernels.lora.lora_table import LoraTable

_MOST_PARTIALS = 32
_MOST_FOLLOWED_ROWS = MANY_ROWS - 1


class Delta(NamedTuple):
    """The part of LoRA that is still to be added to a product: the further arguments of `lora_expand`."""

    sums: torch.Tensor
    table: LoraTable
    order: RowOrder | None


class ExpandConfig(NamedTuple):
    """Rows and columns of the product in a tile, float32 products, launch option."""

    block_m: int
    block_n: int
    precision: str
    num_warps: int


def lora_expand(product: torch.Tensor, shrunk: torch.Tensor, table: LoraTable,
                order: RowOrder | None) -> torch.Tensor:
    """``product + shrunk @ b.T + bias * scaling``, in place, added up in float32 and rounded once.

    With the table's `rounds_delta` what is added to the product is rounded to its dtype first.

    Args:
        product: ``[T, N]``, rows contiguous; the table's `columns` say where each member's are.
        shrunk: of `lora_shrink` with the same table and entries; rounded to the table's `compute_dtype`.
        table: whose b are ``[n, r]``.
        order: as given there.

    Returns:
        ``product``.
    """
    if not product.is_cuda:
        return lora_expand_reference(product, shrunk, table, order)
    return lora_expand_triton(product, shrunk, table, order, expand_config(product, table))


def lora_expand_reference(product: torch.Tensor, shrunk: torch.Tensor, table: LoraTable,
                          order: RowOrder | None) -> torch.Tensor:
    """:func:`lora_expand` in plain torch."""
    total, sums = torch.zeros_like(product, dtype=torch.float32), shrunk.sum(0).to(table.compute_dtype).float()
    for e, entry in enumerate(table.entries[: 1 if order is None else None]):
        rows = (torch.arange(len(product), device=product.device) if order is None
                else (order.entries == e).nonzero()[:, 0])
        for p, part in enumerate(entry):
            for j, adapter in enumerate(part):
                if adapter is None:
                    continue
                first, size = table.columns[j]
                delta = sums[rows, p, j, : len(adapter.a)] @ adapter.b.to(table.compute_dtype).float().t()
                if adapter.bias is not None:
                    delta += adapter.bias.to(table.compute_dtype).float() * adapter.scaling
                total[rows, first : first + size] += delta
    return product.copy_(product.float() + (total.to(product.dtype) if table.rounds_delta else total))


def lora_expand_silu_mul(
    product: torch.Tensor, shrunk: torch.Tensor, table: LoraTable, order: RowOrder | None,
    following: LoraTable | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``silu_mul(lora_expand(product, ...))`` of gates and ups ``[T, 2 * I]``, the members: ``[T, I]``.

    Beside it `lora_shrink` of that for the `following` table, or None where it has to be taken by itself.

    `product` may be written.
    """
    if not product.is_cuda:
        return silu_mul_reference(lora_expand_reference(product, shrunk, table, order)), None
    if table.num_members != 2:  # the kernel's programs take a gate and an up, each with a place in the table
        return silu_mul(lora_expand(product, shrunk, table, order)), None
    config = expand_config(product, table)
    if following is not None and not _can_follow(product, table, following, config):
        following = None
    return lora_expand_silu_mul_triton(product, shrunk, table, order, config, following)


def _can_follow(product: torch.Tensor, table: LoraTable, following: LoraTable, config: ExpandConfig) -> bool:
    """Return whether rows, partial sums (one a tile of columns) and ranks are few, and the adapters of one dtype."""
    few = len(product) <= _MOST_FOLLOWED_ROWS and following.num_slots * following.rank <= 64
    alike = (table.dtype, table.compute_dtype) == (following.dtype, following.compute_dtype)
    return few and alike and product.shape[1] // 2 <= _MOST_PARTIALS * config.block_n


@jit(varying_ints=("num_rows",))
def _expand_kernel(
    product, shrunk, places, scales, rows, tile_entries, out, next_places, next_scales, next_out, num_rows, first_0,
    first_1, first_2, size_0, size_1, size_2, product_stride, out_stride, HAS_ROWS: tl.constexpr, SPLITS: tl.constexpr,
    SILU: tl.constexpr, HAS_NEXT: tl.constexpr, NEXT_COLUMNS: tl.constexpr, NEXT_TILES: tl.constexpr,
    X_IS_EXACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
    PREFETCH: tl.constexpr, PDL: tl.constexpr, L: tl.constexpr, N: tl.constexpr,
):
    """out [num_rows, columns] may be product. SILU: the members are gates and ups, a program takes as many of both.

    HAS_NEXT: next_out [tiles, num_rows, N.parts, N.members, N.rank] are partial sums for the layers that read out.
    """
    after_previous_kernel(PDL)
    row, inside, entry = rows_of_tile(rows, tile_entries, num_rows, HAS_ROWS, BLOCK_M)
    places, scales = places_of(places, scales, entry, L)
    if HAS_NEXT:
        next_places, next_scales = places_of(next_places, next_scales, entry, N)
    tile = tl.program_id(1)
    member = 0
    begin = first_0
    size = size_0
    if not SILU and L.members > 1:
        tiles = tl.cdiv(size_0, BLOCK_N)
        beyond = tile >= tiles
        member = tl.where(beyond, 1, 0)
        tile = tl.where(beyond, tile - tiles, tile)
        begin = tl.where(beyond, first_1, first_0)
        size = tl.where(beyond, size_1, size_0)
    if not SILU and L.members > 2:
        tiles = tl.cdiv(size_1, BLOCK_N)
        beyond = (member == 1) & (tile >= tiles)
        member = tl.where(beyond, 2, member)
        tile = tl.where(beyond, tile - tiles, tile)
        begin = tl.where(beyond, first_2, begin)
        size = tl.where(beyond, size_2, size)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n_inside = n < size
    if PREFETCH and ((tl.program_id(0) == 0) | HAS_ROWS):  # what is read behind the following layers' product
        prefetch_b(next_places, tile, NEXT_TILES, N)

    dtype = out.dtype.element_ty
    mask = inside[:, None] & n_inside[None, :]
    product_at = product + row.to(tl.int64)[:, None] * product_stride + n[None, :]
    base = tl.load(product_at + begin, mask=mask, other=0.0).to(tl.float32)
    base_up = base
    if SILU:
        base_up = tl.load(product_at + first_1, mask=mask, other=0.0).to(tl.float32)
    shrunk_rows = shrunk + row.to(tl.int64) * (L.parts * L.members * L.rank)
    split_stride = num_rows.to(tl.int64) * (L.parts * L.members * L.rank)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    acc = add_delta(acc, shrunk_rows, split_stride, places, entry, inside, member, n, n_inside, SPLITS, L)
    if L.has_bias:
        acc = add_bias(acc, places, scales, entry, member, n, n_inside, L)
    if SILU:
        acc_up = add_delta(acc_up, shrunk_rows, split_stride, places, entry, inside, 1, n, n_inside, SPLITS, L)
        if L.has_bias:
            acc_up = add_bias(acc_up, places, scales, entry, 1, n, n_inside, L)
    result = plus_delta(base, acc, dtype, L)
    if SILU:
        up = plus_delta(base_up, acc_up, dtype, L).to(tl.float32)
        result = silu_mul_tile(result.to(tl.float32), up, dtype, INTERPRETED)
        begin = 0
    if HAS_NEXT:
        partial = tl.program_id(1).to(tl.int64) * num_rows + row
        next_rows = next_out + partial * (N.parts * N.members * N.rank)
        for first in tl.static_range(0, N.parts * N.members * N.rank, NEXT_COLUMNS):
            sums = tl.zeros([BLOCK_M, NEXT_COLUMNS], tl.float32)
            sums = shrink_chunk(sums, first, result, n, n_inside, next_places, entry, size, NEXT_COLUMNS, X_IS_EXACT, N)
            store_shrunk(next_rows, first, sums, inside, next_places, next_scales, entry, NEXT_COLUMNS, N)
    tl.store(out + row.to(tl.int64)[:, None] * out_stride + (begin + n)[None, :], result, mask=mask)


def expand_config(product: torch.Tensor, table: LoraTable) -> ExpandConfig:
    """What is fastest on an H200 (lora_speed.py), with more warps where four would spill (`compile_lora.py`)."""
    precision = precision_of(product.dtype)
    low = table.compute_dtype != torch.float32
    largest_of_four_warps = 64 if low else 32 if precision == "bf16x3" else 0  # rank, with a tile of many rows
    num_warps = 8 if len(product) >= MANY_ROWS and table.rank > largest_of_four_warps else 4
    return ExpandConfig(tile_of(len(product)), 128, precision, num_warps)


def lora_expand_triton(product: torch.Tensor, shrunk: torch.Tensor, table: LoraTable,
                       order: RowOrder | None, config: ExpandConfig) -> torch.Tensor:
    """:func:`lora_expand` as one Triton launch."""
    tiles = sum(cdiv(size, config.block_n) for _, size in table.columns)
    _launch(product, shrunk, table, order, product, tiles, config)
    return product


def lora_expand_silu_mul_triton(
    product: torch.Tensor, shrunk: torch.Tensor, table: LoraTable, order: RowOrder | None,
    config: ExpandConfig, following: LoraTable | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """:func:`lora_expand_silu_mul` as one Triton launch.

    Raises:
        ValueError: the table's members are not the gates and the ups.
    """
    require_triton()
    if table.num_members != 2:
        raise ValueError(f"table of {table.num_members} members: expected gates and ups, 2")
    rows, inner = len(product), product.shape[1] // 2
    tiles = cdiv(inner, config.block_n)
    out = torch.empty(rows, inner, dtype=product.dtype, device=product.device)
    sums = None
    if following is not None:
        sums = torch.empty(tiles, rows, following.num_parts, following.num_members, following.rank,
                           dtype=torch.float32, device=product.device)
    _launch(product, shrunk, table, order, out, tiles, config, silu=True, following=following, sums=sums)
    return out, sums


def _launch(product: torch.Tensor, shrunk: torch.Tensor, table: LoraTable, order: RowOrder | None,
            out: torch.Tensor, tiles: int, config: ExpandConfig, *, silu: bool = False,
            following: LoraTable | None = None, sums: torch.Tensor | None = None) -> None:
    require_triton()
    if not product.numel():
        return
    then = following or table
    row_tiles, row_arguments = tiles_of_rows(len(product), config.block_m, order)
    with on_device_of(product):
        _expand_kernel[(row_tiles, tiles)](
            product, shrunk, table.places, table.scales, row_arguments.pop("rows"), row_arguments.pop("tile_entries"),
            out, then.places, then.scales, sums, len(product), *member_arguments(table), product.stride(0),
            out.stride(0), L=constants(shape_of(table, config.precision)),
            N=constants(shape_of(then, config.precision)), SPLITS=len(shrunk),
            SILU=silu, HAS_NEXT=following is not None, NEXT_COLUMNS=columns_of(then), NEXT_TILES=tiles,
            X_IS_EXACT=out.dtype == torch.bfloat16, BLOCK_N=config.block_n, INTERPRETED=triton.knobs.runtime.interpret,
            PREFETCH=following is not None and prefetches(then, product), num_warps=config.num_warps, **row_arguments,
            **early_options(product),
        )
