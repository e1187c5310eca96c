# mypy: disallow-untyped-defs=False
"""Paged attention for rows of any number of new tokens: tiles over packed queries, FlashAttention-2 style."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.device.cuda import shared_memory
from hf_paged.kernels._triton import (
    column_numbers,
    constants,
    jit,
    next_power_of_2,
    on_device_of,
    require_triton,
    row_of_tile,
    tl,
)
from hf_paged.kernels.attention._tile import (
    add_scores,
    blocks_of_tile,
    empty_result,
    first_visible,
    launch_arguments,
    load_keys,
    load_values,
    scores_of,
)
from hf_paged.kernels.attention.types import AttentionOptions, PagedMetadata, RowEntry, positively_scaled

_ROW_PART, _ROW_PIECES, *_, _ROW_FIELDS = column_numbers(RowEntry)


class PrefillConfig(NamedTuple):
    """Tile shape and launch options: ``block_m`` queries times group heads, ``block_n`` positions."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int  # of K and V in shared memory
    branch: bool = False  # tiles that every query sees jump over the mask
    max_registers: int | None = None  # per thread, so that two programs fit a multiprocessor


class SharedParts(NamedTuple):
    """Partial results of positions that were read for several rows (`PromptWork`), from which the rows' tiles start."""

    own_begin: torch.Tensor  # [R] int32, multiples of the block size: what lies ahead is in the parts
    rows: torch.Tensor  # [T, ROW_FIELDS] int32, see `RowEntry`; tokens of a row have equally many pieces
    acc: torch.Tensor  # [parts, Hq, Dv] float32
    sums: torch.Tensor  # [parts, Hq, 2] float32


# Shared memory a block needs for the deep configurations: Hopper and later have it, Ampere and Ada do not.
DEEP_SHARED_MEMORY = 200 << 10

# By padded head_dim. Jumping over masks pays on Hopper; two programs a multiprocessor hide each other's ends, and only
# very long rows do better with one that holds more. Measured on an H200 for 64 and 128.
_DEEP = {
    32: PrefillConfig(128, 64, 8, 3, branch=True),
    64: PrefillConfig(128, 64, 8, 3, branch=True),
    128: PrefillConfig(128, 32, 8, 3, branch=True, max_registers=128),
    256: PrefillConfig(64, 32, 4, 2, branch=True),
    512: PrefillConfig(64, 16, 8, 2, branch=True),
}
_DEEP_LONG = {128: PrefillConfig(128, 128, 8, 3, branch=True)}
# Longest sequence for which the tiles of long ones are not taken: a CUDA graph is for these or for all.
SHORT_SEQUENCE = 4096
# Query tile plus K and V in flight stay under Ampere's 99 KiB of shared memory. No branch: Triton would no longer see
# that one product feeds the next, and spread a row of scores over several warps.
_SHALLOW = {
    32: PrefillConfig(128, 64, 4, 2),
    64: PrefillConfig(128, 64, 4, 2),
    128: PrefillConfig(128, 64, 8, 2),
    256: PrefillConfig(64, 32, 4, 2),
    512: PrefillConfig(32, 16, 4, 2),
}
# An exact fp32 dot runs on the plain cores out of registers: larger tiles spill thousands of bytes a thread.
_FLOAT = {
    32: PrefillConfig(64, 32, 8, 2),
    64: PrefillConfig(64, 32, 8, 2),
    128: PrefillConfig(32, 32, 8, 2),
    256: PrefillConfig(32, 16, 8, 2),
    512: PrefillConfig(16, 16, 8, 1),
}
# Where the longest row of a step has as many new tokens, the tiles are those of any longer one.
FULL_TILE = max(c.block_m for configs in (_DEEP, _DEEP_LONG, _SHALLOW, _FLOAT) for c in configs.values())


