"""What LoRA adds to the products of linear layers that read one input: shrunk before them, added by who reads them."""

from __future__ import annotations

import torch

from hf_paged.kernels.lora.lora_expand import Delta, lora_expand_silu_mul_unchecked
from hf_paged.kernels.lora.lora_order import RowOrder
from hf_paged.kernels.lora.lora_shrink import lora_shrink_unchecked
from hf_paged.kernels.lora.lora_table import LoraTable
from hf_paged.models.lora_rows import AdapterRows


class AdaptedLayers:
    """Linear layers that read one input and whose products are their bases', with what LoRA adds by kernels.

    Entries of the table: the active adapters, then each adapter alone, by name.
    """

    def __init__(self, table: LoraTable, has_active: bool) -> None:
        """`has_active`: the first entry adds something."""
        self._table, self._has_active = table, has_active

    def tensors(self) -> list[torch.Tensor]:
        """What kernels find the adapters by."""
        return [self._table.places, self._table.scales]

    def table(self, rows: AdapterRows | None) -> LoraTable | None:
        """Where their adapters lie; None: nothing is added to any row."""
        return self._table if rows is not None or self._has_active else None

    def delta(self, hidden: torch.Tensor, rows: AdapterRows | None,
              shrunk: torch.Tensor | None = None) -> Delta | None:
        """What is to be added to the bases' product of `hidden` [T, k]; None: nothing.

        To be called before that product is taken, which hides what it waits for. `shrunk`: of `hidden`, where the
        kernel that made it has made that, too.
        """
        if (table := self.table(rows)) is None:
            return None
        order = _order(rows)
        return Delta(lora_shrink_unchecked(hidden, table, order) if shrunk is None else shrunk, table, order)


def silu_mul_of(product: torch.Tensor, delta: Delta, following: AdaptedLayers | None,
                rows: AdapterRows | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """silu(gate) * up [T, I] of gates and ups [T, 2 * I] to which `delta` is added; the product may be written.

    Beside it what is shrunk of it for the layers that read it, if they add anything, where that is cheaper together.
    """
    return lora_expand_silu_mul_unchecked(product, *delta, None if following is None else following.table(rows))


def _order(rows: AdapterRows | None) -> RowOrder | None:
    if rows is None:
        return None
    assert rows.order is not None, "a step with adapters by row puts its rows in order first"
    return rows.order
