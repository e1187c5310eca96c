# mypy: disallow-untyped-defs=False
"""The second product of each row's experts, in one launch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hf_paged.kernels._checks import Expected, check_tensors, checked
from hf_paged.kernels._triton import after_previous_kernel, cdiv, jit, on_device_of, pdl_options, require_triton, tl
from hf_paged.kernels.experts.gate_up import ExpertsConfig, check_routes, fastest_config
from hf_paged.kernels.experts.route import Routes


def _check(hidden: torch.Tensor, weight: torch.Tensor, routes: Routes) -> None:
    check_tensors(
        Expected("hidden", hidden, (len(routes.order), None), None, contiguous=True),
        Expected("weight", weight, (None, None, hidden.shape[1]), hidden.dtype, contiguous=True),
    )
    check_routes(routes, len(routes.experts))


def down_unchecked(hidden: torch.Tensor, weight: torch.Tensor, routes: Routes) -> torch.Tensor:
    """``hidden @ weight[expert].T`` of pairs of a row and one of its experts.

    Args:
        hidden: ``[T * k, I]``, contiguous, in the order of `Routes.order`, as `gate_up` gives it.
        weight: ``[E, H, I]``, hidden's dtype, contiguous.
        routes: the experts of the T rows.

    Returns:
        ``[T, k, H]``, hidden's dtype, rounded once; places of pairs without an expert are undefined.

    Raises:
        ValueError: from the checked op, shapes, dtypes or strides that are not as above.
    """
    return down_triton(hidden, weight, routes) if hidden.is_cuda else down_reference(hidden, weight, routes)


down = checked(_check, down_unchecked)


def down_reference(hidden: torch.Tensor, weight: torch.Tensor, routes: Routes) -> torch.Tensor:
    """:func:`down` in plain torch; zeros where it is undefined."""
    out = hidden.new_zeros(len(routes.order), weight.shape[1])
    for expert, first, count in routes.groups.tolist():
        if expert >= 0:
            pairs = routes.order[first : first + count].long()
            out[pairs] = F.linear(hidden[first : first + count], weight[expert])
    return out.view(*routes.experts.shape, -1)


@jit()
def _down_kernel(
    hidden, weight, order, groups, out, WIDTH: tl.constexpr, INNER: tl.constexpr, TILE: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):
    """Programs: by tile of an expert's rows, by block of columns of out, and by expert.

    The weight's rows are the rows of the product.
    """
    after_previous_kernel(PDL)
    EVEN_K: tl.constexpr = INNER % BLOCK_K == 0
    EVEN_N: tl.constexpr = WIDTH % BLOCK_N == 0
    group = groups + tl.program_id(2) * 3
    expert = tl.load(group)
    if expert >= 0:
        first, count = tl.load(group + 1), tl.load(group + 2)
        n, k = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        n_inside = (n < WIDTH) | EVEN_N
        w_at = weight + expert.to(tl.int64) * (WIDTH * INNER) + n[:, None] * INNER + k[None, :]
        for begin in range(tl.program_id(0) * TILE, count, PROGRAMS * TILE):
            row = begin + tl.arange(0, TILE)
            is_real = row < count
            h_at = hidden + (first + row).to(tl.int64)[None, :] * INNER + k[:, None]
            acc = tl.zeros([BLOCK_N, TILE], tl.float32)
            for start in range(0, INNER, BLOCK_K):
                k_inside = (start + k < INNER) | EVEN_K
                w_mask = None if EVEN_N and EVEN_K else n_inside[:, None] & k_inside[None, :]
                w = tl.load(w_at + start, mask=w_mask, other=None if EVEN_N and EVEN_K else 0.0)
                rows = tl.load(h_at + start, mask=is_real[None, :] & k_inside[:, None], other=0.0)
                acc = tl.dot(w, rows, acc, input_precision="ieee")
            pair = tl.load(order + first + row, mask=is_real, other=0)
            at = pair.to(tl.int64)[None, :] * WIDTH + n[:, None]
            tl.store(out + at, acc.to(out.dtype.element_ty), mask=n_inside[:, None] & is_real[None, :])


def down_triton(hidden: torch.Tensor, weight: torch.Tensor, routes: Routes,
                config: ExpertsConfig | None = None) -> torch.Tensor:
    """:func:`down` as one Triton launch."""
    require_triton()
    (num_rows, top_k), (num_experts, width, inner) = routes.experts.shape, weight.shape
    out = torch.empty(num_rows, top_k, width, dtype=hidden.dtype, device=hidden.device)
    if out.numel() == 0:
        return out
    config = config or fastest_config(num_rows, top_k, num_experts)
    with on_device_of(hidden):
        _down_kernel[(config.programs, cdiv(width, config.block_n), len(routes.groups))](
            hidden, weight, routes.order, routes.groups, out, WIDTH=width, INNER=inner, TILE=config.tile,
            PROGRAMS=config.programs, BLOCK_N=config.block_n, BLOCK_K=config.block_k, num_warps=config.num_warps,
            num_stages=config.num_stages, **pdl_options(hidden),
        )
    return out
