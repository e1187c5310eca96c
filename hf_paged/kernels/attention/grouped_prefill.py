# mypy: disallow-untyped-defs=False
"""Paged attention for prompts that share prefixes: what lies ahead of all new tokens is read once for a tile of them.

Two launches over planned parts (`hf_paged/attention/plan_prompts.py`): tiles of several rows' queries over what these
rows share, which none of them has to mask, as in `grouped_decode` (which names the sources), with tokens in place of
rows; then `prefill` over each row's own positions. Its tiles start from the parts of their rows, in the order of the
positions that these are of.
"""

from __future__ import annotations

import torch

from hf_paged.kernels._triton import jit, on_device_of, require_triton, tl
from hf_paged.kernels.attention._launch import launch_arguments, partial_results
from hf_paged.kernels.attention._parts import BEGIN, END, FIRST, PART, ROWS, SLOT, SPLIT, SPLITS, shared_part
from hf_paged.kernels.attention.prefill import SharedParts, paged_attention_prefill
from hf_paged.kernels.attention.types import (
    PART_FIELDS,
    ROW_FIELDS,
    AttentionOptions,
    PagedMetadata,
    PromptWork,
    positively_scaled,
)

# A split of less costs more in its partial results than it gains.
MIN_SPLIT = 128


@jit(varying_pointers=("items", "table"))
def _shared_kernel(
    q,
    k_cache,
    v_cache,
    partial_acc,
    partial_sums,
    items,
    table,
    block_table,
    q_stride_t,
    q_stride_h,
    table_stride,
    window,
    scale_log2,
    softcap_log2,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PART_FIELDS: tl.constexpr,
    ROW_FIELDS: tl.constexpr,
):
    columns = items + tl.program_id(1) * PART_FIELDS
    rows = tl.load(columns + ROWS)
    if rows > 0:
        shared_part(
            q, k_cache, v_cache, partial_acc, partial_sums, table, block_table, q_stride_t, q_stride_h, table_stride,
            window, scale_log2, softcap_log2, tl.program_id(0), rows, tl.load(columns + FIRST),
            tl.load(columns + SLOT).to(tl.int64), tl.load(columns + BEGIN), tl.load(columns + END),
            tl.load(columns + SPLIT), tl.load(columns + SPLITS), tl.load(columns + PART).to(tl.int64), HAS_WINDOW,
            HAS_SOFTCAP, GROUP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_N, STAGES, MIN_TILES,
            ROW_FIELDS,
        )


def paged_attention_grouped_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: PagedMetadata,
    options: AttentionOptions,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`~hf_paged.attention.paged_attention.paged_attention` for rows of any length, over ``meta.work``.

    fp16, bf16 or fp32; head_dim up to 256. The grids and the memory for parts depend on the shapes of the plan alone: a
    CUDA graph serves every plan of the same shapes and tile.

    Args:
        meta: its ``work`` is a :class:`~hf_paged.kernels.attention.types.PromptWork`.
        out: ``[T, Hq, D]`` contiguous, q's dtype; every element is written. None: a new tensor.
    """
    require_triton()
    assert isinstance(meta.work, PromptWork), "the plan of prompts that share prefixes"
    (items, rows, num_parts, config), own_begin = meta.work
    q, options = positively_scaled(q, options)
    arguments = launch_arguments(q, k_cache, meta, options)
    acc, sums = partial_results(num_parts, q)
    with on_device_of(q):
        _shared_kernel[(k_cache.shape[2], len(items))](
            q, k_cache, v_cache, acc, sums, items, rows, meta.block_table, *arguments.numbers,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            STAGES=config.num_stages,
            MIN_TILES=-(-MIN_SPLIT // config.block_n),
            PART_FIELDS=PART_FIELDS,
            ROW_FIELDS=ROW_FIELDS,
            num_warps=config.num_warps,
            **arguments.constants,
            **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
        )
    shared = SharedParts(own_begin, rows, acc, sums)
    return paged_attention_prefill(q, k_cache, v_cache, meta, options, out=out, shared=shared)
