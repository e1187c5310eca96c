# mypy: disallow-untyped-defs=False
"""States of a layer in all slots, and the convolution of a token's channels behind their last inputs."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels._triton import jit, tl


class LayerStates(NamedTuple):
    """States of a layer in S slots, each contiguous.

    Attributes:
        conv: ``[S, C, T]``, the inputs' dtype: the last T inputs of each of C channels.
        recurrent: ``[S, heads, ...]`` float32.
    """

    conv: torch.Tensor
    recurrent: torch.Tensor

    @property
    def slot_strides(self) -> tuple[int, int]:
        return self.conv.stride(0), self.recurrent.stride(0)


@jit()
def exp(x, INTERPRETED: tl.constexpr):
    # libdevice's exp, as torch's on CUDA; tl.exp is ex2.approx.
    return tl.exp(x) if INTERPRETED else tl.extra.cuda.libdevice.exp(x)


@jit()
def silu(x, INTERPRETED: tl.constexpr):
    return tl.div_rn(x, 1.0 + exp(-x, INTERPRETED))


@jit()
def softplus(x, INTERPRETED: tl.constexpr):
    power = exp(tl.minimum(x, 20.0), INTERPRETED)
    if INTERPRETED:
        above = 1.0 + power
        low = tl.where(above == 1.0, power, tl.log(above) * power / tl.where(above == 1.0, 1.0, above - 1.0))
    else:
        low = tl.extra.cuda.libdevice.log1p(power)
    return tl.where(x > 20.0, x, low)


@jit()
def window_of(states, channel, new, TAPS: tl.constexpr):
    """The last inputs [N, TAPS] of channels [N], their new ones [N] among them."""
    tap = tl.arange(0, TAPS)[None, :]
    before = tl.load(states + channel[:, None] * TAPS + tap + 1, mask=tap < TAPS - 1, other=0.0)
    return tl.where(tap == TAPS - 1, new[:, None], before)


@jit()
def store_window(states, channel, window, TAPS: tl.constexpr):
    """Write the last inputs of channels. Those of before must have been read by all threads (`tl.debug_barrier`)."""
    tl.store(states + channel[:, None] * TAPS + tl.arange(0, TAPS)[None, :], window)


@jit()
def convolved(window, weight, bias, channel, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, INTERPRETED: tl.constexpr):
    """silu of the convolution of channels over their last inputs, both rounded to the inputs' dtype; float32 [N]."""
    taps = tl.load(weight + channel[:, None] * TAPS + tl.arange(0, TAPS)[None, :]).to(tl.float32)
    mixed = tl.sum(window.to(tl.float32) * taps, 1)
    if HAS_BIAS:
        mixed += tl.load(bias + channel).to(tl.float32)
    mixed = mixed.to(window.dtype).to(tl.float32)
    return silu(mixed, INTERPRETED).to(window.dtype).to(tl.float32)


@jit()
def convolved_in_place(
    states, weight, bias, channel, new, TAPS: tl.constexpr, HAS_BIAS: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """`convolved` of channels that no other program reads, whose new inputs enter the states."""
    window = window_of(states, channel, new, TAPS)
    tl.debug_barrier()
    store_window(states, channel, window, TAPS)
    return convolved(window, weight, bias, channel, TAPS, HAS_BIAS, INTERPRETED)
