"""Layers of Mamba-2 by hf_paged's kernel in decode steps: what it reads of a layer, and why its own module runs.

Projections and the norm run by their own modules; what lies between them is one launch on the rows' slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_paged.kernels.recurrent.mamba2 import Mamba2Weights, mamba2, takes_sizes
from hf_paged.models.base import StateShape
from hf_paged.models.recurrent.plain_weights import unlike_layers, unlike_states
from hf_paged.models.recurrent.view import StateView

# Module and class of layers whose forwards are alike.
_LAYERS = {(f"transformers.models.{package}.modeling_{package}", name) for package, name in (
    ("bamba", "BambaMixer"), ("granitemoehybrid", "GraniteMoeHybridMambaLayer"), ("mamba2", "Mamba2Mixer"),
    ("nemotron_h", "NemotronHMamba2Mixer"), ("zamba2", "Zamba2MambaMixer"),
)}


def handles(module: nn.Module) -> bool:
    """Return whether a module is of a class that the kernel may stand in for."""
    return (type(module).__module__, type(module).__name__) in _LAYERS


def decode(layer: Any, hidden_states: torch.Tensor, cache: StateView, **_: Any) -> torch.Tensor:
    """Compute a layer that this file `handles`, of which `misfit` finds none, on one new token of each row of a cache:
    [R, 1, H] -> [R, 1, H]."""
    gate, mixed, dt = layer.in_proj(hidden_states).split([layer.intermediate_size, layer.conv_dim, layer.num_heads], -1)
    conv = layer.conv1d
    weights = Mamba2Weights(conv.weight, conv.bias, layer.A_log, layer.D, layer.dt_bias)
    lines = cache.lines(layer.layer_idx)
    made = mamba2(mixed[:, 0], dt[:, 0], weights, lines.states, lines.arrivals, lines.slots, lines.lengths)
    output: torch.Tensor = layer.out_proj(layer.norm(made[:, None], gate).to(hidden_states.dtype))
    return output


def misfit(layer: Any, states: tuple[StateShape, ...], dtype: torch.dtype) -> str | None:
    """Return what the kernel does not take of a layer that this file `handles`, with these states, or None.

    Eligibility has checked the layer's code. ``dtype``: of hidden states.
    """
    return next(_unlike(layer, {state.key: state for state in states}, dtype), None)


def _unlike(layer: Any, states: Mapping[Any, StateShape], dtype: torch.dtype) -> Iterator[str]:
    conv, taps = layer.conv1d, layer.conv_kernel_size
    if type(conv) is not nn.Conv1d or layer.activation != "silu":
        yield "another convolution than torch's, or another activation than silu"
        return
    of_dtype = {"conv1d": conv.weight, "D": layer.D} | ({} if conv.bias is None else {"bias": conv.bias})
    yield from unlike_layers((layer, conv), of_dtype, {"A_log": layer.A_log, "dt_bias": layer.dt_bias}, dtype)
    heads, dim, size = layer.num_heads, layer.head_dim, layer.ssm_state_size
    if not takes_sizes(layer.conv_dim, heads, dim, size, taps) or heads * dim != layer.intermediate_size or (
            tuple(conv.weight.shape) != (layer.conv_dim, 1, taps)):
        yield f"{heads} heads of {dim} with states of {size}, or a convolution of {[*conv.weight.shape]}"
    yield from unlike_states(layer.layer_idx, (layer.conv_dim, taps), (heads, dim, size), states, dtype)
