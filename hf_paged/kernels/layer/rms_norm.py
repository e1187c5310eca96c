# mypy: disallow-untyped-defs=False
"""RMSNorm of any dims in one pass, in the three ways in which transformers' modules round it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels._triton import (
    after_previous_kernel,
    cdiv,
    jit,
    next_power_of_2,
    on_device_of,
    pdl_options,
    require_triton,
    tl,
)

_TILE = 1024  # elements of a program that has several rows


class NormForm(NamedTuple):
    """How a norm multiplies with its weight.

    ``rounds_first``: the normed values are rounded to x's dtype before, else the product alone is. ``adds_one``: the
    weight is that much less than the factor.
    """

    rounds_first: bool = True
    adds_one: bool = False


USUAL_FORM = NormForm()  # as of ``Qwen3RMSNorm``


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, form: NormForm) -> torch.Tensor:
    """Compute RMSNorm over the last dim, in float32.

    Args:
        x: ``[..., H]``, float32, float16 or bfloat16; rows may be strided, the last dim is contiguous.
        weight: ``[H]``, contiguous; x's dtype if the form rounds first.
        eps: added to the mean square.
        form: how it is rounded.

    Returns:
        x's shape and dtype, contiguous.
    """
    return (rms_norm_triton if x.is_cuda else rms_norm_reference)(x, weight, eps, form)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float,
                       form: NormForm = USUAL_FORM) -> torch.Tensor:
    """:func:`rms_norm` in plain torch."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if form.rounds_first:
        return weight * normed.to(x.dtype)
    return (normed * (1.0 + weight.float() if form.adds_one else weight)).to(x.dtype)


@jit(varying_ints=("num_rows",))
def _rms_norm_kernel(
    x, weight, out, eps, num_rows, row_stride, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, BLOCK: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr, ADDS_ONE: tl.constexpr, PDL: tl.constexpr,
):
    """A program has BLOCK rows of x."""
    after_previous_kernel(PDL)
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
    column = tl.arange(0, WIDTH_PAD)[None, :]
    inside = (row < num_rows) & (column < WIDTH)
    dtype: tl.constexpr = out.dtype.element_ty
    hidden = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if ADDS_ONE:
        scale += 1.0
    # torch's mean on CUDA multiplies by the reciprocal.
    normed = hidden * tl.rsqrt(tl.sum(hidden * hidden, 1) * (1.0 / WIDTH) + eps)[:, None]
    if ROUNDS_FIRST:
        normed = normed.to(dtype).to(tl.float32)
    tl.store(out + row * WIDTH + column, (normed * scale).to(dtype), mask=inside)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float, form: NormForm) -> torch.Tensor:
    """:func:`rms_norm` as one Triton launch."""
    require_triton()
    out, width = torch.empty(x.shape, dtype=x.dtype, device=x.device), x.shape[-1]
    if out.numel() == 0:
        return out
    rows = x.flatten(0, -2) if x.dim() > 1 else x[None]
    width_pad = next_power_of_2(width)
    block = max(1, _TILE // width_pad)
    with on_device_of(x):
        _rms_norm_kernel[(cdiv(len(rows), block),)](
            rows, weight, out, eps, len(rows), rows.stride(0) if len(rows) > 1 else width, WIDTH=width,
            WIDTH_PAD=width_pad, BLOCK=block, ROUNDS_FIRST=form.rounds_first, ADDS_ONE=form.adds_one,
            num_warps=max(1, min(16, block * width_pad // 256)), enable_fp_fusion=False, **pdl_options(x),
        )
    return out
