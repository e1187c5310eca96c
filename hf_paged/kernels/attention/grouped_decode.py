# mypy: disallow-untyped-defs=False
"""Paged attention for rows of one new token that share prefixes: what a group shares is read once for a tile of rows.

Over planned parts (`hf_paged/attention/plan_groups.py`). A tile of a group's queries is one operand of the tensor
cores, as in Hydragen (Juravsky et al. 2024, arXiv 2402.05099), ChunkAttention (Ye et al. 2024, arXiv 2402.15220, whose
prefix tree nests as groups do) and FlashInfer's cascade inference (Ye et al. 2025, arXiv 2501.01005, which joins
partial results by their sums of weights, too). Here the parts of all levels and rows run beside each other in one grid;
a small second launch joins them. (Joining by the program that finishes a row's last piece, as in `decode`, made that
program join a whole tile of rows alone, which took longer than everything before it.)
"""

from __future__ import annotations

import torch

from hf_paged.kernels._triton import jit, next_power_of_2, on_device_of, pdl_supported, require_triton, tl
from hf_paged.kernels.attention._launch import launch_arguments, partial_results
from hf_paged.kernels.attention._parts import (
    BEGIN,
    END,
    FIRST,
    LENGTH,
    PART,
    ROWS,
    SLOT,
    SPLIT,
    SPLITS,
    cut_positions,
    join_parts,
    shared_part,
    store_nothing,
    store_part,
)
from hf_paged.kernels.attention._tile import attend_tile, blocks_of
from hf_paged.kernels.attention.decode import MIN_SPLIT
from hf_paged.kernels.attention.types import (
    PART_FIELDS,
    ROW_FIELDS,
    AttentionOptions,
    GroupedConfig,
    GroupedWork,
    PagedMetadata,
    positively_scaled,
)

# A group's split has all its rows' partial results to write: shorter ones cost more in that than they gain.
MIN_GROUP_SPLIT = 128
# By bytes of one head's key (padded). Measured on an H200 for 256 bytes; larger tiles for larger
# groups were no faster, since three programs a multiprocessor hide more than they save.
_G = GroupedConfig
_DEEP = {
    64: _G(64, 64, 3, 64, 3, 4, 3, 168),
    128: _G(64, 64, 3, 64, 3, 4, 3, 168),
    256: _G(64, 32, 3, 64, 3, 4, 3, 168),
    512: _G(64, 32, 2, 32, 3, 4, 2),
}
_SHALLOW = {
    64: _G(64, 64, 2, 64, 2, 4, 3),
    128: _G(64, 64, 2, 64, 2, 4, 2),
    256: _G(64, 32, 2, 32, 2, 4, 2),
    512: _G(32, 16, 2, 16, 2, 4, 2),
}
# An exact fp32 dot runs on the plain cores out of registers, where larger tiles spill.
_FLOAT = {
    64: _G(16, 32, 2, 32, 2, 4, 2),
    128: _G(16, 32, 2, 32, 2, 4, 2),
    256: _G(16, 32, 2, 32, 2, 4, 2),
    512: _G(16, 16, 2, 16, 2, 4, 2),
    1024: _G(16, 16, 2, 16, 2, 4, 2),
}
# Shared memory a block needs for the deep configurations; smaller GPUs (sm_86, sm_89: 99 KiB) take the shallow ones.
_DEEP_SHARED_MEMORY = 160 << 10


def grouped_config(head_dim_pad: int, itemsize: int, group: int, shared_memory: int) -> GroupedConfig:
    """Tiles for a head size and query heads of a KV head. `shared_memory`: bytes a block may have."""
    configs = _FLOAT if itemsize == 4 else _DEEP if shared_memory >= _DEEP_SHARED_MEMORY else _SHALLOW
    config = configs[max(64, head_dim_pad * itemsize)]
    return config._replace(block_m=max(config.block_m, next_power_of_2(group)))


