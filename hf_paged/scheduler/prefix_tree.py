"""Tree of the rows whose block tables begin with the same blocks, updated while rows are added and removed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
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


class Node:
    """Leading blocks that at least two rows share; the root has none.

    Attributes:
        end: Number of these blocks.
        blocks: The blocks after the parent's `end`.
        inner: Nodes of longer prefixes, by their first block after `end`.
        leaves: Slots of rows that share no more, by their block after `end`, or by -1 - slot if the table ends here.
    """

    __slots__ = ("blocks", "end", "inner", "leaves", "parent")

    def __init__(self, parent: Node | None, end: int, blocks: list[int]) -> None:
        self.parent = parent
        self.end = end
        self.blocks = blocks
        self.inner: dict[int, Node] = {}
        self.leaves: dict[int, int] = {}


class _Forest(NamedTuple):
    """All nodes but the root in the layout of `PrefixGroups`, over all rows of the tree; children follow parents."""

    slots: np.ndarray  # [M] int64
    first: np.ndarray  # [G] int32, as are all fields below
    last: np.ndarray  # end (exclusive) of the group's rows in `slots`
    begin: np.ndarray
    end: np.ndarray
    inner: np.ndarray  # [I] groups with a parent
    parent: np.ndarray  # [I] their parents


class PrefixTree:
    """A tree over the block tables of all rows that hold blocks, by the slots of the rows.

    The tree compares block ids, not contents. Blocks that no other row has may be appended to a table, followed by
    `extended`; any other change to a table requires `remove` before it and `add` after it.

    Args:
        block_size: Tokens per block.
        is_kept: If False, rows are not entered and there are no groups.
    """

    def __init__(self, block_size: int, is_kept: bool = True) -> None:
        self.is_kept = is_kept
        self._block_size = block_size
        self._root = Node(None, 0, [])
        self._tables: dict[int, list[int]] = {}  # by slot, as are the next two
        self._node: dict[int, Node] = {}  # node whose `leaves` have the slot
        self._key: dict[int, int] = {}  # key of the slot in those `leaves`
        self._open: set[int] = set()  # slots whose table ends at the end of their node
        self._num_slots = 0  # above every slot so far
        self._forest: _Forest | None = None  # None if outdated
        self._known: dict[bytes, PrefixGroups | None] = {}  # by the slots of a step's rows

    def add(self, slot: int, table: list[int]) -> None:
        """Add a row; keeps a reference to the table."""
        if not self.is_kept:
            return
        node = self._root
        while True:
            key = table[node.end] if len(table) > node.end else -1 - slot
            inner = node.inner.get(key)
            if inner is None:
                break
            if table[node.end : inner.end] != inner.blocks:
                inner = _split(inner, _num_common(table[node.end : inner.end], inner.blocks))
            node = inner
        if (twin := node.leaves.get(key)) is not None:
            end = node.end + _num_common(table[node.end :], self._tables[twin][node.end :])
            node.inner[key] = pair = Node(node, end, table[node.end : end])
            del node.leaves[key]
            self._put(twin, pair)
            node = pair
        self._tables[slot] = table
        self._num_slots = max(self._num_slots, slot + 1)
        self._put(slot, node)
        if node is not self._root:
            self._forget()

    def remove(self, slot: int) -> None:
        node = self._node.pop(slot, None)
        if node is None:
            return
        del node.leaves[self._key.pop(slot)], self._tables[slot]
        self._open.discard(slot)
        if node.parent is not None:
            self._forget()
            if len(node.leaves) + len(node.inner) == 1:
                self._dissolve(node, node.parent)

    def extended(self) -> None:
        """Update the tree after blocks were appended to tables."""
        for slot in [slot for slot in self._open if len(self._tables[slot]) > self._node[slot].end]:
            node = self._node[slot]
            del node.leaves[self._key[slot]]
            self._put(slot, node)

    def groups(self, slots: np.ndarray) -> PrefixGroups | None:
        """Return the groups of a step whose row i has slot ``slots[i]`` (int32); None if no two rows share a block.

        While neither slots nor shared blocks change, the result is the same object, which must not be modified.
        """
        if not self._root.inner:
            return None
        step = slots.tobytes()
        if self._forest is None:
            self._forest = self._flattened()
        if step not in self._known:
            self._know(step, _among(self._forest, slots, self._num_slots))
        return self._known[step]

    def groups_ahead(self, slots: np.ndarray, start: np.ndarray) -> PrefixGroups | None:
        """Return the groups of a step's prompts, row i with slot ``slots[i]``, that end before their rows' new tokens.

        Returns None if no two rows share a block there. ``start``: [R] integers, position of a row's first new token.
        """
        if len(slots) < 2 or not self._root.inner:
            return None
        num_blocks = start // self._block_size
        rows = np.flatnonzero(num_blocks)
        groups = self.groups(slots[rows])
        if groups is None:
            return None
        last = groups.first + groups.count
        ahead = np.append(num_blocks[rows][groups.members], 0) * self._block_size
        if (np.minimum.reduceat(ahead, np.stack([groups.first, last], 1).reshape(-1))[::2] < groups.end).any():
            # Some row computes positions in this step that other rows of its group have in the cache.
            tree = PrefixTree(self._block_size)
            for row in rows.tolist():
                tree.add(row, self._tables[int(slots[row])][: int(num_blocks[row])])
            groups = tree.groups(rows)
        return None if groups is None else groups._replace(members=rows[groups.members].astype(np.int32))

    def groups_of_copies(self, slots: np.ndarray, copies: np.ndarray, start: np.ndarray) -> PrefixGroups | None:
        """Return `groups` of a step in which row i is repeated ``copies[i]`` times, from position ``start[i]`` on."""
        if not self.is_kept:  # otherwise copies of one row would form a group
            return None
        end = shared_by_copies(start, self._block_size)
        groups, step = self.groups(slots), b"".join((b"+", slots.tobytes(), copies.tobytes(), end.tobytes()))
        if step not in self._known:
            self._know(step, repeated(groups, copies, end))
        return self._known[step]

    def _know(self, step: bytes, groups: PrefixGroups | None) -> None:
        if len(self._known) == 8:
            self._known.clear()
        self._known[step] = groups

    def _put(self, slot: int, node: Node) -> None:
        table = self._tables[slot]
        if len(table) > node.end:
            key = table[node.end]
            self._open.discard(slot)
        else:
            key = -1 - slot
            self._open.add(slot)
        node.leaves[key] = slot
        self._node[slot], self._key[slot] = node, key

    def _dissolve(self, node: Node, parent: Node) -> None:
        """Remove a node that has only one leaf or one inner node left, and attach what is left to its parent."""
        del parent.inner[node.blocks[0]]
        for slot in node.leaves.values():
            self._put(slot, parent)
        for inner in node.inner.values():
            inner.parent, inner.blocks = parent, node.blocks + inner.blocks
            parent.inner[inner.blocks[0]] = inner

    def _forget(self) -> None:
        self._forest = None
        self._known.clear()

    def _flattened(self) -> _Forest:
        slots: list[int] = []
        first: list[int] = []
        parents: list[int] = []
        nodes: list[Node] = []
        left = [(node, -1) for node in self._root.inner.values()]
        while left:
            node, parent = left.pop()
            if node.inner:
                left += [(inner, len(nodes)) for inner in node.inner.values()]
            nodes.append(node)
            parents.append(parent)
            first.append(len(slots))
            slots += node.leaves.values()
        last = [start + len(node.leaves) for start, node in zip(first, nodes, strict=True)]
        parent_of = np.array(parents, np.int32)
        inner = np.flatnonzero(parent_of >= 0)
        for i in reversed(inner.tolist()):
            last[parents[i]] = max(last[parents[i]], last[i])
        end = np.array([node.end for node in nodes] + [0], np.int32) * np.int32(self._block_size)
        return _Forest(np.array(slots, np.int64), np.array(first, np.int32), np.array(last, np.int32), end[parent_of],
                       end[:-1], inner, parent_of[inner])


def _split(node: Node, count: int) -> Node:
    """Return a new node between this node and its parent, with the first `count` of this node's blocks."""
    parent, blocks = node.parent, node.blocks
    assert parent is not None
    outer = Node(parent, parent.end + count, blocks[:count])
    parent.inner[blocks[0]] = outer
    node.parent, node.blocks = outer, blocks[count:]
    outer.inner[node.blocks[0]] = node
    return outer


