"""The choice of the groups of rows whose shared prefixes are read once; it does not depend on the rows' lengths.

The groups form a forest: a group's parent is the group whose prefix its own prefix extends.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from hf_paged.device.cuda import num_multiprocessors, shared_memory
from hf_paged.kernels.attention._tile import padded_head_dim
from hf_paged.kernels.attention.grouped import grouped_config
from hf_paged.kernels.attention.types import AttentionSpec, GroupedConfig
from hf_paged.scheduler.prefix_tree import PrefixGroups

# Measured on an H200 (docs/notebook.md). The cost of writing and reading a row's partial result, in positions that a
# row of one KV head reads.
PIECE_COST = 24
# A step is grouped if that saves so many positions for each multiprocessor (times KV heads, of 256 bytes of key): with
# less, joining the partial results takes as long as was saved.
MIN_SAVED = 400


class Kernel(NamedTuple):
    """The properties of the kernel and its device that a plan depends on."""

    config: GroupedConfig
    tile_rows: int  # rows of a group that one program takes
    cta_slots: int  # number of parts of one KV head that run at the same time
    positions_worth_it: float  # positions of one KV head that grouping has to save in a step (`MIN_SAVED`)


def group_kernel_of(spec: AttentionSpec) -> Kernel:
    """Return the properties of the kernel of `kernels/attention/grouped.py` on the device."""
    head_dim_pad = padded_head_dim(spec.head_dim)
    config = grouped_config(head_dim_pad, spec.dtype.itemsize, spec.group, shared_memory(spec.device))
    multiprocessors = num_multiprocessors(spec.device)
    return Kernel(
        config, tile_rows=config.block_m // spec.group,
        cta_slots=max(1, config.programs_per_sm * multiprocessors // spec.num_kv_heads),
        positions_worth_it=MIN_SAVED * 256 / (head_dim_pad * spec.dtype.itemsize) * multiprocessors / spec.num_kv_heads,
    )


class GroupChoice(NamedTuple):
    """The G chosen groups of R rows, with M members: the part of a plan that does not depend on the rows' lengths.

    The positions of a group that is not chosen are read by the groups inside it and by rows. Integers are int64.
    """

    members: np.ndarray  # [M] rows
    inner: np.ndarray  # [M] innermost group of each member, -1 for none
    own_begin: np.ndarray  # [R] where a row's own positions begin
    first: np.ndarray  # [G], in `members`
    count: np.ndarray  # type: ignore[assignment]  # [G] rows; a tuple's method otherwise
    begin: np.ndarray  # [G] positions that the group reads
    end: np.ndarray  # [G]
    tiles: np.ndarray  # [G] of rows
    saved_positions: int  # that rows would read and tiles do not, without a window
    levels: list[tuple[np.ndarray, np.ndarray]]  # groups in groups, outermost first, and the groups that they lie in
    kernel: Kernel

    @property
    def num_items(self) -> int:
        """The length of a plan, the same for all lengths and groups of as many rows."""
        return len(self.own_begin) + _most_tiles(len(self.own_begin)) + self.kernel.cta_slots

    @property
    def num_parts(self) -> int:
        """The most pieces that all rows of a plan have together."""
        return len(self.own_begin) + self.kernel.cta_slots + most_group_parts(len(self.own_begin))


def _most_tiles(num_rows: int) -> int:
    return max(num_rows // 2, min(num_rows, 16))


def most_group_parts(num_rows: int) -> int:
    return 2 * num_rows + 512


def choose_groups(groups: PrefixGroups, num_rows: int, kernel: Kernel) -> GroupChoice | None:
    """Return the groups, of the first rows of `num_rows`, that save time; None if reading row by row is as fast.

    The choice is valid while the groups do not change.
    """
    if ((groups.count - 1) * (groups.end - groups.begin)).sum() < kernel.positions_worth_it:  # one tile each
        return None
    parent, inner = forest_of(groups)
    count, tiles = groups.count.astype(np.int64), -(-groups.count.astype(np.int64) // kernel.tile_rows)
    kept, saved = worth_it(groups, parent, np.bincount(inner, minlength=len(count)), tiles, count, PIECE_COST)
    kept = _fitting(groups, kept, saved, kernel.tile_rows, num_rows)
    if saved[kept].sum() < max(kernel.positions_worth_it, 1):
        return None
    return choice_of(groups, parent, inner, kept, num_rows, kernel)


def choice_of(groups: PrefixGroups, parent: np.ndarray, inner: np.ndarray, kept: np.ndarray, num_rows: int,
              kernel: Kernel) -> GroupChoice:
    """Return the choice of the groups marked in ``kept``; ``parent`` and ``inner`` are of `forest_of`."""
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
        levels=[(number[level], number[around[level]]) for level in levels], kernel=kernel,
    )


def forest_of(groups: PrefixGroups) -> tuple[np.ndarray, np.ndarray]:
    """Return the parent of each group (-1 for none), and the innermost group of each member."""
    inner = np.full(len(groups.members), -1)
    parent = np.empty(len(groups.first), dtype=np.int64)
    last = groups.first + groups.count
    for group, (begin, end) in enumerate(zip(groups.first.tolist(), last.tolist(), strict=True)):  # outer ones first
        parent[group] = inner[begin]
        inner[begin:end] = group
    return parent, inner


def worth_it(groups: PrefixGroups, parent: np.ndarray, readers: np.ndarray, tiles: np.ndarray, count: np.ndarray,
             piece_cost: float) -> tuple[np.ndarray, np.ndarray]:
    """Return which groups save more than they cost, and how many positions of one KV head each saves.

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
    """Return each group's nearest kept ancestor (-1 for none), and its number of kept ancestors."""
    around, depth, is_kept = parent.tolist(), [0] * len(parent), kept.tolist()
    for group in np.flatnonzero(parent >= 0).tolist():  # outer ones first
        outer = around[group]
        around[group] = nearest = outer if is_kept[outer] else around[outer]
        depth[group] = depth[nearest] + 1 if nearest >= 0 else 0
    return np.array(around, dtype=np.int64), np.array(depth, dtype=np.int64)


def _fitting(groups: PrefixGroups, kept: np.ndarray, saved: np.ndarray, tile_rows: int, num_rows: int) -> np.ndarray:
    """Return the kept groups that save most, as many as the plan has room for."""
    count, most_tiles, most_parts = groups.count, _most_tiles(num_rows), most_group_parts(num_rows)
    if -(-count[kept] // tile_rows).sum() <= most_tiles and count[kept].sum() <= most_parts:
        return kept
    best = np.argsort(np.where(kept, -saved, 0.0), kind="stable")[: int(kept.sum())]
    fits = (np.cumsum(-(-count[best] // tile_rows)) <= most_tiles) & (np.cumsum(count[best]) <= most_parts)
    fitting = np.zeros_like(kept)
    fitting[best[fits]] = True
    return fitting
