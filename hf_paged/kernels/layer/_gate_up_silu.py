# mypy: disallow-untyped-defs=False
"""silu(gate) * up of a product with few rows on tensor cores: a program has gates and the ups that belong to them."""

from __future__ import annotations

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
from hf_paged.kernels.layer._splitk_linear import DotConfig
from hf_paged.kernels.layer.silu_mul import silu_mul_tile


@jit(varying_ints=("num_rows",))
def _dot_silu_kernel(
    x,
    weight,
    out,
    num_rows,
    N,
    K,
    x_stride,
    weight_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out [num_rows, N] of a weight [2 * N, K], gates then ups."""
    HALF: tl.constexpr = BLOCK_N // 2
    n_begin = tl.program_id(0) * HALF
    gates = weight + n_begin.to(tl.int64) * weight_stride
    ups = gates + N * weight_stride.to(tl.int64)
    if PREFETCH:
        size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        count = tl.minimum(N - n_begin, HALF)
        prefetch_rows(gates, count, K * size, weight_stride * size)
        prefetch_rows(ups, count, K * size, weight_stride * size)
    after_previous_kernel(PDL)

    # A tile's first half are gates, its second the ups that belong to them: one product of BLOCK_N rows, as without.
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    row = tl.arange(0, ROWS)
    n_inside = (n_begin + n % HALF < N) | EVEN_N
    row_inside = row < num_rows
    w_at = gates + (n % HALF + n // HALF * N)[:, None].to(tl.int64) * weight_stride + k[None, :]
    x_at = x + row[None, :] * x_stride + k[:, None]
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for start in range(0, K, BLOCK_K):
        k_inside = (start + k < K) | EVEN_K
        w_mask = None if EVEN_N and EVEN_K else n_inside[:, None] & k_inside[None, :]
        w = tl.load(w_at + start, mask=w_mask, other=None if EVEN_N and EVEN_K else 0.0)
        x_tile = tl.load(x_at + start, mask=row_inside[None, :] & k_inside[:, None], other=0.0)
        acc = tl.dot(w, x_tile, acc, input_precision="ieee")
    dtype: tl.constexpr = out.dtype.element_ty
    gate, up = tl.split(tl.permute(tl.reshape(acc.to(dtype), [2, HALF, ROWS]), [1, 2, 0]))
    result = silu_mul_tile(gate.to(tl.float32), up.to(tl.float32), dtype, INTERPRETED)
    at = row.to(tl.int64)[None, :] * N + (n_begin + tl.arange(0, HALF))[:, None]
    tl.store(out + at, result, mask=((n_begin + tl.arange(0, HALF) < N) | EVEN_N)[:, None] & row_inside[None, :])


def dot_silu(x: torch.Tensor, weight: torch.Tensor, config: DotConfig) -> torch.Tensor:
    """One launch: x ``[T, K]``, weight ``[2 * N, K]``, gates then ups: ``[T, N]``. The configuration has no splits."""
    require_triton()
    (num_rows, width), num_outputs = x.shape, len(weight) // 2
    out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    with on_device_of(x):
        _dot_silu_kernel[(cdiv(num_outputs, config.block_n // 2),)](
            x,
            weight,
            out,
            num_rows,
            num_outputs,
            width,
            x.stride(0),
            weight.stride(0),
            ROWS=max(16, next_power_of_2(num_rows)),
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            EVEN_N=num_outputs % (config.block_n // 2) == 0,
            EVEN_K=width % config.block_k == 0,
            INTERPRETED=triton.knobs.runtime.interpret,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **prefetch_options(weight, config.block_n // 2 <= 32 * config.num_warps),
        )
    return out
