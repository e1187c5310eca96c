# mypy: disallow-untyped-defs=False
"""The weighted sum of each row's experts, alone or with the residual add and RMSNorm behind it, in one launch."""

from __future__ import annotations

from typing import NamedTuple

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
from hf_paged.kernels.experts.route import Routes
from hf_paged.kernels.layer.add_rms_norm import MANY_ROWS, add_rms_norm_reference, normed_row


class ExpertOutputs(NamedTuple):
    """Products of experts that still have to be weighed and added up: ``products`` [T, k, H], and the routes."""

    products: torch.Tensor
    routes: Routes


def join_experts(outputs: ExpertOutputs) -> torch.Tensor:
    """The sum over a row's experts of score * product.

    Args:
        outputs: products ``[T, k, H]``, contiguous, and the routes, whose scores are float32 or of the products' dtype.
            Each score * product is rounded to the scores' dtype, and they are added up in float32, in their order.

    Returns:
        ``[T, H]``, the products' dtype, rounded once; zeros for rows without experts.
    """
    if outputs.products.is_cuda:
        return join_experts_triton(outputs)
    return join_experts_reference(outputs)


def join_experts_add_rms_norm(outputs: ExpertOutputs, residual: torch.Tensor, weight: torch.Tensor,
                              eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """``summed = residual + join_experts(outputs)`` and ``normed = RMSNorm(summed)``, as (normed, summed).

    Args:
        outputs: as for :func:`join_experts`.
        residual: ``[T, H]``, the products' dtype; rows may be strided.
        weight: ``[H]``, the same dtype.
        eps: added to the mean square.

    Returns:
        two ``[T, H]`` tensors, contiguous.
    """
    if outputs.products.is_cuda:
        return join_experts_add_rms_norm_triton(outputs, residual, weight, eps)
    return add_rms_norm_reference(join_experts_reference(outputs), residual, weight, eps)


def join_experts_reference(outputs: ExpertOutputs) -> torch.Tensor:
    """:func:`join_experts` in plain torch."""
    products, (scores, experts, *_) = outputs
    weighted = torch.where(experts[..., None] >= 0, products * scores[..., None], 0.0)
    total = torch.zeros(products.shape[0], products.shape[2], dtype=torch.float32, device=products.device)
    for place in range(products.shape[1]):
        total += weighted[:, place].float()
    return total.to(products.dtype)


@jit()
def _join_experts_kernel(
    products, scores, experts, residual, weight, normed, summed, eps, residual_stride, K: tl.constexpr,
    HAS_NORM: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):
    """A program has a row. HAS_NORM: `summed` has the residual as well, and `normed` its norm."""
    if PREFETCH:
        prefetch_vector(weight, WIDTH * weight.dtype.element_ty.primitive_bitwidth // 8)
    after_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < WIDTH
    dtype: tl.constexpr = summed.dtype.element_ty
    total = tl.zeros([WIDTH_PAD], tl.float32)
    for place in tl.static_range(K):
        is_real = tl.load(experts + row * K + place + tl.zeros_like(column)) >= 0
        score = tl.load(scores + row * K + place).to(tl.float32)
        product = tl.load(products + (row * K + place) * WIDTH + column, mask=inside & is_real, other=0.0)
        weighted = (product.to(tl.float32) * score).to(scores.dtype.element_ty)
        total += tl.where(is_real, weighted.to(tl.float32), 0.0)
    result = total.to(dtype)
    if HAS_NORM:
        before = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + before).to(dtype)
        scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(normed + row * WIDTH + column, normed_row(result.to(tl.float32), scale, eps, dtype, dtype, WIDTH),
                 mask=inside)
    tl.store(summed + row * WIDTH + column, result, mask=inside)


def join_experts_triton(outputs: ExpertOutputs) -> torch.Tensor:
    """:func:`join_experts` as one Triton launch, a program per row."""
    return _joined(outputs, None, None, 0.0)[1]


def join_experts_add_rms_norm_triton(outputs: ExpertOutputs, residual: torch.Tensor, weight: torch.Tensor,
                                     eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`join_experts_add_rms_norm` as one Triton launch, a program per row."""
    return _joined(outputs, residual, weight, eps)


def _joined(outputs: ExpertOutputs, residual: torch.Tensor | None, weight: torch.Tensor | None,
            eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    require_triton()
    products, (scores, experts, *_) = outputs
    num_rows, top_k, width = products.shape
    summed = torch.empty(num_rows, width, dtype=products.dtype, device=products.device)
    normed = summed if weight is None else torch.empty_like(summed)
    if summed.numel() == 0:
        return normed, summed
    width_pad, options = next_power_of_2(width), pdl_options(products)
    with on_device_of(products):
        _join_experts_kernel[(num_rows,)](
            products, scores, experts, residual, weight, normed, summed, eps,
            0 if residual is None else residual.stride(0), K=top_k, HAS_NORM=weight is not None, WIDTH=width,
            WIDTH_PAD=width_pad, PREFETCH=options["PDL"] and weight is not None and num_rows < MANY_ROWS,
            num_warps=max(1, min(16, width_pad // 256)), enable_fp_fusion=False, **options,
        )
    return normed, summed
