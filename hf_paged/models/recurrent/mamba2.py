"""Layers of Mamba-2 by hf_paged's kernels: what they read of a layer, and why its own module runs.

Projections run by their own modules; what lies between them is one launch on the rows' slots in decode steps, before a
norm by its own module, and three in packed prompts, without a copy of states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_paged.device.cuda import compute_capability
from hf_paged.kernels.recurrent.grouped_rms_norm import grouped_rms_norm
from hf_paged.kernels.recurrent.mamba2 import Mamba2Weights, mamba2, takes_sizes
from hf_paged.kernels.recurrent.packed_convolution import packed_convolution
from hf_paged.kernels.recurrent.packed_mamba2 import Steps, fits, limits_in, packed_mamba2
from hf_paged.models.base import StateShape
from hf_paged.models.recurrent.plain_weights import unlike_layers, unlike_states
from hf_paged.models.recurrent.view import StateView

# Module and class of layers whose forwards are alike.
_LAYERS = {(f"transformers.models.{package}.modeling_{package}", name) for package, name in (
    ("bamba", "BambaMixer"), ("granitemoehybrid", "GraniteMoeHybridMambaLayer"), ("mamba2", "Mamba2Mixer"),
    ("nemotron_h", "NemotronHMamba2Mixer"), ("zamba2", "Zamba2MambaMixer"),
)}

# Of a head and its states, as published, with which the kernel of packed prompts was tried on Hopper GPUs; compiled for
# others it spills registers by the kilobyte.
_TRIED_SIZES, _TRIED_CAPABILITY = {(64, 64), (64, 128)}, (9, 0)


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


def prompts(layer: Any, hidden_states: torch.Tensor, cache: StateView, **_: Any) -> torch.Tensor:
    """Compute such a layer on the tokens of a cache's packed rows: [1, T, H] -> [1, T, H]."""
    shared = layer.n_groups * layer.ssm_state_size
    gate, *parts, dt = layer.in_proj(hidden_states)[0, :, None].split(
        [layer.intermediate_size, layer.intermediate_size, shared, shared, layer.num_heads], -1)
    states, rows = cache.lines(layer.layer_idx).states, cache.packed
    assert rows is not None
    mixed = packed_convolution(parts, layer.conv1d.weight, layer.conv1d.bias, states.conv, rows)
    steps = Steps(dt[:, 0], layer.A_log, layer.D, layer.dt_bias, *limits_in(dt.dtype, *layer.time_step_limit))
    made, norm = packed_mamba2(mixed, steps, states.recurrent, rows).flatten(1), layer.norm
    made = grouped_rms_norm(made, gate[:, 0], norm.weight, made.shape[1] // norm.group_size, norm.variance_epsilon)
    output: torch.Tensor = layer.out_proj(made[None])
    return output


def packs(layer: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `prompts` computes this layer of which `misfit` finds none; on Hopper GPUs alone, with sizes of
    published models."""
    norm = layer.norm
    is_of_file = type(norm).__module__ == type(layer).__module__ and type(norm).__name__.endswith("RMSNormGated")
    is_known = is_of_file and hasattr(norm, "group_size") and norm.weight.shape == (layer.intermediate_size,) and not [
        *unlike_layers((norm,), {"norm": norm.weight}, {}, dtype)]
    return is_known and _is_tried((layer.head_dim, layer.ssm_state_size), device) and fits(layer.ssm_state_size, device)


def _is_tried(sizes: tuple[int, int], device: torch.device) -> bool:
    return device.type != "cuda" or (sizes in _TRIED_SIZES and compute_capability(device) == _TRIED_CAPABILITY)


def token_bytes(layer: Any, dtype: torch.dtype) -> int:
    """Return the bytes that `prompts` takes for each token, besides what projections make."""
    return dtype.itemsize * (layer.conv_dim + layer.intermediate_size) + 4 * layer.intermediate_size


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
