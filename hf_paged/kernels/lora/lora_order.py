# mypy: disallow-untyped-defs=False
"""The order of a step's rows by LoRA entry, so that a tile of rows has one set of adapters."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels._triton import (
    after_previous_kernel,
    jit,
    next_power_of_2,
    on_device_of,
    pdl_options,
    require_triton,
    tl,
)

MANY_ROWS = 1024  # prompts: their tiles are filled, and what a launch of its own costs counts for little


class RowOrder(NamedTuple):
    """Which adapters T rows use. ``entries`` [T] int32: the entry in a `LoraTable` of each row, -1: none.

    The same as tiles: ``rows`` [tiles, rows of a tile] int32 are row numbers, ascending within an entry, -1: nothing;
    ``tile_entries`` [tiles] int32 is the entry of a tile's rows. Every row is in one tile.
    """

    entries: torch.Tensor
    rows: torch.Tensor
    tile_entries: torch.Tensor

    @property
    def tile(self) -> int:
        """Rows of a tile."""
        return self.rows.shape[1]


def tile_of(num_rows: int) -> int:
    """Rows of a tile where nothing else says how many: at least as many as a product on tensor cores has."""
    return 64 if num_rows >= MANY_ROWS else 16


def order_rows(entries: torch.Tensor, num_entries: int, tile: int | None = None) -> RowOrder:
    """Put T rows into tiles; nothing is read on the host.

    Args:
        entries: ``[T]`` int32, -1 to ``num_entries - 1``.
        num_entries: of the tables that will be used.
        tile: rows of a tile, a power of two from 16; None: as is fastest.

    Raises:
        ValueError: entries of another dtype or shape.
    """
    if entries.dtype != torch.int32 or entries.dim() != 1:
        raise ValueError(f"entries must be int32 [T], got {entries.dtype} {tuple(entries.shape)}")
    tile = tile or tile_of(len(entries))
    run = order_rows_triton if entries.is_cuda else order_rows_reference
    return run(entries, num_entries, tile)


def _num_tiles(num_rows: int, num_entries: int, tile: int) -> int:
    """As many as there can be: each entry, and no entry, may have a tile that is not full."""
    return num_rows // tile + min(num_rows, num_entries + 1)


def order_rows_reference(entries: torch.Tensor, num_entries: int, tile: int) -> RowOrder:
    """:func:`order_rows` in plain torch."""
    count = _num_tiles(len(entries), num_entries, tile)
    rows = torch.full((count, tile), -1, dtype=torch.int32, device=entries.device)
    tile_entries = torch.full((count,), -1, dtype=torch.int32, device=entries.device)
    first = 0
    for entry in range(-1, num_entries):
        own = (entries == entry).nonzero()[:, 0].int()
        last = first + -(-len(own) // tile)
        rows[first:last].view(-1)[: len(own)] = own
        tile_entries[first:last] = entry
        first = last
    return RowOrder(entries, rows, tile_entries)


@jit(varying_ints=("num_rows", "num_tiles"))
def _order_kernel(entries, rows, tile_entries, num_rows, num_tiles, ENTRIES: tl.constexpr, TILE: tl.constexpr,
                  CHUNK: tl.constexpr, PDL: tl.constexpr):
    """A program for each entry, -1 first, and one for the tiles that are left; ENTRIES: a power of two above all."""
    after_previous_kernel(PDL)
    mine = tl.program_id(0) - 1
    each = tl.arange(0, ENTRIES) - 1
    at = tl.arange(0, CHUNK)
    counts = tl.zeros([ENTRIES], tl.int32)
    for start in range(0, num_rows, CHUNK):
        found = tl.load(entries + start + at, mask=start + at < num_rows, other=ENTRIES)
        counts += tl.sum((found[:, None] == each[None, :]).to(tl.int32), 0)
    tiles = (counts + TILE - 1) // TILE
    first = tl.sum(tl.where(each < mine, tiles, 0), 0)
    last = first + tl.sum(tl.where(each == mine, tiles, 0), 0)
    is_rest = mine == tl.num_programs(0) - 2
    last = tl.where(is_rest, num_tiles, last)
    filled = tl.sum(tl.where((each == mine) & (is_rest == 0), counts, 0), 0)
    # Places without a row first: no other program writes to these tiles.
    for start in range(first * TILE + filled, last * TILE, CHUNK):
        tl.store(rows + start + at, tl.full([CHUNK], -1, tl.int32), mask=start + at < last * TILE)
    for start in range(first, last, CHUNK):
        value = tl.where(is_rest, -1, mine)
        tl.store(tile_entries + start + at, tl.zeros([CHUNK], tl.int32) + value, mask=start + at < last)
    place = first * TILE
    if filled > 0:
        for start in range(0, num_rows, CHUNK):
            found = tl.load(entries + start + at, mask=start + at < num_rows, other=ENTRIES)
            own = (found == mine).to(tl.int32)
            tl.store(rows + place + tl.cumsum(own, 0) - 1, start + at, mask=own > 0)
            place += tl.sum(own, 0)


def order_rows_triton(entries: torch.Tensor, num_entries: int, tile: int) -> RowOrder:
    """:func:`order_rows` as one Triton launch."""
    require_triton()
    count = _num_tiles(len(entries), num_entries, tile)
    rows = torch.empty(count, tile, dtype=torch.int32, device=entries.device)
    tile_entries = torch.empty(count, dtype=torch.int32, device=entries.device)
    bins = max(16, next_power_of_2(num_entries + 1))
    if len(entries):
        with on_device_of(entries):
            _order_kernel[(num_entries + 2,)](
                entries, rows, tile_entries, len(entries), count, ENTRIES=bins, TILE=tile, CHUNK=max(32, 4096 // bins),
                num_warps=4, **pdl_options(entries),
            )
    return RowOrder(entries, rows, tile_entries)
