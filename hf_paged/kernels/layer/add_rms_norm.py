# mypy: disallow-untyped-defs=False
"""Residual add and RMSNorm in one pass, each value rounded where transformers' modules round it.

A product whose columns several programs shared is added up in the same pass.
"""

from __future__ import annotations

import torch

from hf_paged.kernels._triton import (
    after_previous_kernel,
    jit,
    next_power_of_2,
    on_device_of,
    pdl_options,
    prefetch_vector,
    require_triton,
    tl,
)
from hf_paged.kernels.layer.linear import joined_reference
from hf_paged.kernels.layer.rms_norm import rms_norm_reference

MANY_ROWS = 512


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``summed = residual + x`` and ``normed = RMSNorm(summed)``, as (normed, summed).

    Args:
        x: ``[T, H]``; rows may be strided, the last dim is contiguous. Or a product in parts, float32 ``[S, T, H]``,
            contiguous, see :func:`~hf_paged.kernels.layer.linear.linear_parts`, which takes a residual: parts are added
            up in order and rounded once, to the residual's dtype.
        residual: ``[T, H]``, rows strided on their own; None: nothing is added and ``summed`` is x itself.
        weight: ``[H]``, x's dtype, or the residual's for parts.
        eps: added to the mean square.
        dtype: None: all tensors have one dtype, which the results have, too. Else the three may be of any of float32,
            float16 and bfloat16, and what modules of torch would give by promotion is at last rounded to it in
            ``normed``, as a linear layer under autocast rounds its input.

    Returns:
        two ``[T, H]`` tensors, contiguous but for a ``summed`` that is x; ``summed`` has the dtype that x and the
        residual promote to.
    """
    if x.is_cuda:
        return add_rms_norm_triton(x, residual, weight, eps, dtype)
    if dtype is not None or x.dim() == 3:
        return add_rms_norm_reference(x, residual, weight, eps, dtype)
    summed = x if residual is None else residual + x
    return rms_norm_host(summed, weight, eps), summed


def add_rms_norm_reference(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`add_rms_norm` in plain torch."""
    x = x if residual is None else joined_reference(x, residual.dtype)
    summed = x if residual is None else residual + x
    normed = rms_norm_reference(summed, weight, eps)
    return normed if dtype is None else normed.to(dtype), summed


def rms_norm_host(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """:func:`rms_norm_reference` on a CPU, in one call of torch where nothing is rounded in between."""
    if x.dtype != torch.float32:
        return rms_norm_reference(x, weight, eps)
    return torch.rms_norm(x, weight.shape, weight, eps)


@jit()
def normed_row(hidden, scale, eps, dtype: tl.constexpr, product: tl.constexpr, WIDTH: tl.constexpr):
    """RMSNorm of a row in float32, times ``scale``, rounded where transformers' module rounds it.

    ``dtype`` is that of the row in memory, ``product`` what it and the weight promote to.
    """
    # torch's mean on CUDA multiplies by the reciprocal.
    variance = tl.sum(hidden * hidden, 0) * (1.0 / WIDTH)
    return (scale * (hidden * tl.rsqrt(variance + eps)).to(dtype).to(tl.float32)).to(product)


@jit()
def _add_rms_norm_kernel(
    x, residual, weight, normed, summed, eps, part_stride, x_stride, residual_stride, PARTS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):
    """A program has a row of x; PARTS: x has so many parts of it, else 0."""
    if PREFETCH:
        prefetch_vector(weight, WIDTH * weight.dtype.element_ty.primitive_bitwidth // 8)
    after_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < WIDTH
    dtype: tl.constexpr = summed.dtype.element_ty
    product: tl.constexpr = dtype if weight.dtype.element_ty == dtype else tl.float32
    hidden = tl.zeros([WIDTH_PAD], tl.float32)
    if PARTS == 0:
        hidden = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        before = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(PARTS):
        hidden += tl.load(x + part * part_stride.to(tl.int64) + row * WIDTH + column, mask=inside, other=0.0)
    if PARTS > 0:
        hidden = hidden.to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        rounded = (hidden + before).to(dtype)
        tl.store(summed + row * WIDTH + column, rounded, mask=inside)
        hidden = rounded.to(tl.float32)
    result = normed_row(hidden, scale, eps, dtype, product, WIDTH).to(normed.dtype.element_ty)
    tl.store(normed + row * WIDTH + column, result, mask=inside)


def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`add_rms_norm` as one Triton launch, a program per row."""
    require_triton()
    (num_rows, width), in_parts = x.shape[-2:], x.dim() == 3
    if residual is None:
        normed, summed = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device), x
    else:
        common = residual.dtype if in_parts or dtype is None else torch.promote_types(x.dtype, residual.dtype)
        normed, summed = (torch.empty(num_rows, width, dtype=d, device=x.device) for d in (dtype or common, common))
    if num_rows == 0:
        return normed, summed
    width_pad = next_power_of_2(width)
    options = pdl_options(x)
    with on_device_of(x):
        _add_rms_norm_kernel[(num_rows,)](
            x,
            x if residual is None else residual,
            weight,
            normed,
            summed,
            eps,
            x.stride(0) if in_parts else None,
            None if in_parts else x.stride(0),
            0 if residual is None else residual.stride(0),
            PARTS=len(x) if in_parts else 0,
            HAS_RESIDUAL=residual is not None,
            WIDTH=width,
            WIDTH_PAD=width_pad,
            # Very many programs that all prefetch the same few lines cost a fifth of the time at a width of 1,024.
            PREFETCH=options["PDL"] and num_rows < MANY_ROWS,
            # Eight elements a thread: one 16-byte load of a half-precision row.
            num_warps=max(1, min(16, width_pad // 256)),
            enable_fp_fusion=False,
            **options,
        )
    return normed, summed