def _num_common(a: Seq[int], b: Seq[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _among(forest: _Forest, slots: np.ndarray, num_slots: int) -> PrefixGroups | None:
    """Return the groups of the forest restricted to the rows of a step."""
    row_of = np.full(num_slots, -1, np.int32)
    row_of[slots] = np.arange(len(slots), dtype=np.int32)
    members = row_of[forest.slots]
    present = members >= 0
    before = np.zeros(len(present) + 1, np.int32)  # rows of the step before each row of the forest
    np.cumsum(present, out=before[1:])
    first = before[forest.first]
    count = before[forest.last] - first
    # A group whose rows all belong to one nested group is dropped in favour of the nested, longer one.
    is_same = count[forest.inner] == count[forest.parent]
    if count.min() > 1 and not is_same.any():
        return PrefixGroups(members[present], first, count, forest.begin, forest.end)

    size = len(count)
    hidden = np.zeros(size + 1, bool)
    hidden[forest.parent[is_same]] = True
    keep = np.flatnonzero((count > 1) & ~hidden[:-1])
    if not keep.size:
        return None
    around = np.full(size + 1, size)  # parent of each group; `size` if none
    around[forest.inner] = forest.parent
    jump = np.where(hidden, around, np.arange(size + 1))  # skips 1, 2, 4, ... hidden parents
    while hidden[around[keep]].any():
        around, jump = jump[around], jump[jump]
    begin = np.append(forest.end, np.int32(0))[around[keep]]
    outermost = np.delete(np.arange(size), forest.inner)  # together they cover all rows of the forest, in order
    present &= np.repeat(count[outermost] > 1, (forest.last - forest.first)[outermost])
    np.cumsum(present, out=before[1:])
    return PrefixGroups(members[present], before[forest.first[keep]], count[keep], begin, forest.end[keep])
