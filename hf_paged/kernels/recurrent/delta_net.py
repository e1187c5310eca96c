# mypy: disallow-untyped-defs=False
"""A new token of rows in a gated delta net, between its projections: convolution, gates, delta rule and gated norm on
the rows' states in place, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_paged.kernels._triton import after_previous_kernel, jit, on_device_of, pdl_options, require_triton, tl, triton
from hf_paged.kernels.recurrent._convolution import LayerStates, convolved_in_place, exp, silu, softplus

MAX_DIM = 256  # of heads, which are powers of two
L2_EPS = 1e-6  # of transformers' `l2norm`


class DeltaNetInputs(NamedTuple):
    """What projections make of R tokens, of H heads of keys with G heads of values each; dtypes are alike, the last
    dims contiguous.

    Attributes:
        query, key: ``[R, H, K]``.
        value, gate: ``[R, H, G, V]``, the heads of one head of keys side by side; ``gate`` of the norm.
        alpha, beta: ``[R, H, G]``, of the decay, and of the share of the new value.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    gate: torch.Tensor
    alpha: torch.Tensor
    beta: torch.Tensor


class DeltaNetWeights(NamedTuple):
    """Weights of the layer, contiguous.

    Attributes:
        conv: ``[C, 1, T]``, the inputs' dtype: T taps for each channel of all queries, keys and values, in this order.
        a_log, dt_bias: ``[H * G]``.
        norm: ``[V]``, the inputs' dtype.
        eps: added to the mean square.
    """

    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    eps: float


def takes_sizes(key_dim: int, value_dim: int, taps: int) -> bool:
    """Return whether the op takes heads of these sizes, and a convolution of so many taps."""
    ranges = (key_dim, 16, MAX_DIM), (value_dim, 16, MAX_DIM), (taps, 2, 8)
    return all(not size & (size - 1) and least <= size <= most for size, least, most in ranges)


def delta_net(inputs: DeltaNetInputs, weights: DeltaNetWeights, states: LayerStates, slots: torch.Tensor,
              lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a new token of each row, which changes the states in its slot.

    Args:
        inputs: of R rows.
        weights: of the layer.
        states: of all slots, ``[S, H * G, K, V]``; K and V are powers of two from 16 to 256, T from 2 to 8.
        slots: ``[R]`` int32, no two alike but for padding.
        lengths: ``[R]`` int32: rows of length 0 are padding, which changes no state; None: there are none.

    Returns:
        ``[R, H * G * V]``, contiguous; zeros for padding. Rounded where transformers' Qwen3-Next and Qwen3.5 round: the
        convolution before and behind silu, beta, the rule's result, and in the norm.
    """
    run = delta_net_triton if inputs.query.is_cuda else delta_net_reference
    return run(inputs, weights, states, slots, lengths)


def delta_net_reference(inputs: DeltaNetInputs, weights: DeltaNetWeights, states: LayerStates, slots: torch.Tensor,
                        lengths: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`delta_net` in plain torch."""
    (num_rows, heads, key_dim), (group, value_dim), dtype = (
        inputs.query.shape, inputs.value.shape[2:], inputs.query.dtype)
    real = slots >= 0 if lengths is None else lengths > 0
    lines = slots[real].long()
    query, key, value, gate, alpha, beta = (tensor[real] for tensor in inputs)
    mixed = torch.cat([query.flatten(1), key.flatten(1), value.flatten(1)], 1)
    window = torch.cat([states.conv[lines, :, 1:], mixed[:, :, None]], 2)
    states.conv[lines] = window
    mixed = F.silu(F.conv1d(window, weights.conv, groups=len(weights.conv))[:, :, 0]).float()
    query, key = (_normed(part.unflatten(1, (heads, key_dim))).repeat_interleave(group, 1)
                  for part in mixed[:, : 2 * heads * key_dim].chunk(2, 1))
    query, value = query / key_dim**0.5, mixed[:, 2 * heads * key_dim :].unflatten(1, (heads * group, value_dim))

    share = beta.flatten(1).sigmoid().float()[:, :, None]
    decay = (-weights.a_log.float().exp() * F.softplus(alpha.flatten(1).float() + weights.dt_bias)).exp()
    state = states.recurrent[lines] * decay[:, :, None, None]
    delta = (value - (state * key[..., None]).sum(-2)) * share
    state = state + key[..., None] * delta[:, :, None]
    states.recurrent[lines] = state
    attended = (state * query[..., None]).sum(-2).to(dtype).float()

    variance = attended.pow(2).mean(-1, keepdim=True)
    normed = weights.norm * (attended * torch.rsqrt(variance + weights.eps)).to(dtype)
    normed = normed * F.silu(gate.reshape(attended.shape).float())
    out = normed.new_zeros(num_rows, heads * group * value_dim, dtype=dtype)
    out[real] = normed.to(dtype).flatten(1)
    return out


def _normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPS)


@jit()
def _sigmoid(x, INTERPRETED: tl.constexpr):
    return tl.div_rn(tl.zeros_like(x) + 1.0, 1.0 + exp(-x, INTERPRETED))


