# mypy: disallow-untyped-defs=False
"""A new token of rows in a layer of Mamba-2, between its input projection and its norm: convolution and state space
update on the rows' states in place, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_paged.kernels._triton import after_previous_kernel, jit, on_device_of, pdl_options, require_triton, tl, triton
from hf_paged.kernels.recurrent._convolution import (
    LayerStates,
    convolved,
    convolved_in_place,
    exp,
    softplus,
    store_window,
    window_of,
)

MAX_GROUPS = 16  # for which there are counters in a slot
MAX_DIM, MAX_STATE = 128, 256


class Mamba2Weights(NamedTuple):
    """Weights of the layer, contiguous; H heads.

    Attributes:
        conv: ``[C, 1, T]``, the inputs' dtype.
        conv_bias: ``[C]``, or None.
        a_log, d, dt_bias: ``[H]``, ``d`` of the inputs' dtype.
    """

    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    a_log: torch.Tensor
    d: torch.Tensor
    dt_bias: torch.Tensor


def takes_sizes(channels: int, heads: int, dim: int, size: int, taps: int) -> bool:
    """Return whether the op takes heads of ``dim`` with states of ``size``, of so many channels and taps."""
    ranges = (dim, 16, MAX_DIM), (size, 16, MAX_STATE), (taps, 2, 8)
    groups, rest = divmod(channels - heads * dim, 2 * size)
    has_groups = not rest and 1 <= groups <= MAX_GROUPS and not heads % groups
    return has_groups and all(not value & (value - 1) and least <= value <= most for value, least, most in ranges)


def mamba2(mixed: torch.Tensor, dt: torch.Tensor, weights: Mamba2Weights, states: LayerStates,
           arrivals: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a new token of each row, which changes the states in its slot.

    Args:
        mixed: ``[R, C]``, channels of H heads of P, then of B and of C, N of each of G groups; rows may be strided.
        dt: ``[R, H]``, mixed's dtype; rows may be strided.
        weights: of the layer.
        states: of all slots, ``[S, H, P, N]``; P, N and T are powers of two, see `takes_sizes`.
        arrivals: ``[S, MAX_GROUPS]`` int32 zeros, which no two launches at the same time share.
        slots: ``[R]`` int32, no two alike but for padding.
        lengths: ``[R]`` int32: rows of length 0 are padding, which changes no state; None: there are none.

    Returns:
        ``[R, H * P]``, contiguous; zeros for padding. Rounded where transformers' `mamba2_selective_state_update`
        rounds, and its convolution before.
    """
    run = mamba2_triton if mixed.is_cuda else mamba2_reference
    return run(mixed, dt, weights, states, arrivals, slots, lengths)


