# mypy: disallow-untyped-defs=False
"""silu(gate) * up of the merged gate and up projections, rounded where torch rounds."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hf_paged.kernels._triton import (
    after_previous_kernel,
    cdiv,
    jit,
    next_power_of_2,
    on_device_of,
    pdl_options,
    require_triton,
    tl,
    triton,
)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` where each row of ``gate_up`` is its gate followed by its up.

    Args:
        gate_up: ``[T, 2 * I]``; rows may be strided, the last dim is contiguous.

    Returns:
        ``[T, I]``, gate_up's dtype, contiguous; ``silu(gate)`` is rounded to it before the product.
    """
    return silu_mul_parts(*gate_up.chunk(2, dim=-1))


def silu_mul_parts(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """:func:`silu_mul` of two tensors ``[T, I]``, each with rows of its own stride."""
    return _launch(gate, up) if gate.is_cuda else F.silu(gate) * up


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """:func:`silu_mul` in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul_host(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of two tensors of a CPU, in the memory of ``gate``."""
    return F.silu(gate, inplace=True).mul_(up)


@jit()
def silu_mul_tile(gate, up, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """silu(gate) * up of float32 values that were rounded to dtype, the same bits in kernels that fuse a * b + c."""
    # torch on CUDA: libdevice's exp and a correctly rounded division. tl.exp is ex2.approx, other last bits.
    if INTERPRETED:
        above_one = 1.0 + tl.exp(-gate)
    else:
        # add_rn is never contracted with the multiplication that exp ends in.
        above_one = tl.extra.cuda.libdevice.add_rn(tl.extra.cuda.libdevice.exp(-gate), 1.0)
    silu = tl.div_rn(gate, above_one).to(dtype).to(tl.float32)
    return (silu * up).to(dtype)


@jit()
def _silu_mul_kernel(
    gate, up, out, gate_stride, up_stride, WIDTH: tl.constexpr, TILE: tl.constexpr, INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):
    after_previous_kernel(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    dtype = out.dtype.element_ty
    gates = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, silu_mul_tile(gates, ups, dtype, INTERPRETED), mask=inside)


def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """:func:`silu_mul` as one Triton launch, a program per row and up to 1,024 columns."""
    return _launch(*gate_up.chunk(2, dim=-1))


def _launch(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    require_triton()
    num_rows, width = gate.shape
    out = torch.empty(num_rows, width, dtype=gate.dtype, device=gate.device)
    if out.numel() == 0:
        return out
    tile = min(1024, next_power_of_2(width))
    with on_device_of(gate):
        _silu_mul_kernel[(num_rows, cdiv(width, tile))](
            gate, up, out, gate.stride(0), up.stride(0), WIDTH=width, TILE=tile,
            INTERPRETED=triton.knobs.runtime.interpret, num_warps=4, enable_fp_fusion=False, **pdl_options(gate),
        )
    return out
