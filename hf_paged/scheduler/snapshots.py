"""Snapshots of recurrent states: behind which tokens they are kept, and which one a prompt goes on from.

A model with recurrent states goes on behind cached blocks only from the state at that place. A snapshot may stand
behind any token: it has the states there, and the keys and values behind the last full block. It is found by the
``prefix_id`` of the full blocks before it, so it is lost with the last of these, and by what it has behind them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

import numpy as np

from hf_paged.scheduler.block_pool import NULL_BLOCK_ID, ROOT_PREFIX_ID, BlockPool, KVBlock
from hf_paged.scheduler.sequence import Sequence

_Tail = tuple[bytes, bytes]  # tokens behind the last full block, as int32, and their `Sequence.block_key`


class Snapshot:
    """The states behind the first `position` tokens of a prompt.

    Attributes:
        prefix_id: Of the full blocks before it.
        tail: What it has behind these blocks.
        generation: That of the block pool when the states were computed.
        content: What the runner keeps, from the step on that computes the states.
    """

    __slots__ = ("content", "generation", "position", "prefix_id", "tail")

    def __init__(self, prefix_id: int, tail: _Tail, position: int, generation: int) -> None:
        self.prefix_id, self.tail, self.position, self.generation = prefix_id, tail, position, generation
        self.content: Any = None


class StateMove(NamedTuple):
    """A copy between the states in a slot and a snapshot.

    ``block_id``: the block of the sequence with the tokens behind the snapshot's last full block; the null block where
    there are none, or where another sequence's block has them.
    """

    slot: int
    block_id: int
    snapshot: Snapshot


class StateMoves(NamedTuple):
    """The copies of a step: ``ended`` of sequences that ended, before all others; and by slot ``loads``, before the
    row's first token, and ``saves``, each behind the token at its snapshot's position, in order."""

    ended: list[StateMove]
    loads: dict[int, StateMove]
    saves: dict[int, list[StateMove]]

    def saved(self) -> list[Snapshot]:
        return [move.snapshot for moves in (self.ended, *self.saves.values()) for move in moves]


class SnapshotCache:
    """Snapshots by their tokens; the one used longest ago makes way. A plan that loads one keeps it alive.

    States are saved in front of a prompt's last token (its last `least_chunk` tokens), so that the same prompt computes
    that token alone; where the cached blocks of a prompt end without a snapshot, for a third prompt that begins alike;
    and at a sequence's end.

    Args:
        capacity: Maximum of snapshots.
        pool: Blocks that the snapshots stand behind.
        whole_prompts: States can be followed by one token only: a snapshot counts for a prompt that has one more.
        least_chunk: Tokens that a prompt computes at once behind a snapshot, at least.
    """

    def __init__(self, capacity: int, pool: BlockPool, block_size: int, *, whole_prompts: bool = False,
                 least_chunk: int = 1) -> None:
        self.capacity, self._pool, self._size, self._whole_prompts = capacity, pool, block_size, whole_prompts
        self._least = least_chunk
        self._kept: OrderedDict[Snapshot, None] = OrderedDict()  # the first is dropped next
        self._at: dict[int, dict[_Tail, Snapshot]] = {}  # by prefix_id and tail
        self._cuts: dict[int, list[int]] = {}  # positions at which the prompt in a slot is saved
        self._moves = StateMoves([], {}, {})  # of the next plan

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, seq: Sequence, hits: Seq[KVBlock]) -> Snapshot | None:
        """Return the furthest snapshot behind some of these blocks that a waiting sequence can go on from."""
        last = seq.num_tokens - self._least
        if not seq.read_cache or last < 0:
            return None
        for count in range(min(len(hits), last // self._size), -1, -1):
            kept = self._at.get(hits[count - 1].prefix_id if count else ROOT_PREFIX_ID)
            if kept:
                first = count * self._size
                ids = np.array(seq.ids_between(first, min(first + self._size - 1, last)), np.int32)
                for num_tokens in range(len(ids), -1, -1):
                    snapshot = kept.get(_tail(seq, ids[:num_tokens], first))
                    if (snapshot is not None and self._pool.is_trusted(snapshot.generation)
                            and (snapshot.position == last or not self._whole_prompts)):
                        return snapshot
        return None

    def admit(self, seq: Sequence, hits: Seq[KVBlock], snapshot: Snapshot | None) -> None:
        """Plan the loading of the snapshot into the sequence's slot, and the saves while its prompt is computed."""
        slot, start, shared = seq.slot, 0, len(hits) * self._size
        if snapshot is not None:
            start = snapshot.position
            self._kept.move_to_end(snapshot)
            has_own = start > shared  # else another sequence's block has the tokens behind the last full block
            self._moves.loads[slot] = StateMove(slot, seq.block_table[start // self._size] if has_own else
                                                NULL_BLOCK_ID, snapshot)
        last = seq.num_tokens - self._least
        cuts = self._apart({last} if self._whole_prompts else {shared, last}, start, seq.num_tokens)
        # A forward ends at each cut, so no token in front of it may see a later one.
        self._cuts[slot] = [cut for cut in cuts if cut < seq.num_tokens and seq.chunk_end(start, cut) == cut]

    def save_chunk(self, seq: Sequence, tokens: np.ndarray, start: int, end: int) -> None:
        """Plan the saves of a prompt's chunk, whose full blocks are published. ``tokens``: int32, those up to `end`."""
        cuts = self._apart(self._cuts[seq.slot], start, end)
        if moves := [move for cut in cuts if (move := self._save(seq, tokens, cut)) is not None]:
            self._moves.saves[seq.slot] = moves

    def _apart(self, cuts: Iterable[int], start: int, end: int) -> list[int]:
        """Return the cuts, in order, that a chunk from `start` to `end` can have, its end among them."""
        found: list[int] = []
        for cut in sorted(cuts):
            before = found[-1] if found else start
            if start < cut <= end and (not before or cut - before >= self._least) and (
                    cut == end or end - cut >= self._least):
                found.append(cut)
        return found

    def save_end(self, seq: Sequence, tokens: np.ndarray, position: int) -> None:
        """Plan to save, before the next step, the states of a sequence that ends, behind `position` tokens."""
        if (move := self._save(seq, tokens, position)) is not None:
            self._moves.ended.append(move)

    def take_moves(self) -> StateMoves | None:
        """Return the copies of the plan that is made now, and begin those of the next."""
        moves, self._moves = self._moves, StateMoves([], {}, {})
        return moves if any(moves) else None

    def take_ended(self) -> list[StateMove]:
        """Return the saves of sequences that ended, which the next plan then lacks."""
        ended, self._moves = self._moves.ended, self._moves._replace(ended=[])
        return ended

    def drop(self, snapshots: Seq[Snapshot]) -> None:
        """Forget snapshots; ignores those that are forgotten already."""
        for snapshot in snapshots:
            if snapshot in self._kept:
                del self._kept[snapshot]
                kept = self._at[snapshot.prefix_id]
                del kept[snapshot.tail]
                if not kept:
                    del self._at[snapshot.prefix_id]

    def clear(self) -> None:
        self._kept.clear()
        self._at.clear()
        self._moves.ended.clear()

    def _save(self, seq: Sequence, tokens: np.ndarray, position: int) -> StateMove | None:
        """Make a snapshot behind `position` tokens; None if there is one, or the blocks before it are not cached."""
        count, prefix_id = position // self._size, ROOT_PREFIX_ID
        if seq.is_mixed or not self.capacity:
            return None
        if count:
            block = self._pool.blocks[seq.block_table[count - 1]]
            if block.digest is None:
                return None
            prefix_id = block.prefix_id
        first = count * self._size
        tail = _tail(seq, tokens[first:position], first)
        if (known := self._at.get(prefix_id, {}).get(tail)) is not None:
            if self._pool.is_trusted(known.generation):
                self._kept.move_to_end(known)
                return None
            self.drop([known])
        if len(self._kept) >= self.capacity:
            self.drop([next(iter(self._kept))])
        snapshot = Snapshot(prefix_id, tail, position, self._pool.generation)
        self._kept[snapshot] = None
        self._at.setdefault(prefix_id, {})[tail] = snapshot
        return StateMove(seq.slot, seq.block_table[count] if position > first else NULL_BLOCK_ID, snapshot)


def _tail(seq: Sequence, ids: np.ndarray, first: int) -> _Tail:
    """Return the tail with these tokens of a sequence, int32, from `first` on."""
    return ids.tobytes(), seq.block_key(first, first + len(ids))
