"""Products x @ weight.T of few rows of x, whose time is that of reading the weight once.

Alone, or with the silu(gate) * up that comes after it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from hf_paged.device.cuda import compute_capability, shared_memory
from hf_paged.kernels._triton import triton
from hf_paged.kernels.layer._gemv import GemvConfig, gemv
from hf_paged.kernels.layer._splitk_linear import DotConfig, dot_linear, dot_parts, dot_silu, joined_dot_parts
from hf_paged.kernels.layer.silu_mul import silu_mul

# Shared memory a block must be allowed for the tiles below, which take up to 96 KiB: with 99 KiB (sm_86, sm_89, sm_120)
# there would be one on a multiprocessor, and none is measured.
_DOT_SHARED_MEMORY = 160 << 10


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, added up in float32 in a fixed order and rounded once.

    Args:
        x: ``[T, K]``, any strides (torch's own where the last dim is not contiguous, as for the weight).
        weight: ``[N, K]``, x's dtype.
        bias: ``[N]``, x's dtype; None: nothing is added.

    Returns:
        ``[T, N]``, x's dtype, contiguous.
    """
    config = choose_config(x, weight) if bias is None or bias.is_contiguous() else None
    return F.linear(x, weight, bias) if config is None else linear_triton(x, weight, bias, config)


def linear_triton(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, config: GemvConfig | DotConfig
) -> torch.Tensor:
    """:func:`linear` as one Triton launch (two where a `DotConfig` splits K)."""
    if isinstance(config, GemvConfig):
        return gemv(x, weight, bias, config)
    return dot_linear(x, weight, bias, config)


def linear_parts(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute the first launch of :func:`linear`, for callers that add the partial sums up in their own kernel.

    Returns:
        ``[T, N]`` as :func:`linear`, or float32 ``[S, T, N]``: sums over parts of the columns, to be added up in order
        and rounded once.
    """
    config = choose_config(x, weight)
    return dot_parts(x, weight, config) if isinstance(config, DotConfig) else linear(x, weight)


def joined(product: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what :func:`linear` returns in `dtype`, from the result of :func:`linear_parts`."""
    if product.is_cuda and product.dim() == 3:
        return joined_dot_parts(product, None, dtype)
    return joined_reference(product, dtype)


def joined_reference(product: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """:func:`joined` in plain torch."""
    if product.dim() == 2:
        return product
    total = torch.zeros_like(product[0])
    for part in product:
        total += part
    return total.to(dtype)


def makes_parts(device: torch.device) -> bool:
    """Return whether :func:`linear_parts` may return sums over parts of the columns on a device."""
    return device.type == "cuda"


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``silu_mul(linear(x, weight))``, weight ``[2 * I, K]`` being gates, then ups: ``[T, I]``."""
    config = choose_config(x, weight)
    if isinstance(config, GemvConfig) or (config is not None and config.split_k == 1):
        return linear_silu_mul_triton(x, weight, config)
    return silu_mul(linear(x, weight))


def linear_silu_mul_triton(
    x: torch.Tensor, weight: torch.Tensor, config: GemvConfig | DotConfig
) -> torch.Tensor:
    """:func:`linear_silu_mul` as one Triton launch; ``[T, 2 * I]`` never is in memory.

    A program takes as many weight rows as with :func:`linear_triton`, half of them gates, so that the products are
    added up alike, but, without tensor cores, for which of the first two the compiler fuses into the addition. A
    `DotConfig` must not split K.
    """
    if isinstance(config, DotConfig):
        return dot_silu(x, weight, config)
    return gemv(x, weight, None, config._replace(block_n=max(1, config.block_n // 2)), silu=True)


def choose_config(x: torch.Tensor, weight: torch.Tensor) -> GemvConfig | DotConfig | None:
    """Return the fastest configuration for these tensors; None if torch's own product is."""
    if triton is None or not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16):
        return None
    if x.stride(1) != 1 or weight.stride(1) != 1 or len(x) == 0:
        return None
    config, available = fastest_config(len(x), *weight.shape), _shared_memory(x.device)
    return config if available >= (_DOT_SHARED_MEMORY if isinstance(config, DotConfig) else 1) else None


def fastest_config(rows: int, outputs: int, width: int) -> GemvConfig | DotConfig | None:
    """Return the fastest configuration on an H200 for x [rows, width] and a weight [outputs, width]; None for cuBLAS.

    Measured by `benchmarks/linear_tuning.py`.
    """
    if rows == 1:
        # Some 8 KiB of the weight a program.
        return GemvConfig(4 if width < 2048 else 2 if width < 4096 else 1, 4, 2)
    if rows == 2:
        if outputs >= 16384:  # enough programs to make them small: a warp each, sums joined without shared memory
            return GemvConfig(4, 1, 2)
        if width < 2048:  # one turn of the loop, or two
            return GemvConfig(4, 4, 1)
        return GemvConfig(1 if outputs < 4096 else 2, 4, 2)
    if rows == 4 and outputs < 2048:  # too few tiles of 64 outputs, even with K split
        return GemvConfig(2, 4, 2)  # for 3 rows another kernel would be compiled, and no graph has 3
    if rows <= 32:
        if outputs <= 4096:  # fewer tiles than half the multiprocessors: K split makes four times as many
            return DotConfig(64, 128, 4, 4, 4)
        if outputs >= 16384 or width < 2048:
            return DotConfig(64, 128, 1, 4, 4)
        return None  # about a tile a multiprocessor, for some none: up to a third slower than cuBLAS
    if rows <= 64 and outputs <= 1024:  # cuBLAS leaves most multiprocessors idle
        return DotConfig(64, 64, 8, 4, 4)
    return None


@lru_cache(maxsize=64)
def _shared_memory(device: torch.device) -> int:
    """Return the shared memory of a block in bytes; 0 if the kernels do not run (before Ampere, AMD)."""
    if (compute_capability(device) or (0, 0)) < (8, 0):
        return 0
    return max(1, shared_memory(device))
