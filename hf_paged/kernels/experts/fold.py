# mypy: disallow-untyped-defs=False
"""LoRA updates of experts' weights, folded into each tile of a weight before it is multiplied with.

PEFT adds ``scale * B @ A`` to all experts' weights in each forward, by `torch.baddbmm`. On a CPU that rounds the sum
alone, on a GPU mostly the update as well (see `rounds_update`). A kernel that reads a weight once does it in registers,
with a GPU's roundings, and writes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels._triton import jit, next_power_of_2, tl

MOST_RANK = 64  # of an update that kernels take: more columns of B would not fit into registers beside the tile
_LEAST_BLOCK = 16  # columns that a product of tiles has at least


class ExpertUpdate(NamedTuple):
    """LoRA update of the weights of E experts, each [N, K], in PEFT's layout.

    ``a`` [E * r, K], the rows of an expert one after another; ``b`` [N, r * E], the columns of all experts beside one
    another; ``scale`` of their product. Both may have another dtype than the weights, to which they are rounded first.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def rank(self, num_experts: int) -> int:
        """Return r."""
        return len(self.a) // num_experts

    def folded(self, weight: torch.Tensor, *, is_transposed: bool) -> torch.Tensor:
        """Return the experts' weights [E, N, K], or [E, K, N] if they are transposed, with the update, as PEFT does."""
        num_experts = len(weight)
        a = self.a.view(num_experts, -1, self.a.shape[1]).to(weight.dtype)
        b = self.b.view(len(self.b), -1, num_experts).permute(2, 0, 1).to(weight.dtype)
        left, right = (a.mT, b.mT) if is_transposed else (b, a)
        return torch.baddbmm(weight, left, right, alpha=self.scale)


def rank_block(rank: int) -> int:
    """Return the number of columns that tiles of B have for a rank."""
    return max(_LEAST_BLOCK, next_power_of_2(rank))


def rounds_update(rank: int, *, is_transposed: bool) -> bool:
    """Return whether cuBLAS rounds an update to the weights' dtype before it adds it, in 16 bits.

    Its kernels for tensor cores do. They read lines that begin at 16 bytes, which those of B, of `rank` values, do not
    for other ranks than multiples of 8; of transposed weights it reads B the other way round.
    """
    return is_transposed or rank % 8 == 0


@jit()
def update_columns(b, expert, n, n_inside, dtype: tl.constexpr, S: tl.constexpr):
    """Rows n of an expert's B, rounded to dtype: [BLOCK_N, S.rank_block], zeros beyond its columns."""
    j = tl.arange(0, S.rank_block)
    at = b + expert + n[:, None] * (S.rank * S.experts) + j[None, :] * S.experts
    return tl.load(at, mask=n_inside[:, None] & (j < S.rank)[None, :], other=0.0).to(dtype)


@jit()
def folded_tile(w, columns, a_of_expert, k, k_inside, scale, S: tl.constexpr):
    """A tile w [BLOCK_N, BLOCK_K] of an expert's weight with its update, rounded as `torch.baddbmm` does; k: its
    columns."""
    j = tl.arange(0, S.rank_block)
    mask = (j < S.rank)[:, None] & k_inside[None, :]
    a = tl.load(a_of_expert + j[:, None] * S.columns + k[None, :], mask=mask, other=0.0).to(w.dtype)
    update = scale * tl.dot(columns, a, input_precision="ieee")
    if S.rounds_update:
        update = update.to(w.dtype).to(tl.float32)
    return (w.to(tl.float32) + update).to(w.dtype)
