"""The order in which a step of a model with states computes its prompts: in pieces that end where states are saved."""

from __future__ import annotations

from collections import deque

from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.snapshots import Snapshot, StateMoves


class Prompt:
    """The new tokens of one row that are still to be computed.

    Attributes:
        row, slot: of the plan.
        start, end: positions of the tokens.
        load: the copy before the first of them, or None.
        saves: copies behind some of them, in order.
    """

    def __init__(self, plan: StepPlan, row: int, moves: StateMoves, block_size: int) -> None:
        self.row, self.slot, self.start = row, int(plan.slots[row]), int(plan.start[row])
        self.end = self.start + int(plan.num_new_tokens[row])
        self.load, self.saves = moves.loads.get(self.slot), deque(moves.saves.get(self.slot, ()))
        self._blocks, self._size = plan.sequences[row].block_table, block_size
        self._num_cached = -(-max(self.start, int(plan.write_from[row])) // block_size)

    @property
    def piece_end(self) -> int:
        """Where the next forward ends."""
        return self.saves[0].snapshot.position if self.saves else self.end

    @property
    def is_last_token(self) -> bool:
        """Whether what is left is one token behind a state, which decode rows take along."""
        return not self.saves and 0 < self.start == self.end - 1

    @property
    def ends_with_a_token(self) -> bool:
        """Whether the last forward of these tokens is that of one token behind a state."""
        return 0 < (self.saves[-1].snapshot.position if self.saves else self.start) == self.end - 1

    def reads(self) -> list[int]:
        """Return the blocks whose keys and values other rows may compute."""
        return self._blocks[: self._num_cached]

    def writes(self, start: int) -> list[int]:
        """Return the blocks of the tokens from `start` on."""
        return self._blocks[start // self._size : -(-self.end // self._size)]


def next_prompts(waiting: list[Prompt], late: set[int], *, packed: bool) -> list[Prompt]:
    """Return the prompts whose next piece can be computed now, in one forward; those of `waiting` are in the plan's
    order.

    A prompt reads, behind its cached blocks, the states that earlier rows save, and in these blocks the keys and values
    that they or decode rows compute. Those of the same forward come in time.

    Args:
        late: blocks that wait for decode rows; the last token of a prompt is computed with these.
        packed: several prompts may be; else the first one.
    """
    found: list[Prompt] = []
    late_prompts: set[int] = set()
    unsaved: set[Snapshot] = set()
    for prompt in waiting:
        has_state = prompt.load is None or prompt.load.snapshot not in unsaved
        reads = () if not has_state else prompt.reads()
        is_free = late_prompts.isdisjoint(reads) and (prompt.is_last_token or late.isdisjoint(reads))
        begins = has_state and is_free
        if begins:
            found.append(prompt)
            if not packed:
                break
        unsaved.update(move.snapshot for move in prompt.saves)
        late_prompts.update(prompt.writes(prompt.piece_end if begins and not prompt.is_last_token else prompt.start))
    return found
