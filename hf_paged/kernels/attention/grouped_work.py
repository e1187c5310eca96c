"""How a decode step whose rows share prefixes is cut into parts: which groups pay, and where to cut them and the rows.

The host plans, as for other decode steps (`decode_work`): all arrays have sizes that depend on the padded number of
rows alone, so that one CUDA graph serves every plan.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from hf_paged.kernels.attention.decode_work import MIN_SPLIT
from hf_paged.kernels.attention.metadata import MEMBER_FIELDS, PART_FIELDS, GroupedConfig, PartItem
from hf_paged.scheduler.prefix_groups import PrefixGroups

# What costs how much, in positions that a row of one KV head reads: a position of a group's tile, whose products take
# longer, but whose keys another tile may have brought into L2; a row's partial result, written and read again.
TILE_COST = 1.0
PIECE_COST = 24
# A group's split has all its rows' partial results to write: shorter ones cost more in that than they gain.
MIN_GROUP_SPLIT = 128
# A step is grouped if that saves as many positions for each multiprocessor (times KV heads, of 256 bytes of key): where
# it saves less, the joining adds as much time.
MIN_SAVED = 200


class GroupedPlan(NamedTuple):
    """`GroupedWork` on the host; `items` and `members` are int32."""

    items: np.ndarray  # [num_group_items, PART_FIELDS]
    members: np.ndarray  # [R, MEMBER_FIELDS]
    num_parts: int
    config: GroupedConfig


class Forest(NamedTuple):
    """What can be said of the groups of a step without its lengths, G groups over M members."""

    groups: PrefixGroups
    parent: np.ndarray  # [G] group that it lies in; -1: none
    levels: list[np.ndarray]  # groups by how many groups they lie in
    inner: np.ndarray  # [M] last group of each member


def forest_of(groups: PrefixGroups) -> Forest:
    """Which groups lie in which."""
    count, first = groups.count.astype(np.int64), groups.first.astype(np.int64)
    group = np.repeat(np.arange(len(count)), count)
    member = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count) + first[group]
    inner = np.empty(len(groups.members), dtype=np.int64)
    inner[member] = group  # of several, the last one stays
    parent = np.full(len(count), -1)
    # The groups of one member, outermost first: each one's predecessor is its parent.
    by_member = np.argsort(member, kind="stable")
    chain, whose = group[by_member], member[by_member]
    inside = whose[1:] == whose[:-1]
    parent[chain[1:][inside]] = chain[:-1][inside]
    levels, depth = [], np.zeros(len(count), dtype=np.int64)
    here = np.flatnonzero(parent < 0)
    while len(here):
        levels.append(here)
        depth[here] = len(levels)
        here = np.flatnonzero((parent >= 0) & (depth[parent] == len(levels)) & (depth == 0))
    return Forest(groups, parent, levels, inner)


def num_group_items(num_rows: int, cta_slots: int) -> int:
    """Length of the plan of `num_rows` rows, whatever their lengths and groups."""
    return num_rows + _most_tiles(num_rows) + cta_slots


def num_parts(num_rows: int, cta_slots: int) -> int:
    """Most pieces that the rows of a plan have together."""
    return num_rows + cta_slots + _most_group_parts(num_rows)


def _most_tiles(num_rows: int) -> int:
    return max(num_rows // 2, min(num_rows, 16))


def _most_group_parts(num_rows: int) -> int:
    return 2 * num_rows + 512


def plan_groups(seq_lens: np.ndarray, slots: np.ndarray, forest: Forest, config: GroupedConfig, *, tile_rows: int,
                cta_slots: int, positions_worth_it: float) -> GroupedPlan | None:
    """Cut R rows and what they share into parts; None where it would not be faster than reading row by row.

    Args:
        seq_lens, slots: [R] integers, visible tokens and slot of each row.
        forest: of the rows' groups.
        config: of the kernel that the plan is for.
        tile_rows: rows of a group that one program takes.
        cta_slots: parts of one KV head that run at the same time.
        positions_worth_it: of one KV head, that the step has to save to be grouped (`MIN_SAVED`).
    """
    lengths = seq_lens.astype(np.int64)
    kept, saved = _worth_it(forest, tile_rows)
    most_parts = _most_group_parts(len(lengths))
    kept = _fitting(forest, kept, saved, tile_rows, _most_tiles(len(lengths)), most_parts)
    if saved[kept].sum() < max(positions_worth_it, 1):
        return None
    begin, shared = _reach(forest, kept)
    own_begin = np.zeros_like(lengths)
    own_begin[forest.groups.members] = shared
    own = lengths - own_begin
    span = np.where(kept, forest.groups.end - begin, 0)
    tiles = np.where(kept, -(-forest.groups.count // tile_rows), 0)
    share = _share(own, span, tiles, cta_slots)
    splits = np.where(kept, np.maximum(1, _group_splits(span, share)), 0)
    splits = _bounded(splits, forest.groups.count, most_parts)
    own_splits = np.maximum(1, -(-own // share))
    cuts = _Cuts(begin, splits, own_begin, own_splits)
    return _plan(lengths, slots, forest, cuts, config, tile_rows, num_group_items(len(lengths), cta_slots),
                 num_parts(len(lengths), cta_slots))


def plan_fixed_pieces(seq_lens: np.ndarray, slots: np.ndarray, forest: Forest, config: GroupedConfig, *,
                      tile_rows: int, piece_length: int, max_seq_len: int) -> GroupedPlan:
    """As :func:`plan_groups`, but each row is cut at multiples of `piece_length`, whatever other rows there are.

    So which positions are summed up together, and in which order, depends on the row's length alone. What may still
    depend on other rows is the rounding inside of a piece: a tile of several rows' queries is another product than that
    of one row's.

    Args:
        seq_lens, slots, forest, config, tile_rows: as there; without groups in the forest, the step shares
            nothing.
        piece_length: positions of a piece, a multiple of the block size.
        max_seq_len: at least every length; the sizes of the arrays depend on it and on R.
    """
    lengths = seq_lens.astype(np.int64)
    end = forest.groups.end // piece_length * piece_length
    begin = forest.groups.begin // piece_length * piece_length
    forest = forest._replace(groups=forest.groups._replace(begin=begin, end=end))
    kept, _ = _worth_it(forest, tile_rows)
    begin, shared = _reach(forest, kept)
    own_begin = np.zeros_like(lengths)
    own_begin[forest.groups.members] = shared
    splits = np.where(kept, (end - begin) // piece_length, 0)
    own_splits = np.maximum(1, -(-(lengths - own_begin) // piece_length))
    most = len(lengths) * max(1, -(-max_seq_len // piece_length))  # a group's piece stands for one of each of its rows
    cuts = _Cuts(begin, splits, own_begin, own_splits, piece_length)
    return _plan(lengths, slots, forest, cuts, config, tile_rows, most, most)


class _Cuts(NamedTuple):
    """Where groups [G] and rows [R] begin and how they are cut; a group with no split is not read as one."""

    begin: np.ndarray
    splits: np.ndarray
    own_begin: np.ndarray
    own_splits: np.ndarray
    piece_length: int | None = None  # of a split; None: the splits are about equal

    def places(self, begin: np.ndarray, end: np.ndarray, split: np.ndarray, splits: np.ndarray) -> dict[str, object]:
        """Columns of `PartItem` for split number `split` of `splits` of positions `begin` to `end - 1`."""
        if self.piece_length is None:
            return {"begin": begin, "end": end, "split": split, "splits": splits}
        begin = begin + split * self.piece_length
        return {"begin": begin, "end": np.minimum(begin + self.piece_length, end), "split": 0, "splits": 1}


def _worth_it(forest: Forest, tile_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Which groups save more than they cost, and how many positions of one KV head each saves."""
    groups = forest.groups
    count, span = groups.count.astype(np.int64), (groups.end - groups.begin).astype(np.int64)
    tiles = -(-count // tile_rows)
    readers = np.bincount(forest.inner, minlength=len(count))
    saved = np.zeros(len(count))
    kept = np.zeros(len(count), dtype=bool)
    for level in reversed(forest.levels):  # what lies in a group reads it: by tiles where it is kept, else by rows
        saved[level] = (readers[level] - TILE_COST * tiles[level]) * span[level] - PIECE_COST * count[level]
        kept[level] = saved[level] > 0
        inside = level[forest.parent[level] >= 0]
        np.add.at(readers, forest.parent[inside], np.where(kept[inside], tiles[inside], readers[inside]))
    return kept, saved


def _fitting(forest: Forest, kept: np.ndarray, saved: np.ndarray, tile_rows: int, most_tiles: int,
             most_parts: int) -> np.ndarray:
    """Of the groups that save anything, those that save most, as many as the plan has room for."""
    count = forest.groups.count
    if -(-count[kept] // tile_rows).sum() <= most_tiles and count[kept].sum() <= most_parts:
        return kept
    best = np.argsort(np.where(kept, -saved, 0.0), kind="stable")[: int(kept.sum())]
    fits = (np.cumsum(-(-count[best] // tile_rows)) <= most_tiles) & (np.cumsum(count[best]) <= most_parts)
    fitting = np.zeros_like(kept)
    fitting[best[fits]] = True
    return fitting


def _reach(forest: Forest, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each group begins if it reads what dropped ones around it would have read, and each member's own part."""
    begin, end = np.zeros(len(kept), dtype=np.int64), np.zeros(len(kept), dtype=np.int64)
    for depth, level in enumerate(forest.levels):
        if depth:
            begin[level] = end[forest.parent[level]]
        end[level] = np.where(kept[level], forest.groups.end[level], begin[level])
    return begin, end[forest.inner]


def _share(own: np.ndarray, span: np.ndarray, tiles: np.ndarray, cta_slots: int) -> int:
    """Length to cut to, in positions of a row, so that programs end together; see `decode_work.split_length`."""
    own = np.maximum(own, 1)
    cost = np.ceil(span * TILE_COST).astype(np.int64)
    total = int(own.sum() + (cost * tiles).sum())
    share = max(MIN_SPLIT, -(-total // cta_slots))
    if len(own) + int(tiles.sum()) > cta_slots:
        return share
    low, high = share, max(share, int(own.max()), int(cost.max()))
    while low < high:
        middle = (low + high) // 2
        if int((-(-own // middle)).sum() + (tiles * _group_splits(span, middle)).sum()) <= cta_slots:
            high = middle
        else:
            low = middle + 1
    return low


def _group_splits(span: np.ndarray, share: int) -> np.ndarray:
    return -(-span // max(MIN_GROUP_SPLIT, math.ceil(share / TILE_COST)))


def _bounded(splits: np.ndarray, count: np.ndarray, most: int) -> np.ndarray:
    """Fewer splits, alike for all groups, where their partial results would be more than `most`."""
    parts, least = int((splits * count).sum()), int(count[splits > 0].sum())
    if parts <= most:
        return splits
    factor = (most - least) / (parts - least)
    return np.where(splits > 0, 1 + np.floor((splits - 1) * factor).astype(np.int64), 0)


def _plan(lengths: np.ndarray, slots: np.ndarray, forest: Forest, cuts: _Cuts, config: GroupedConfig,
          tile_rows: int, size: int, most_parts: int) -> GroupedPlan:
    """Groups come first, longest splits first, then the rows' own parts, which so end last and find the others done."""
    groups = forest.groups
    members = groups.members
    before = np.zeros(len(cuts.splits), dtype=np.int64)  # pieces of a group's rows ahead of its own
    for level in forest.levels[1:]:
        parent = forest.parent[level]
        before[level] = before[parent] + cuts.splits[parent]
    own_piece = np.zeros_like(lengths)
    own_piece[members] = (before + cuts.splits)[forest.inner]
    pieces = own_piece + cuts.own_splits
    part = np.cumsum(pieces) - pieces

    table = np.zeros((len(lengths), MEMBER_FIELDS), dtype=np.int32)
    for column, values in enumerate((members, part[members], pieces[members], lengths[members])):
        table[: len(members), column] = values

    items = np.full((size, PART_FIELDS), -1, dtype=np.int32)
    kept = np.flatnonzero(cuts.splits)
    span = groups.end - cuts.begin
    kept = kept[np.argsort(-span[kept] // cuts.splits[kept], kind="stable")]
    tiles = -(-groups.count[kept] // tile_rows)
    group, number = _numbered(kept, tiles * cuts.splits[kept])
    tiles = np.repeat(tiles, tiles * cuts.splits[kept])
    split, tile = number // tiles, number % tiles  # tiles that read the same follow each other
    each = -(-groups.count[group] // tiles)
    rows = np.minimum(each, groups.count[group] - tile * each)
    first = groups.first[group] + tile * each
    _fill(items[: len(group)], PartItem(
        rows=rows, first=first, slot=slots[members[first]], piece=before[group] + split, pieces=0, part=0, length=0,
        **cuts.places(cuts.begin[group], groups.end[group], split, cuts.splits[group]),
    ))
    own = lengths - cuts.own_begin
    order = np.argsort(own // -cuts.own_splits, kind="stable")
    row, split = _numbered(order, cuts.own_splits[order])
    _fill(items[len(group) : len(group) + len(row)], PartItem(
        rows=0, first=row, slot=slots[row], piece=own_piece[row] + split, pieces=pieces[row], part=part[row],
        length=lengths[row], **cuts.places(cuts.own_begin[row], lengths[row], split, cuts.own_splits[row]),
    ))
    return GroupedPlan(items, table, most_parts, config)


def _numbered(what: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each of `what` as often as `counts` says, and a number from 0 on for each time."""
    return np.repeat(what, counts), np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _fill(items: np.ndarray, columns: PartItem) -> None:
    for column, values in enumerate(columns):
        items[:, column] = values
