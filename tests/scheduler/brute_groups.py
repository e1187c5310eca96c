"""Groups of rows made from nothing but their block tables, to compare those of the tree with."""

from __future__ import annotations

import numpy as np

from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.prefix_tree import PrefixGroups, shared_by_copies


def groups_of(tables: list[list[int]], block_size: int) -> set[tuple[frozenset[int], int, int]]:
    """(row numbers, begin, end) of every group of rows whose tables begin with the same blocks."""
    longest: dict[frozenset[int], int] = {}
    for table in tables:
        for count in range(1, len(table) + 1):
            rows = frozenset(i for i, other in enumerate(tables) if other[:count] == table[:count])
            if len(rows) > 1:
                longest[rows] = max(longest.get(rows, 0), count)
    return {
        (rows, block_size * max((end for outer, end in longest.items() if outer > rows), default=0), block_size * end)
        for rows, end in longest.items()
    }


def check_groups(groups: PrefixGroups | None, tables: list[list[int]], block_size: int) -> None:
    """These are the groups of rows with these tables, written as `PrefixGroups` says."""
    expected = groups_of(tables, block_size)
    if groups is None:
        assert not expected
        return
    assert all(column.dtype == np.int32 for column in groups)
    members, first, count, begin, end = (column.tolist() for column in groups)
    found = [(frozenset(members[a : a + n]), b, e) for a, n, b, e in zip(first, count, begin, end, strict=True)]
    assert set(found) == expected
    assert len(found) == len(expected)
    assert len(set(members)) == len(members)
    assert set(members) == set().union(*(rows for rows, _, _ in expected))
    for i, (rows, start, _) in enumerate(found):
        around = [(outer, e) for outer, _, e in found[:i] if outer > rows]
        assert start == (min(around, key=lambda outer: len(outer[0]))[1] if around else 0), "an outer one comes later"


def _read_together(plan: StepPlan, row: int, block_size: int) -> list[int]:
    """Blocks of a row that others may read with it: all, or of several rows of one sequence those of whole pieces, and
    what the sequence has in common with others."""
    sequences = plan.sequences[: plan.num_decode_rows]
    seq = sequences[row]
    if sequences.count(seq) == 1:
        return seq.block_table
    count = int(shared_by_copies(plan.start[sequences.index(seq)], block_size)) // block_size
    for other in sequences:
        same = [a == b for a, b in zip(seq.block_table, other.block_table, strict=False)] + [False]
        count = max(count, same.index(False)) if other is not seq else count
    return seq.block_table[:count]


def check_plan(plan: StepPlan, block_size: int) -> None:
    """The groups of a plan are those of its decode rows, and of its prompts, and end before each row's new tokens."""
    rows = plan.num_decode_rows
    check_groups(plan.prompt_groups, [
        seq.block_table[: int(start) // block_size]
        for seq, start in zip(plan.sequences[rows:], plan.start[rows:], strict=True)
    ], block_size)
    tables = [seq.block_table for seq in plan.sequences[:rows]]
    if plan.drafts is not None:
        tables = [_read_together(plan, row, block_size) for row in range(rows)]
    check_groups(plan.groups, tables, block_size)
    if plan.groups is not None:
        members, first, count, _, end = (column.tolist() for column in plan.groups)
        for a, n, e in zip(first, count, end, strict=True):
            assert all(e <= plan.start[row] for row in members[a : a + n])
