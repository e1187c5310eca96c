"""Plans of prompts that share prefixes: the choice of groups, and the cuts of their shared positions.

All new tokens of a row see the positions before the first of them, so that a tile of queries may have several rows
there. Shared positions are planned as for decode steps (`choose_groups`, `plan_groups`), with tokens in place of rows;
each row's own positions are left to the kernel that reads row by row, which continues from the partial results.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hf_paged.attention.choose_groups import GroupChoice, Kernel, choice_of, forest_of, worth_it
from hf_paged.attention.plan_decode import group_items, number_pieces, numbered, row_entries
from hf_paged.device.cuda import num_multiprocessors, shared_memory
from hf_paged.kernels.attention._tile import padded_head_dim
from hf_paged.kernels.attention.grouped import MIN_SPLIT, grouped_config
from hf_paged.kernels.attention.prefill import DEEP_SHARED_MEMORY, prefill_config
from hf_paged.kernels.attention.types import PART_FIELDS, AttentionSpec
from hf_paged.kernels.hopper.prefill_support import packed_heads, tile_tokens
from hf_paged.scheduler.prefix_tree import PrefixGroups

# Times are in positions that a tile of a group's queries reads on a full machine, measured on an H200 for heads of 256
# bytes (docs/notebook.md). The time to write and read a token's partial result of one KV head.
PIECE_COST = 10.0
# The fixed time of a program that reads row by row.
ROW_START = 80
# The time of the additional launch.
LAUNCH = 125.0
# A step is grouped if it is expected to take at most this part of its time without groups.
MOST = 0.85
# The same for kernels, head sizes and GPUs that were not measured.
MOST_ELSEWHERE = 0.6
# The fewest and the most splits of the longest group that are tried.
SPLITS = 1, 32
# By query lines of a program that reads row by row: the number of programs on a multiprocessor, the time of a position
# in positions of a group's tile, and the part of that time for a program alone there. Measured on an H200.
_ROW_PROGRAMS = {16: (6, 1.6, 0.45), 32: (5, 2.0, 0.75), 64: (3, 0.9, 0.5), 128: (2, 1.06, 0.7)}
# The same with the tiles of long sequences, which have four times as many positions.
_LONG_ROW_PROGRAMS = {16: (1, 0.3, 1.0), 32: (1, 0.33, 1.0), 64: (1, 0.4, 1.0), 128: (1, 0.44, 1.0)}
# The time of a position of a full tile of the kernel for Hopper, at the best measured rate (700 TFLOP/s).
_HOPPER_COST = 0.31


class Prompts(NamedTuple):
    """R rows of several new tokens; arrays are [R] integers."""

    start: np.ndarray  # position of the first of a row's new tokens
    num_new: np.ndarray
    slots: np.ndarray
    max_query_len: int  # bounds of `PagedMetadata`, which may be above all rows'
    max_seq_len: int


class RowPrograms(NamedTuple):
    """The properties of programs that read row by row."""

    tokens: int  # of one row, in a program
    slots: int  # programs of one KV head that run at the same time
    cost: float  # of a position, on a full machine
    lone: float  # of that, what a position costs a program that has its multiprocessor for itself


class PromptKernel(NamedTuple):
    """The properties of the kernels and their device that a plan depends on."""

    shared: Kernel  # `tile_rows` are tokens
    rows: RowPrograms  # where nothing is shared
    own: RowPrograms  # of what rows have behind it
    is_measured: bool = True


def prompt_kernel_of(spec: AttentionSpec, max_query_len: int, max_seq_len: int) -> PromptKernel:
    """What the kernels for prompts that share prefixes are on the device, and what reads row by row there."""
    head_dim_pad, itemsize, memory = padded_head_dim(spec.head_dim), spec.dtype.itemsize, shared_memory(spec.device)
    config = grouped_config(head_dim_pad, itemsize, spec.group, memory)
    rows = prefill_config(head_dim_pad, itemsize, spec.group, max_query_len, max_seq_len, memory)
    by_lines = _LONG_ROW_PROGRAMS if rows.block_n > 64 else _ROW_PROGRAMS
    programs, cost, lone = by_lines[min(rows.block_m, 128)]
    if itemsize == 4:  # products on the plain cores take as long as they have lines
        cost = rows.block_m / config.block_m
    multiprocessors = num_multiprocessors(spec.device)

    def slots(programs_per_sm: int) -> int:
        return max(1, programs_per_sm * multiprocessors // spec.num_kv_heads)

    shared = Kernel(config, config.block_m // spec.group, slots(config.programs_per_sm), 1)
    is_measured = head_dim_pad == 128 and itemsize == 2 and memory >= DEEP_SHARED_MEMORY
    row_programs = RowPrograms(rows.block_m // spec.group, slots(programs), cost, lone)
    return PromptKernel(shared, row_programs, row_programs, is_measured)


def hopper_rows(spec: AttentionSpec) -> RowPrograms:
    """The programs of `kernels/hopper/prefill.py`, one on each multiprocessor."""
    slots = max(1, num_multiprocessors(spec.device) // spec.num_kv_heads)
    cost = _HOPPER_COST * (spec.group // packed_heads(spec.group))
    return RowPrograms(tile_tokens(spec.group), slots, cost, 1.0)


class PromptPlan(NamedTuple):
    """The arrays of `PromptWork` on the host, int32."""

    items: np.ndarray  # [N, PART_FIELDS]
    rows: np.ndarray  # [T, ROW_FIELDS]
    own_begin: np.ndarray  # [R]
    num_parts: int
    kernel: Kernel
    saved_positions: int  # that rows of these groups do not read again, in one layer without a window


def plan_prompts(groups: PrefixGroups, prompts: Prompts, kernel: PromptKernel,
                 share_of_layers: float = 1.0) -> PromptPlan | None:
    """Cut the shared prefixes of R rows into parts; returns None if reading row by row is as fast.

    Args:
        groups: of the rows, ending at or before each one's first new token.
        share_of_layers: of all layers that read by this plan, in how many it saves anything.
    """
    start, num_new = prompts.start.astype(np.int64), prompts.num_new.astype(np.int64)
    row_tiles = -(-num_new // kernel.rows.tokens)
    choice = _choose(groups, num_new, row_tiles, kernel)
    if choice is None:
        return None
    own_begin, num_tokens = choice.own_begin[np.cumsum(num_new) - num_new], int(num_new.sum())
    splits, grouped = _cut(choice, num_tokens)
    if splits is None:
        return None
    lengths = start + num_new
    by_rows = _row_time(lengths, row_tiles, kernel.rows)
    grouped += _row_time(lengths - own_begin, -(-num_new // kernel.own.tokens), kernel.own) + LAUNCH
    most = MOST if kernel.is_measured else MOST_ELSEWHERE
    if by_rows - grouped < (1 - most) * by_rows / max(share_of_layers, 1e-9):
        return None
    before, pieces = number_pieces(choice, splits, num_tokens)
    part = np.cumsum(pieces) - pieces
    row_of, place = numbered(np.arange(len(num_new)), num_new)
    return PromptPlan(
        group_items(choice, prompts.slots[row_of], splits, before),
        row_entries(choice, start[row_of] + place + 1, part, pieces), own_begin.astype(np.int32),
        int(pieces.sum()), kernel.shared, choice.saved_positions,
    )


def most_items(num_tokens: int, kernel: Kernel) -> int:
    """Length of `PromptPlan.items` at most, of as many tokens."""
    return 2 * -(-num_tokens // kernel.tile_rows) + 128 + 2 * kernel.cta_slots


def most_parts(num_tokens: int) -> int:
    """`PromptPlan.num_parts` at most, of as many tokens."""
    return 2 * num_tokens + 2048


def padded(plan: PromptPlan, num_tokens: int, num_rows: int) -> PromptPlan:
    """The plan with array sizes that depend on the padded numbers of tokens and rows alone."""
    items = np.full((most_items(num_tokens, plan.kernel), PART_FIELDS), -1, np.int32)
    items[: len(plan.items)] = plan.items
    rows = np.zeros((num_tokens, plan.rows.shape[1]), np.int32)
    rows[: len(plan.rows)] = plan.rows
    own_begin = np.zeros(num_rows, np.int32)
    own_begin[: len(plan.own_begin)] = plan.own_begin
    return plan._replace(items=items, rows=rows, own_begin=own_begin, num_parts=most_parts(num_tokens))


def _choose(groups: PrefixGroups, num_new: np.ndarray, row_tiles: np.ndarray,
            kernel: PromptKernel) -> GroupChoice | None:
    """Return the choice of groups that save time, with tokens as their members."""
    parent, inner = forest_of(groups)
    last = np.cumsum(num_new[groups.members])
    first = np.append(0, last)[groups.first]
    count = last[groups.first + groups.count - 1] - first
    tiles = -(-count // kernel.shared.tile_rows)
    rows, num_tiles = kernel.rows, int(row_tiles.sum())
    # Of the whole machine's time, also where tiles of rows leave a part of it idle.
    each = max(1 / rows.slots, _speed(num_tiles / rows.slots, rows.lone) / num_tiles)
    weight = rows.cost * each * kernel.shared.cta_slots
    readers = np.bincount(inner, weights=row_tiles[groups.members] * weight, minlength=len(count))
    kept, _ = worth_it(groups, parent, readers, tiles, count, PIECE_COST)
    if not kept.any():
        return None
    begins = np.cumsum(num_new) - num_new
    members, place = numbered(begins[groups.members], num_new[groups.members])
    of_tokens = PrefixGroups(members + place, first, count, groups.begin, groups.end)
    choice = choice_of(of_tokens, parent, np.repeat(inner, num_new[groups.members]), kept, int(num_new.sum()),
                       kernel.shared)
    spared = np.maximum(groups.count[kept] - choice.tiles, 0)  # of readings, where each row would read once
    return choice._replace(saved_positions=int((spared * (choice.end - choice.begin)).sum()))


def _row_time(positions: np.ndarray, tiles: np.ndarray, rows: RowPrograms) -> float:
    """Of programs that read so many positions, `tiles` of each."""
    positions, num_tiles = positions + ROW_START, int(tiles.sum())
    longest = _speed(num_tiles / rows.slots, rows.lone) * float(positions.max())
    return rows.cost * max(float((positions * tiles).sum()) / rows.slots, longest)


def _speed(share: float, lone: float) -> float:
    """What a position costs where this share of the slots is taken, as a part of its cost on a full machine."""
    return max(lone, min(0.25 + 0.75 * share, 1.0))


def _cut(choice: GroupChoice, num_tokens: int) -> tuple[np.ndarray | None, float]:
    """Into how many splits each group is cut, and the time that these and their partial results take."""
    span, tiles, count, slots = choice.end - choice.begin, choice.tiles, choice.count, choice.kernel.cta_slots
    items, parts = most_items(num_tokens, choice.kernel), most_parts(num_tokens)
    best: tuple[np.ndarray | None, float] = None, np.inf
    longest, (fewest, most) = int(span.max()), SPLITS
    for number in range(fewest, max(fewest, min(most, -(-longest // MIN_SPLIT))) + 1):
        length = max(MIN_SPLIT, -(-longest // number))
        splits = -(-span // length)
        programs, pieces = int((tiles * splits).sum()), int((count * splits).sum())
        if programs > items or pieces > parts:
            break
        # Longest first: the last ones to run are the shortest.
        each, left = np.sort(np.repeat(-(-span // splits), tiles * splits))[::-1], programs % slots
        full = float(each[: programs - left].sum()) / slots
        time = full + _speed(left / slots, 0.5) * float(each[programs - left]) if left else full
        time += PIECE_COST * pieces / slots
        if time < best[1]:
            best = splits, time
    return best
