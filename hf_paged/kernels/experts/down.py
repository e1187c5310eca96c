# mypy: disallow-untyped-defs=False
"""The second product of each row's experts, in one launch."""

from __future__ import annotations

import torch

from hf_paged.kernels._triton import after_previous_kernel, cdiv, jit, on_device_of, pdl_options, require_triton, tl
from hf_paged.kernels.experts.gate_up import (
    ExpertsConfig,
    ExpertWeights,
    expert_product,
    fastest_config,
)
from hf_paged.kernels.experts.route import Routes


def down(hidden: torch.Tensor, weights: ExpertWeights, routes: Routes) -> torch.Tensor:
    """``hidden @ weight[expert].T + bias[expert]`` of pairs of a row and one of its experts.

    Args:
        hidden: ``[T * k, I]``, contiguous, in the order of `Routes.order`, as `gate_up` gives it.
        weights: with N = H and K = I, of hidden's dtype, contiguous.
        routes: the experts of the T rows.

    Returns:
        ``[T, k, H]``, hidden's dtype; the product is rounded, and the sum with the bias as well. Places of pairs
        without an expert are undefined.
    """
    return down_triton(hidden, weights, routes) if hidden.is_cuda else down_reference(hidden, weights, routes)


def down_reference(hidden: torch.Tensor, weights: ExpertWeights, routes: Routes) -> torch.Tensor:
    """:func:`down` in plain torch; zeros where it is undefined."""
    out, weights = hidden.new_zeros(len(routes.order), weights.sizes[0]), weights.folded()
    for expert, first, count in routes.groups.tolist():
        if expert >= 0:
            pairs = routes.order[first : first + count].long()
            out[pairs] = weights.product(hidden[first : first + count], expert)
    return out.view(*routes.experts.shape, -1)


@jit()
def _down_kernel(
    hidden, weight, bias, a, b, order, groups, out, scale, S: tl.constexpr, TILE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    """Programs: by tile of an expert's rows, by block of columns of out, and by expert."""
    after_previous_kernel(PDL)
    EVEN_N: tl.constexpr = S.rows % BLOCK_N == 0
    group = groups + tl.program_id(2) * 3
    expert = tl.load(group)
    if expert >= 0:
        first, count = tl.load(group + 1), tl.load(group + 2)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        n_inside = (n < S.rows) | EVEN_N
        for begin in range(tl.program_id(0) * TILE, count, tl.num_programs(0) * TILE):
            row = begin + tl.arange(0, TILE)
            is_real = row < count
            product = expert_product(weight, bias, a, b, scale, expert, n, n_inside,
                                     hidden + (first + row).to(tl.int64) * S.columns, is_real, out.dtype.element_ty, S,
                                     EVEN_N, BLOCK_K)
            pair = tl.load(order + first + row, mask=is_real, other=0)
            at = pair.to(tl.int64)[None, :] * S.rows + n[:, None]
            tl.store(out + at, product, mask=n_inside[:, None] & is_real[None, :])


def down_triton(hidden: torch.Tensor, weights: ExpertWeights, routes: Routes,
                config: ExpertsConfig | None = None) -> torch.Tensor:
    """:func:`down` as one Triton launch."""
    require_triton()
    (num_rows, top_k), width = routes.experts.shape, weights.sizes[0]
    out = torch.empty(num_rows, top_k, width, dtype=hidden.dtype, device=hidden.device)
    if out.numel() == 0:
        return out
    config = config or fastest_config(num_rows, top_k, weights)
    with on_device_of(hidden):
        _down_kernel[(config.programs, cdiv(width, config.block_n), len(routes.groups))](
            hidden=hidden, order=routes.order, groups=routes.groups, out=out, TILE=config.tile,
            BLOCK_N=config.block_n, BLOCK_K=config.block_k, num_warps=config.num_warps,
            num_stages=config.num_stages, **weights.kernel_arguments(), **pdl_options(hidden),
        )
    return out
