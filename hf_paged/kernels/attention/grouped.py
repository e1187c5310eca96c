# mypy: disallow-untyped-defs=False
"""Paged attention for rows and prompts that share prefixes: what a group shares is read once for a tile of its rows.

Over planned parts (`hf_paged/attention/plan_decode.py`, `plan_prompts.py`). A tile of a group's queries is one operand
of the tensor cores, as in Hydragen (Juravsky et al. 2024, arXiv 2402.05099), ChunkAttention (Ye et al. 2024, arXiv
2402.15220, whose prefix tree nests as groups do) and FlashInfer's cascade inference (Ye et al. 2025, arXiv 2501.01005,
which joins partial results by their sums of weights, too).

* Rows of one new token: the parts of all levels and rows run beside each other in one grid; a small second launch joins
  them. (Joining by the program that finishes a row's last piece, as in `decode`, made that program join a whole tile of
  rows alone, which took longer than everything before it.)
* Prompts: tiles of several rows' queries over what lies ahead of all new tokens, which no row has to mask, with tokens
  in place of rows; then `prefill` over each row's own positions. Its tiles start from the parts of their rows, in the
  order of the positions that these are of.

A part is of one row, or one token, and of some of its positions: the weighted sum of values, the largest score (base 2)
and the sum of weights.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.kernels._triton import (
    after_previous_kernel,
    cdiv,
    column_numbers,
    constants,
    jit,
    next_power_of_2,
    on_device_of,
    pdl_options,
    pdl_supported,
    require_triton,
    tl,
)
from hf_paged.kernels.attention._tile import (
    KernelShape,
    add_scores,
    attend_row,
    blocks_of,
    blocks_of_tile,
    empty_result,
    first_visible,
    launch_arguments,
    load_keys,
    load_values,
    partial_results,
    scores_of,
    store_part,
    store_result,
)
from hf_paged.kernels.attention.decode import MIN_SPLIT
from hf_paged.kernels.attention.prefill import SharedParts, paged_attention_prefill
from hf_paged.kernels.attention.types import (
    AttentionOptions,
    GroupedConfig,
    GroupedWork,
    PagedMetadata,
    PartItem,
    PromptWork,
    RowEntry,
    positively_scaled,
)

_ROWS, _FIRST, _SLOT, _BEGIN, _END, _SPLIT, _SPLITS, _PART, _LENGTH, _PART_FIELDS = column_numbers(PartItem)
_ROW_PART, _ROW_PIECES, _MEMBER, _MEMBER_PART, _MEMBER_LENGTH, _ROW_FIELDS = column_numbers(RowEntry)

# A split of a group of prompts of less costs more in its partial results than it gains.
MIN_PROMPT_SPLIT = 128
# A group's split has all its rows' partial results to write: shorter ones cost more in that than they gain.
MIN_GROUP_SPLIT = 128
# Pieces that are joined at a time. A row of most steps has no more: eight of its group, and its own.
_JOINED_PIECES = 16
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
def cut_positions(begin, end, split, splits, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr):
    """Split number `split` of positions ``begin .. end - 1``, in whole tiles; none where it is empty."""
    first_tile = begin // BLOCK_N
    tiles = tl.maximum(tl.cdiv(tl.cdiv(end, BLOCK_N) - first_tile, splits), MIN_TILES)
    loop_begin = (first_tile + split * tiles) * BLOCK_N
    loop_end = tl.minimum(loop_begin + tiles * BLOCK_N, end)
    return loop_begin, tl.where(begin < end, loop_end, loop_begin)


@jit()
def _store_nothing(partial_sums, part, query_head, live, S: tl.constexpr):
    """A part out of sight: what it would have in `partial_acc` is not read."""
    place = part * (S.kv_heads * S.group) + query_head
    zero = tl.zeros(place.shape, tl.float32)
    tl.store(partial_sums + place * 2, zero + float("-inf"), mask=live)
    tl.store(partial_sums + place * 2 + 1, zero, mask=live)


@jit()
def _shared_part(
    q, k_cache, v_cache, partial_acc, partial_sums, table, block_table, q_stride_t, q_stride_h, table_stride, window,
    scale_log2, softcap_log2, head, rows, first, slot, begin, end, split, splits, piece, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MIN_TILES: tl.constexpr, S: tl.constexpr,
):
    """A split of what a tile of rows shares. Tile row m is query head m % group of the tile's row m // group."""
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    lane = tl.arange(0, S.head_pad)
    member = m // S.group
    live = member < rows
    entry = table + (first + member) * _ROW_FIELDS
    row = tl.load(entry + _MEMBER, mask=live, other=0).to(tl.int64)
    part = tl.load(entry + _MEMBER_PART, mask=live, other=0).to(tl.int64) + piece
    query_head = head * S.group + m % S.group
    row_begin = begin
    if S.has_window:
        last = tl.load(entry + _MEMBER_LENGTH, mask=live, other=0) - 1
        row_begin = tl.maximum(first_visible(last, window, S), 0)
        begin = tl.maximum(begin, tl.min(tl.where(live, row_begin, end), 0))
    loop_begin, loop_end = cut_positions(begin, end, split, splits, BLOCK_N, MIN_TILES)
    if loop_begin < loop_end:
        table_row = block_table + slot * table_stride
        inside = live[:, None] & (lane < S.head_dim)[None, :]
        q_tile = tl.load(q + row[:, None] * q_stride_t + query_head[:, None] * q_stride_h + lane[None, :],
                         mask=inside, other=0.0)
        acc = tl.zeros([BLOCK_M, S.value_pad], tl.float32)
        # Finite and below every score: with -inf a row that has seen nothing yet would compute -inf - -inf.
        top = tl.full([BLOCK_M], -3.0e38, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        # Each tile's blocks are looked up one tile ahead, so that its loads need not wait for the lookup.
        blocks = blocks_of_tile(table_row, loop_begin, begin, loop_end, n, BLOCK_N, True, S)
        for start in tl.range(loop_begin, loop_end, BLOCK_N, num_stages=STAGES):
            k = load_keys(k_cache, blocks, start, n, head, BLOCK_N, S)
            v = load_values(v_cache, blocks, start, begin, loop_end, n, head, BLOCK_N, True, S)
            blocks = blocks_of_tile(table_row, start + BLOCK_N, begin, loop_end, n, BLOCK_N, True, S)

            score, scale = scores_of(q_tile, k, scale_log2, softcap_log2, S)
            position = start + n
            readable = ((position >= begin) & (position < loop_end))[None, :]
            if S.has_window:
                readable = readable & (position[None, :] >= row_begin[:, None])
            score = tl.where(readable, score, float("-inf"))
            acc, top, total = add_scores(acc, top, total, score, scale, v)
        store_part(acc, top, total, partial_acc, partial_sums, part, query_head, live, S)
    else:
        _store_nothing(partial_sums, part, query_head, live, S)


@jit()
def _own_part(
    q, k_cache, v_cache, out, partial_acc, partial_sums, block_table, sinks, q_stride_t, q_stride_h, table_stride,
    window, scale_log2, softcap_log2, head, row, slot, begin, end, split, splits, part, length, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, MIN_TILES: tl.constexpr, S: tl.constexpr,
):
    """A split of a row's own positions."""
    if S.has_window:
        begin = tl.maximum(begin, first_visible(length - 1, window, S))
    loop_begin, loop_end = cut_positions(begin, end, split, splits, BLOCK_N, MIN_TILES)
    table_row = block_table + slot * table_stride
    # Block ids come a tile ahead, so that loads of K and V need not wait for them.
    block = blocks_of(table_row, loop_begin + tl.arange(0, BLOCK_N), begin, loop_end, S)
    acc, top, total = attend_row(  # the joining of several pieces counts the sink
        q, k_cache, v_cache, sinks, table_row, q_stride_t, q_stride_h, scale_log2, softcap_log2, head, row, block,
        begin, loop_begin, loop_end, part < 0, BLOCK_M, BLOCK_N, STAGES, S,
    )
    m = tl.arange(0, BLOCK_M)
    live, query_head = m < S.group, head * S.group + m
    if part < 0:
        store_result(out, acc, total, row, query_head, live, S)
    elif loop_begin < loop_end:
        store_part(acc, top, total, partial_acc, partial_sums, part, query_head, live, S)
    else:
        _store_nothing(partial_sums, part, query_head, live, S)


@jit(varying_pointers=("items", "table"))
def _grouped_kernel(
    q, k_cache, v_cache, out, partial_acc, partial_sums, items, table, block_table, sinks, q_stride_t, q_stride_h,
    table_stride, window, scale_log2, softcap_log2, S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, MIN_TILES: tl.constexpr, OWN_BLOCK_M: tl.constexpr, OWN_BLOCK_N: tl.constexpr,
    OWN_STAGES: tl.constexpr, OWN_MIN_TILES: tl.constexpr, PDL: tl.constexpr,
):
    """A program computes an item of the plan for one KV head. OWN_BLOCK_M of 0: no item is of a row's own positions."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()  # the joining may be put on the machine: it waits for all of this
    head = tl.program_id(0)
    columns = items + tl.program_id(1) * _PART_FIELDS
    # All at once, and not each where it is needed: one way to memory before the next.
    rows = tl.load(columns + _ROWS)
    first = tl.load(columns + _FIRST)
    slot = tl.load(columns + _SLOT).to(tl.int64)
    begin = tl.load(columns + _BEGIN)
    end = tl.load(columns + _END)
    split = tl.load(columns + _SPLIT)
    splits = tl.load(columns + _SPLITS)
    part = tl.load(columns + _PART).to(tl.int64)
    length = tl.load(columns + _LENGTH)
    if rows > 0:
        _shared_part(
            q, k_cache, v_cache, partial_acc, partial_sums, table, block_table, q_stride_t, q_stride_h, table_stride,
            window, scale_log2, softcap_log2, head, rows, first, slot, begin, end, split, splits, part, BLOCK_M,
            BLOCK_N, STAGES, MIN_TILES, S,
        )
    elif OWN_BLOCK_M > 0:  # noqa: SIM102  (decided at compile time)
        if rows == 0:
            _own_part(
                q, k_cache, v_cache, out, partial_acc, partial_sums, block_table, sinks, q_stride_t, q_stride_h,
                table_stride, window, scale_log2, softcap_log2, head, first.to(tl.int64), slot, begin, end, split,
                splits, part, length, OWN_BLOCK_M, OWN_BLOCK_N, OWN_STAGES, OWN_MIN_TILES, S,
            )


@jit(varying_pointers=("table",))
def _join_kernel(out, partial_acc, partial_sums, table, sinks, HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
                 VALUE_PAD: tl.constexpr, HAS_SINKS: tl.constexpr, PIECES: tl.constexpr, PDL: tl.constexpr):
    """A row's pieces in order, for one query head.

    `PIECES` are loaded before they are used, and what weighs a piece is a number that each thread has: no tensor
    changes its layout, which would go through shared memory.
    """
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    part = tl.load(table + row * _ROW_FIELDS + _ROW_PART).to(tl.int64)
    pieces = tl.load(table + row * _ROW_FIELDS + _ROW_PIECES)
    # The plan comes from copies, which end every PDL chain: it is read ahead of the wait.
    after_previous_kernel(PDL)
    if pieces == 1:
        return
    lane = tl.arange(0, VALUE_PAD)
    acc = tl.zeros([VALUE_PAD], tl.float32)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    if HAS_SINKS:
        # A score without a value, of weight 1 at its own height, in base 2 by log2(e).
        top = tl.maximum(tl.load(sinks + head).to(tl.float32) * 1.4426950408889634, -3.0e38)
        total += 1.0
    for start in range(0, pieces, PIECES):
        values, tops, totals = (), (), ()
        for i in tl.static_range(PIECES):
            is_piece = start + i < pieces
            place = (part + start + i) * HEADS + head
            inside = lane < tl.where(is_piece, VALUE_DIM, 0)
            sums = partial_sums + ((part + tl.minimum(start + i, pieces - 1)) * HEADS + head) * 2
            # mypy would have the tuples stay empty.
            value = tl.load(partial_acc + place * VALUE_DIM + lane, mask=inside, other=0.0)
            values += (value,)  # type: ignore[assignment]
            tops += (tl.where(is_piece, tl.load(sums), float("-inf")),)  # type: ignore[assignment]
            totals += (tl.load(sums + 1),)  # type: ignore[assignment]
        new_top = top
        for i in tl.static_range(PIECES):
            new_top = tl.maximum(new_top, tops[i])
        # A row that has seen nothing yet: every weight is 0.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        rescale = tl.exp2(top - shift)
        acc *= rescale
        total *= rescale
        for i in tl.static_range(PIECES):
            weight = tl.exp2(tops[i] - shift)
            total += totals[i] * weight
            # What a piece out of sight did not write may be NaN.
            acc += tl.where(tops[i] > float("-inf"), values[i], 0.0) * weight
        top = new_top
    result = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out + (row * HEADS + head) * VALUE_DIM + lane, result.to(out.dtype.element_ty), mask=lane < VALUE_DIM)


def _join_parts(out: torch.Tensor, acc: torch.Tensor, sums: torch.Tensor, rows: torch.Tensor,
                sinks: torch.Tensor | None, shape: KernelShape) -> None:
    """Fill the lines of ``out`` [R, Hq, Dv] that have several parts.

    Args:
        acc, sums: ``[num_parts, Hq, Dv]`` and ``[num_parts, Hq, 2]``, float32.
        rows: ``[R, ROW_FIELDS]`` int32, see :class:`~hf_paged.kernels.attention.types.RowEntry`.
    """
    heads = shape.kv_heads * shape.group
    with on_device_of(out):
        _join_kernel[(heads, len(out))](
            out, acc, sums, rows, sinks, HEADS=heads, VALUE_DIM=shape.value_dim, VALUE_PAD=shape.value_pad,
            HAS_SINKS=shape.has_sinks, PIECES=_JOINED_PIECES, num_warps=max(1, shape.value_pad // 128),
            **pdl_options(out),
        )


def _launch(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata,
            options: AttentionOptions, work: GroupedWork, out: torch.Tensor | None, sinks: torch.Tensor | None,
            **tiles: Any) -> tuple[torch.Tensor, torch.Tensor, KernelShape]:
    """Compute the items of ``work``: parts of results, and with ``out`` rows that have one part."""
    config, (numbers, shape) = work.config, launch_arguments(q, k_cache, v_cache, meta, options)
    acc, sums = partial_results(work.num_parts, q, shape.value_dim)
    registers = {} if config.max_registers is None else {"maxnreg": config.max_registers}
    with on_device_of(q):
        _grouped_kernel[(shape.kv_heads, len(work.items))](
            q, k_cache, v_cache, out, acc, sums, work.items, work.rows, meta.block_table, sinks, *numbers,
            S=constants(shape),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, STAGES=config.num_stages, num_warps=config.num_warps,
            **tiles, **registers,
        )
    return acc, sums, shape


def paged_attention_grouped(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata, options: AttentionOptions, *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`~hf_paged.attention.registry.paged_attention` of one new token a row, over ``meta.work``.

    fp16, bf16 or fp32; head_dim up to 256. The grid and the memory for parts depend on the shapes of the plan alone: a
    CUDA graph serves every plan of the same shapes and tile.

    Args:
        meta: its ``work`` is a :class:`~hf_paged.kernels.attention.types.GroupedWork`.
        out: ``[T, Hq, Dv]`` contiguous, q's dtype; every element is written. None: a new tensor.
    """
    require_triton()
    work = meta.work
    assert isinstance(work, GroupedWork), "the plan of a grouped step"
    out = empty_result(q, v_cache) if out is None else out
    q, options = positively_scaled(q, options)
    config, group_pad = work.config, next_power_of_2(q.shape[1] // k_cache.shape[2])
    acc, sums, shape = _launch(
        q, k_cache, v_cache, meta, options, work, out, options.sinks,
        MIN_TILES=cdiv(MIN_GROUP_SPLIT, config.block_n), OWN_BLOCK_M=max(16, group_pad),
        OWN_BLOCK_N=config.own_block_n, OWN_STAGES=config.own_stages,
        OWN_MIN_TILES=cdiv(MIN_SPLIT, config.own_block_n), PDL=pdl_supported(q.device),
    )
    _join_parts(out, acc, sums, work.rows, options.sinks, shape)
    return out


def paged_attention_grouped_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata, options: AttentionOptions, *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """:func:`~hf_paged.attention.registry.paged_attention` for rows of any length, over ``meta.work``.

    fp16, bf16 or fp32; head_dim up to 256. The grids and the memory for parts depend on the shapes of the plan alone: a
    CUDA graph serves every plan of the same shapes and tile.

    Args:
        meta: its ``work`` is a :class:`~hf_paged.kernels.attention.types.PromptWork`.
        out: ``[T, Hq, Dv]`` contiguous, q's dtype; every element is written. None: a new tensor.
    """
    require_triton()
    assert isinstance(meta.work, PromptWork), "the plan of prompts that share prefixes"
    work, own_begin = meta.work
    q, options = positively_scaled(q, options)
    acc, sums, _ = _launch(
        q, k_cache, v_cache, meta, options, work, None, None, MIN_TILES=cdiv(MIN_PROMPT_SPLIT, work.config.block_n),
        OWN_BLOCK_M=0, OWN_BLOCK_N=0, OWN_STAGES=0, OWN_MIN_TILES=0, PDL=False,
    )
    shared = SharedParts(own_begin, work.rows, acc, sums)
    return paged_attention_prefill(q, k_cache, v_cache, meta, options, out=out, shared=shared)
