# mypy: disallow-untyped-defs=False
"""`add_rms_norm` of a product to which LoRA's part is still to be added, with the shrinking for what reads the norm.

Two launches: the sum, with the squares of each tile's columns, then the norm and its products with every a. One launch
would have each program see all columns of its rows, which takes longer than a second launch.
"""

from __future__ import annotations

import torch

from hf_paged.kernels._lora_tile import (
    add_bias,
    add_delta,
    columns_of,
    places_of,
    precision_of,
    prefetch_following,
    prefetches,
    rows_of_tile,
    shrink_chunk,
    store_shrunk,
    table_options,
    tiles_of_rows,
)
from hf_paged.kernels._triton import (
    after_previous_kernel,
    jit,
    on_device_of,
    prefetch_vector,
    require_triton,
    tl,
    triton,
)
from hf_paged.kernels.add_rms_norm import add_rms_norm_unchecked
from hf_paged.kernels.lora_expand import Delta, lora_expand_unchecked
from hf_paged.kernels.lora_order import RowOrder
from hf_paged.kernels.lora_shrink import lora_shrink_unchecked
from hf_paged.kernels.lora_table import LoraTable

_BLOCK_N = 128  # columns of a tile
_PROGRAMS = 8  # that share the columns of a few rows' norm: partial sums are as many
_NORM_WARPS = 8
_MANY_ROWS = 1024  # prompts, of which a program takes more rows and all columns


