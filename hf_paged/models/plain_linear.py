"""Linear layers whose forward is only a product with a float weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from hf_paged.kernels.lora.lora_expand import Delta
from hf_paged.models.adapted_layers import AdaptedLayers
from hf_paged.models.lora_rows import AdapterRows, apply_layer
from hf_paged.parallel.group import SINGLE, ParallelGroup
from hf_paged.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelHead


def is_plain_linear(module: nn.Module) -> bool:
    """Return whether a module is exactly `torch.nn.Linear` or a rank's rows of one, with a float weight, without hooks.

    Eligibility checks whether these classes are patched.
    """
    return type(module) in (nn.Linear, ColumnParallelLinear) and _is_untouched(module)


def is_plain_product(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer without bias."""
    return is_plain_linear(module) and module.bias is None


def _is_untouched(module: nn.Module) -> bool:
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    weight: torch.Tensor = module.weight  # type: ignore[assignment]
    return type(weight) is nn.Parameter and weight.is_floating_point() and "forward" not in vars(module)


def apply_linear(module: nn.Module, hidden: torch.Tensor, linear: Callable[..., torch.Tensor],
                 rows: AdapterRows | None = None) -> torch.Tensor:
    """Compute [T, k] -> [T, n] by `linear`; a layer that is not plain (LoRA, quantized) is called as it stands."""
    if is_plain_linear(module):
        assert isinstance(module, nn.Linear)
        return linear(hidden, module.weight, module.bias)
    if type(module) is RowParallelLinear and module.group.is_parallel and _is_untouched(module):
        return module.finish(linear(hidden, module.weight, None))
    return apply_module(module, hidden, rows)


def apply_module(module: nn.Module, hidden: torch.Tensor, rows: AdapterRows | None = None) -> torch.Tensor:
    """Compute [T, k] -> [T, n] by a module as it stands; ValueError if kernels cannot read its result."""
    result = apply_layer(module, hidden, rows)
    same = result.dtype == hidden.dtype or torch.is_autocast_enabled(hidden.device.type)
    if not same or result.dim() != 2 or result.stride(1) != 1:
        found = f"{result.dtype} {list(result.shape)} with strides {list(result.stride())}"
        raise ValueError(f"{type(module).__name__} returned {found}: expected {hidden.dtype} [T, n], rows contiguous")
    return result


def row_product(module: nn.Module, hidden: torch.Tensor, linear: Callable[..., torch.Tensor],
                rows: AdapterRows | None = None) -> tuple[torch.Tensor, ParallelGroup]:
    """Return `apply_linear`, and the ranks whose products still have to be summed; `SINGLE` if there are none."""
    if type(module) is RowParallelLinear and module.bias is None and _is_untouched(module):
        return linear(hidden, module.weight, None), module.group
    return apply_linear(module, hidden, linear, rows), SINGLE


def product_and_delta(
    lora: AdaptedLayers | None, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
    linear: Callable[..., torch.Tensor], rows: AdapterRows | None, shrunk: torch.Tensor | None,
) -> tuple[torch.Tensor, Delta | None]:
    """Return `linear` of hidden [T, k], and the LoRA update still to be added; `shrunk`: see `AdaptedLayers.delta`."""
    delta = None if lora is None else lora.delta(hidden, rows, shrunk)
    return linear(hidden, weight, bias), delta


class RowProduct(NamedTuple):
    """Function that computes `row_product` of a module checked before, whose parameters it reads anew.

    With `lora` the module is the base layer, and the kernel that reads its product adds the LoRA update.
    """

    module: Any
    is_plain: bool
    lora: AdaptedLayers | None = None

    @classmethod
    def of(cls, module: nn.Module, lora: AdaptedLayers | None = None) -> RowProduct:
        return cls(module, is_plain_linear(module), lora)

    def __call__(self, hidden: torch.Tensor, linear: Callable[..., torch.Tensor],
                 rows: AdapterRows | None = None,
                 shrunk: torch.Tensor | None = None) -> tuple[torch.Tensor, ParallelGroup, Delta | None]:
        """Return the product, the ranks to sum over and the LoRA update to add. `rows`: None for active adapters."""
        if not self.is_plain:
            return *row_product(self.module, hidden, linear, rows), None
        module = self.module
        product, delta = product_and_delta(self.lora, hidden, module.weight, module.bias, linear, rows, shrunk)
        return product, SINGLE, delta


def apply_head(head: nn.Module, hidden: torch.Tensor, linear: Callable[..., torch.Tensor],
               rows: AdapterRows | None = None) -> torch.Tensor:
    """Compute [R, k] -> [R, this rank's own columns]; all columns of a head that is not sharded."""
    if type(head) is VocabParallelHead:
        return linear(hidden, head.weight, head.bias)
    return apply_linear(head, hidden, linear, rows)


def all_columns(head: nn.Module, columns: torch.Tensor) -> torch.Tensor:
    """Gather the columns that `apply_head` returns on every rank -> [R, vocab_size]."""
    return head.gathered(columns) if type(head) is VocabParallelHead else columns
