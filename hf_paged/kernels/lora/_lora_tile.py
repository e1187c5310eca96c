# mypy: disallow-untyped-defs=False
"""Device code that the kernels of LoRA share: products as exact as PEFT's, and the look-up of adapters.

A kernel may read its table before `after_previous_kernel`: the table was written by a copy, and kernels behind a copy
are not put on the machine before it is done. The adapters, which kernels train, are only prefetched there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hf_paged.kernels._triton import cdiv, jit, next_power_of_2, pdl_options, prefetch_rows, tl, triton
from hf_paged.kernels.lora.lora_order import RowOrder
from hf_paged.kernels.lora.lora_table import LoraTable

FIELDS = 5 if tl is None else tl.constexpr(5)  # int64 values of an adapter in the table
_EARLY_ROWS = 32
_KINDS = {} if tl is None else {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


class LoraShape(NamedTuple):
    """What a kernel is compiled for of the table that it reads; its argument ``L``."""

    parts: int
    members: int
    rank: int
    tile: int  # rank columns that a program takes at once
    rank_divisor: int
    has_bias: bool
    kind: Any  # Triton's dtype of the adapters
    compute: Any  # the one in which PEFT would multiply
    low: bool  # that is not float32
    precision: str  # of float32 products, see `lora_dot`
    aligned: bool
    rounds_delta: bool


@jit()
def lora_dot(x, weight, acc, X_IS_EXACT: tl.constexpr, L: tl.constexpr):
    """acc + x @ weight, of float32 values unless L.low.

    L.precision "bf16x3": values as sums of three bfloat16 (X_IS_EXACT: of x one is enough), whose products tensor cores
    add up in float32; terms below 2**-22 are left out. Else what `tl.dot` calls so.
    """
    if L.low:
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    elif L.precision == "bf16x3":
        # Cut off, which is cheaper than rounding and as exact: each takes 8 of 24 bits.
        cut = (weight.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        rest = weight - cut
        rest_cut = (rest.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        w_high = cut.to(tl.bfloat16)
        w_middle = rest_cut.to(tl.bfloat16)
        w_low = (rest - rest_cut).to(tl.bfloat16)
        if X_IS_EXACT:  # not one behind the other, since there are few columns and each waits for the one before
            small = tl.dot(x, w_low) + tl.dot(x, w_middle)
            acc = tl.dot(x, w_high, acc) + small
        else:
            x_high = x.to(tl.bfloat16)
            x_rest = x - x_high.to(tl.float32)
            x_middle = x_rest.to(tl.bfloat16)
            x_low = (x_rest - x_middle.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(x_low, w_high, acc)
            acc = tl.dot(x_middle, w_middle, acc)
            acc = tl.dot(x_high, w_low, acc)
            acc = tl.dot(x_middle, w_high, acc)
            acc = tl.dot(x_high, w_middle, acc)
            acc = tl.dot(x_high, w_high, acc)
    else:
        acc = tl.dot(x.to(tl.float32), weight, acc, input_precision=L.precision)
    return acc


@jit()
def rows_of_tile(rows, tile_entries, num_rows, HAS_ROWS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Row numbers of a program's tile, which of them there are, and the entry of them all, -1: none.

    Without HAS_ROWS they lie side by side and have the first entry; else see `RowOrder`.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = row < num_rows
    entry = 0
    if HAS_ROWS:
        row = tl.load(rows + row)
        inside = row >= 0
        entry = tl.load(tile_entries + tl.program_id(0))
    return row, inside, entry


@jit()
def pointer_to(address, kind: tl.constexpr, ALIGNED: tl.constexpr):
    """Addresses out of the table as pointers to `kind`."""
    pointer = address.to(tl.pointer_type(kind))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@jit()
def places_of(places, scales, entry, L: tl.constexpr):
    """A table's rows of an entry; those of the first for the entry -1, of which nothing is to be taken."""
    at = tl.maximum(entry, 0) * (L.parts * L.members)
    return places + at * FIELDS, scales + at


