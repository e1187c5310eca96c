"""What LoRA adds to the products of linear layers that read one input, by two kernels."""

from __future__ import annotations

import torch

from hf_paged.kernels.lora_expand import lora_expand_silu_mul_unchecked, lora_expand_unchecked
from hf_paged.kernels.lora_order import RowOrder
from hf_paged.kernels.lora_shrink import lora_shrink_unchecked
from hf_paged.kernels.lora_table import LoraTable
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

    def shrink(self, hidden: torch.Tensor, rows: AdapterRows | None) -> torch.Tensor | None:
        """To be called before the bases' product is taken, which hides what it waits for; None: nothing is added."""
        adds = rows is not None or self._has_active
        return lora_shrink_unchecked(hidden, self._table, _order(rows)) if adds else None

    def expand(self, product: torch.Tensor, shrunk: torch.Tensor | None, rows: AdapterRows | None) -> torch.Tensor:
        """The bases' product [T, N], which is written, with what each row's adapters add to it."""
        return product if shrunk is None else lora_expand_unchecked(product, shrunk, self._table, _order(rows))

    def expand_silu_mul(self, product: torch.Tensor, shrunk: torch.Tensor, rows: AdapterRows | None,
                        following: AdaptedLayers | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same of gates and ups [T, 2 * I], and silu(gate) * up: [T, I].

        Beside it `shrink` of that for the layers that read it, if they add anything, where that is cheaper together.
        """
        adds = following is not None and (rows is not None or following._has_active)
        then = following._table if adds and following is not None else None
        return lora_expand_silu_mul_unchecked(product, shrunk, self._table, _order(rows), then)


def _order(rows: AdapterRows | None) -> RowOrder | None:
    if rows is None:
        return None
    assert rows.order is not None, "a step with adapters by row puts its rows in order first"
    return rows.order
