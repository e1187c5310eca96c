"""Rows in tiles of one LoRA entry: every row once, entries ascending, as the reference puts them."""

from __future__ import annotations

import pytest
import torch

from hf_paged.kernels.lora.lora_order import order_rows, order_rows_reference, order_rows_triton


def draw(seed, rows, entries):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-1, entries, (rows,), generator=g).to(torch.int32)


@pytest.mark.parametrize(("rows", "entries", "tile"), [(0, 3, None), (1, 1, 16), (40, 5, 16), (1500, 9, None)])
def test_every_row_is_in_one_tile(rows, entries, tile):
    given = draw(rows, rows, entries)
    order = order_rows(given, entries, tile)
    for numbers, entry in zip(order.rows.tolist(), order.tile_entries.tolist(), strict=True):
        own = [row for row in numbers if row >= 0]
        assert own == sorted(own)
        assert own + [-1] * (order.tile - len(own)) == numbers
        assert all(given[row] == entry for row in own)
    assert sorted(order.rows[order.rows >= 0].tolist()) == list(range(rows))


@pytest.mark.parametrize("rows", [1, 3, 15, 17, 100])
def test_there_are_tiles_for_any_entries(rows):
    """As many as entries, that have one row each, and all others in one."""
    entries = torch.arange(rows).clamp(max=20).to(torch.int32)
    assert (order_rows(entries, 21, 16).rows >= 0).sum() == rows


@pytest.mark.interpreted
@pytest.mark.parametrize(("rows", "entries", "tile"), [
    (1, 1, 16), (5, 3, 16), (64, 9, 16), (257, 9, 16), (300, 70, 16), (1500, 4, 64), (33, 2, 32),
])
def test_kernel(rows, entries, tile):
    given = draw(1, rows, entries)
    for one, other in zip(order_rows_triton(given, entries, tile), order_rows_reference(given, entries, tile),
                          strict=True):
        assert torch.equal(one, other)


@pytest.mark.interpreted
@pytest.mark.parametrize("entry", [-1, 0, 3])
def test_kernel_with_rows_of_one_entry(entry):
    given = torch.full((50,), entry, dtype=torch.int32)
    for one, other in zip(order_rows_triton(given, 4, 16), order_rows_reference(given, 4, 16), strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "entries"), [(1, 1), (256, 9), (5000, 20)])
def test_on_a_gpu(rows, entries):
    given = draw(2, rows, entries).cuda()
    order = order_rows(given, entries)
    for one, other in zip(order, order_rows_reference(given, entries, order.tile), strict=True):
        assert torch.equal(one, other)
