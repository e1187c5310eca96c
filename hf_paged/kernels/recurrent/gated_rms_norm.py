# mypy: disallow-untyped-defs=False
"""RMS norm of heads, and a product with silu of their gates, in one launch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hf_paged.kernels._triton import (
    after_previous_kernel,
    cdiv,
    jit,
    next_power_of_2,
    on_device_of,
    pdl_options,
    require_triton,
    tl,
    triton,
)
from hf_paged.kernels.recurrent._convolution import silu

_TILE = 2048  # elements


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute ``weight * norm(x) * silu(gate)`` of each head, rounded where transformers' Qwen3-Next and Qwen3.5 round.

    Args:
        x: ``[T, H * G, V]``, contiguous; V is a power of two.
        gate: ``[T, H, G, V]``, x's dtype, the last dim contiguous.
        weight: ``[V]``, x's dtype.
        eps: added to the mean square.

    Returns:
        ``[T, H * G * V]``, x's dtype, contiguous.
    """
    return (gated_rms_norm_triton if x.is_cuda else gated_rms_norm_reference)(x, gate, weight, eps)


def gated_rms_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """:func:`gated_rms_norm` in plain torch."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normed * F.silu(gate.flatten(1, 2).to(wide.dtype))).to(x.dtype).flatten(1)


@jit()
def _gated_rms_norm_kernel(
    x, gate, weight, out, gate_token, gate_head, gate_member, eps, HEADS: tl.constexpr, GROUP: tl.constexpr,
    V: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Programs: by BLOCK heads, and by token."""
    after_previous_kernel(PDL)
    token = tl.program_id(1).to(tl.int64)
    head, v = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, V)[None, :]
    inside = (head < HEADS * GROUP)[:, None]
    dtype = out.dtype.element_ty
    at = (token * (HEADS * GROUP) + head)[:, None] * V + v
    gate_at = gate + (token * gate_token + head // GROUP * gate_head + head % GROUP * gate_member)[:, None] + v
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    variance = tl.sum(value * value, 1) / V
    normed = (value * tl.rsqrt(variance + eps)[:, None]).to(dtype).to(tl.float32)
    normed = (tl.load(weight + v).to(tl.float32) * normed).to(dtype).to(tl.float32)
    tl.store(out + at, (normed * silu(opened, INTERPRETED)).to(dtype), mask=inside)


def gated_rms_norm_triton(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """:func:`gated_rms_norm` as one Triton launch."""
    require_triton()
    tokens, heads, group, width = gate.shape
    out = torch.empty(tokens, heads * group * width, dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    block = min(next_power_of_2(heads * group), max(1, _TILE // width))
    with on_device_of(out):
        _gated_rms_norm_kernel[(cdiv(heads * group, block), tokens)](
            x, gate, weight, out, *gate.stride()[:3], eps, HEADS=heads, GROUP=group, V=width, BLOCK=block,
            INTERPRETED=triton.knobs.runtime.interpret, num_warps=4, enable_fp_fusion=False, **pdl_options(out),
        )
    return out
