# mypy: disallow-untyped-defs=False
"""`add_rms_norm` of a product to which LoRA's part is still to be added, with the shrinking for what reads the norm."""

from __future__ import annotations

import torch

from hf_paged.kernels._lora_tile import (
    add_bias,
    add_delta,
    columns_of,
    places_of,
    precision_of,
    prefetch_following,
    rows_of_tile,
    shrink_chunk,
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

# Rows of a tile (the fewest of a product on tensor cores), columns that a program norms at once, programs a tile.
_BLOCK_M, _BLOCK_N, _PROGRAMS = 16, 128, 8
# Columns times ranks of b that a program holds at once to see all of a row.
_WHOLE = 16384
_MOST_PARTIALS = 32
# Of more rows, which are a prompt's, each program would see too many others' columns.
_MOST_ROWS = 1024


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
    if product.is_cuda and _is_one_launch(product, delta, residual, weight, dtype, following, order):
        return lora_add_rms_norm_triton(product, delta, residual, weight, eps, following, order)
    if delta is not None:
        lora_expand_unchecked(product, *delta)
    normed, summed = add_rms_norm_unchecked(product, residual, weight, eps, dtype)
    return normed, summed, None if following is None else lora_shrink_unchecked(normed, following, order)


def _is_one_launch(product: torch.Tensor, delta: Delta | None, residual: torch.Tensor | None, weight: torch.Tensor,
                   dtype: torch.dtype | None, following: LoraTable | None, order: RowOrder | None) -> bool:
    tables = [table for table in (None if delta is None else delta.table, following) if table is not None]
    if not tables or len(product) >= _MOST_ROWS or (order is not None and order.tile != _BLOCK_M):
        return False
    if dtype not in (None, product.dtype) or weight.dtype != product.dtype:
        return False
    if residual is not None and residual.dtype != product.dtype:
        return False
    if delta is not None and delta.table.columns != ((0, product.shape[1]),):
        return False
    few = following is None or triton.cdiv(product.shape[1], _BLOCK_N) <= _MOST_PARTIALS
    alike = len({(table.dtype, table.compute_dtype) for table in tables}) == 1
    return few and alike and all(table.num_slots * table.rank <= 192 for table in tables)


@jit()
def _summed_tile(
    product, residual, row, inside, column, product_stride, residual_stride, shrunk_rows, split_stride, places, scales,
    entry, dtype: tl.constexpr, WIDTH: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PARTS: tl.constexpr,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, RANK_DIVISOR: tl.constexpr, KIND: tl.constexpr, COMPUTE: tl.constexpr,
    LOW: tl.constexpr, PRECISION: tl.constexpr, ALIGNED: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Some columns of some rows of the sum, float32 values that were rounded to dtype."""
    known = (column < WIDTH) | EVEN
    at = tl.where(inside, row, 0).to(tl.int64)[:, None]  # what is made of rows that are none is written nowhere
    hidden = tl.load(product + at * product_stride + column[None, :], mask=known[None, :], other=0.0).to(tl.float32)
    if PARTS > 0:
        acc = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
        acc = add_delta(acc, shrunk_rows, split_stride, places, entry, inside, 0, column, known, PARTS, 1, RANK,
                        BLOCK_R, RANK_DIVISOR, KIND, COMPUTE, LOW, PRECISION, ALIGNED, SPLITS)
        if HAS_BIAS:
            acc = add_bias(acc, places, scales, entry, 0, column, known, PARTS, 1, KIND, COMPUTE)
        hidden = (hidden + acc).to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        hidden += tl.load(residual + at * residual_stride + column[None, :], mask=known[None, :],
                          other=0.0).to(tl.float32)
        hidden = hidden.to(dtype).to(tl.float32)
    return hidden


@jit(varying_ints=("num_rows",))
def _lora_add_rms_norm_kernel(
    product,
    residual,
    weight,
    normed,
    summed,
    eps,
    shrunk,
    places,
    scales,
    next_places,
    next_scales,
    next_out,
    rows,
    tile_entries,
    num_rows,
    product_stride,
    residual_stride,
    HAS_ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    RANK_DIVISOR: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ALIGNED: tl.constexpr,
    NEXT_SLOTS: tl.constexpr,
    NEXT_RANK: tl.constexpr,
    NEXT_COLUMNS: tl.constexpr,
    NEXT_ALIGNED: tl.constexpr,
    KIND: tl.constexpr,
    COMPUTE: tl.constexpr,
    LOW: tl.constexpr,
    PRECISION: tl.constexpr,
    X_IS_EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WHOLE: tl.constexpr,
    CHUNKS: tl.constexpr,
    THREADS: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program sees all columns of some rows and writes CHUNKS times BLOCK_N of them; PARTS 0: no delta.

    next_out [chunks of the row, num_rows, NEXT_SLOTS * NEXT_RANK]: partial sums for the following layers.
    """
    share = tl.program_id(1)
    begin = share * (CHUNKS * BLOCK_N)
    if PDL:
        prefetch_vector(weight, WIDTH * weight.dtype.element_ty.primitive_bitwidth // 8)
    if HAS_ROWS:
        after_previous_kernel(PDL)
    row, inside, entry = rows_of_tile(rows, tile_entries, num_rows, HAS_ROWS, BLOCK_M)
    places, scales = places_of(places, scales, entry, PARTS)
    next_places, next_scales = places_of(next_places, next_scales, entry, NEXT_SLOTS)
    if PREFETCH:
        prefetch_following(next_places, entry, share, begin, tl.minimum(WIDTH - begin, CHUNKS * BLOCK_N),
                  HAS_ROWS or tl.program_id(0) == 0, WIDTH, NEXT_SLOTS, KIND, THREADS)
    if not HAS_ROWS:
        after_previous_kernel(PDL)

    dtype: tl.constexpr = summed.dtype.element_ty
    shrunk_rows = row.to(tl.int64) * (PARTS * RANK)
    if PARTS > 0:
        shrunk_rows += shrunk
    split_stride = num_rows.to(tl.int64) * (PARTS * RANK)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, WIDTH, WHOLE):
        hidden = _summed_tile(
            product, residual, row, inside, start + tl.arange(0, WHOLE), product_stride, residual_stride, shrunk_rows,
            split_stride, places, scales, entry, dtype, WIDTH, HAS_RESIDUAL, PARTS, RANK, BLOCK_R, RANK_DIVISOR, KIND,
            COMPUTE, LOW, PRECISION, ALIGNED, SPLITS, HAS_BIAS, WIDTH % WHOLE == 0)
        squares += tl.sum(hidden * hidden, 1)
    scale = tl.rsqrt(squares * (1.0 / WIDTH) + eps)[:, None]

    for chunk in range(CHUNKS):
        column = begin + chunk * BLOCK_N + tl.arange(0, BLOCK_N)
        hidden = _summed_tile(
            product, residual, row, inside, column, product_stride, residual_stride, shrunk_rows, split_stride, places,
            scales, entry, dtype, WIDTH, HAS_RESIDUAL, PARTS, RANK, BLOCK_R, RANK_DIVISOR, KIND, COMPUTE, LOW,
            PRECISION, ALIGNED, SPLITS, HAS_BIAS, WIDTH % BLOCK_N == 0)
        known = (column < WIDTH) | (WIDTH % BLOCK_N == 0)
        mask = inside[:, None] & known[None, :]
        at = row.to(tl.int64)[:, None] * WIDTH + column[None, :]
        if HAS_RESIDUAL or PARTS > 0:
            tl.store(summed + at, hidden.to(dtype), mask=mask)
        factor = tl.load(weight + column, mask=known, other=0.0).to(tl.float32)[None, :]
        result = (factor * (hidden * scale).to(dtype).to(tl.float32)).to(dtype)
        tl.store(normed + at, result, mask=mask)
        if NEXT_SLOTS > 0:
            partial = (share * CHUNKS + chunk).to(tl.int64) * num_rows + row
            shrink_chunk(result, next_out + partial * (NEXT_SLOTS * NEXT_RANK), inside, column, next_places,
                          next_scales, entry, WIDTH, NEXT_SLOTS, NEXT_RANK, NEXT_COLUMNS, KIND, COMPUTE, LOW,
                          PRECISION, NEXT_ALIGNED, X_IS_EXACT)


def lora_add_rms_norm_triton(
    product: torch.Tensor, delta: Delta | None, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
    following: LoraTable | None, order: RowOrder | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """:func:`lora_add_rms_norm_unchecked` as one Triton launch.

    Raises:
        ValueError: neither a `delta` nor a `following` table.
    """
    require_triton()
    if delta is None and following is None:
        raise ValueError("delta and following are None: expected one of them, else `add_rms_norm` is what is wanted")
    num_rows, width = product.shape
    normed = torch.empty(product.shape, dtype=product.dtype, device=product.device)
    summed = product if residual is None and delta is None else torch.empty_like(normed)
    chunks = triton.cdiv(triton.cdiv(width, _BLOCK_N), _PROGRAMS)
    programs = triton.cdiv(width, _BLOCK_N * chunks)
    sums = None
    if following is not None:
        sums = torch.empty(programs * chunks, num_rows, following.num_parts, following.num_members, following.rank,
                           dtype=torch.float32, device=product.device)
    if num_rows == 0:
        return normed, summed, sums
    table = following if delta is None else delta.table
    then = table if following is None else following
    assert table is not None and then is not None
    options = table_options(table, product, precision_of(product.dtype))
    del options["MEMBERS"], options["PARTS"]
    row_tiles, row_arguments = tiles_of_rows(num_rows, _BLOCK_M, order)
    num_warps = 8
    with on_device_of(product):
        _lora_add_rms_norm_kernel[(row_tiles, programs)](
            product, product if residual is None else residual, weight, normed, summed, eps,
            None if delta is None else delta.sums, table.places, table.scales, then.places, then.scales, sums,
            row_arguments.pop("rows"), row_arguments.pop("tile_entries"), num_rows, product.stride(0),
            0 if residual is None else residual.stride(0),
            HAS_RESIDUAL=residual is not None,
            WIDTH=width,
            PARTS=0 if delta is None else table.num_parts,
            BLOCK_R=table.rank_tile,
            RANK_DIVISOR=table.rank_divisor,
            SPLITS=0 if delta is None else len(delta.sums),
            HAS_BIAS=table.has_bias,
            NEXT_SLOTS=0 if following is None else then.num_slots,
            NEXT_RANK=then.rank,
            NEXT_COLUMNS=columns_of(then),
            NEXT_ALIGNED=then.aligned,
            X_IS_EXACT=product.dtype == torch.bfloat16,
            BLOCK_N=_BLOCK_N,
            WHOLE=min(_WHOLE // table.rank_tile, triton.next_power_of_2(width)),
            CHUNKS=chunks,
            THREADS=32 * num_warps,
            PREFETCH=options["PDL"] and then.aligned and width * then.dtype.itemsize % 16 == 0,
            num_warps=num_warps,
            enable_fp_fusion=False,
            **row_arguments,
            **options,
        )
    return normed, summed, sums
