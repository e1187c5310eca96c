"""LoRA updates of linear layers that read one input: shrunk before their product, added by the kernel that reads it."""

from __future__ import annotations

import torch

from hf_paged.kernels.lora.lora_expand import Delta, lora_expand_silu_mul_unchecked
from hf_paged.kernels.lora.lora_order import RowOrder
from hf_paged.kernels.lora.lora_shrink import lora_shrink_unchecked
from hf_paged.kernels.lora.lora_table import LoraTable
from hf_paged.models.tuners import AdapterRows


class AdaptedLayers:
    """Adapters of linear layers that read one input; kernels add their LoRA updates to the base layers' product.

    Entries of the table: the active adapters, then each adapter alone, by name.
    """

    def __init__(self, table: LoraTable, has_active: bool) -> None:
        """Keep the table; `has_active`: whether its first entry adds an update."""
        self._table, self._has_active = table, has_active

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors by which kernels find the adapters."""
        return [self._table.places, self._table.scales]

    def table(self, rows: AdapterRows | None) -> LoraTable | None:
        """Return the table of the rows' adapters; None if nothing is added to any row."""
        return self._table if rows is not None or self._has_active else None

    def delta(self, hidden: torch.Tensor, rows: AdapterRows | None,
              shrunk: torch.Tensor | None = None) -> Delta | None:
        """Return the update to add to the base layers' product of `hidden` [T, k]; None if there is none.

        To be called before that product is computed, which hides the latency of shrinking. `shrunk`: `hidden` times A,
        if the kernel that made `hidden` has computed it, too.
        """
        if (table := self.table(rows)) is None:
            return None
        order = _order(rows)
        return Delta(lora_shrink_unchecked(hidden, table, order) if shrunk is None else shrunk, table, order)


def silu_mul_of(product: torch.Tensor, delta: Delta, following: AdaptedLayers | None,
                rows: AdapterRows | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return silu(gate) * up [T, I] of gates and ups [T, 2 * I] plus `delta`; may overwrite the product.

    The second result is its shrunk form for the `following` layers, if they add anything and one kernel for both is
    cheaper, else None.
    """
    return lora_expand_silu_mul_unchecked(product, *delta, None if following is None else following.table(rows))


def _order(rows: AdapterRows | None) -> RowOrder | None:
    if rows is None:
        return None
    assert rows.order is not None, "a step with adapters by row puts its rows in order first"
    return rows.order
