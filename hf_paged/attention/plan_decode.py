"""Plans of decode steps: rows are cut into splits of work, longest first, so that all multiprocessors end together.

Rows that share prefixes are cut with the chosen groups (`plan_groups`), others alone (`plan_items`). The host knows
every length before a step is launched, and plans it. All arrays have sizes that depend on the padded number of rows
alone: a CUDA graph reads another plan at each replay, as in FlashInfer (Ye et al. 2025, arXiv 2501.01005).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from hf_paged.attention.choose_groups import GroupChoice, most_group_parts
from hf_paged.kernels.attention.decode import MAX_SPLITS, MIN_SPLIT
from hf_paged.kernels.attention.grouped import MIN_GROUP_SPLIT
from hf_paged.kernels.attention.types import ITEM_FIELDS, PART_FIELDS, ROW_FIELDS, GroupedConfig, PartItem, WorkItem

# The cost of joining splits, in positions of the longest split, for as many rows of this length as there are CTA slots;
# it is scaled down for fewer rows, which read faster (docs/notebook.md, "Sixteen and 32 rows").
JOINING = 420
# Of grouped steps, measured on an H200 (docs/notebook.md): the time of a position of a group's tile, in positions
# that a row of one KV head reads. Products take longer, but three programs a multiprocessor hide that, and L2 has the
# keys of the group.
TILE_COST = 0.5
# Splits of long groups are an eighth of the group, of at least so many positions.
MIN_LONG_SPLIT = 256
# A step is grouped if it saves this part of the positions that are still read: all but one row read shared positions
# from L2 anyway, at twice the rate, and this kernel reads somewhat slower than the kernel for single rows.
MIN_SAVED_SHARE = 0.6


def split_length(lengths: np.ndarray, cta_slots: int) -> int:
    """Return the length to which rows of ``lengths`` [R] are cut, for `cta_slots` splits that run at the same time.

    Few rows become at most `cta_slots` splits, as short as that allows, or stay whole if joining splits would take
    longer than cutting saves; of many rows, only rows longer than a CTA slot's share of all positions are cut.
    """
    lengths = np.maximum(lengths, 1)  # an empty row takes a CTA slot, too
    share = max(MIN_SPLIT, -(-int(lengths.sum()) // cta_slots))
    if len(lengths) > cta_slots:
        return share
    longest = int(lengths.max())
    low = _shortest(share, longest, lambda length: int((-(-lengths // length)).sum()) <= cta_slots)
    saved = longest - int((-(-lengths // num_splits(lengths, low))).max())
    sharing = lengths.sum() / longest  # rows of the longest's length that read as much
    return low if saved * cta_slots >= JOINING * sharing else longest


def _shortest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Return the shortest length from `low` on that fits, where all longer ones fit as well; `high` fits."""
    while low < high:
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return low


