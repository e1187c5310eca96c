# mypy: disallow-untyped-defs=False
"""The sums of a product whose columns several programs shared, the residual add and RMSNorm in one pass."""

from __future__ import annotations

import torch

from hf_paged.kernels._checks import Expected, check_tensors, checked
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
from hf_paged.kernels.layer.add_rms_norm import add_rms_norm_reference, normed_row
from hf_paged.kernels.layer.linear import joined_reference


def _check(parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    check_tensors(
        Expected("parts", parts, (None, None, None), torch.float32, contiguous=True),
        Expected("residual", residual, tuple(parts.shape[1:]), residual.dtype),
        Expected("weight", weight, tuple(parts.shape[2:]), residual.dtype),
    )


def join_add_rms_norm_unchecked(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`~hf_paged.kernels.layer.add_rms_norm.add_rms_norm` of a product in parts, as (normed, summed).

    Args:
        parts: ``[S, T, H]`` float32, contiguous, see :func:`~hf_paged.kernels.layer.linear.linear_parts`. They are
            added up in order and rounded once, to the residual's dtype.
        residual: ``[T, H]``; rows may be strided, the last dim is contiguous.
        weight: ``[H]``, the residual's dtype.
        eps: added to the mean square.

    Returns:
        two ``[T, H]`` tensors, contiguous, the residual's dtype.

    Raises:
        ValueError: from the checked op, shapes, dtypes or strides that are not as above.
    """
    run = join_add_rms_norm_triton if parts.is_cuda else join_add_rms_norm_reference
    return run(parts, residual, weight, eps)


sum_splits_add_rms_norm = checked(_check, join_add_rms_norm_unchecked)


def join_add_rms_norm_reference(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`sum_splits_add_rms_norm` in plain torch."""
    return add_rms_norm_reference(joined_reference(parts, residual.dtype), residual, weight, eps)


@jit()
def _join_add_rms_norm_kernel(
    parts,
    residual,
    weight,
    normed,
    summed,
    eps,
    part_stride,
    residual_stride,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        prefetch_vector(weight, WIDTH * weight.dtype.element_ty.primitive_bitwidth // 8)
    after_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < WIDTH
    dtype: tl.constexpr = summed.dtype.element_ty
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    before = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([WIDTH_PAD], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + part * part_stride.to(tl.int64) + row * WIDTH + column, mask=inside, other=0.0)
    rounded = (total.to(dtype).to(tl.float32) + before).to(dtype)
    tl.store(summed + row * WIDTH + column, rounded, mask=inside)
    result = normed_row(rounded.to(tl.float32), scale, eps, dtype, dtype, WIDTH)
    tl.store(normed + row * WIDTH + column, result.to(dtype), mask=inside)


def join_add_rms_norm_triton(
    parts: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`sum_splits_add_rms_norm` as one Triton launch, a program per row."""
    require_triton()
    num_parts, num_rows, width = parts.shape
    normed, summed = (torch.empty(num_rows, width, dtype=residual.dtype, device=parts.device) for _ in range(2))
    if num_rows == 0:
        return normed, summed
    width_pad = next_power_of_2(width)
    with on_device_of(parts):
        _join_add_rms_norm_kernel[(num_rows,)](
            parts,
            residual,
            weight,
            normed,
            summed,
            eps,
            parts.stride(0),
            residual.stride(0),
            PARTS=num_parts,
            WIDTH=width,
            WIDTH_PAD=width_pad,
            num_warps=max(1, min(16, width_pad // 256)),
            enable_fp_fusion=False,
            **pdl_options(parts),
        )
    return normed, summed
