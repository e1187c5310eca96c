"""What kernels of decode steps read of layers with a recurrent state: plain weights, of modules without hooks, and
states as slots have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_paged.models.base import StateShape


def unlike_layers(modules: Iterable[nn.Module], of_dtype: Mapping[str, Any], others: Mapping[str, Any],
                  dtype: torch.dtype) -> Iterator[str]:
    """Yield what kernels do not take of the modules that they stand in for, and of weights by name.

    ``dtype``: of hidden states, and of the weights ``of_dtype``.
    """
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        yield f"hidden states of {dtype}"
    if any(one._forward_hooks or one._forward_pre_hooks or {"forward", "_hf_hook"} & vars(one).keys()
           for one in modules):
        yield "hooks, or forwards of their own, on modules that the kernel stands in for"
    for name, weight in {**of_dtype, **others}.items():
        if type(weight) is not nn.Parameter or not weight.is_contiguous() or (
                weight.dtype != dtype and name in of_dtype):
            yield f"in {name} no plain contiguous parameter of {dtype}"


def unlike_states(layer_idx: int, conv: tuple[int, ...], recurrent: tuple[int, ...], states: Mapping[Any, StateShape],
                  dtype: torch.dtype) -> Iterator[str]:
    """Yield what kernels do not take of the states of a layer: inputs of its convolution, in the dtype of hidden
    states, and a recurrent state in float32."""
    for kind, shape, own in (("conv", conv, dtype), ("recurrent", recurrent, torch.float32)):
        if (state := states.get((layer_idx, kind, 0))) is None or (state.shape, state.dtype) != (shape, own):
            yield f"other states than {[*shape]} of {own}"
