"""Random adapters of some linear layers, and what LoRA adds to their product in float64."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels.lora.lora_order import RowOrder, order_rows
from hf_paged.kernels.lora.lora_table import Adapter, LoraTable, Members, make_tables


class Case(NamedTuple):
    x: torch.Tensor  # [T, K]
    product: torch.Tensor  # [T, N]
    table: LoraTable
    row_entries: torch.Tensor | None  # [T] int32

    @property
    def order(self) -> RowOrder | None:
        """Its rows, as kernels take them."""
        return None if self.row_entries is None else order_rows(self.row_entries, len(self.table.entries))


def make_case(seed: int, rows: int, width: int, sizes: list[int], ranks: list[list[list[int]]], *,
              dtype: torch.dtype = torch.float32, adapters: torch.dtype = torch.float32,
              compute: torch.dtype | None = None, mixed: bool = True, bias: bool = False, gap: int = 0,
              device: str = "cpu") -> Case:
    """`ranks` by entry, part and member, 0: no adapter; `gap`: columns between members that belong to nobody."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    entries = tuple(
        tuple(
            tuple(
                None if not rank else Adapter(
                    (draw(rank, width) / width**0.5).to(device, adapters), draw(size, rank).to(device, adapters),
                    draw(size).to(device, adapters) if bias and (rank + size) % 3 else None, 0.25 + 0.5 * rank)
                for rank, size in zip(part, sizes, strict=True))
            for part in entry)
        for entry in ranks)
    firsts = [sum(sizes[:j]) + gap * (j + 1) for j in range(len(sizes))]
    columns = tuple(zip(firsts, sizes, strict=True))
    table, = make_tables([Members(entries, columns, compute or adapters)], torch.device(device))
    row_entries = None
    if mixed:
        row_entries = torch.randint(-1, len(ranks), (rows,), generator=g).to(torch.int32).to(device)
    # Rows a stride apart, in tensors that are NaN elsewhere.
    wide = torch.full((rows, width + 24), torch.nan)
    wide[:, 8:-16] = draw(rows, width)
    product = torch.full((rows, firsts[-1] + sizes[-1] + gap + 8), torch.nan)
    product[:, :-8] = draw(rows, product.shape[1] - 8)
    return Case(wide.to(device, dtype)[:, 8:-16], product.to(device, dtype)[:, :-8], table, row_entries)


def expected(case: Case) -> torch.Tensor:
    """[T, N] float64, row by row as PEFT defines it."""
    table = case.table
    total = case.product.double()
    x = case.x.to(table.compute_dtype).double()
    for row in range(len(total)):
        entry = 0 if case.row_entries is None else int(case.row_entries[row])
        if entry < 0:
            continue
        for part in table.entries[entry]:
            for adapter, (first, size) in zip(part, table.columns, strict=True):
                if adapter is None:
                    continue
                a, b = (t.to(table.compute_dtype).double() for t in (adapter.a, adapter.b))
                total[row, first : first + size] += x[row] @ a.t() @ b.t() * adapter.scaling
                if adapter.bias is not None:
                    total[row, first : first + size] += adapter.bias.double() * adapter.scaling
    return total
