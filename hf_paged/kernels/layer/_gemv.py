# mypy: disallow-untyped-defs=False
"""x @ weight.T for a few rows of x without tensor cores, with or without a silu(gate) * up after it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels._triton import (
    after_previous_kernel,
    cdiv,
    jit,
    next_power_of_2,
    on_device_of,
    prefetch_options,
    prefetch_rows,
    require_triton,
    tl,
    triton,
)
from hf_paged.kernels.layer.silu_mul import silu_mul_tile

# A program keeps a partial sum in registers for each row of x and row of its weight tile.
MAX_ROWS = 4


class GemvConfig(NamedTuple):
    """Weight rows a program, warps (each takes 256 columns of all rows at a time), turns of the loop unrolled."""

    block_n: int
    num_warps: int
    unroll: int


@jit()
def _dot_rows(x, w, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Products of x [ROWS, 1, K] and w [1, N, K], eight columns added up within a thread: [ROWS, N, K / 8]."""
    return tl.sum(tl.reshape(x * w.to(tl.float32), [ROWS, BLOCK_N, BLOCK_K // 8, 8]), 3)


@jit(varying_ints=("num_rows",))
def _gemv_kernel(
    x, weight, bias, out, num_rows, N, K, x_stride, weight_stride, SILU: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, EVEN_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr, UNROLL: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """out [num_rows, N]. SILU: weight has 2 * N rows, gates then ups.

    A thread holds eight neighbouring columns of x and of every weight row, in 16-byte loads, and no other ones.
    """
    n_begin = tl.program_id(0) * BLOCK_N
    first_row = weight + n_begin.to(tl.int64) * weight_stride
    up_rows = first_row + N * weight_stride.to(tl.int64) if SILU else first_row
    if PREFETCH:
        count = tl.minimum(N - n_begin, BLOCK_N)
        size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        prefetch_rows(first_row, count, K * size, weight_stride * size)
        if SILU:
            prefetch_rows(up_rows, count, K * size, weight_stride * size)
    after_previous_kernel(PDL)

    dtype = out.dtype.element_ty
    # Three dimensions (row of x, row of the weight, column), so that both operands are loaded in the layout in which
    # they are multiplied: a thread has the same columns of all rows.
    row = tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, None, :]
    row_inside = (row < num_rows) | EVEN_ROWS
    n_inside = (n_begin + n < N) | EVEN_N
    x_at = row[:, None, None] * x_stride + k
    w_at = n[None, :, None] * weight_stride + k

    acc = tl.zeros([ROWS, BLOCK_N, BLOCK_K // 8], tl.float32)
    acc_up = acc
    for start in tl.range(0, K, BLOCK_K, loop_unroll_factor=UNROLL):
        k_inside = (start + k < K) | EVEN_K
        x_mask = None if EVEN_ROWS and EVEN_K else row_inside[:, None, None] & k_inside
        x_other = None if EVEN_ROWS and EVEN_K else 0.0
        w_mask = None if EVEN_N and EVEN_K else n_inside[None, :, None] & k_inside
        w_other = None if EVEN_N and EVEN_K else 0.0
        x_tile = tl.load(x + x_at + start, mask=x_mask, other=x_other).to(tl.float32)
        w = tl.load(first_row + w_at + start, mask=w_mask, other=w_other)
        acc += _dot_rows(x_tile, w, ROWS, BLOCK_N, BLOCK_K)
        if SILU:
            w_up = tl.load(up_rows + w_at + start, mask=w_mask, other=w_other)
            acc_up += _dot_rows(x_tile, w_up, ROWS, BLOCK_N, BLOCK_K)

    total = tl.sum(acc, 2)
    if HAS_BIAS:
        total += tl.load(bias + n_begin + n, mask=n_inside, other=0.0).to(tl.float32)[None, :]
    if SILU:
        up = tl.sum(acc_up, 2).to(dtype).to(tl.float32)
        result = silu_mul_tile(total.to(dtype).to(tl.float32), up, dtype, INTERPRETED)
    else:
        result = total.to(dtype)
    out_at = row[:, None].to(tl.int64) * N + (n_begin + n)[None, :]
    tl.store(out + out_at, result, mask=row_inside[:, None] & n_inside[None, :])


def gemv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: GemvConfig, *, silu: bool = False,
) -> torch.Tensor:
    """Return the product [T, N], T at most MAX_ROWS; `silu`: [T, N / 2], by block_n gates and their ups a program."""
    require_triton()
    (num_rows, width), num_outputs = x.shape, len(weight) // (1 + silu)
    if num_rows > MAX_ROWS:
        raise ValueError(f"at most {MAX_ROWS} rows, got {num_rows}")
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    block_k = 256 * config.num_warps
    rows = next_power_of_2(num_rows)
    with on_device_of(x):
        _gemv_kernel[(cdiv(num_outputs, config.block_n),)](
            x, weight, bias, out, num_rows, num_outputs, width, x.stride(0), weight.stride(0), SILU=silu,
            HAS_BIAS=bias is not None, ROWS=rows, EVEN_ROWS=rows == num_rows, BLOCK_N=config.block_n, BLOCK_K=block_k,
            EVEN_N=num_outputs % config.block_n == 0, EVEN_K=width % block_k == 0, UNROLL=config.unroll,
            INTERPRETED=triton.knobs.runtime.interpret, num_warps=config.num_warps, **prefetch_options(weight),
        )
    return out
