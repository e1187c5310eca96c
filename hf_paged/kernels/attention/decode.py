# mypy: disallow-untyped-defs=False
"""Paged attention for rows of one new token: split-KV (flash-decoding) over planned splits of work, in one launch.

Source of the method: Dao et al., "Flash-Decoding for long-context inference" (2023). The program that finishes a row's
last split joins them all (as stream-K's fix-up does, Osama et al. 2023, arXiv 2301.03598).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from hf_paged.device.cuda import num_multiprocessors, shared_memory
from hf_paged.kernels._triton import (
    after_previous_kernel,
    column_numbers,
    constants,
    jit,
    on_device_of,
    pdl_options,
    require_triton,
    tl,
)
from hf_paged.kernels.attention._tile import (
    attend_row,
    blocks_of,
    empty_result,
    first_visible,
    launch_arguments,
    padded_head_dim,
    partial_results,
    store_part,
    store_result,
)
from hf_paged.kernels.attention.types import AttentionOptions, DecodeWork, PagedMetadata, WorkItem

# A row is never cut further: its splits are joined by one program.
MAX_SPLITS = 64
# A shorter split costs more in its start and its part of the joining than it gains.
MIN_SPLIT = 64
# Shared memory a block needs for the deep configurations; smaller GPUs (sm_86, sm_89: 99 KiB) take the shallow ones.
_DEEP_SHARED_MEMORY = 160 << 10
# Rows times KV heads a multiprocessor up to which a step counts as tiny, as few, as small, as middling.
_TINY, _FEW, _SMALL, _MIDDLING = 0.25, 0.5, 3, 9.5
ROW, SPLIT, NUM_SPLITS, LENGTH, SLOT, _ITEM_FIELDS = column_numbers(WorkItem)


class DecodeConfig(NamedTuple):
    """Positions per tile, launch options, and how many such programs a multiprocessor holds."""

    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int


class DecodeConfigs(NamedTuple):
    """Configurations for a head size; of `middling` ones, the one whose programs fill their last wave best is used."""

    tiny: DecodeConfig
    few: DecodeConfig
    small: DecodeConfig
    middling: tuple[DecodeConfig, ...]
    large: DecodeConfig


# By bytes of one head's key (padded). Measured on an H200 for 256 bytes, with the cache's blocks spread as an engine
# spreads them; the others keep the same bytes in flight.
_D = DecodeConfig
_DEEP = {
    64: DecodeConfigs(_D(64, 2, 3, 2), _D(64, 2, 2, 6), _D(64, 2, 3, 4), (_D(64, 2, 3, 5),), _D(64, 2, 3, 5)),
    128: DecodeConfigs(
        _D(64, 2, 3, 2), _D(64, 2, 2, 6), _D(64, 2, 3, 4),
        (_D(128, 4, 2, 4), _D(128, 4, 3, 3), _D(128, 4, 4, 2)), _D(64, 2, 3, 5),
    ),
    256: DecodeConfigs(
        _D(32, 2, 3, 2), _D(32, 2, 2, 6), _D(32, 2, 3, 4),
        (_D(64, 4, 2, 4), _D(64, 4, 3, 3), _D(64, 4, 4, 2)), _D(32, 2, 3, 5),
    ),
    512: DecodeConfigs(
        _D(16, 2, 3, 2), _D(16, 2, 2, 6), _D(16, 2, 3, 4),
        (_D(32, 4, 2, 4), _D(32, 4, 3, 3), _D(32, 4, 4, 2)), _D(16, 2, 3, 5),
    ),
    1024: DecodeConfigs(
        _D(16, 4, 2, 4), _D(16, 4, 2, 4), _D(16, 4, 2, 4), (_D(16, 4, 2, 4),), _D(16, 4, 2, 4),
    ),
    2048: DecodeConfigs(
        _D(16, 8, 2, 1), _D(16, 8, 2, 1), _D(16, 8, 2, 1), (_D(16, 8, 2, 1),), _D(16, 8, 2, 1),
    ),
}
_SHALLOW = {
    64: _D(64, 2, 2, 8),
    128: _D(32, 2, 2, 6),
    256: _D(32, 2, 2, 4),
    512: _D(16, 2, 2, 4),
    1024: _D(16, 4, 2, 2),
    2048: _D(16, 8, 1, 1),
}


def decode_config(head_dim_pad: int, itemsize: int, programs_per_sm: float, shared_memory: int) -> DecodeConfig:
    """Tiles for a head size and rows times KV heads a multiprocessor. `shared_memory`: bytes a block may have."""
    size = max(64, head_dim_pad * itemsize)
    if shared_memory < _DEEP_SHARED_MEMORY:
        return _SHALLOW[size]
    configs = _DEEP[size]
    if programs_per_sm <= _FEW:
        return configs.tiny if programs_per_sm <= _TINY else configs.few
    if programs_per_sm <= _SMALL:
        return configs.small
    if programs_per_sm > _MIDDLING:
        return configs.large

    def used(config: DecodeConfig) -> float:
        waves = programs_per_sm / config.programs_per_sm
        return waves / math.ceil(waves)

    return max(configs.middling, key=used)


def padded_rows(num_rows: int) -> int:
    """Return the next size on the list 1, 2, 4, 8, then steps of 8, and from 64 on of a quarter to an eighth.

    Steps in CUDA graphs have these sizes. Tiles are chosen by them, so that steps of any size share their kernels.
    """
    power = (num_rows - 1).bit_length()
    each = 1 << power if power <= 3 else max(8, 1 << power - 3)
    return -(-num_rows // each) * each


def config_of(num_rows: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype,
              device: torch.device) -> DecodeConfig:
    """Return the tiles of :func:`paged_attention_decode` on ``device`` for that many rows."""
    programs_per_sm = padded_rows(num_rows) * num_kv_heads / num_multiprocessors(device)
    return decode_config(padded_head_dim(head_dim), dtype.itemsize, programs_per_sm, shared_memory(device))


def cta_slots_of(config: DecodeConfig, num_kv_heads: int, device: torch.device) -> int:
    """Return the number of splits of one KV head that run at the same time, for which a plan cuts the rows."""
    return max(1, config.programs_per_sm * num_multiprocessors(device) // num_kv_heads)


def decode_cta_slots(num_rows: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return :func:`cta_slots_of` the configuration of that many rows."""
    return cta_slots_of(config_of(num_rows, num_kv_heads, head_dim, dtype, device), num_kv_heads, device)


