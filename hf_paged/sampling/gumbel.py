# mypy: disallow-untyped-defs=False
"""Random numbers of the sampler: Exponential(1) variates hashed from (seed, position, index), in torch and in Triton.

-log of a variate is Gumbel noise. Indices 0 .. 2**31 - 1 are tokens; groups of tokens (`sample_tokens`) start at
:data:`GROUP_STREAM`, so that no token and group share a number.
"""

from __future__ import annotations

import torch

from hf_paged.kernels._triton import jit, tl

MASK32 = 0xFFFFFFFF
GROUP_STREAM = 0x80000000


def exponential_noise(
    seed: torch.Tensor, position: torch.Tensor, vocab_size: int, first_index: int = 0
) -> torch.Tensor:
    """Return Exponential(1) variates float32 [R, vocab_size], a function of (seed, position, token) alone."""
    index = torch.arange(first_index, first_index + vocab_size, device=seed.device, dtype=torch.int64)
    return exponential_noise_at(seed, position, index[None, :])


def exponential_noise_at(seed: torch.Tensor, position: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the variates of ``index`` [R or 1, N] int64, float32 [R, N].

    32 hashed bits u in (0, 1) give -log1p(-u): small values, which decide the arg-max, keep full precision. u stays
    below 1 in float32, since an infinite variate would bar its token even if no other token is left.
    """
    low, high = seed & MASK32, (seed >> 32) & MASK32
    key0 = _mix(low ^ _mix(high ^ _mix(position ^ 0x9E3779B9)))[:, None]
    key1 = _mix(high ^ _mix(low ^ _mix(position ^ 0x85EBCA6B)))[:, None]
    bits = _mix(_mix(index ^ key0) ^ key1)
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log1p(-uniform)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Mix 32-bit values in int64 tensors by the finaliser "lowbias32" (C. Wellons, hash-prospector)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


@jit()
def _mix32(x):
    """Compute :func:`_mix` in uint32 arithmetic."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@jit()
def row_keys(seed, position):
    """Return the two uint32 keys of a row in :func:`exponential_noise_at`."""
    low, high, place = seed.to(tl.uint32), (seed >> 32).to(tl.uint32), position.to(tl.uint32)
    key0 = _mix32(low ^ _mix32(high ^ _mix32(place ^ 0x9E3779B9)))
    key1 = _mix32(high ^ _mix32(low ^ _mix32(place ^ 0x85EBCA6B)))
    return key0, key1


@jit()
def hashed_bits(index, key0, key1):
    return _mix32(_mix32(index.to(tl.uint32) ^ key0) ^ key1)


@jit()
def exponential_of(bits, INTERPRETED: tl.constexpr):
    uniform = tl.minimum((bits.to(tl.float32) + 0.5) * (1.0 / 4294967296.0), 1.0 - 1.0 / 16777216.0)
    if INTERPRETED:  # the interpreter lacks log1p; 1 - uniform is exact in float64
        noise = -tl.log(1.0 - uniform.to(tl.float64)).to(tl.float32)
    else:
        noise = -tl.extra.cuda.libdevice.log1p(-uniform)
    return noise


@jit()
def gumbel_noise(index, key0, key1, INTERPRETED: tl.constexpr):
    return -tl.log(exponential_of(hashed_bits(index, key0, key1), INTERPRETED))