@jit()
def _own_part(
    q, k_cache, v_cache, out, partial_acc, partial_sums, block_table, sinks, q_stride_t, q_stride_h, table_stride,
    window, scale_log2, softcap_log2, head, row, slot, begin, end, split, splits, part, length,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MIN_TILES: tl.constexpr,
):
    """A split of a row's own positions. The group's heads are the rows of one tile, padded to what tl.dot takes."""
    HEADS: tl.constexpr = KV_HEADS * GROUP
    if HAS_WINDOW:
        begin = tl.maximum(begin, length - window)
    loop_begin, loop_end = cut_positions(begin, end, split, splits, BLOCK_N, MIN_TILES)
    table_row = block_table + slot * table_stride
    n = tl.arange(0, BLOCK_N)
    # The next tile's block ids come a tile ahead, so that its loads of K and V need not wait for them.
    block = blocks_of(table_row, loop_begin + n, begin, loop_end, BLOCK_SIZE)
    m = tl.arange(0, BLOCK_M)
    lane = tl.arange(0, HEAD_DIM_PAD)
    query_head = head * GROUP + m
    live = m < GROUP
    inside = live[:, None] & (lane < HEAD_DIM)[None, :]
    q_tile = tl.load(q + row * q_stride_t + query_head[:, None] * q_stride_h + lane[None, :], mask=inside, other=0.0)
    acc = tl.zeros([BLOCK_M, HEAD_DIM_PAD], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        # Of several pieces, the joining counts it.
        sink = tl.load(sinks + query_head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(part < 0, tl.maximum(sink, -3.0e38), top)
        total = tl.where(part < 0, 1.0, total)
    for start in tl.range(loop_begin, loop_end, BLOCK_N, num_stages=STAGES):
        position = start + n
        next_block = blocks_of(table_row, position + BLOCK_N, begin, loop_end, BLOCK_SIZE)
        readable = (position >= begin) & (position < loop_end)
        acc, top, total = attend_tile(
            q_tile, acc, top, total, k_cache, v_cache, block, head, position, readable,
            scale_log2, softcap_log2, HAS_SOFTCAP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE,
        )
        block = next_block

    if part < 0:
        result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        offset = (row * HEADS + query_head)[:, None] * HEAD_DIM + lane[None, :]
        tl.store(out + offset, result.to(out.dtype.element_ty), mask=inside)
    elif loop_begin < loop_end:
        store_part(acc, top, total, partial_acc, partial_sums, part, query_head, live, HEADS, HEAD_DIM, HEAD_DIM_PAD)
    else:
        store_nothing(partial_sums, part, query_head, live, HEADS)


@jit(varying_pointers=("items", "table"))
def _grouped_kernel(
    q,
    k_cache,
    v_cache,
    out,
    partial_acc,
    partial_sums,
    items,
    table,
    block_table,
    sinks,
    q_stride_t,
    q_stride_h,
    table_stride,
    window,
    scale_log2,
    softcap_log2,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    MIN_TILES: tl.constexpr,
    OWN_BLOCK_M: tl.constexpr,
    OWN_BLOCK_N: tl.constexpr,
    OWN_STAGES: tl.constexpr,
    OWN_MIN_TILES: tl.constexpr,
    PART_FIELDS: tl.constexpr,
    ROW_FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # the joining may be put on the machine: it waits for all of this
    head = tl.program_id(0)
    columns = items + tl.program_id(1) * PART_FIELDS
    # All at once, and not each where it is needed: one way to memory before the next.
    rows = tl.load(columns + ROWS)
    first = tl.load(columns + FIRST)
    slot = tl.load(columns + SLOT).to(tl.int64)
    begin = tl.load(columns + BEGIN)
    end = tl.load(columns + END)
    split = tl.load(columns + SPLIT)
    splits = tl.load(columns + SPLITS)
    part = tl.load(columns + PART).to(tl.int64)
    length = tl.load(columns + LENGTH)
    if rows > 0:
        shared_part(
            q, k_cache, v_cache, partial_acc, partial_sums, table, block_table, q_stride_t, q_stride_h, table_stride,
            window, scale_log2, softcap_log2, head, rows, first, slot, begin, end, split, splits, part, HAS_WINDOW,
            HAS_SOFTCAP, GROUP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_N, STAGES, MIN_TILES,
            ROW_FIELDS,
        )
    elif rows == 0:
        _own_part(
            q, k_cache, v_cache, out, partial_acc, partial_sums, block_table, sinks, q_stride_t, q_stride_h,
            table_stride, window, scale_log2, softcap_log2, head, first.to(tl.int64), slot, begin, end, split, splits,
            part, length, HAS_WINDOW, HAS_SOFTCAP, HAS_SINKS, GROUP, KV_HEADS, HEAD_DIM, HEAD_DIM_PAD, BLOCK_SIZE,
            OWN_BLOCK_M, OWN_BLOCK_N, OWN_STAGES, OWN_MIN_TILES,
        )


def paged_attention_grouped(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: PagedMetadata,
    options: AttentionOptions,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`~hf_paged.attention.paged_attention.paged_attention` of one new token a row, over ``meta.work``.

    fp16, bf16 or fp32; head_dim up to 256. The grid and the memory for parts depend on the shapes of the plan alone: a
    CUDA graph serves every plan of the same shapes and tile.

    Args:
        meta: its ``work`` is a :class:`~hf_paged.kernels.attention.types.GroupedWork`.
        out: ``[T, Hq, D]`` contiguous, q's dtype; every element is written. None: a new tensor.
    """
    require_triton()
    work = meta.work
    assert isinstance(work, GroupedWork), "the plan of a grouped step"
    num_kv_heads, config = k_cache.shape[2], work.config
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    q, options = positively_scaled(q, options)
    shared = launch_arguments(q, k_cache, meta, options)
    acc, sums = partial_results(work.num_parts, q)
    with on_device_of(q):
        _grouped_kernel[(num_kv_heads, len(work.items))](
            q, k_cache, v_cache, out, acc, sums, work.items, work.rows, meta.block_table, options.sinks,
            *shared.numbers,
            HAS_SINKS=options.sinks is not None,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            STAGES=config.num_stages,
            MIN_TILES=-(-MIN_GROUP_SPLIT // config.block_n),
            OWN_BLOCK_M=max(16, shared.group_pad),
            OWN_BLOCK_N=config.own_block_n,
            OWN_STAGES=config.own_stages,
            OWN_MIN_TILES=-(-MIN_SPLIT // config.own_block_n),
            PART_FIELDS=PART_FIELDS,
            ROW_FIELDS=ROW_FIELDS,
            PDL=pdl_supported(q.device),
            num_warps=config.num_warps,
            **shared.constants,
            **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
        )
        join_parts(out, acc, sums, work.rows, options.sinks, num_kv_heads)
    return out
