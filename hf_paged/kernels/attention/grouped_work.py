"""How a decode step whose rows share prefixes is cut into parts: which groups pay, and where to cut them and the rows.

The host plans, as for other decode steps (`decode_work`): all arrays have sizes that depend on the padded number of
rows alone, so that one CUDA graph serves every plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from hf_paged.kernels.attention.decode_work import MIN_SPLIT
from hf_paged.kernels.attention.metadata import PART_FIELDS, ROW_FIELDS, GroupedConfig, PartItem
from hf_paged.scheduler.prefix_groups import PrefixGroups

# All measured on an H200 (docs/notebook.md). What a position of a group's tile takes, in positions that a row of one KV
# head reads: the products take longer, but three programs a multiprocessor hide that, and L2 has the keys of the group.
TILE_COST = 0.5
# What a row's partial result costs to write and to read again, in such positions.
PIECE_COST = 24
# A group's split has all its rows' partial results to write: shorter ones cost more in that than they gain; of long
# groups, an eighth, up to the second, since the joining takes eight pieces at a time.
MIN_GROUP_SPLIT, MIN_LONG_SPLIT = 128, 256
# A step is grouped if that saves as many positions for each multiprocessor (times KV heads, of 256 bytes of key): where
# it saves less, the joining adds as much time.
MIN_SAVED = 400
# And if it saves so much for each position that is still read: what several rows share comes out of L2 for all but one
# of them anyway, at twice the rate, and this kernel reads somewhat slower than that of single rows.
MIN_SAVED_SHARE = 0.6


class GroupedPlan(NamedTuple):
    """`GroupedWork` on the host; arrays are int32."""

    items: np.ndarray  # [choice.num_items, PART_FIELDS]
    rows: np.ndarray  # [R, ROW_FIELDS]
    num_parts: int
    config: GroupedConfig


class FixedPieces(NamedTuple):
    """Rows are cut at multiples of `length` positions, whatever other rows there are.

    So which positions are summed up together, and in which order, depends on the row's length alone. What may still
    depend on other rows is the rounding inside of a piece: a tile of several rows' queries is another product than that
    of one row's.
    """

    length: int  # a multiple of the block size
    max_seq_len: int  # at least every length; the sizes of a plan's arrays depend on it


class Kernel(NamedTuple):
    """What a plan has to know of the kernel and its device."""

    config: GroupedConfig
    tile_rows: int  # rows of a group that one program takes
    cta_slots: int  # parts of one KV head that run at the same time
    positions_worth_it: float  # that a step has to save, of one KV head, to be grouped (`MIN_SAVED`)


class GroupChoice(NamedTuple):
    """Which groups of R rows are read as such, G of them, over M members: all of a plan that their lengths leave open.

    A group that is not chosen leaves its positions to those that lie in it, and to the rows. Integers are int64.
    """

    members: np.ndarray  # [M] rows
    inner: np.ndarray  # [M] last group of each member; -1: none
    own_begin: np.ndarray  # [R] where a row's own positions begin
    first: np.ndarray  # [G], in `members`
    count: np.ndarray  # type: ignore[assignment]  # [G] rows; a tuple's method otherwise
    begin: np.ndarray  # [G] positions that the group reads
    end: np.ndarray  # [G]
    tiles: np.ndarray  # [G] of rows
    saved_positions: int  # that rows would read and tiles do not, without a window
    levels: list[tuple[np.ndarray, np.ndarray]]  # groups in groups, outermost first, and the groups that they lie in
    kernel: Kernel
    pieces: FixedPieces | None

    @property
    def num_items(self) -> int:
        """Length of a plan, whatever the lengths and groups of as many rows."""
        if self.pieces is not None:
            return self.num_parts
        return len(self.own_begin) + _most_tiles(len(self.own_begin)) + self.kernel.cta_slots

    @property
    def num_parts(self) -> int:
        """Most pieces that the rows of a plan have together."""
        rows = len(self.own_begin)
        if self.pieces is not None:  # a piece of a group stands for one of each of its rows
            return rows * max(1, -(-self.pieces.max_seq_len // self.pieces.length))
        return rows + self.kernel.cta_slots + _most_group_parts(rows)


def _most_tiles(num_rows: int) -> int:
    return max(num_rows // 2, min(num_rows, 16))


def _most_group_parts(num_rows: int) -> int:
    return 2 * num_rows + 512


def choose_groups(groups: PrefixGroups, num_rows: int, kernel: Kernel,
                  pieces: FixedPieces | None = None) -> GroupChoice | None:
    """The groups that pay; None where reading row by row is as fast. It holds while the groups stay as they are.

    Args:
        groups: of the first rows of `num_rows`.
        kernel: that the plan is for.
        pieces: None: rows are cut so that programs end together. With it, there is a choice in any case.
    """
    if pieces is not None:
        groups = groups._replace(begin=groups.begin // pieces.length * pieces.length,
                                 end=groups.end // pieces.length * pieces.length)
    elif ((groups.count - 1) * (groups.end - groups.begin)).sum() < kernel.positions_worth_it:  # one tile each
        return None
    parent, inner = forest_of(groups)
    count, tiles = groups.count.astype(np.int64), -(-groups.count.astype(np.int64) // kernel.tile_rows)
    kept, saved = worth_it(groups, parent, np.bincount(inner, minlength=len(count)), tiles, count, PIECE_COST)
    if pieces is None:
        kept = _fitting(groups, kept, saved, kernel.tile_rows, num_rows)
        if saved[kept].sum() < max(kernel.positions_worth_it, 1):
            return None
    return choice_of(groups, parent, inner, kept, num_rows, kernel, pieces)


def choice_of(groups: PrefixGroups, parent: np.ndarray, inner: np.ndarray, kept: np.ndarray, num_rows: int,
              kernel: Kernel, pieces: FixedPieces | None = None) -> GroupChoice:
    """Those groups that are kept, of a forest as of `forest_of`."""
    around, depth = _kept_around(parent, kept)
    innermost = np.where(kept[inner], inner, around[inner])  # of each member
    ends = np.append(groups.end, 0).astype(np.int64)  # the last: of none
    own_begin = np.zeros(num_rows, dtype=np.int64)
    own_begin[groups.members] = ends[innermost]
    number = np.append(np.cumsum(kept) - 1, -1)  # among those that are kept
    inside = np.flatnonzero(kept & (depth > 0))
    inside = inside[np.argsort(depth[inside], kind="stable")]
    levels = np.split(inside, np.flatnonzero(np.diff(depth[inside])) + 1) if len(inside) else []
    # A group reads what dropped ones around it would have read.
    begin, end = ends[around][kept], ends[:-1][kept]
    count = groups.count[kept].astype(np.int64)
    tiles = -(-count // kernel.tile_rows)
    return GroupChoice(
        members=groups.members.astype(np.int64), inner=number[innermost], own_begin=own_begin,
        first=groups.first[kept].astype(np.int64), count=count, begin=begin, end=end, tiles=tiles,
        saved_positions=int(((count - tiles) * (end - begin)).sum()),
        levels=[(number[level], number[around[level]]) for level in levels], kernel=kernel, pieces=pieces,
    )


def forest_of(groups: PrefixGroups) -> tuple[np.ndarray, np.ndarray]:
    """Parent of each group (-1: none), last group of each member."""
    inner = np.full(len(groups.members), -1)
    parent = np.empty(len(groups.first), dtype=np.int64)
    last = groups.first + groups.count
    for group, (begin, end) in enumerate(zip(groups.first.tolist(), last.tolist(), strict=True)):  # outer ones first
        parent[group] = inner[begin]
        inner[begin:end] = group
    return parent, inner


def worth_it(groups: PrefixGroups, parent: np.ndarray, readers: np.ndarray, tiles: np.ndarray, count: np.ndarray,
             piece_cost: float) -> tuple[np.ndarray, np.ndarray]:
    """Which groups save more than they cost, and how many positions of one KV head each saves.

    Args:
        readers: [G] times that rows which lie in no inner group read what they share, where the group is not kept.
        tiles: [G] times where it is.
        count: [G] partial results of each of its splits.
    """
    span = (groups.end - groups.begin).astype(np.int64)
    inside = np.flatnonzero(parent >= 0)
    columns = (inside, parent[inside], count[inside], span[inside], tiles[inside])
    reading = readers.tolist()
    for group, outer, rows, positions, some in reversed(list(zip(*(c.tolist() for c in columns), strict=True))):
        # What lies in a group reads it: by tiles where it is kept, else by rows.
        is_kept = (reading[group] - some) * positions - piece_cost * rows > 0
        reading[outer] += some if is_kept else reading[group]
    saved = (np.array(reading, dtype=np.float64) - tiles) * span - piece_cost * count
    return saved > 0, saved


def _kept_around(parent: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of each group the nearest kept one around it (-1: none), and how many kept ones are around it."""
    around, depth, is_kept = parent.tolist(), [0] * len(parent), kept.tolist()
    for group in np.flatnonzero(parent >= 0).tolist():  # outer ones first
        outer = around[group]
        around[group] = nearest = outer if is_kept[outer] else around[outer]
        depth[group] = depth[nearest] + 1 if nearest >= 0 else 0
    return np.array(around, dtype=np.int64), np.array(depth, dtype=np.int64)


