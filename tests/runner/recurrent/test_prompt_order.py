"""Which prompts of a step go into one forward: pieces up to saves, behind all that they read."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from hf_paged.runner.recurrent.prompt_order import Prompt, next_prompts
from hf_paged.scheduler.snapshots import Snapshot, StateMove, StateMoves

SIZE = 4


class Rows:
    """Prompts in the order of a plan, whose row is their slot."""

    def __init__(self) -> None:
        self.moves, self.waiting = StateMoves([], {}, {}), []

    def add(self, start, end, blocks, *, saves=(), load=None, write_from=0):
        row = len(self.waiting)
        if load is not None:
            self.moves.loads[row] = StateMove(row, 0, load)
        self.moves.saves[row] = [StateMove(row, 0, snapshot) for snapshot in saves]
        plan = SimpleNamespace(slots=np.array([row] * (row + 1)), start=np.array([start] * (row + 1)),
                               num_new_tokens=np.array([end - start] * (row + 1)),
                               write_from=np.array([write_from] * (row + 1)),
                               sequences=[SimpleNamespace(block_table=blocks)] * (row + 1))
        self.waiting.append(Prompt(plan, row, self.moves, SIZE))
        return self

    def rounds(self, *, packed=True, late=()):
        """Pieces of each forward, and the last tokens that joined decode rows before it."""
        found, late = [], set(late)
        while self.waiting:
            pieces = []
            now = next_prompts(self.waiting, late, packed=packed)
            for prompt in now:
                pieces.append((prompt.row, prompt.start, prompt.end if prompt.is_last_token else prompt.piece_end))
                prompt.load = None
                if prompt.is_last_token:
                    late.update(prompt.writes(prompt.start))
                    prompt.start = prompt.end
                else:
                    prompt.start = prompt.piece_end
                    if prompt.saves:
                        prompt.saves.popleft()
            if not now:
                assert late, "none can go on"
                late.clear()
            self.waiting = [prompt for prompt in self.waiting if prompt.start < prompt.end]
            found.append(pieces)
        return found


def snapshot(position):
    return Snapshot((0, b""), b"", position, 0)


def test_prompts_go_together_up_to_their_last_tokens():
    rows = Rows().add(0, 6, [1, 2], saves=[snapshot(5)]).add(0, 9, [3, 4, 5], saves=[snapshot(4), snapshot(8)])
    rows.add(0, 1, [6]).add(0, 3, [7])
    assert rows.rounds() == [[(0, 0, 5), (1, 0, 4), (2, 0, 1), (3, 0, 3)], [(0, 5, 6), (1, 4, 8)], [(1, 8, 9)]]


def test_one_by_one_in_order():
    rows = Rows().add(0, 6, [1, 2], saves=[snapshot(5)]).add(0, 3, [3])
    assert rows.rounds(packed=False) == [[(0, 0, 5)], [(0, 5, 6)], [(1, 0, 3)]]


def test_a_state_is_read_behind_the_forward_that_saves_it():
    saved = snapshot(8)
    rows = Rows().add(0, 10, [1, 2, 3], saves=[saved]).add(8, 12, [1, 2, 4], load=saved, write_from=8).add(0, 2, [5])
    assert rows.rounds() == [[(0, 0, 8), (2, 0, 2)], [(0, 8, 10), (1, 8, 12)]]


@pytest.mark.parametrize("load", [None, snapshot(4)])
def test_keys_and_values_of_the_same_forward_are_in_time(load):
    """The second prompt computes anew what lies in cached blocks, and does not store it."""
    rows = Rows().add(0, 9, [1, 2, 3]).add(4 if load else 0, 10, [1, 2, 4], load=load, write_from=8)
    assert rows.rounds() == [[(0, 0, 9), (1, 4 if load else 0, 10)]]


def test_a_prompt_waits_for_the_last_token_of_another_in_a_block_that_it_reads():
    rows = Rows().add(0, 8, [1, 2], saves=[snapshot(7)]).add(0, 10, [1, 2, 3], write_from=8)
    assert rows.rounds() == [[(0, 0, 7)], [(0, 7, 8)], [], [(1, 0, 10)]]


def test_last_tokens_go_with_those_that_they_read():
    before = snapshot(8)
    rows = Rows().add(0, 8, [1, 2], saves=[snapshot(7)]).add(8, 9, [1, 2, 3], load=before, write_from=8)
    assert rows.rounds() == [[(0, 0, 7)], [(0, 7, 8)], [(1, 8, 9)]]  # all in one forward of decode rows, at the end


def test_a_prompt_waits_for_decode_rows_whose_block_it_reads():
    assert Rows().add(0, 10, [1, 2, 3], write_from=8).rounds(late={2, 9}) == [[], [(0, 0, 10)]]
    assert Rows().add(0, 10, [1, 2, 3], write_from=8).rounds(late={3, 9}) == [[(0, 0, 10)]]
