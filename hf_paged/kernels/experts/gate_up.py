# mypy: disallow-untyped-defs=False
"""The gated first product of each row's experts, rounded where transformers' experts round, in one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from hf_paged.kernels._triton import (
    after_previous_kernel,
    cdiv,
    constants,
    jit,
    on_device_of,
    pdl_options,
    require_triton,
    tl,
    triton,
)
from hf_paged.kernels.experts.fold import ExpertUpdate, folded_tile, rank_block, rounds_update, update_columns
from hf_paged.kernels.experts.route import Routes
from hf_paged.kernels.layer.silu_mul import silu_mul_tile

_MANY = 80  # rows of an expert, on the average, beyond which its weights are no longer what takes the time


class ExpertWeights(NamedTuple):
    """Weights of one product of experts: ``weight`` [E, N, K], or [E, K, N] if it is transposed, ``bias`` [E, N] or
    None, and the LoRA ``update`` that is added to the weight, or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    is_transposed: bool = False
    update: ExpertUpdate | None = None

    @property
    def sizes(self) -> tuple[int, int]:
        """N and K."""
        rows, columns = self.weight.shape[1:]
        return (columns, rows) if self.is_transposed else (rows, columns)

    def folded(self) -> ExpertWeights:
        """Return weights without an update, to which it was added."""
        if self.update is None:
            return self
        return self._replace(weight=self.update.folded(self.weight, is_transposed=self.is_transposed), update=None)

    def product(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        """Return ``x @ weight[expert].T + bias[expert]``, rounded before the bias is added as well; without the update.
        """
        weight = self.weight[expert]
        product = x @ weight if self.is_transposed else F.linear(x, weight)
        return product if self.bias is None else product + self.bias[expert]

    def kernel_arguments(self) -> dict[str, Any]:
        """Return the arguments by which kernels get the weights."""
        num_experts, update = len(self.weight), self.update
        rank = 0 if update is None else update.rank(num_experts)
        shape = WeightsShape(*self.sizes, num_experts, self.is_transposed, self.bias is not None, rank,
                             rank_block(rank), rounds_update(rank, is_transposed=self.is_transposed))
        a, b, scale = (None, None, 0.0) if update is None else update
        return {"weight": self.weight, "bias": self.bias, "a": a, "b": b, "scale": scale, "S": constants(shape)}


class WeightsShape(NamedTuple):
    """What kernels are compiled for: N and K of each expert's weight, the number of experts, and the update's rank (0:
    none) with the columns of its tiles and whether it is rounded by itself."""

    rows: int
    columns: int
    experts: int
    is_transposed: bool
    has_bias: bool
    rank: int
    rank_block: int
    rounds_update: bool


class Gating(NamedTuple):
    """How gates and ups become one: ``silu(gate) * up`` or, with a ``limit``, gpt-oss' clamped gate with ``alpha``.

    ``is_interleaved``: a gate is followed by the up that belongs to it; else ups follow all gates.
    """

    is_interleaved: bool = False
    limit: float | None = None
    alpha: float = 1.0

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Compute [T, 2 * I] -> [T, I] in plain torch, each operation rounded."""
        if self.is_interleaved:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        else:
            gate, up = gate_up.chunk(2, dim=-1)
        if self.limit is None:
            return F.silu(gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


SILU_GATING = Gating()


class ExpertsConfig(NamedTuple):
    """Rows of an expert in a tile, programs that share an expert's rows, weight rows and columns of a tile, options."""

    tile: int
    programs: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def gate_up(x: torch.Tensor, weights: ExpertWeights, routes: Routes,
            gating: Gating = SILU_GATING) -> torch.Tensor:
    """The gated product of pairs of a row and one of its experts.

    Args:
        x: ``[T, H]``; rows may be strided, the last dim is contiguous.
        weights: with N = 2 * I and K = H, of x's dtype, contiguous.
        routes: the experts of the T rows.
        gating: where gates and ups lie in N, and how they become one.

    Returns:
        ``[T * k, I]``, x's dtype, in the order of `Routes.order`. Products and each operation of the gating are rounded
        to it. Lines of pairs without an expert are undefined.
    """
    run = gate_up_triton if x.is_cuda else gate_up_reference
    return run(x, weights, routes, gating)


def gate_up_reference(x: torch.Tensor, weights: ExpertWeights, routes: Routes,
                      gating: Gating = SILU_GATING) -> torch.Tensor:
    """:func:`gate_up` in plain torch; zeros where it is undefined."""
    out, weights = x.new_zeros(len(routes.order), weights.sizes[0] // 2), weights.folded()
    for expert, first, count in routes.groups.tolist():
        if expert >= 0:
            rows = routes.order[first : first + count].long() // routes.experts.shape[1]
            out[first : first + count] = gating(weights.product(x[rows], expert))
    return out


@jit()
def expert_product(weight, bias, a, b, scale, expert, n, n_inside, x_at, is_real, dtype: tl.constexpr, S: tl.constexpr,
                   EVEN_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The product of rows n of an expert's weight with rows of pointers x_at [TILE], in dtype: [BLOCK_N, TILE].

    The weight's rows are the rows of the product. EVEN_N: all of them are inside.
    """
    EVEN_K: tl.constexpr = S.columns % BLOCK_K == 0
    k = tl.arange(0, BLOCK_K)
    w_at = weight + expert.to(tl.int64) * (S.rows * S.columns)
    w_at += n[:, None] + k[None, :] * S.rows if S.is_transposed else n[:, None] * S.columns + k[None, :]
    x_at = x_at[None, :] + k[:, None]
    step: tl.constexpr = S.rows if S.is_transposed else 1
    if S.rank > 0:
        columns = update_columns(b, expert, n, n_inside, weight.dtype.element_ty, S)
        a += expert.to(tl.int64) * (S.rank * S.columns)
    acc = tl.zeros([n.shape[0], is_real.shape[0]], tl.float32)
    for start in range(0, S.columns, BLOCK_K):
        k_inside = (start + k < S.columns) | EVEN_K
        w_mask = None if EVEN_N and EVEN_K else n_inside[:, None] & k_inside[None, :]
        w = tl.load(w_at + start * step, mask=w_mask, other=None if EVEN_N and EVEN_K else 0.0)
        if S.rank > 0:
            w = folded_tile(w, columns, a, start + k, k_inside, scale, S)
        rows = tl.load(x_at + start, mask=is_real[None, :] & k_inside[:, None], other=0.0)
        acc = tl.dot(w, rows, acc, input_precision="ieee")
    result = acc.to(dtype)
    if S.has_bias:
        added = tl.load(bias + expert * S.rows + n, mask=n_inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + added[:, None]).to(dtype)
    return result


@jit()
def _clamped_tile(gate, up, limit, alpha, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """gpt-oss' gating of float32 values that were rounded to dtype; NaN stays NaN."""
    gate = tl.where(gate > limit, limit, gate).to(dtype).to(tl.float32)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)).to(dtype).to(tl.float32)
    scaled = (gate * alpha).to(dtype).to(tl.float32)
    if INTERPRETED:
        above_one = 1.0 + tl.exp(-scaled)
    else:
        above_one = tl.extra.cuda.libdevice.add_rn(tl.extra.cuda.libdevice.exp(-scaled), 1.0)
    sigmoid = tl.div_rn(tl.zeros_like(gate) + 1.0, above_one).to(dtype).to(tl.float32)
    glu = (gate * sigmoid).to(dtype).to(tl.float32)
    return ((up + 1.0).to(dtype).to(tl.float32) * glu).to(dtype)


@jit()
def _gate_up_kernel(
    x, weight, bias, a, b, order, groups, out, x_stride, scale, limit, alpha, S: tl.constexpr, K: tl.constexpr,
    INTERLEAVED: tl.constexpr, CLAMPED: tl.constexpr, TILE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr, INTERPRETED: tl.constexpr,
):
    """Programs: by tile of an expert's rows, by block of columns of out, and by expert.

    A block has the gates of BLOCK_N / 2 columns and the ups that belong to them.
    """
    after_previous_kernel(PDL)
    COLUMNS: tl.constexpr = BLOCK_N // 2
    INNER: tl.constexpr = S.rows // 2
    EVEN_N: tl.constexpr = INNER % COLUMNS == 0
    group = groups + tl.program_id(2) * 3
    expert = tl.load(group)
    if expert >= 0:
        first, count = tl.load(group + 1), tl.load(group + 2)
        n_begin = tl.program_id(1) * COLUMNS
        n = tl.arange(0, BLOCK_N)
        n_row = 2 * n_begin + n if INTERLEAVED else n_begin + n % COLUMNS + n // COLUMNS * INNER
        n_inside = n_row < 2 * INNER if INTERLEAVED else n_begin + n % COLUMNS < INNER
        column = n_begin + tl.arange(0, COLUMNS)
        dtype: tl.constexpr = out.dtype.element_ty
        for begin in range(tl.program_id(0) * TILE, count, tl.num_programs(0) * TILE):
            row = begin + tl.arange(0, TILE)
            is_real = row < count
            token = tl.load(order + first + row, mask=is_real, other=0) // K
            product = expert_product(weight, bias, a, b, scale, expert, n_row, n_inside,
                                     x + token.to(tl.int64) * x_stride, is_real, dtype, S, EVEN_N, BLOCK_K)
            if INTERLEAVED:
                gate, up = tl.split(tl.permute(tl.reshape(product, [COLUMNS, 2, TILE]), [0, 2, 1]))
            else:
                gate, up = tl.split(tl.permute(tl.reshape(product, [2, COLUMNS, TILE]), [1, 2, 0]))
            gate, up = gate.to(tl.float32), up.to(tl.float32)
            if CLAMPED:
                result = _clamped_tile(gate, up, limit, alpha, dtype, INTERPRETED)
            else:
                result = silu_mul_tile(gate, up, dtype, INTERPRETED)
            at = (first + row).to(tl.int64)[None, :] * INNER + column[:, None]
            tl.store(out + at, result, mask=((column < INNER) | EVEN_N)[:, None] & is_real[None, :])


def gate_up_triton(x: torch.Tensor, weights: ExpertWeights, routes: Routes, gating: Gating = SILU_GATING,
                   config: ExpertsConfig | None = None) -> torch.Tensor:
    """:func:`gate_up` as one Triton launch."""
    require_triton()
    num_rows, inner, top_k = len(x), weights.sizes[0] // 2, routes.experts.shape[1]
    out = torch.empty(num_rows * top_k, inner, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    config = config or fastest_config(num_rows, top_k, weights)
    with on_device_of(x):
        _gate_up_kernel[(config.programs, cdiv(inner, config.block_n // 2), len(routes.groups))](
            x=x, order=routes.order, groups=routes.groups, out=out, x_stride=x.stride(0), limit=gating.limit or 0.0,
            alpha=gating.alpha, K=top_k, INTERLEAVED=gating.is_interleaved, CLAMPED=gating.limit is not None,
            TILE=config.tile, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            INTERPRETED=triton.knobs.runtime.interpret, num_warps=config.num_warps, num_stages=config.num_stages,
            **weights.kernel_arguments(),
            **pdl_options(x),
        )
    return out


def fastest_config(num_rows: int, top_k: int, weights: ExpertWeights) -> ExpertsConfig:
    """Return the configuration for so many rows, by times on an H100 at 1 to 256 rows of 8 of 128 experts."""
    num_experts, update = len(weights.weight), weights.update
    mean = num_rows * top_k / num_experts
    if mean > _MANY:
        return ExpertsConfig(128, cdiv(int(2 * mean), 128), 128, 64, 8, 3 if update is None else 2)
    tile = 16 if mean <= 8 else 32 if mean <= 20 else 64
    programs = 1 if num_rows <= tile else 2
    if update is not None:  # tile and update are in registers: of 128 columns two programs would fit an SM
        return ExpertsConfig(tile, programs, 64, 64, 4, 4 if tile == 16 else 3)
    # Both operands of 64 rows in tiles of 128 columns would not fit into the shared memory of smaller GPUs.
    block_k = 128 if tile < 64 else 64
    return ExpertsConfig(tile, programs, 64, block_k, 4, 3 if num_rows == 1 else 4)