@jit(varying_pointers=("items",))
def _decode_kernel(
    q, k_cache, v_cache, out, partial_acc, partial_sums, items, arrivals, block_table, sinks, q_stride_t, q_stride_h,
    table_stride, window, scale_log2, softcap_log2, S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MIN_TILES: tl.constexpr, ALL_SPLITS: tl.constexpr, TILE_SPLITS: tl.constexpr, PDL: tl.constexpr,
):
    head = tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    columns = items + item * _ITEM_FIELDS
    row = tl.load(columns + ROW).to(tl.int64)
    if row < 0:
        after_previous_kernel(PDL)
        return
    split = tl.load(columns + SPLIT)
    splits = tl.load(columns + NUM_SPLITS)
    end = tl.load(columns + LENGTH)
    slot = tl.load(columns + SLOT).to(tl.int64)
    begin = 0
    if S.has_window:
        begin = tl.maximum(first_visible(end - 1, window, S), 0)
    first_tile = begin // BLOCK_N
    num_tiles = tl.cdiv(end, BLOCK_N) - first_tile
    tiles = tl.maximum(tl.cdiv(num_tiles, splits), MIN_TILES)
    loop_begin = (first_tile + split * tiles) * BLOCK_N
    loop_end = tl.minimum(loop_begin + tiles * BLOCK_N, end)

    table_row = block_table + slot * table_stride
    # Block ids come a tile ahead, so that loads of K and V need not wait for them.
    block = blocks_of(table_row, loop_begin + tl.arange(0, BLOCK_N), begin, loop_end, S)
    # Plan and block table come from copies and torch's kernels, which end every PDL chain: read ahead of the wait.
    after_previous_kernel(PDL)

    acc, top, total = attend_row(
        q, k_cache, v_cache, sinks, table_row, q_stride_t, q_stride_h, scale_log2, softcap_log2, head, row, block,
        begin, loop_begin, loop_end, split == 0, BLOCK_M, BLOCK_N, None, S,
    )
    m = tl.arange(0, BLOCK_M)
    live, query_head = m < S.group, head * S.group + m
    if splits == 1:
        store_result(out, acc, total, row, query_head, live, S)
    else:
        if loop_begin < loop_end:
            store_part(acc, top, total, partial_acc, partial_sums, item, query_head, live, S)
        # All threads' parts are written before the arrival is counted: the program that counts the last one sees them.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + row * S.kv_heads + head, 1, sem="acq_rel")
        if arrived == splits - 1:
            used = tl.cdiv(num_tiles, tiles)
            _join_splits(
                out, partial_acc, partial_sums, row, item - split, used, head, ALL_SPLITS, TILE_SPLITS, S
            )
            tl.store(arrivals + row * S.kv_heads + head, 0)


