"""Groups of rows whose block tables begin with the same blocks, which attention then reads once for all rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class PrefixGroups(NamedTuple):
    """Groups of a step's decode rows, or of its prompts; nested, since some members of a group may share more blocks.

    Group g has the rows ``members[first[g] : first[g] + count[g]]``, which all read positions ``begin[g]`` to
    ``end[g] - 1`` from the same blocks. A nested group follows its parent and begins where the parent ends; an
    outermost group begins at 0. So the shared positions of a row are contiguous pieces, in the order of the groups, and
    end before its first new token. All arrays are int32.
    """

    members: np.ndarray  # [M] row numbers of the step, each once; members of a group are contiguous
    first: np.ndarray  # [G] index of the group's first row in `members`
    count: np.ndarray  # type: ignore[assignment]  # [G] at least 2
    begin: np.ndarray  # [G] position, a multiple of the block size
    end: np.ndarray  # [G] position, a multiple of the block size, above `begin`


def shared_by_copies(start: np.ndarray, block_size: int) -> np.ndarray:
    """Return the position up to which copies of a sequence's row, the first at `start`, read as a group.

    Rounded down to several blocks, so that groups stay the same objects for some steps.
    """
    return start & -max(block_size, min(16 * block_size, 256))


def repeated(groups: PrefixGroups | None, copies: np.ndarray, end: np.ndarray) -> PrefixGroups | None:
    """Return the groups after each row was replaced by adjacent copies, for consecutive tokens.

    Args:
        groups: Groups of the original rows.
        copies: [R], at least 1.
        end: [R] position up to which the copies of a row read the same blocks, a multiple of the block size.
    """
    none = np.empty(0, np.int32)
    if groups is None:
        groups = PrefixGroups(none, none, none, none, none)
    shared = np.zeros(len(copies), np.int32)  # end of a row's innermost group
    for first, count, last in zip(groups.first.tolist(), groups.count.tolist(), groups.end.tolist(), strict=True):
        shared[groups.members[first : first + count]] = last
    has_own = (copies > 1) & (end > shared)
    is_member = np.zeros(len(copies), bool)
    is_member[groups.members] = True
    rows = np.concatenate([groups.members, np.flatnonzero(has_own & ~is_member)])
    if not rows.size:
        return None
    ends = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(copies[rows], out=ends[1:])
    begin_of_row = np.cumsum(copies) - copies
    members = np.repeat(begin_of_row[rows] - ends[:-1], copies[rows]) + np.arange(ends[-1])
    own = np.flatnonzero(has_own[rows])
    first = ends[groups.first]
    return PrefixGroups(*(np.concatenate(column).astype(np.int32) for column in (
        (members,), (first, ends[own]), (ends[groups.first + groups.count] - first, copies[rows][own]),
        (groups.begin, shared[rows][own]), (groups.end, end[rows][own]),
    )))