def prefill_config(
    head_dim_pad: int, itemsize: int, group: int, max_query_len: int, max_seq_len: int, shared_memory: int
) -> PrefillConfig:
    """Tiles for a head size; no more rows than the longest row of the step fills, no fewer than the group.

    `shared_memory`: bytes a block may have.
    """
    configs = _FLOAT if itemsize == 4 else _DEEP if shared_memory >= DEEP_SHARED_MEMORY else _SHALLOW
    config = configs[max(32, head_dim_pad)]
    if configs is _DEEP and max_seq_len > SHORT_SEQUENCE:
        config = _DEEP_LONG.get(head_dim_pad, config)
    filled = next_power_of_2(min(max_query_len, config.block_m) * group)
    block_m = max(16, next_power_of_2(group), min(config.block_m, filled))
    if block_m < config.block_m and itemsize == 2:
        if block_m < 64:  # too few rows for Hopper's instructions
            config = config._replace(branch=False)
        return config._replace(block_m=block_m, num_warps=4, max_registers=None)
    return config._replace(block_m=block_m)


@jit()
def _mask_scores(score, query_position, start, n, window, S: tl.constexpr):
    last = query_position - start
    visible = n[None, :] <= last[:, None]
    if S.has_window:
        visible &= n[None, :] > (first_visible(query_position, window, S) - 1 - start)[:, None]
    return tl.where(visible, score, float("-inf"))


@jit()
def _with_part(acc, top, total, partial_acc, partial_sums, place, live, S: tl.constexpr):
    """Return (acc, top, total) after a part of each row of a tile; `live` [M, DV_PAD]."""
    offset = place[:, None] * S.value_dim + tl.arange(0, S.value_pad)[None, :]
    part_top = tl.load(partial_sums + place * 2)
    part_total = tl.load(partial_sums + place * 2 + 1)
    new_top = tl.maximum(top, part_top)
    weight = tl.exp2(part_top - new_top)
    rescale = tl.exp2(top - new_top)
    # What a part out of sight did not write may be NaN.
    values = tl.load(partial_acc + offset, mask=live & (part_top > float("-inf"))[:, None], other=0.0)
    return acc * rescale[:, None] + values * weight[:, None], new_top, total * rescale + part_total * weight