@jit()
def _join_splits(
    out, partial_acc, partial_sums, row, first_item, used, head, ALL_SPLITS: tl.constexpr, TILE_SPLITS: tl.constexpr,
    S: tl.constexpr,
):
    """Join a row's splits in their order, whichever program comes last: the result depends on the plan alone."""
    HEADS: tl.constexpr = S.kv_heads * S.group
    group = tl.arange(0, S.group_pad)
    lane = tl.arange(0, S.value_pad)
    query_head = head * S.group + group
    first_part = first_item * HEADS + query_head

    split = tl.arange(0, ALL_SPLITS)
    part = first_part[None, :] + split[:, None] * HEADS
    inside = (split < used)[:, None] & (group < S.group)[None, :]
    # Written by other multiprocessors: .cg reads past this one's own cache.
    tops = tl.load(partial_sums + part * 2, mask=inside, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(tops, 0)
    # A row of length 0 uses no split: every weight is 0 and so is the result.
    top = tl.where(top == float("-inf"), 0.0, top)
    totals = tl.load(partial_sums + part * 2 + 1, mask=inside, other=0.0, cache_modifier=".cg")
    total = tl.sum(totals * tl.exp2(tops - top[None, :]), 0)

    acc = tl.zeros([S.group_pad, S.value_pad], tl.float32)
    for start in range(0, used, TILE_SPLITS):
        some = start + tl.arange(0, TILE_SPLITS)
        some_part = first_part[None, :] + some[:, None] * HEADS
        here = (some < used)[:, None] & (group < S.group)[None, :]
        weight = tl.load(partial_sums + some_part * 2, mask=here, other=float("-inf"), cache_modifier=".cg")
        parts = tl.load(
            partial_acc + some_part[:, :, None] * S.value_dim + lane[None, None, :],
            mask=here[:, :, None] & (lane < S.value_dim)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        acc += tl.sum(parts * tl.exp2(weight - top[None, :])[:, :, None], 0)
    store_result(out, acc, total, row, query_head, group < S.group, S)


def even_work(meta: PagedMetadata, num_kv_heads: int, splits: int) -> DecodeWork:
    """Make a plan on the device that cuts every row alike, for callers without a plan; does not wait for the device."""
    device = meta.seq_lens.device
    num_rows = meta.seq_lens.numel()
    row = torch.arange(num_rows, device=device, dtype=torch.int32).repeat_interleave(splits)
    split = torch.arange(splits, device=device, dtype=torch.int32).repeat(num_rows)
    length, slot = meta.seq_lens.repeat_interleave(splits), meta.slots.repeat_interleave(splits)
    columns = WorkItem(row=row, split=split, num_splits=torch.full_like(row, splits), length=length, slot=slot)
    arrivals = torch.zeros(num_rows * num_kv_heads, dtype=torch.int32, device=device)
    return DecodeWork(torch.stack(columns, dim=1), arrivals)


def paged_attention_decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata, options: AttentionOptions, *,
    out: torch.Tensor | None = None, config: DecodeConfig | None = None,
) -> torch.Tensor:
    """:func:`~hf_paged.attention.registry.paged_attention` where every row has exactly one new token.

    fp16, bf16 or fp32; head_dim up to 512. One Triton launch over ``meta.work``; without a plan every row is cut alike.
    The grid depends on the number of items alone: a CUDA graph serves every plan that has as many.

    Args:
        out: ``[T, Hq, Dv]`` contiguous, q's dtype; every element is written. None: a new tensor.
        config: tile shape; None: by head size and number of programs.
    """
    require_triton()
    num_rows, _, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    out = empty_result(q, v_cache) if out is None else out
    if num_rows == 0:
        return out
    config = config or config_of(num_rows, num_kv_heads, max(head_dim, v_cache.shape[3]), q.dtype, q.device)
    work = meta.work
    if work is None:
        splits = min(MAX_SPLITS, max(1, cta_slots_of(config, num_kv_heads, q.device) // num_rows))
        work = even_work(meta, num_kv_heads, splits)
    assert isinstance(work, DecodeWork), "the plan of a step that is read row by row"
    numbers, shape = launch_arguments(q, k_cache, v_cache, meta, options)
    acc, sums = partial_results(len(work.items), q, shape.value_dim)
    # Programs that come early are spread over what room there is, unevenly: only a step that has room for all may. They
    # read the plan ahead of the wait, so it must not come from the kernel just before.
    early = meta.work is not None and padded_rows(num_rows) * num_kv_heads <= _FEW * num_multiprocessors(q.device)
    launch = pdl_options(q) if early else {"PDL": False}
    with on_device_of(q):
        _decode_kernel[(num_kv_heads, len(work.items))](
            q, k_cache, v_cache, out, acc, sums, work.items, work.arrivals, meta.block_table, options.sinks,
            *numbers,
            S=constants(shape),
            BLOCK_M=max(16, shape.group_pad),
            BLOCK_N=config.block_n,
            MIN_TILES=-(-MIN_SPLIT // config.block_n),
            ALL_SPLITS=MAX_SPLITS,
            # 64 elements a thread of four warps.
            TILE_SPLITS=max(1, 8192 // (shape.group_pad * shape.value_pad)),
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **launch,
        )
    return out