def mamba2_reference(mixed: torch.Tensor, dt: torch.Tensor, weights: Mamba2Weights, states: LayerStates,
                     arrivals: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`mamba2` in plain torch."""
    (heads, dim, size), dtype = states.recurrent.shape[1:], mixed.dtype
    real = slots >= 0 if lengths is None else lengths > 0
    lines = slots[real].long()
    window = torch.cat([states.conv[lines, :, 1:], mixed[real, :, None]], 2)
    states.conv[lines] = window
    channels = F.silu(F.conv1d(window, weights.conv, weights.conv_bias, groups=len(weights.conv))[:, :, 0])
    x, b, c = channels.split([heads * dim, *[(mixed.shape[1] - heads * dim) // 2] * 2], 1)
    x = x.unflatten(1, (heads, dim))
    b, c = (part.unflatten(1, (-1, size)) for part in (b, c))
    b, c = (part.repeat_interleave(heads // part.shape[1], 1) for part in (b, c))

    step = F.softplus(dt[real] + weights.dt_bias.to(dtype))[:, :, None]
    decay = torch.exp(step.float() * -weights.a_log.float().exp()[:, None])[..., None]
    added = (step * b)[:, :, None] * x[..., None]
    state = states.recurrent[lines] * decay + added
    states.recurrent[lines] = state
    read = (state.to(dtype).float() * c.float()[:, :, None]).sum(-1).to(dtype)
    out = mixed.new_zeros(len(mixed), heads * dim)
    out[real] = (read + x * weights.d[:, None]).to(dtype).flatten(1)
    return out


@jit(varying_pointers=("slots", "lengths"))
def _mamba2_kernel(
    mixed, dt, conv_weight, conv_bias, a_log, d, dt_bias, conv_states, states, arrivals, slots, lengths, out, conv_slot,
    state_slot, mixed_row, dt_row, HEADS: tl.constexpr, GROUPS: tl.constexpr, P: tl.constexpr, SIZE: tl.constexpr,
    TAPS: tl.constexpr, BLOCK: tl.constexpr, MAX_GROUPS: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_LENGTHS: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Programs: by head and BLOCK of its P channels, and by row. Those of a group read its channels of B and C, whose
    new inputs the last of them writes."""
    after_previous_kernel(PDL)
    BLOCKS: tl.constexpr = P // BLOCK
    SHARING: tl.constexpr = HEADS // GROUPS * BLOCKS
    head, row = tl.program_id(0) // BLOCKS, tl.program_id(1).to(tl.int64)
    group = head // (HEADS // GROUPS)
    dtype = out.dtype.element_ty
    p = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, SIZE)
    out += (row * HEADS + head) * P
    length = 1
    if HAS_LENGTHS:
        length = tl.load(lengths + row)
    if length > 0:
        slot = tl.load(slots + row).to(tl.int64)
        conv_states += slot * conv_slot
        mixed += row * mixed_row
        at = slot * state_slot + head * (P * SIZE) + p[:, None] * SIZE + n[None, :]
        state = tl.load(states + at)
        b_channel = HEADS * P + group * SIZE + n
        c_channel = b_channel + GROUPS * SIZE
        b_window = window_of(conv_states, b_channel, tl.load(mixed + b_channel), TAPS)
        c_window = window_of(conv_states, c_channel, tl.load(mixed + c_channel), TAPS)
        # All threads have read the inputs of before when the arrival is counted.
        tl.debug_barrier()
        counter = arrivals + slot * MAX_GROUPS + group
        if tl.atomic_add(counter, 1, sem="acq_rel") == SHARING - 1:
            store_window(conv_states, b_channel, b_window, TAPS)
            store_window(conv_states, c_channel, c_window, TAPS)
            tl.store(counter, 0)
        b = convolved(b_window, conv_weight, conv_bias, b_channel, TAPS, HAS_BIAS, INTERPRETED)
        c = convolved(c_window, conv_weight, conv_bias, c_channel, TAPS, HAS_BIAS, INTERPRETED)
        channel = head * P + p
        x = convolved_in_place(conv_states, conv_weight, conv_bias, channel, tl.load(mixed + channel), TAPS, HAS_BIAS,
                               INTERPRETED)
        step = tl.load(dt + row * dt_row + head).to(tl.float32)
        step = (step + tl.load(dt_bias + head).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        step = softplus(step, INTERPRETED).to(dtype).to(tl.float32)
        decay = exp(step * -exp(tl.load(a_log + head).to(tl.float32), INTERPRETED), INTERPRETED)
        scaled = (step * b).to(dtype).to(tl.float32)
        state = state * decay + (scaled[None, :] * x[:, None]).to(dtype).to(tl.float32)
        tl.store(states + at, state)
        read = tl.sum(state.to(dtype).to(tl.float32) * c[None, :], 1).to(dtype).to(tl.float32)
        skipped = (x * tl.load(d + head).to(tl.float32)).to(dtype).to(tl.float32)
        tl.store(out + p, (read + skipped).to(dtype))
    else:
        tl.store(out + p, tl.zeros([BLOCK], dtype))


def mamba2_triton(mixed: torch.Tensor, dt: torch.Tensor, weights: Mamba2Weights, states: LayerStates,
                  arrivals: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor | None = None, *,
                  block: int = 16, num_warps: int = 4) -> torch.Tensor:
    """:func:`mamba2` as one Triton launch; ``block``: channels of a head in a program.

    Of 16 to 64 channels, 16 are fastest on an H100: 878 us for 256 rows of 128 heads of 64 x 128, whose states are read
    and written in 730 us at 3.0 TB/s.
    """
    require_triton()
    num_rows, (heads, dim, size) = len(mixed), states.recurrent.shape[1:]
    out = mixed.new_empty(num_rows, heads * dim)
    if not num_rows:
        return out
    with on_device_of(out):
        _mamba2_kernel[(heads * dim // block, num_rows)](
            mixed, dt, *weights, *states, arrivals, slots, slots if lengths is None else lengths, out,
            *states.slot_strides, mixed.stride(0), dt.stride(0), HEADS=heads,
            GROUPS=(mixed.shape[1] - heads * dim) // (2 * size), P=dim, SIZE=size, TAPS=weights.conv.shape[-1],
            BLOCK=block, MAX_GROUPS=MAX_GROUPS, HAS_BIAS=weights.conv_bias is not None,
            HAS_LENGTHS=lengths is not None, INTERPRETED=triton.knobs.runtime.interpret, num_warps=num_warps,
            enable_fp_fusion=False, **pdl_options(out),
        )
    return out