def _fitting(groups: PrefixGroups, kept: np.ndarray, saved: np.ndarray, tile_rows: int, num_rows: int) -> np.ndarray:
    """Of the groups that save anything, those that save most, as many as the plan has room for."""
    count, most_tiles, most_parts = groups.count, _most_tiles(num_rows), _most_group_parts(num_rows)
    if -(-count[kept] // tile_rows).sum() <= most_tiles and count[kept].sum() <= most_parts:
        return kept
    best = np.argsort(np.where(kept, -saved, 0.0), kind="stable")[: int(kept.sum())]
    fits = (np.cumsum(-(-count[best] // tile_rows)) <= most_tiles) & (np.cumsum(count[best]) <= most_parts)
    fitting = np.zeros_like(kept)
    fitting[best[fits]] = True
    return fitting


def plan_groups(seq_lens: np.ndarray, slots: np.ndarray, choice: GroupChoice,
                share_of_layers: float = 1.0) -> GroupedPlan | None:
    """Cut R rows and what they share into parts; None where rows have so much of their own that it does not pay.

    Groups come first, longest splits first, then the rows' own parts, likewise: short programs fill the end.

    Args:
        seq_lens, slots: [R] integers, visible tokens and slot of each row.
        choice: of the rows' groups.
        share_of_layers: of all layers that read by this plan, in how many it saves anything.
    """
    lengths = seq_lens.astype(np.int64)
    own = lengths - choice.own_begin
    if choice.pieces is None:
        saved, least = choice.saved_positions * share_of_layers, choice.kernel.positions_worth_it
        if saved < max(least if share_of_layers < 1.0 else 0.0, MIN_SAVED_SHARE * _num_read(own, choice)):
            return None
        share = _share(own, choice)
        splits, own_splits = _group_splits(choice, share), np.maximum(-(-own // share), 1)
    else:
        length = choice.pieces.length
        splits, own_splits = (choice.end - choice.begin) // length, np.maximum(-(-own // length), 1)
    before, own_piece = number_pieces(choice, splits, len(lengths))
    pieces = own_piece + own_splits
    part = np.cumsum(pieces) - pieces
    items = np.full((choice.num_items, PART_FIELDS), -1, dtype=np.int32)
    groups = group_items(choice, slots, splits, before)
    items[: len(groups)] = groups
    order = np.argsort(own // -own_splits, kind="stable")
    row, split = _numbered(order, own_splits[order])
    length = lengths[row]
    _fill(items[len(groups) : len(groups) + len(row)], PartItem(
        rows=0, first=row, slot=slots[row], **_places(choice, choice.own_begin[row], length, split, own_splits[row]),
        part=np.where(pieces[row] > 1, part[row] + own_piece[row] + split, -1), length=length,
    ))
    return GroupedPlan(items, row_entries(choice, lengths, part, pieces), choice.num_parts, choice.kernel.config)


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
    group, number = _numbered(order, (choice.tiles * splits)[order])
    tiles, count = choice.tiles[group], choice.count[group]
    split, tile = number // tiles, number % tiles  # tiles that read the same follow each other
    each = -(-count // tiles)
    first = choice.first[group] + tile * each
    items = np.empty((len(group), PART_FIELDS), dtype=np.int32)
    _fill(items, PartItem(
        rows=np.minimum(each, count - tile * each), first=first, slot=slots[choice.members[first]],
        **_places(choice, choice.begin[group], choice.end[group], split, splits[group]), part=before[group] + split,
        length=0,
    ))
    return items


def _num_read(own: np.ndarray, choice: GroupChoice) -> int:
    return int(own.sum() + ((choice.end - choice.begin) * choice.tiles).sum())


def _share(own: np.ndarray, choice: GroupChoice) -> int:
    """Length to cut to, in positions of a row, so that programs end together; see `decode_work.split_length`."""
    own = np.maximum(own, 1)
    span, tiles, cta_slots = choice.end - choice.begin, choice.tiles, choice.kernel.cta_slots
    total = int(own.sum()) + math.ceil(int((span * tiles).sum()) * TILE_COST)
    share = max(MIN_SPLIT, -(-total // cta_slots))
    if len(own) + int(tiles.sum()) > cta_slots:
        return share
    low, high = share, max(share, int(own.max()), math.ceil(int(span.max()) * TILE_COST))
    while low < high:
        middle = (low + high) // 2
        if int((-(-own // middle)).sum() + (tiles * _uncapped_splits(span, middle)).sum()) <= cta_slots:
            high = middle
        else:
            low = middle + 1
    return low


def _uncapped_splits(span: np.ndarray, share: int) -> np.ndarray:
    least = np.clip(span // 8, MIN_GROUP_SPLIT, MIN_LONG_SPLIT)
    return -(-span // np.maximum(least, math.ceil(share / TILE_COST)))


def _group_splits(choice: GroupChoice, share: int) -> np.ndarray:
    """Of each group; fewer, alike for all, where the rows' partial results would be too many."""
    splits, count = _uncapped_splits(choice.end - choice.begin, share), choice.count
    parts, most = int((splits * count).sum()), _most_group_parts(len(choice.own_begin))
    if parts <= most:
        return splits
    least = int(count.sum())
    return 1 + ((splits - 1) * (most - least)) // (parts - least)


def _places(choice: GroupChoice, begin: np.ndarray, end: np.ndarray, split: np.ndarray,
            splits: np.ndarray) -> dict[str, object]:
    """Columns of `PartItem` for split number `split` of `splits` of positions `begin` to `end - 1`."""
    if choice.pieces is None:
        return {"begin": begin, "end": end, "split": split, "splits": splits}
    begin = begin + split * choice.pieces.length
    return {"begin": begin, "end": np.minimum(begin + choice.pieces.length, end), "split": 0, "splits": 1}


def _numbered(what: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each of `what` as often as `counts` says, and a number from 0 on for each time."""
    ends = np.cumsum(counts)
    return np.repeat(what, counts), np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _fill(table: np.ndarray, columns: Iterable[object]) -> None:
    for column, values in enumerate(columns):
        table[:, column] = values
