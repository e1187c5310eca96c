"""Linear layers whose forward is nothing but a product with a float weight."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def is_plain_linear(module: nn.Module) -> bool:
    """Exactly `torch.nn.Linear` over a float parameter, without hooks. Patched classes: see `recognise`."""
    if type(module) is not nn.Linear or module._forward_hooks or module._forward_pre_hooks:
        return False
    weight = module.weight
    return type(weight) is nn.Parameter and weight.is_floating_point() and "forward" not in vars(module)


def apply_linear(module: nn.Module, hidden: torch.Tensor, linear: Callable[..., torch.Tensor]) -> torch.Tensor:
    """[T, k] -> [T, n] by `linear`; a layer that is not plain (LoRA, quantized) is called as it stands."""
    if is_plain_linear(module):
        assert isinstance(module, nn.Linear)
        return linear(hidden, module.weight, module.bias)
    result: torch.Tensor = module(hidden[None])[0]
    return result
