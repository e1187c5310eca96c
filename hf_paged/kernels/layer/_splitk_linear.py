# mypy: disallow-untyped-defs=False
"""x @ weight.T on tensor cores for up to 64 rows of x, the weight's rows being the rows of the product.

Alone, or with the silu(gate) * up behind it: then a program has gates and the ups that belong to them.
"""

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
    prefetch_options,
    prefetch_rows,
    require_triton,
    tl,
    triton,
)
from hf_paged.kernels.layer.silu_mul import silu_mul_tile

MAX_ROWS = 64


class DotConfig(NamedTuple):
    """Weight rows and columns of a tile, programs that share a tile's columns, launch options."""

    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int


@jit(varying_ints=("num_rows",))
def _dot_kernel(
    x, weight, bias, out, num_rows, N, K, k_per_split, x_stride, weight_stride, SILU: tl.constexpr, SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """out [num_rows, N], or with SPLIT float32 [splits, num_rows, N]. The weight's rows are the rows of the product.

    SILU: the weight has 2 * N rows, gates then ups. A tile's first half are gates, its second the ups that belong to
    them: one product of BLOCK_N rows, as without.
    """
    COLUMNS: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N  # of out
    n_begin = tl.program_id(0) * COLUMNS
    split = 0
    k_begin = 0
    k_end = K
    if not SILU:
        split = tl.program_id(1)
        k_begin = split * k_per_split
        k_end = tl.minimum(k_begin + k_per_split, K)
    first_row = weight + n_begin.to(tl.int64) * weight_stride
    up_rows = first_row + N * weight_stride.to(tl.int64) if SILU else first_row
    if PREFETCH:
        size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        count = tl.minimum(N - n_begin, COLUMNS)
        prefetch_rows(first_row + k_begin, count, (k_end - k_begin) * size, weight_stride * size)
        if SILU:
            prefetch_rows(up_rows, count, K * size, weight_stride * size)
    after_previous_kernel(PDL)

    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = tl.arange(0, ROWS)
    if SILU:
        n_inside = (n_begin + n % COLUMNS < N) | EVEN_N
        row_inside = row < num_rows
        w_at = first_row + (n % COLUMNS + n // COLUMNS * N)[:, None].to(tl.int64) * weight_stride + k[None, :]
    else:
        n_inside = (n_begin + n < N) | EVEN_N
        row_inside = row < num_rows
        w_at = first_row + n[:, None] * weight_stride + k[None, :]
    x_at = x + row[None, :] * x_stride + k[:, None]
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(k_begin, k_end, BLOCK_K):
        k_inside = (start + k < k_end) | EVEN_K
        w_mask = None if EVEN_N and EVEN_K else n_inside[:, None] & k_inside[None, :]
        w = tl.load(w_at + start, mask=w_mask, other=None if EVEN_N and EVEN_K else 0.0)
        x_tile = tl.load(x_at + start, mask=row_inside[None, :] & k_inside[:, None], other=0.0)
        acc = tl.dot(w, x_tile, acc, input_precision="ieee")
    dtype: tl.constexpr = out.dtype.element_ty
    if SILU:
        gate, up = tl.split(tl.permute(tl.reshape(acc.to(dtype), [2, COLUMNS, ROWS]), [1, 2, 0]))
        result = silu_mul_tile(gate.to(tl.float32), up.to(tl.float32), dtype, INTERPRETED)
        n = n_begin + tl.arange(0, COLUMNS)
        at = row.to(tl.int64)[None, :] * N + n[:, None]
        mask = ((n < N) | EVEN_N)[:, None] & row_inside[None, :]
    else:
        if HAS_BIAS:
            acc += tl.load(bias + n_begin + n, mask=n_inside, other=0.0).to(tl.float32)[:, None]
        at = (split * num_rows + row).to(tl.int64)[None, :] * N + (n_begin + n)[:, None]
        mask = n_inside[:, None] & row_inside[None, :]
        result = acc.to(dtype)
    tl.store(out + at, result, mask=mask)


@jit(varying_ints=("size",))
def _join_kernel(partials, bias, out, size, N, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, TILE: tl.constexpr,
                 PDL: tl.constexpr):
    """Add up the splits' partial sums [SPLITS, size = T * N], first split first."""
    after_previous_kernel(PDL)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < size
    total = tl.zeros([TILE], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials + split * size.to(tl.int64) + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % N, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def dot_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: DotConfig
) -> torch.Tensor:
    """Return the product [T, N], T at most MAX_ROWS, by one launch, or two with split_k."""
    parts = _dot(x, weight, bias, config)
    return parts if parts.dim() == 2 else joined_dot_parts(parts, bias, x.dtype)


def dot_silu(x: torch.Tensor, weight: torch.Tensor, config: DotConfig) -> torch.Tensor:
    """Return ``silu(gate) * up`` [T, N] of a weight [2 * N, K], gates then ups, by one launch without splits."""
    return _dot(x, weight, None, config, silu=True)


def dot_parts(x: torch.Tensor, weight: torch.Tensor, config: DotConfig) -> torch.Tensor:
    """Return the product's partial sums, in the order in which they are added up: float32 ``[splits, T, N]``.

    ``[T, N]`` in x's dtype where the configuration makes no splits.
    """
    return _dot(x, weight, None, config)


def _dot(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: DotConfig, *,
         silu: bool = False) -> torch.Tensor:
    require_triton()
    (num_rows, width), num_outputs = x.shape, len(weight) // (1 + silu)
    if num_rows > MAX_ROWS:
        raise ValueError(f"at most {MAX_ROWS} rows, got {num_rows}")
    per_split = cdiv(cdiv(width, config.split_k), config.block_k) * config.block_k
    splits = 1 if silu else max(1, cdiv(width, per_split))
    if splits > 1:
        out = torch.empty(splits, num_rows, num_outputs, dtype=torch.float32, device=x.device)
    else:
        out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    columns = config.block_n // (1 + silu)
    with on_device_of(x):
        _dot_kernel[(cdiv(num_outputs, columns), splits)](
            x, weight, None if splits > 1 else bias, out, num_rows, num_outputs, width, None if silu else per_split,
            x.stride(0), weight.stride(0), SILU=silu, SPLIT=splits > 1, HAS_BIAS=bias is not None and splits == 1,
            ROWS=max(16, next_power_of_2(num_rows)), BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            EVEN_N=num_outputs % columns == 0, EVEN_K=width % config.block_k == 0,
            INTERPRETED=triton.knobs.runtime.interpret, num_warps=config.num_warps, num_stages=config.num_stages,
            **prefetch_options(weight, columns <= 32 * config.num_warps),
        )
    return out


def joined_dot_parts(parts: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Add up the sums of :func:`dot_parts` [S, T, N] and a bias [N], and round once: ``[T, N]``."""
    splits, num_rows, num_outputs = parts.shape
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=parts.device)
    if out.numel() == 0:
        return out
    with on_device_of(parts):
        _join_kernel[(cdiv(out.numel(), 512),)](
            parts, bias, out, out.numel(), num_outputs, SPLITS=splits, HAS_BIAS=bias is not None, TILE=512,
            num_warps=4, **pdl_options(parts),
        )
    return out
