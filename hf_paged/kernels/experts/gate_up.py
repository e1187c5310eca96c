# mypy: disallow-untyped-defs=False
"""silu(gate) * up of each row's experts, rounded where transformers' experts round, in one launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from hf_paged.kernels._checks import Expected, check_tensors, checked
from hf_paged.kernels._triton import (
    after_previous_kernel,
    cdiv,
    jit,
    on_device_of,
    pdl_options,
    require_triton,
    tl,
    triton,
)
from hf_paged.kernels.experts.route import Routes
from hf_paged.kernels.layer.silu_mul import silu_mul_reference, silu_mul_tile


class ExpertsConfig(NamedTuple):
    """Rows of an expert in a tile, programs that share an expert's rows, weight rows and columns of a tile, options."""

    tile: int
    programs: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def _check(x: torch.Tensor, weight: torch.Tensor, routes: Routes) -> None:
    check_tensors(
        Expected("x", x, (None, None), None),
        Expected("weight", weight, (None, None, x.shape[1]), x.dtype, contiguous=True),
    )
    if weight.shape[1] % 2:
        raise ValueError(f"weight must be [E, 2 * I, H], got {tuple(weight.shape)}")
    check_routes(routes, len(x))


def check_routes(routes: Routes, num_rows: int) -> None:
    """Raise ValueError for routes of another number of rows."""
    top_k = routes.experts.shape[1]
    check_tensors(
        Expected("experts", routes.experts, (num_rows, None), torch.int32, contiguous=True),
        Expected("scores", routes.scores, (num_rows, top_k), None, contiguous=True),
        Expected("order", routes.order, (num_rows * top_k,), torch.int32, contiguous=True),
        Expected("groups", routes.groups, (None, 3), torch.int32, contiguous=True),
    )


def gate_up_unchecked(x: torch.Tensor, weight: torch.Tensor, routes: Routes) -> torch.Tensor:
    """``silu(gate) * up`` of pairs of a row and one of its experts.

    Args:
        x: ``[T, H]``; rows may be strided, the last dim is contiguous.
        weight: ``[E, 2 * I, H]``, x's dtype, contiguous: of each expert gates, then ups.
        routes: the experts of the T rows.

    Returns:
        ``[T * k, I]``, x's dtype, in the order of `Routes.order`. Both products are rounded to it, and ``silu(gate)``
        as well, before the product of the two. Lines of pairs without an expert, at the end, are undefined.

    Raises:
        ValueError: from the checked op, shapes, dtypes or strides that are not as above.
    """
    return gate_up_triton(x, weight, routes) if x.is_cuda else gate_up_reference(x, weight, routes)


gate_up = checked(_check, gate_up_unchecked)


def gate_up_reference(x: torch.Tensor, weight: torch.Tensor, routes: Routes) -> torch.Tensor:
    """:func:`gate_up` in plain torch; zeros where it is undefined."""
    out = x.new_zeros(len(routes.order), weight.shape[1] // 2)
    for expert, first, count in routes.groups.tolist():
        if expert >= 0:
            rows = routes.order[first : first + count].long() // routes.experts.shape[1]
            out[first : first + count] = silu_mul_reference(F.linear(x[rows], weight[expert]))
    return out


@jit()
def _gate_up_kernel(
    x, weight, order, groups, out, x_stride, WIDTH: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr,
    TILE: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Programs: by tile of an expert's rows, by block of columns of out, and by expert.

    The weight's rows are the rows of the product: BLOCK_N / 2 gates and the ups that belong to them.
    """
    after_previous_kernel(PDL)
    COLUMNS: tl.constexpr = BLOCK_N // 2
    EVEN_K: tl.constexpr = WIDTH % BLOCK_K == 0
    EVEN_N: tl.constexpr = INNER % COLUMNS == 0
    group = groups + tl.program_id(2) * 3
    expert = tl.load(group)
    if expert >= 0:
        first, count = tl.load(group + 1), tl.load(group + 2)
        n_begin = tl.program_id(1) * COLUMNS
        n, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        of_expert = weight + expert.to(tl.int64) * (2 * INNER * WIDTH) + n_begin * WIDTH
        w_at = of_expert + (n % COLUMNS + n // COLUMNS * INNER)[:, None] * WIDTH + k[None, :]
        n_inside = n_begin + n % COLUMNS < INNER
        column = n_begin + tl.arange(0, COLUMNS)
        for begin in range(tl.program_id(0) * TILE, count, PROGRAMS * TILE):
            row = begin + tl.arange(0, TILE)
            is_real = row < count
            token = tl.load(order + first + row, mask=is_real, other=0) // K
            x_at = x + token.to(tl.int64)[None, :] * x_stride + k[:, None]
            acc = tl.zeros([BLOCK_N, TILE], tl.float32)
            for start in range(0, WIDTH, BLOCK_K):
                k_inside = (start + k < WIDTH) | EVEN_K
                w_mask = None if EVEN_N and EVEN_K else n_inside[:, None] & k_inside[None, :]
                w = tl.load(w_at + start, mask=w_mask, other=None if EVEN_N and EVEN_K else 0.0)
                rows = tl.load(x_at + start, mask=is_real[None, :] & k_inside[:, None], other=0.0)
                acc = tl.dot(w, rows, acc, input_precision="ieee")
            dtype: tl.constexpr = out.dtype.element_ty
            gate, up = tl.split(tl.permute(tl.reshape(acc.to(dtype), [2, COLUMNS, TILE]), [1, 2, 0]))
            result = silu_mul_tile(gate.to(tl.float32), up.to(tl.float32), dtype, INTERPRETED)
            at = (first + row).to(tl.int64)[None, :] * INNER + column[:, None]
            tl.store(out + at, result, mask=((column < INNER) | EVEN_N)[:, None] & is_real[None, :])


def gate_up_triton(x: torch.Tensor, weight: torch.Tensor, routes: Routes,
                   config: ExpertsConfig | None = None) -> torch.Tensor:
    """:func:`gate_up` as one Triton launch."""
    require_triton()
    (num_rows, width), inner, top_k = x.shape, weight.shape[1] // 2, routes.experts.shape[1]
    out = torch.empty(num_rows * top_k, inner, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    config = config or fastest_config(num_rows, top_k, len(weight))
    with on_device_of(x):
        _gate_up_kernel[(config.programs, cdiv(inner, config.block_n // 2), len(routes.groups))](
            x, weight, routes.order, routes.groups, out, x.stride(0), WIDTH=width, INNER=inner, K=top_k,
            TILE=config.tile, PROGRAMS=config.programs, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            INTERPRETED=triton.knobs.runtime.interpret, num_warps=config.num_warps, num_stages=config.num_stages,
            **pdl_options(x),
        )
    return out


def fastest_config(num_rows: int, top_k: int, num_experts: int) -> ExpertsConfig:
    """Return the configuration for so many rows, by times on an H100 at 1 to 256 rows of 8 of 128 experts."""
    mean = num_rows * top_k / num_experts
    tile = 16 if mean <= 8 else 32 if mean <= 20 else 64
    programs = 1 if num_rows <= tile else 2
    # Both operands of 64 rows in tiles of 128 columns would not fit into the shared memory of smaller GPUs.
    block_k = 128 if tile < 64 else 64
    return ExpertsConfig(tile, programs, 64, block_k, 4, 3 if num_rows == 1 else 4)