@jit()
def prefetch_b(places, share, SHARES: tl.constexpr, L: tl.constexpr):
    """Into L2: one of SHARES parts of each b of an entry, but for some bytes.

    One thread asks for it: those of a warp would do so one after the other, for longer than is gained.
    """
    for slot in tl.static_range(L.parts * L.members):
        place = places + slot * FIELDS
        each = (tl.load(place + 4).to(tl.int32) // SHARES) // 16 * 16
        first = tl.load(place + 1) + share.to(tl.int64) * each
        prefetch_rows(first.to(tl.pointer_type(tl.int8)), tl.where(each > 0, 1, 0), each, each)


@jit()
def add_delta(acc, shrunk_rows, split_stride, places, entry, inside, member, n, n_inside, SPLITS: tl.constexpr,
              L: tl.constexpr):
    """acc [rows, columns] and what an entry's adapters of a member add; the entry -1 adds nothing.

    All columns have one address, so that loads are wide. `places` are the entry's.
    """
    SPLITS_PAD: tl.constexpr = triton.next_power_of_2(SPLITS)
    for part in tl.static_range(L.parts):
        place = places + (part * L.members + member) * FIELDS
        rank = tl.multiple_of(tl.where(entry >= 0, tl.load(place + 3), 0).to(tl.int32), L.rank_divisor)
        b = pointer_to(tl.load(place + 1), L.kind, L.aligned)
        # A loop, of which one turn leaves nothing: written out, a rank of 256 would take ptxas up to 100 s and spill
        # 94 KB. One stage: several would ask for more shared memory than some GPUs have.
        for tile in tl.range(L.rank // L.tile, num_stages=1):
            index = tile * L.tile + tl.arange(0, L.tile)
            known = index < rank
            b_tile = tl.load(b + (n[:, None] * rank + index[None, :]), mask=n_inside[:, None] & known[None, :],
                             other=0.0)
            # One tensor of all partial sums: added up one by one, each would change its layout for the product.
            at = shrunk_rows[:, None] + ((part * L.members + member) * L.rank + index)[None, :]
            split = tl.arange(0, SPLITS_PAD)
            partials = tl.load(at[None, :, :] + (split * split_stride)[:, None, None],
                               mask=(inside[:, None] & known[None, :])[None, :, :] & (split < SPLITS)[:, None, None],
                               other=0.0)
            total = tl.sum(partials, 0)
            acc = lora_dot(total.to(L.compute), tl.trans(b_tile.to(L.compute)), acc, False, L)
    return acc


@jit()
def add_bias(acc, places, scales, entry, member, n, n_inside, L: tl.constexpr):
    """acc [rows, columns] and the biases of an entry's adapters of a member, scaled. As `add_delta`."""
    for part in tl.static_range(L.parts):
        slot = part * L.members + member
        address = tl.zeros([n.shape[0]], tl.int64) + tl.where(entry >= 0, tl.load(places + slot * FIELDS + 2), 0)
        bias = tl.load(pointer_to(address, L.kind, False) + n, mask=n_inside & (address != 0), other=0.0)
        acc += (bias.to(L.compute).to(tl.float32) * tl.load(scales + slot))[None, :]
    return acc


@jit()
def plus_delta(base, acc, dtype: tl.constexpr, L: tl.constexpr):
    """base + acc of float32 in `dtype`; with L.rounds_delta acc is rounded to it first."""
    if L.rounds_delta:
        acc = acc.to(dtype).to(tl.float32)
    return (base + acc).to(dtype)


@jit()
def shrink_chunk(sums, first, x_tile, column, known, places, entry, WIDTH, COLUMNS: tl.constexpr,
                 X_IS_EXACT: tl.constexpr, L: tl.constexpr):
    """sums [rows, COLUMNS] and the products of some columns of x, of WIDTH, with the entry's ranks from `first` on."""
    if L.low or not X_IS_EXACT:
        x_tile = x_tile.to(L.compute)
    at = first + tl.arange(0, COLUMNS)
    slot = at // L.rank
    index = at % L.rank
    there = slot < tl.where(entry >= 0, L.parts * L.members, 0)
    own = there & (index < tl.load(places + slot * FIELDS + 3, mask=there, other=0))
    a = pointer_to(tl.load(places + slot * FIELDS, mask=there, other=0), L.kind, L.aligned)
    a_tile = tl.load(a[:, None] + index[:, None] * WIDTH + column[None, :], mask=own[:, None] & known[None, :],
                     other=0.0)
    return lora_dot(x_tile, tl.trans(a_tile.to(L.compute)), sums, X_IS_EXACT, L)


@jit()
def store_shrunk(out_rows, first, sums, inside, places, scales, entry, COLUMNS: tl.constexpr, L: tl.constexpr):
    """What `shrink_chunk` added up, scaled, to rows of all slots' ranks; nothing beyond an adapter's own rank."""
    at = first + tl.arange(0, COLUMNS)
    slot = at // L.rank
    there = slot < tl.where(entry >= 0, L.parts * L.members, 0)
    own = there & (at % L.rank < tl.load(places + slot * FIELDS + 3, mask=there, other=0))
    scaled = sums * tl.load(scales + slot, mask=there, other=0.0)[None, :]
    tl.store(out_rows[:, None] + at[None, :], scaled, mask=inside[:, None] & own[None, :])


def precision_of(dtype: torch.dtype) -> str:
    """Return how to multiply float32 adapters with inputs of a dtype: the fastest exact enough way on an H200."""
    return "bf16x3" if dtype == torch.bfloat16 else "tf32x3"


def early_options(x: torch.Tensor) -> dict[str, bool]:
    """Return `pdl_options` for few rows; a step of 256 rows takes longer with an early start (docs/notebook.md)."""
    return pdl_options(x) if len(x) <= _EARLY_ROWS else {"PDL": False}


def shape_of(table: LoraTable, precision: str) -> LoraShape:
    """The shape of a table; `precision`: how float32 values are multiplied."""
    return LoraShape(
        table.num_parts, table.num_members, table.rank, table.rank_tile, table.rank_divisor, table.has_bias,
        _KINDS[table.dtype], _KINDS[table.compute_dtype], table.compute_dtype != torch.float32, precision,
        table.aligned, table.rounds_delta,
    )


def member_arguments(table: LoraTable) -> tuple[int, ...]:
    """First columns of the members in their product, then numbers of columns, 0 for members that are not there."""
    firsts, sizes = zip(*(*table.columns, (0, 0), (0, 0)), strict=True)
    return *firsts[:3], *sizes[:3]


def columns_of(following: LoraTable) -> int:
    """Ranks of layers that read a kernel's result which it takes at once.

    More than the 16 rows of a tile: with as many, all warps take the same part of a product behind another one.
    """
    return min(64, max(32, next_power_of_2(following.num_slots * following.rank)))


def prefetches(table: LoraTable, x: torch.Tensor) -> bool:
    """Return whether kernels that start early may prefetch the table's adapters."""
    return table.aligned and early_options(x)["PDL"]


def tiles_of_rows(num_rows: int, block_m: int, order: RowOrder | None) -> tuple[int, dict]:
    """Return the number of tiles of rows, and the launch arguments of `rows_of_tile`."""
    if order is None:
        return cdiv(num_rows, block_m), {"rows": None, "tile_entries": None, "HAS_ROWS": False,
                                                "BLOCK_M": block_m}
    return len(order.rows), {"rows": order.rows, "tile_entries": order.tile_entries, "HAS_ROWS": True,
                             "BLOCK_M": order.tile}