def lora_add_rms_norm_unchecked(
    product: torch.Tensor, delta: Delta | None, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
    dtype: torch.dtype | None, following: LoraTable | None, order: RowOrder | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`add_rms_norm` of ``lora_expand(product, *delta)``, and `lora_shrink` of what is normed, which see.

    Args:
        product: may be written. ``delta``: None: nothing is to be added to it.
        following: the table for the shrinking; None: none.
        order: of the rows in both.

    Returns:
        normed, summed, and what was shrunk, None without `following`.

    Unchecked, and exact as the three one after the other, but for the order in which a row's squares are added.
    """
    if delta is not None and residual is not None and following is not None and product.is_cuda \
            and _fits(product, delta, residual, weight, dtype, following):
        return lora_add_rms_norm_triton(product, delta, residual, weight, eps, following)
    if delta is not None:
        lora_expand_unchecked(product, *delta)
    normed, summed = add_rms_norm_unchecked(product, residual, weight, eps, dtype)
    return normed, summed, None if following is None else lora_shrink_unchecked(normed, following, order)


def _fits(product: torch.Tensor, delta: Delta, residual: torch.Tensor, weight: torch.Tensor,
          dtype: torch.dtype | None, following: LoraTable) -> bool:
    """Is all of one dtype, and are the adapters all of one, on all columns of the product?"""
    one_dtype = {product.dtype, residual.dtype, weight.dtype, dtype or product.dtype} == {product.dtype}
    table = delta.table
    alike = (table.dtype, table.compute_dtype) == (following.dtype, following.compute_dtype)
    return one_dtype and alike and table.columns == ((0, product.shape[1]),)


@jit(varying_ints=("num_rows",))
def _sum_kernel(
    product,
    residual,
    summed,
    squares,
    shrunk,
    places,
    scales,
    rows,
    tile_entries,
    num_rows,
    product_stride,
    residual_stride,
    HAS_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
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
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program has a tile of summed [num_rows, WIDTH]; squares [tiles of columns, num_rows]."""
    after_previous_kernel(PDL)
    row, inside, entry = rows_of_tile(rows, tile_entries, num_rows, HAS_ROWS, BLOCK_M)
    places, scales = places_of(places, scales, entry, PARTS)
    tile = tl.program_id(1)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    known = (column < WIDTH) | (WIDTH % BLOCK_N == 0)
    mask = inside[:, None] & known[None, :]
    at = row.to(tl.int64)
    dtype: tl.constexpr = summed.dtype.element_ty
    base = tl.load(product + at[:, None] * product_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    rest = tl.load(residual + at[:, None] * residual_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = add_delta(acc, shrunk + at * (PARTS * RANK), num_rows.to(tl.int64) * (PARTS * RANK), places, entry, inside, 0,
                    column, known, PARTS, MEMBERS, RANK, BLOCK_R, RANK_DIVISOR, KIND, COMPUTE, LOW, PRECISION, ALIGNED,
                    SPLITS)
    if HAS_BIAS:
        acc = add_bias(acc, places, scales, entry, 0, column, known, PARTS, MEMBERS, KIND, COMPUTE)
    result = ((base + acc).to(dtype).to(tl.float32) + rest).to(dtype)
    tl.store(summed + at[:, None] * WIDTH + column[None, :], result, mask=mask)
    hidden = result.to(tl.float32)
    tl.store(squares + tile.to(tl.int64) * num_rows + row, tl.sum(hidden * hidden, 1), mask=inside)


@jit(varying_ints=("num_rows",))
def _norm_kernel(
    summed,
    squares,
    weight,
    normed,
    eps,
    places,
    scales,
    out,
    rows,
    tile_entries,
    num_rows,
    HAS_ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    SLOTS: tl.constexpr,
    RANK: tl.constexpr,
    COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNED: tl.constexpr,
    X_IS_EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program norms CHUNKS times BLOCK_N columns of some rows; out [programs, num_rows, SLOTS * RANK]."""
    share = tl.program_id(1)
    begin = share * (CHUNKS * BLOCK_N)
    if PDL:
        prefetch_vector(weight, WIDTH * weight.dtype.element_ty.primitive_bitwidth // 8)
    if HAS_ROWS:
        after_previous_kernel(PDL)
    row, inside, entry = rows_of_tile(rows, tile_entries, num_rows, HAS_ROWS, BLOCK_M)
    places, scales = places_of(places, scales, entry, SLOTS)
    if PREFETCH:
        prefetch_following(places, entry, share, begin, tl.minimum(WIDTH - begin, CHUNKS * BLOCK_N),
                           HAS_ROWS or tl.program_id(0) == 0, WIDTH, SLOTS, KIND, THREADS)
    if not HAS_ROWS:
        after_previous_kernel(PDL)

    dtype: tl.constexpr = summed.dtype.element_ty
    tile = tl.arange(0, triton.next_power_of_2(TILES))
    parts = tl.load(squares + tile.to(tl.int64)[:, None] * num_rows + row[None, :],
                    mask=(tile < TILES)[:, None] & inside[None, :], other=0.0)
    scale = tl.rsqrt(tl.sum(parts, 0) * (1.0 / WIDTH) + eps)[:, None]
    at = row.to(tl.int64)
    out_rows = out + (share.to(tl.int64) * num_rows + at) * (SLOTS * RANK)
    for first in tl.static_range(0, SLOTS * RANK, COLUMNS):
        sums = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
        for chunk in range(CHUNKS):
            column = begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N)
            known = (column < WIDTH) | (WIDTH % (CHUNKS * BLOCK_N) == 0)
            mask = inside[:, None] & known[None, :]
            hidden = tl.load(summed + at[:, None] * WIDTH + column[None, :], mask=mask, other=0.0).to(tl.float32)
            factor = tl.load(weight + column, mask=known, other=0.0).to(tl.float32)[None, :]
            result = (factor * (hidden * scale).to(dtype).to(tl.float32)).to(dtype)
            if first == 0:
                tl.store(normed + at[:, None] * WIDTH + column[None, :], result, mask=mask)
            sums = shrink_chunk(sums, first, result, column, known, places, entry, WIDTH, SLOTS, RANK, COLUMNS, KIND,
                                COMPUTE, LOW, PRECISION, ALIGNED, X_IS_EXACT)
        store_shrunk(out_rows, first, sums, inside, places, scales, entry, SLOTS, RANK, COLUMNS)


def lora_add_rms_norm_triton(
    product: torch.Tensor, delta: Delta, residual: torch.Tensor, weight: torch.Tensor, eps: float,
    following: LoraTable,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """:func:`lora_add_rms_norm_unchecked` as two Triton launches."""
    require_triton()
    num_rows, width = product.shape
    is_many = num_rows >= _MANY_ROWS
    tiles = triton.cdiv(width, _BLOCK_N)
    chunks = tiles if is_many else triton.cdiv(tiles, _PROGRAMS)
    programs = triton.cdiv(tiles, chunks)
    summed, normed = (torch.empty(product.shape, dtype=product.dtype, device=product.device) for _ in range(2))
    squares = torch.empty(tiles, num_rows, dtype=torch.float32, device=product.device)
    sums = torch.empty(programs, num_rows, following.num_parts, following.num_members, following.rank,
                       dtype=torch.float32, device=product.device)
    if num_rows == 0:
        return normed, summed, sums
    table, precision = delta.table, precision_of(product.dtype)
    row_tiles, row_arguments = tiles_of_rows(num_rows, 64 if is_many else 16, delta.order)
    order = row_arguments.pop("rows"), row_arguments.pop("tile_entries"), num_rows
    with on_device_of(product):
        _sum_kernel[(row_tiles, tiles)](
            product, residual, summed, squares, delta.sums, table.places, table.scales, *order, product.stride(0),
            residual.stride(0),
            WIDTH=width,
            BLOCK_R=table.rank_tile,
            RANK_DIVISOR=table.rank_divisor,
            SPLITS=len(delta.sums),
            HAS_BIAS=table.has_bias,
            BLOCK_N=_BLOCK_N,
            num_warps=4,
            enable_fp_fusion=False,
            **row_arguments,
            **table_options(table, product, precision),
        )
        options = table_options(following, product, precision)
        del options["PARTS"], options["MEMBERS"]
        _norm_kernel[(row_tiles, programs)](
            summed, squares, weight, normed, eps, following.places, following.scales, sums, *order,
            WIDTH=width,
            TILES=tiles,
            SLOTS=following.num_slots,
            COLUMNS=columns_of(following),
            X_IS_EXACT=product.dtype == torch.bfloat16,
            BLOCK_N=_BLOCK_N,
            CHUNKS=chunks,
            THREADS=32 * _NORM_WARPS,
            PREFETCH=prefetches(following, product),
            num_warps=_NORM_WARPS,
            enable_fp_fusion=False,
            **row_arguments,
            **options,
        )
    return normed, summed, sums
