# mypy: disallow-untyped-defs=False
"""RMS norm of groups of channels behind a product with silu of their gates, in one launch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hf_paged.kernels._triton import (
    after_previous_kernel,
    jit,
    next_power_of_2,
    on_device_of,
    pdl_options,
    require_triton,
    tl,
    triton,
)
from hf_paged.kernels.recurrent._convolution import silu


def grouped_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int,
                     eps: float) -> torch.Tensor:
    """Compute ``weight * norm(x * silu(gate))``, rounded where transformers' norms of Mamba-2 round.

    Args:
        x: ``[T, C]`` float32, contiguous.
        gate: ``[T, C]``, the last dim contiguous.
        weight: ``[C]``, the gate's dtype.
        groups: whose mean squares are taken, of C / groups channels each.
        eps: added to the mean square.

    Returns:
        ``[T, C]``, the gate's dtype, contiguous.
    """
    return (grouped_rms_norm_triton if x.is_cuda else grouped_rms_norm_reference)(x, gate, weight, groups, eps)


def grouped_rms_norm_reference(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int,
                               eps: float) -> torch.Tensor:
    """:func:`grouped_rms_norm` in plain torch."""
    opened = (x * F.silu(gate.to(x.dtype))).unflatten(1, (groups, -1))
    normed = opened * torch.rsqrt(opened.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * normed.flatten(1)).to(gate.dtype)


@jit()
def _grouped_rms_norm_kernel(
    x, gate, weight, out, gate_token, eps, GROUPS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Programs: by token, and by group of WIDTH channels."""
    after_previous_kernel(PDL)
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    channel, inside = tl.program_id(1) * WIDTH + lane, lane < WIDTH
    at = token * (GROUPS * WIDTH) + channel
    value = tl.load(x + at, mask=inside, other=0.0)
    opened = tl.load(gate + token * gate_token + channel, mask=inside, other=0.0).to(tl.float32)
    value *= silu(opened, INTERPRETED)
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
    value *= tl.load(weight + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def grouped_rms_norm_triton(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, groups: int,
                            eps: float) -> torch.Tensor:
    """:func:`grouped_rms_norm` as one Triton launch."""
    require_triton()
    tokens, width = len(x), x.shape[1] // groups
    out = torch.empty(x.shape, dtype=gate.dtype, device=x.device)
    if not tokens:
        return out
    block = next_power_of_2(width)
    with on_device_of(out):
        # The stride of a single token may be a smaller number.
        _grouped_rms_norm_kernel[(tokens, groups)](
            x, gate, weight, out, max(gate.stride(0), x.shape[1]), eps, GROUPS=groups, WIDTH=width,
            BLOCK=block, INTERPRETED=triton.knobs.runtime.interpret, num_warps=4 if block <= 2048 else 8,
            enable_fp_fusion=False, **pdl_options(out),
        )
    return out
