"""Linear layers of 4 bits, bitsandbytes' `Linear4bit`, and what kernels read of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hf_paged.guards.original_classes import patched_class
from hf_paged.kernels.dequantize_4bit import NestedScales, Packed4Bit
from hf_paged.kernels.layer.linear_4bit import Packed4BitGroup, why_not

_BITSANDBYTES, _LINEARS = "bitsandbytes.nn.modules", ("Linear4bit", "LinearNF4", "LinearFP4")

Groups = Mapping[str, tuple[Any, ...]]  # linear layers that read one input, by a name


def has_4bit(groups: Groups) -> bool:
    """Return whether a layer of these groups is a 4-bit one."""
    return any(is_4bit(linear) for linears in groups.values() for linear in linears)


def may_have_4bit() -> bool:
    """Return whether bitsandbytes is loaded: else there can be no 4-bit layer."""
    return _BITSANDBYTES in sys.modules


def is_4bit(layer: nn.Module) -> bool:
    """Return whether a layer is bitsandbytes' `Linear4bit`, whose code may be patched and whose settings any."""
    home = sys.modules.get(_BITSANDBYTES)
    return home is not None and type(layer) in (getattr(home, name, None) for name in _LINEARS)


def packed_weight(layer: Any, dtype: torch.dtype) -> Packed4Bit | None:
    """Return the weight of a 4-bit layer that multiplies inputs of `dtype` in that dtype, else None.

    None, too, if the layer has hooks or patched code, if it has not quantized its weight yet, if a block of one scale
    crosses rows (bitsandbytes 0.50.2 reads other scales then on a CPU), and if the bytes were laid out anew for a CPU.
    """
    if not is_4bit(layer) or layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer):
        return None
    state = vars(layer.weight).get("quant_state") or vars(layer).get("quant_state")
    if state is None or getattr(state, "packing_format_for_cpu", False) or patched_class((type(layer),)) is not None:
        return None
    # The first input sets the dtype where none is set.
    computes_in = layer.compute_dtype if layer.compute_type_is_set or dtype == torch.float16 else dtype
    shape, is_known = torch.Size(state.shape), state.quant_type in ("nf4", "fp4")
    # Versions before `gemm_4bit` round to the dtype of the weight that was quantized first.
    rounds_twice = state.dtype != dtype and not hasattr(torch.ops.bitsandbytes, "gemm_4bit")
    if computes_in not in (dtype, None) or not is_known or rounds_twice or len(shape) != 2:
        return None
    if shape != torch.Size((layer.out_features, layer.in_features)) or shape[1] % state.blocksize or state.code is None:
        return None
    with torch._C.DisableTorchFunctionSubclass():
        data = layer.weight.detach().reshape(-1).view(torch.uint8)
    nested = None
    if state.nested:
        nested = NestedScales(state.state2.code, state.state2.absmax, state.offset, state.state2.blocksize)
    return Packed4Bit(data, shape, state.code, state.absmax, state.blocksize, nested)


def packed_group(linears: tuple[Any, ...], dtype: torch.dtype, scratch: torch.Tensor) -> Packed4BitGroup | None:
    """Return 4-bit layers of one input as kernels multiply with them, or None if one is no layer that they take."""
    weights = [packed for linear in linears if (packed := packed_weight(linear, dtype)) is not None]
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    whole = len(weights) == len(linears) and len(biases) in (0, len(linears))
    if not whole or any(bias.dtype != dtype or not bias.is_contiguous() for bias in biases):
        return None
    return None if why_not(tuple(weights)) else Packed4BitGroup(tuple(weights), tuple(biases), scratch)
