"""x @ weight.T for few rows of x, where reading the weight once at full bandwidth is all there is to do.

Alone, with the residual add and RMSNorm that come before it, with the silu(gate) * up that comes after it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from hf_paged.kernels._gemv import GemvConfig, Norm, gemv, gemv_config
from hf_paged.kernels._linear_dot import DotConfig, dot_linear
from hf_paged.kernels._triton import triton
from hf_paged.kernels.add_rms_norm import add_rms_norm, norm_warps
from hf_paged.kernels.silu_mul import silu_mul

# Rows of x up to which `linear` takes the kernel without tensor cores; above it cuBLAS.
GEMV_ROWS = 4
# Rows of x and columns up to which a norm is computed by every program of the product instead of once. Wider rows
# would also be added up in another order than `linear`'s.
NORM_ROWS, NORM_WIDTH = 2, 1024


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``, added up in float32 in a fixed order and rounded once.

    Args:
        x: ``[T, K]``, any strides (torch's own where the last dim is not contiguous, as for the weight).
        weight: ``[N, K]``, x's dtype.
        bias: ``[N]``, x's dtype; None: nothing is added.

    Returns:
        ``[T, N]``, x's dtype, contiguous.

    Raises:
        ValueError: shapes or dtypes that are not as above.
    """
    _check(x, weight, bias)
    config = choose_config(x, weight) if bias is None or bias.is_contiguous() else None
    return linear_reference(x, weight, bias) if config is None else linear_triton(x, weight, bias, config)


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """:func:`linear` in plain torch."""
    return F.linear(x, weight, bias)


def linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    config: GemvConfig | DotConfig | None = None,
) -> torch.Tensor:
    """:func:`linear` as one Triton launch (two where a `DotConfig` splits K)."""
    config = config or gemv_config(len(x), len(weight))
    if isinstance(config, GemvConfig):
        return gemv(x, weight, bias, config)
    return dot_linear(x, weight, bias, config)


def linear_silu_mul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``silu_mul(linear(x, weight))`` to the bit, weight ``[2 * I, K]`` being gates, then ups: ``[T, I]``."""
    _check(x, weight, None)
    if len(weight) % 2:
        raise ValueError(f"weight must be [2 * I, K], got {tuple(weight.shape)}")
    if isinstance(choose_config(x, weight), GemvConfig):
        return linear_silu_mul_triton(x, weight)
    return silu_mul(linear(x, weight))


def linear_silu_mul_triton(x: torch.Tensor, weight: torch.Tensor, config: GemvConfig | None = None) -> torch.Tensor:
    """:func:`linear_silu_mul` as one Triton launch; ``[T, 2 * I]`` never is in memory."""
    if config is None:
        config = gemv_config(len(x), len(weight))
        config = config._replace(block_n=max(1, config.block_n // 2))
    return gemv(x, weight, None, config, silu=True)


def add_rms_norm_linear(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    *,
    silu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(``linear(normed, weight)``, ``summed``) of :func:`add_rms_norm`'s (normed, summed), to the bit.

    `silu`: :func:`linear_silu_mul` in place of linear. Arguments and errors are those functions'.
    """
    _check(x, weight, None)
    fused = len(x) <= NORM_ROWS and x.shape[1] <= NORM_WIDTH and _is_half_norm(x, residual, norm_weight)
    if fused and isinstance(choose_config(x, weight), GemvConfig):
        return add_rms_norm_linear_triton(x, residual, norm_weight, eps, weight, silu=silu)
    normed, summed = add_rms_norm(x, residual, norm_weight, eps)
    return (linear_silu_mul if silu else linear)(normed, weight), summed


def add_rms_norm_linear_triton(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    *,
    silu: bool = False,
    block_n: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`add_rms_norm_linear` as one Triton launch: every program norms all rows of x for itself.

    Its products are added up as with ``GemvConfig(block_n, norm_warps(K), 1)``.
    """
    block_n = block_n or gemv_config(len(x), len(weight)).block_n
    # The norm's own number of warps, so that it adds up the squares in the same order.
    config = GemvConfig(block_n, norm_warps(x.shape[1]), 1)
    summed = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return gemv(x, weight, None, config, silu=silu, norm=Norm(residual, norm_weight, eps, summed)), summed


def choose_config(x: torch.Tensor, weight: torch.Tensor) -> GemvConfig | DotConfig | None:
    """What is fastest for these shapes; None: torch's own."""
    if triton is None or not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16):
        return None
    if x.stride(1) != 1 or weight.stride(1) != 1 or not _is_ampere(x.device):
        return None
    if 0 < len(x) <= GEMV_ROWS:
        return gemv_config(len(x), len(weight))
    return None


@lru_cache(maxsize=64)
def _is_ampere(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _is_half_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> bool:
    """Arguments that the fused kernel takes; `add_rms_norm` says what is wrong with others."""
    if weight.shape != x.shape[1:] or weight.dtype != x.dtype or weight.stride(0) != 1:
        return False
    return residual is None or (residual.shape == x.shape and residual.dtype == x.dtype and residual.stride(1) == 1)


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"x must be [T, K] and weight [N, K], got {tuple(x.shape)} and {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must be [{weight.shape[0]}], got {tuple(bias.shape)}")
    dtypes = {t.dtype for t in (x, weight, bias) if t is not None}
    if len(dtypes) > 1:
        raise ValueError(f"x, weight and bias must share a dtype, got {sorted(map(str, dtypes))}")