@jit(varying_pointers=("slots", "lengths"))
def _delta_net_kernel(
    query, key, value, gate, alpha, beta, conv_weight, a_log, dt_bias, norm_weight, conv_states, states, slots, lengths,
    out, conv_slot, state_slot, query_row, query_head, key_row, key_head, value_row, value_head, gate_row, gate_head,
    alpha_row, alpha_head, beta_row, beta_head, eps, HEADS: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr,
    V: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr, ROOT: tl.constexpr, L2_EPS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Programs: by head of keys, and by row. Each goes through states of its heads of values by tiles [K, BLOCK]."""
    after_previous_kernel(PDL)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    BLOCKS: tl.constexpr = V // BLOCK
    TILES: tl.constexpr = GROUP * BLOCKS
    dtype = out.dtype.element_ty
    k, v, block = tl.arange(0, K), tl.arange(0, BLOCK), tl.arange(0, BLOCKS)[:, None]
    column = block * BLOCK + v[None, :]
    out += (row * HEADS + head) * (GROUP * V)
    length = 1
    if HAS_LENGTHS:
        length = tl.load(lengths + row)
    if length > 0:
        slot = tl.load(slots + row).to(tl.int64)
        conv_states += slot * conv_slot
        at = slot * state_slot + head * (GROUP * K * V) + k[:, None] * V + v[None, :]
        state = tl.load(states + at)
        query_at = query + row * query_row + head * query_head + k
        q = convolved_in_place(conv_states, conv_weight, None, head * K + k, tl.load(query_at), TAPS, False,
                               INTERPRETED)
        q = q * tl.rsqrt(tl.sum(q * q, 0) + L2_EPS) / ROOT
        key_at = key + row * key_row + head * key_head + k
        key_vector = convolved_in_place(conv_states, conv_weight, None, (HEADS + head) * K + k, tl.load(key_at), TAPS,
                                        False, INTERPRETED)
        key_vector = key_vector * tl.rsqrt(tl.sum(key_vector * key_vector, 0) + L2_EPS)
        value += row * value_row + head * value_head
        gate += row * gate_row + head * gate_head
        alpha += row * alpha_row + head * alpha_head
        beta += row * beta_row + head * beta_head
        channels = 2 * HEADS * K + head * GROUP * V
        attended = tl.zeros([BLOCKS, BLOCK], tl.float32)
        for tile in range(TILES):
            member, part = tile // BLOCKS, tile % BLOCKS
            here = at + (member * K * V + part * BLOCK)
            following = tile + 1  # whose state is on its way while this one is computed with
            following_at = at + (following // BLOCKS * K * V + following % BLOCKS * BLOCK)
            next_state = tl.load(states + following_at, mask=k[:, None] < (TILES - following) * K, other=0.0)
            offset = member * V + part * BLOCK + v
            new = convolved_in_place(conv_states, conv_weight, None, channels + offset, tl.load(value + offset), TAPS,
                                     False, INTERPRETED)
            share = _sigmoid(tl.load(beta + member).to(tl.float32), INTERPRETED).to(dtype).to(tl.float32)
            step = tl.load(alpha + member).to(tl.float32) + tl.load(dt_bias + head * GROUP + member).to(tl.float32)
            rate = -exp(tl.load(a_log + head * GROUP + member).to(tl.float32), INTERPRETED)
            state = state * exp(rate * softplus(step, INTERPRETED), INTERPRETED)
            delta = (new - tl.sum(state * key_vector[:, None], 0)) * share
            state = state + key_vector[:, None] * delta[None, :]
            tl.store(states + here, state)
            read = tl.sum(state * q[:, None], 0).to(dtype).to(tl.float32)
            attended = tl.where(block == part, read[None, :], attended)
            if part == BLOCKS - 1:
                variance = tl.sum(tl.sum(attended * attended, 1), 0) / V
                normed = (attended * tl.rsqrt(variance + eps)).to(dtype).to(tl.float32)
                normed = (tl.load(norm_weight + column).to(tl.float32) * normed).to(dtype).to(tl.float32)
                opened = tl.load(gate + member * V + column).to(tl.float32)
                tl.store(out + member * V + column, (normed * silu(opened, INTERPRETED)).to(dtype))
            state = next_state
    else:
        for member in range(GROUP):
            tl.store(out + member * V + column, tl.zeros([BLOCKS, BLOCK], dtype))


def delta_net_triton(inputs: DeltaNetInputs, weights: DeltaNetWeights, states: LayerStates, slots: torch.Tensor,
                     lengths: torch.Tensor | None = None, *, block: int = 32, num_warps: int = 4,
                     max_registers: int | None = 128) -> torch.Tensor:
    """:func:`delta_net` as one Triton launch; ``block``: columns of a state in registers at a time.

    Of 16 to 64 columns, 32 are fastest on an H100: 224 us for 256 rows of 16 heads of 128 x 128, whose states torch
    copies in 182 us.
    """
    require_triton()
    (num_rows, heads, key_dim), (group, value_dim) = inputs.query.shape, inputs.value.shape[2:]
    out = inputs.query.new_empty(num_rows, heads * group * value_dim)
    if not num_rows:
        return out
    strides = (stride for tensor in inputs for stride in tensor.stride()[:2])
    with on_device_of(out):
        _delta_net_kernel[(heads, num_rows)](
            *inputs, *weights[:4], *states, slots, slots if lengths is None else lengths, out, *states.slot_strides,
            *strides, weights.eps,
            HEADS=heads, GROUP=group, K=key_dim, V=value_dim, TAPS=weights.conv.shape[-1], BLOCK=min(block, value_dim),
            ROOT=key_dim**0.5, L2_EPS=L2_EPS, HAS_LENGTHS=lengths is not None,
            INTERPRETED=triton.knobs.runtime.interpret, num_warps=num_warps, enable_fp_fusion=False,
            **({} if max_registers is None else {"maxnreg": max_registers}), **pdl_options(out),
        )
    return out
