"""Gated delta nets by hf_paged's kernels: what they read of a layer, and why its own module runs instead.

Projections run by their own modules; what lies between them is one launch on the rows' slots in decode steps, and four
in packed prompts, without a copy of states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hf_paged.kernels.recurrent.delta_net import DeltaNetInputs, DeltaNetWeights, delta_net, takes_sizes
from hf_paged.kernels.recurrent.gated_rms_norm import gated_rms_norm
from hf_paged.kernels.recurrent.packed_convolution import packed_convolution
from hf_paged.kernels.recurrent.packed_delta_rule import DeltaGates, fits, packed_delta_rule, scratch_bytes
from hf_paged.models.base import StateShape
from hf_paged.models.recurrent.plain_weights import unlike_layers, unlike_states
from hf_paged.models.recurrent.view import StateView


def _of_four_products(layer: Any, hidden: torch.Tensor) -> DeltaNetInputs:
    """Project like Qwen3.5: queries, keys and values side by side, and a product each for gates, beta and alpha."""
    heads, group = layer.num_k_heads, layer.num_v_heads // layer.num_k_heads
    query, key, value = layer.in_proj_qkv(hidden).flatten(0, 1).split(
        [layer.key_dim, layer.key_dim, layer.value_dim], -1)
    gate, beta, alpha = (product(hidden).flatten(0, 1) for product in (layer.in_proj_z, layer.in_proj_b,
                                                                       layer.in_proj_a))
    return DeltaNetInputs(
        query.unflatten(1, (heads, -1)), key.unflatten(1, (heads, -1)),
        *(part.unflatten(1, (heads, group, layer.head_v_dim)) for part in (value, gate)),
        *(part.unflatten(1, (heads, group)) for part in (alpha, beta)))


def _of_two_products(layer: Any, hidden: torch.Tensor) -> DeltaNetInputs:
    """Project like Qwen3-Next: all that belongs to a head of keys side by side."""
    heads, group = layer.num_k_heads, layer.num_v_heads // layer.num_k_heads
    width = group * layer.head_v_dim
    query, key, value, gate = layer.in_proj_qkvz(hidden).flatten(0, 1).unflatten(1, (heads, -1)).split(
        [layer.head_k_dim, layer.head_k_dim, width, width], -1)
    beta, alpha = layer.in_proj_ba(hidden).flatten(0, 1).unflatten(1, (heads, -1)).split([group, group], -1)
    value, gate = (part.unflatten(2, (group, layer.head_v_dim)) for part in (value, gate))
    return DeltaNetInputs(query, key, value, gate, alpha, beta)


# By module and class of a layer: how its forward projects.
_LAYERS: Mapping[tuple[str, str], Callable[[Any, torch.Tensor], DeltaNetInputs]] = {
    (f"transformers.models.{package}.modeling_{package}", f"{name}GatedDeltaNet"): project
    for package, name, project in (
        ("qwen3_5", "Qwen3_5", _of_four_products), ("qwen3_5_moe", "Qwen3_5Moe", _of_four_products),
        ("qwen3_next", "Qwen3Next", _of_two_products),
    )
}


def handles(module: nn.Module) -> bool:
    """Return whether a module is of a class that the kernel may stand in for."""
    return (type(module).__module__, type(module).__name__) in _LAYERS


def decode(layer: Any, hidden_states: torch.Tensor, cache: StateView, **_: Any) -> torch.Tensor:
    """Compute a layer that this file `handles`, of which `misfit` finds none, on one new token of each row of a cache:
    [R, 1, H] -> [R, 1, H]."""
    inputs = _LAYERS[type(layer).__module__, type(layer).__name__](layer, hidden_states)
    weights = DeltaNetWeights(layer.conv1d.weight, layer.A_log, layer.dt_bias, layer.norm.weight,
                              layer.norm.variance_epsilon)
    lines = cache.lines(layer.layer_idx)
    made = delta_net(inputs, weights, lines.states, lines.slots, lines.lengths)
    output: torch.Tensor = layer.out_proj(made[:, None])
    return output


def prompts(layer: Any, hidden_states: torch.Tensor, cache: StateView, **_: Any) -> torch.Tensor:
    """Compute such a layer on the tokens of a cache's packed rows: [1, T, H] -> [1, T, H]."""
    query, key, value, gate, alpha, beta = _LAYERS[type(layer).__module__, type(layer).__name__](layer, hidden_states)
    states, rows = cache.lines(layer.layer_idx).states, cache.packed
    assert rows is not None
    mixed = packed_convolution((query, key, value.flatten(2)), layer.conv1d.weight, None, states.conv, rows)
    gates = DeltaGates(alpha, beta, layer.A_log, layer.dt_bias)
    made = packed_delta_rule(mixed, gates, states.recurrent, rows)
    made = gated_rms_norm(made, gate, layer.norm.weight, layer.norm.variance_epsilon)
    output: torch.Tensor = layer.out_proj(made[None])
    return output


def packs(layer: Any, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether `prompts` computes this layer of which `misfit` finds none."""
    return fits(layer.head_k_dim, dtype, device)


def token_bytes(layer: Any, dtype: torch.dtype) -> int:
    """Return the bytes that `prompts` takes for each token, besides what projections make."""
    return scratch_bytes(layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim, dtype.itemsize)


def misfit(layer: Any, states: tuple[StateShape, ...], dtype: torch.dtype) -> str | None:
    """Return what the kernel does not take of a layer that this file `handles`, with these states, or None.

    Eligibility has checked the layer's code. ``dtype``: of hidden states.
    """
    return next(_unlike(layer, {state.key: state for state in states}, dtype), None)


def _unlike(layer: Any, states: Mapping[Any, StateShape], dtype: torch.dtype) -> Iterator[str]:
    conv, norm, taps = layer.conv1d, layer.norm, layer.conv_kernel_size
    if type(conv) is not nn.Conv1d or conv.bias is not None or norm.activation != "silu" or layer.activation != "silu":
        yield "another convolution than one without biases, or another activation than silu"
        return
    yield from unlike_layers((layer, conv, norm), {"conv1d": conv.weight, "norm": norm.weight},
                             {"A_log": layer.A_log, "dt_bias": layer.dt_bias}, dtype)
    if not takes_sizes(layer.head_k_dim, layer.head_v_dim, taps):
        yield f"heads of {layer.head_k_dim} and {layer.head_v_dim}, or a convolution of {taps}"
    channels, heads = 2 * layer.key_dim + layer.value_dim, layer.num_v_heads
    state = heads, layer.head_k_dim, layer.head_v_dim
    yield from unlike_states(layer.layer_idx, (channels, taps), state, states, dtype)
    if tuple(conv.weight.shape) != (channels, 1, taps) or heads % layer.num_k_heads:
        yield f"a convolution of {[*conv.weight.shape]} or {heads} heads"
