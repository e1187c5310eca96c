"""The backend of the prefill kernel for Hopper, and how evenly that deals the tiles of prompts to its programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch

from hf_paged.attention.plan_decode import numbered
from hf_paged.attention.plan_prompts import PromptKernel, Prompts, hopper_rows
from hf_paged.attention.triton_backend import TritonBackend
from hf_paged.device.cuda import num_multiprocessors
from hf_paged.kernels.attention.types import AttentionOptions, AttentionSpec, PagedMetadata, PromptWork
from hf_paged.kernels.hopper import prefill_support
from hf_paged.kernels.hopper.prefill_support import POSITIONS, packed_heads, takes, takes_rows, tile_tokens

_UNEVEN = 1.15  # times as long as even shares would take: from here on a queue of tiles is faster, see docs/notebook.md
# What a tile costs besides the positions it sees, in tiles of keys: its queries come, its result goes. An estimate.
_FIXED_COST = 1.0


class HopperBackend(TritonBackend):
    """The kernel for Hopper where rows of new tokens fill its tiles, else the others; see `prefill_support`.

    With ``measured_only`` larger heads than those it was measured to be faster with go to the others as well.
    """

    name = "hopper"
    has_queue = True

    def __init__(self, *, measured_only: bool = False) -> None:
        self.largest_head_dim = prefill_support.MEASURED_HEAD_DIM if measured_only else 256

    def why_not(self, spec: AttentionSpec) -> str | None:
        reason = prefill_support.why_not_on(spec.device)
        reason = reason or prefill_support.why_not_of(spec.dtype, spec.head_dim, spec.block_size)
        return reason and f"expected a model and GPU that its kernel can be used for; it {reason}"

    def prompt_kernel(self, prompts: Prompts, spec: AttentionSpec) -> PromptKernel:
        kernel = super().prompt_kernel(prompts, spec)
        if not self._takes_rows(prompts.max_query_len, spec):
            return kernel
        return kernel._replace(rows=hopper_rows(spec))

    def wants_queue(self, num_new: np.ndarray, seq_lens: np.ndarray, spec: AttentionSpec) -> bool:
        if not self._takes_rows(int(num_new.max()), spec):
            return False
        bundles = spec.num_heads // packed_heads(spec.group)
        programs = num_multiprocessors(spec.device)
        return imbalance(num_new, seq_lens, tile_tokens(spec.group), bundles, programs) > _UNEVEN

    def _takes_rows(self, max_query_len: int, spec: AttentionSpec) -> bool:
        is_one_size = spec.are_calls_alike and not spec.has_value_dim
        fits = is_one_size and spec.head_dim <= self.largest_head_dim
        return fits and takes_rows(spec.dtype, spec.head_dim, max_query_len, spec.group)

    def run(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata,
            options: AttentionOptions, out: torch.Tensor | None = None) -> torch.Tensor:
        is_shared = isinstance(meta.work, PromptWork)
        fits = meta.max_query_len > 1 and not is_shared and q.shape[2] <= self.largest_head_dim and not options.chunk
        if fits and takes(q, k_cache, v_cache, meta):
            return _hopper_kernel()(q, k_cache, v_cache, meta, options, out=out)
        return super().run(q, k_cache, v_cache, meta, options, out)


@cache
def _hopper_kernel() -> Callable[..., torch.Tensor]:
    from hf_paged.kernels.hopper.prefill import paged_attention_hopper

    return paged_attention_hopper


def imbalance(num_new: np.ndarray, seq_lens: np.ndarray, tokens: int, bundles: int, programs: int) -> float:
    """How many times as long the launch takes as it could, where tiles are dealt back and forth.

    Args:
        num_new: ``[R]``, new tokens of each row, the last ones of its ``seq_lens`` ``[R]``.
        tokens: of a tile.
        bundles: items that each tile is, of equal cost: groups of heads.
        programs: among which items are dealt.
    """
    tiles = -(-num_new // tokens)
    row, number = numbered(np.arange(len(num_new)), tiles)  # within the row, its last tile first
    before = (tiles[row] - 1 - number) * tokens
    seen = seq_lens[row] - num_new[row] + np.minimum(before + tokens, num_new[row])
    # Rows begin at numbers that need no table: between two of them some belong to none.
    number += (np.cumsum(num_new) - num_new)[row] // tokens + row
    num_items = (int(num_new.sum()) // tokens + len(num_new)) * bundles
    costs = np.zeros((-(-num_items // programs), programs))
    items = costs.reshape(-1)[:num_items].reshape(-1, bundles)
    items[number] = (np.ceil(seen / POSITIONS) + _FIXED_COST)[:, None]
    costs[1::2] = costs[1::2, ::-1].copy()
    shares = costs.sum(0)
    return float(shares.max() / max(shares.mean(), costs.max()))


BACKEND = HopperBackend()