def num_splits(lengths: np.ndarray, longest: int) -> np.ndarray:
    """Return the number of splits of rows of ``lengths`` [R]: at most `longest` positions each, at most MAX_SPLITS."""
    return np.minimum(np.maximum(-(-lengths // longest), 1), MAX_SPLITS)  # np.clip takes twice as long


def num_items(num_rows: int, cta_slots: int) -> int:
    """Return the length of the plan of `num_rows` rows, the same for all lengths."""
    return cta_slots if num_rows <= cta_slots else num_rows + cta_slots


def plan_items(seq_lens: np.ndarray, slots: np.ndarray, cta_slots: int) -> np.ndarray:
    """Cut R rows into splits of about equal length, longest first; int32 [num_items, ITEM_FIELDS], unused rows -1.

    Args:
        seq_lens, slots: [R] integers, visible tokens and slot of each row.
        cta_slots: splits of one KV head that run at the same time.
    """
    lengths = seq_lens.astype(np.int64)
    splits = num_splits(lengths, split_length(lengths, cta_slots))
    order = np.argsort(lengths // -splits, kind="stable")
    row, split = numbered(order, splits[order])
    items = np.full((num_items(len(lengths), cta_slots), ITEM_FIELDS), -1, dtype=np.int32)
    _fill(items[: len(row)],
          WorkItem(row=row, split=split, num_splits=splits[row], length=lengths[row], slot=slots[row]))
    return items


class GroupedPlan(NamedTuple):
    """The arrays of `GroupedWork` on the host, int32."""

    items: np.ndarray  # [choice.num_items, PART_FIELDS]
    rows: np.ndarray  # [R, ROW_FIELDS]
    num_parts: int
    config: GroupedConfig


def plan_groups(seq_lens: np.ndarray, slots: np.ndarray, choice: GroupChoice,
                share_of_layers: float = 1.0) -> GroupedPlan | None:
    """Cut R rows and their shared prefixes into parts; returns None if the rows' own positions outweigh the savings.

    Parts of groups come first, longest splits first, then the rows' own parts, likewise: short programs run last.

    Args:
        seq_lens, slots: [R] integers, visible tokens and slot of each row.
        choice: the choice of the rows' groups.
        share_of_layers: the fraction of layers in which the plan saves reads.
    """
    lengths = seq_lens.astype(np.int64)
    own = lengths - choice.own_begin
    num_read = int(own.sum() + ((choice.end - choice.begin) * choice.tiles).sum())
    saved, least = choice.saved_positions * share_of_layers, choice.kernel.positions_worth_it
    if saved < max(least if share_of_layers < 1.0 else 0.0, MIN_SAVED_SHARE * num_read):
        return None
    share = _share(own, choice)
    splits, own_splits = _group_splits(choice, share), np.maximum(-(-own // share), 1)
    before, own_piece = number_pieces(choice, splits, len(lengths))
    pieces = own_piece + own_splits
    part = np.cumsum(pieces) - pieces
    items = np.full((choice.num_items, PART_FIELDS), -1, dtype=np.int32)
    groups = group_items(choice, slots, splits, before)
    items[: len(groups)] = groups
    order = np.argsort(own // -own_splits, kind="stable")
    row, split = numbered(order, own_splits[order])
    length = lengths[row]
    _fill(items[len(groups) : len(groups) + len(row)], PartItem(
        rows=0, first=row, slot=slots[row], begin=choice.own_begin[row], end=length, split=split,
        splits=own_splits[row], part=np.where(pieces[row] > 1, part[row] + own_piece[row] + split, -1), length=length,
    ))
    return GroupedPlan(items, row_entries(choice, lengths, part, pieces), choice.num_parts, choice.kernel.config)


def emptied(plan: GroupedPlan, slots: np.ndarray) -> GroupedPlan:
    """Return a plan of the same sizes for rows [R] that see nothing, as rows that pad a step do."""
    items, rows = np.full_like(plan.items, -1), np.zeros_like(plan.rows)
    row = np.arange(len(rows))
    _fill(items[: len(rows)],
          PartItem(rows=0, first=row, slot=slots, begin=0, end=0, split=0, splits=1, part=-1, length=0))
    _fill(rows, (row, 1))
    return plan._replace(items=items, rows=rows)


def number_pieces(choice: GroupChoice, splits: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Pieces that come ahead: of a group's first one, for each of its rows, and of each row's own first one."""
    before = np.zeros(len(splits) + 1, dtype=np.int64)  # the last: of none
    behind = np.append(splits, 0)
    for group, around in choice.levels:
        before[group] = behind[around]
        behind[group] += before[group]
    own_piece = np.zeros(num_rows, dtype=np.int64)
    own_piece[choice.members] = behind[choice.inner]
    return before, own_piece


def row_entries(choice: GroupChoice, lengths: np.ndarray, part: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """`GroupedWork.rows` of rows with these visible tokens, places of their first pieces, and numbers of pieces."""
    rows, members = np.zeros((len(lengths), ROW_FIELDS), dtype=np.int32), choice.members
    _fill(rows, (part, pieces))
    _fill(rows[: len(members), 2:], (members, part[members], lengths[members]))
    return rows


def group_items(choice: GroupChoice, slots: np.ndarray, splits: np.ndarray, before: np.ndarray) -> np.ndarray:
    """`GroupedWork.items` of the groups, longest splits first; int32 [N, PART_FIELDS]."""
    order = np.argsort((choice.end - choice.begin) // -splits, kind="stable")
    group, number = numbered(order, (choice.tiles * splits)[order])
    tiles, count = choice.tiles[group], choice.count[group]
    split, tile = number // tiles, number % tiles  # tiles that read the same follow each other
    each = -(-count // tiles)
    first = choice.first[group] + tile * each
    items = np.empty((len(group), PART_FIELDS), dtype=np.int32)
    _fill(items, PartItem(
        rows=np.minimum(each, count - tile * each), first=first, slot=slots[choice.members[first]],
        begin=choice.begin[group], end=choice.end[group], split=split, splits=splits[group],
        part=before[group] + split, length=0,
    ))
    return items


def _share(own: np.ndarray, choice: GroupChoice) -> int:
    """Return the length of splits, in positions of a row, with which programs end together (`split_length`)."""
    own = np.maximum(own, 1)
    span, tiles, cta_slots = choice.end - choice.begin, choice.tiles, choice.kernel.cta_slots
    total = int(own.sum()) + math.ceil(int((span * tiles).sum()) * TILE_COST)
    share = max(MIN_SPLIT, -(-total // cta_slots))
    if len(own) + int(tiles.sum()) > cta_slots:
        return share
    longest = max(int(own.max()), math.ceil(int(span.max()) * TILE_COST))
    return _shortest(share, longest, lambda length: int(
        (-(-own // length)).sum() + (tiles * _uncapped_splits(span, length)).sum()) <= cta_slots)


def _uncapped_splits(span: np.ndarray, share: int) -> np.ndarray:
    least = np.clip(span // 8, MIN_GROUP_SPLIT, MIN_LONG_SPLIT)
    return -(-span // np.maximum(least, math.ceil(share / TILE_COST)))


def _group_splits(choice: GroupChoice, share: int) -> np.ndarray:
    """Of each group; fewer, alike for all, where the rows' partial results would be too many."""
    splits, count = _uncapped_splits(choice.end - choice.begin, share), choice.count
    parts, most = int((splits * count).sum()), most_group_parts(len(choice.own_begin))
    if parts <= most:
        return splits
    least = int(count.sum())
    return 1 + ((splits - 1) * (most - least)) // (parts - least)


def numbered(what: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each of `what` as often as `counts` says, and a number from 0 on for each time."""
    ends = np.cumsum(counts)
    return np.repeat(what, counts), np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _fill(table: np.ndarray, columns: Iterable[object]) -> None:
    for column, values in enumerate(columns):
        table[:, column] = values