@jit(varying_ints=("num_rows",), varying_pointers=("query_start", "seq_lens", "slots", "own_begin", "token_rows"))
def _prefill_kernel(
    q, k_cache, v_cache, out, query_start, seq_lens, block_table, slots, sinks, own_begin, token_rows, partial_acc,
    partial_sums, num_rows, q_stride_t, q_stride_h, table_stride, window, scale_log2, softcap_log2, S: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BRANCH: tl.constexpr, HAS_SHARED_PARTS: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // S.group
    head = tl.program_id(0) % S.kv_heads
    tile = tl.program_id(0) // S.kv_heads
    row = row_of_tile(query_start, tile, num_rows, BLOCK_Q)
    first_token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first_token
    seq_len = tl.load(seq_lens + row)
    tile = tile - (first_token // BLOCK_Q + row)
    num_tiles = tl.cdiv(count, BLOCK_Q)
    if tile >= num_tiles:
        return
    # The last tile of a row sees the most: it starts first.
    tile = num_tiles - 1 - tile

    # Tile row m is query m // group of query head m % group; a group that does not divide BLOCK_M leaves rows over.
    m = tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    lane = tl.arange(0, S.head_pad)
    query = tile * BLOCK_Q + m // S.group
    token = (first_token + query).to(tl.int64)
    query_head = head * S.group + m % S.group
    is_query = (m < BLOCK_Q * S.group) & (query < count)
    q_tile = tl.load(
        q + token[:, None] * q_stride_t + query_head[:, None] * q_stride_h + lane[None, :],
        mask=is_query[:, None] & (lane < S.head_dim)[None, :], other=0.0,
    )
    value_lane = tl.arange(0, S.value_pad)
    live = is_query[:, None] & (value_lane < S.value_dim)[None, :]

    # The tile reads positions begin .. end - 1, from first on; some query does not see all of a tile that starts at
    # masked_from or later, or before masked_until.
    first_position = seq_len - count + tile * BLOCK_Q
    end = tl.minimum(first_position + BLOCK_Q, seq_len)
    row_begin = 0
    if HAS_SHARED_PARTS:
        row_begin = tl.load(own_begin + row)
    begin = row_begin
    masked_until = 0
    if S.has_window:
        begin = tl.maximum(first_visible(first_position, window, S), row_begin)
        masked_until = first_visible(end - 1, window, S)
    masked_from = first_position + 2 - BLOCK_N
    first = row_begin + (begin - row_begin) // BLOCK_N * BLOCK_N

    table_row = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, S.value_pad], tl.float32)
    # Finite and below every score: with -inf a row that has seen nothing yet would compute -inf - -inf.
    top = tl.full([BLOCK_M], -3.0e38, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if S.has_sinks:
        # A score without a value, of weight 1 at its own height; log2(e) turns it to base 2.
        sink = tl.load(sinks + query_head, mask=m < BLOCK_Q * S.group, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(sink, top)
        total += 1.0
    if HAS_SHARED_PARTS:
        entry = token_rows + token * _ROW_FIELDS
        part = tl.load(entry + _ROW_PART, mask=is_query, other=0).to(tl.int64)
        for piece in range(tl.load(token_rows + first_token * _ROW_FIELDS + _ROW_PIECES)):
            acc, top, total = _with_part(
                acc, top, total, partial_acc, partial_sums, (part + piece) * (S.kv_heads * S.group) + query_head, live,
                S,
            )
    # Each tile's blocks are looked up one tile ahead, so that its loads need not wait for the lookup.
    blocks = blocks_of_tile(table_row, first, begin, end, n, BLOCK_N, S.has_window, S)
    for start in range(first, end, BLOCK_N):
        k = load_keys(k_cache, blocks, start, n, head, BLOCK_N, S)
        v = load_values(v_cache, blocks, start, begin, end, n, head, BLOCK_N, S.has_window, S)
        blocks = blocks_of_tile(table_row, start + BLOCK_N, begin, end, n, BLOCK_N, S.has_window, S)

        score, scale = scores_of(q_tile, k, scale_log2, softcap_log2, S)
        if BRANCH:
            if (start >= masked_from) | (start < masked_until):
                # The length is loaded again because a branch without a load would be compiled to selects on every tile.
                position = tl.load(seq_lens + row) - count + query
                score = _mask_scores(score, position, start, n, window, S)
        else:
            score = _mask_scores(score, seq_len - count + query, start, n, window, S)
        acc, top, total = add_scores(acc, top, total, score, scale, v)

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_offset = (token[:, None] * (S.kv_heads * S.group) + query_head[:, None]) * S.value_dim + value_lane[None, :]
    tl.store(out + out_offset, result.to(out.dtype.element_ty), mask=live)


def paged_attention_prefill(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata, options: AttentionOptions, *,
    out: torch.Tensor | None = None, config: PrefillConfig | None = None, shared: SharedParts | None = None,
) -> torch.Tensor:
    """:func:`~hf_paged.attention.registry.paged_attention` for rows of any length, one Triton launch.

    fp16, bf16 or fp32; head_dim up to 512. Rows find their tiles on the device (a tile's row by binary search over
    ``query_start``, as in vLLM's unified kernel), so the grid needs only T and R.

    Args:
        out: ``[T, Hq, Dv]`` contiguous, q's dtype; every element is written. None: a new tensor.
        config: tile shape; None: by head size and ``meta.max_query_len``.
        shared: partial results of what rows need not read; None: every row reads all that it sees.
    """
    require_triton()
    num_tokens = len(q)
    num_kv_heads = k_cache.shape[2]
    num_rows = meta.seq_lens.numel()
    out = empty_result(q, v_cache) if out is None else out
    if num_tokens == 0:
        return out
    q, options = positively_scaled(q, options)
    numbers, shape = launch_arguments(q, k_cache, v_cache, meta, options)
    if config is None:
        config = prefill_config(max(shape.head_pad, shape.value_pad), q.element_size(), shape.group, meta.max_query_len,
                                meta.max_seq_len, shared_memory(q.device))
    own_begin, rows, acc, sums = (None,) * 4 if shared is None else shared
    # A row of n tokens that starts anywhere needs at most n // BLOCK_Q + 1 tiles.
    num_tiles = num_tokens // (config.block_m // shape.group) + num_rows
    with on_device_of(q):
        _prefill_kernel[(num_tiles * num_kv_heads,)](
            q, k_cache, v_cache, out, meta.query_start, meta.seq_lens, meta.block_table, meta.slots, options.sinks,
            own_begin, rows, acc, sums, num_rows, *numbers, S=constants(shape), BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BRANCH=config.branch, HAS_SHARED_PARTS=shared is not None, num_warps=config.num_warps,
            num_stages=config.num_stages, **({} if config.max_registers is None else {"maxnreg": config.max_registers}),
        )
    return out
