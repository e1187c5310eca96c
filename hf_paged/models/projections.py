"""Projections of a fused layer that read one input: q, k and v, or gate and up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hf_paged.kernels.layer.silu_mul import silu_mul_host
from hf_paged.kernels.lora.lora_expand import Delta
from hf_paged.models.adapted_layers import AdaptedLayers, silu_mul_of
from hf_paged.models.layer_ops import LayerOps
from hf_paged.models.lora_rows import AdapterRows
from hf_paged.models.plain_linear import apply_linear

# On a CPU copying products of so few rows is faster than writing them into columns of one tensor.
_FEW_ROWS = 8


class Projections(NamedTuple):
    """Linear layers over the same input, checked before, and their merged weight if there is one.

    With `lora` the layers are base layers, and the kernel that reads their product adds the LoRA update. `linear`
    multiplies with the merged weight; it returns parts (`linear_parts`) if the kernel that reads them sums them.
    """

    linears: tuple[nn.Module, ...]
    weight: torch.Tensor | None
    are_plain: bool
    ops: LayerOps
    linear: Callable[..., torch.Tensor]
    bias: torch.Tensor | None = None  # of a merged weight
    lora: AdaptedLayers | None = None

    def __call__(self, hidden: torch.Tensor, rows: AdapterRows | None) -> tuple[torch.Tensor, Delta | None]:
        """Compute [T, k] -> [T, sum of outputs], or parts of it, and the LoRA update still to be added.

        `rows`: adapters of the rows; None: the active ones.
        """
        delta = None if self.lora is None else self.lora.delta(hidden, rows)
        return self._product(hidden, rows), delta

    def silu_mul(self, hidden: torch.Tensor, rows: AdapterRows | None,
                 following: AdaptedLayers | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute silu(gate) * up of a gate and an up projection: [T, k] -> [T, inner]; see `silu_mul_of`."""
        if self.lora is not None and (delta := self.lora.delta(hidden, rows)) is not None:
            return silu_mul_of(self._product(hidden, rows), delta, following, rows)
        if self.weight is not None and self.bias is None:
            return self.ops.linear_silu_mul(hidden, self.weight), None
        if self.weight is None and self.are_plain and hidden.device.type == "cpu":
            return silu_mul_host(*self._products(hidden)), None
        return self.ops.silu_mul(self._product(hidden, rows)), None

    def _product(self, hidden: torch.Tensor, rows: AdapterRows | None) -> torch.Tensor:
        if self.weight is not None:
            return self.linear(hidden, self.weight, self.bias)
        if self.are_plain and hidden.device.type == "cpu":
            if len(hidden) > _FEW_ROWS and all(linear.bias is None for linear in self.linears):
                return _side_by_side(hidden, [linear.weight for linear in self.linears])
            return torch.cat(self._products(hidden), dim=-1)
        return torch.cat([apply_linear(layer, hidden, self.ops.linear, rows) for layer in self.linears], dim=-1)

    def _products(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        linears: Any = self.linears
        return [F.linear(hidden, linear.weight, linear.bias) for linear in linears]


def _side_by_side(hidden: torch.Tensor, weights: list[Any]) -> torch.Tensor:
    """Compute each product in its columns of one tensor: on a CPU as fast as one product over merged weights."""
    sizes = [len(weight) for weight in weights]
    products = hidden.new_empty((len(hidden), sum(sizes)))
    for weight, columns in zip(weights, products.split(sizes, dim=1), strict=True):
        torch.mm(hidden, weight.t(), out=columns)
    return products
