"""Random histories of rows that share prefixes: groups are those of the block tables, and what is shared is computed.

The driver compares the groups of every plan with ones made from nothing, the model reads what rows share, and the
tree is compared with the block tables after every rule.
"""

from __future__ import annotations

import invariants
import numpy as np
import pytest
from brute_groups import check_groups
from fake_model import Driver, abort, config
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hf_paged.scheduler import Sequence, Status
from hf_paged.scheduler.lockstep_rows import LockstepRows, OutOfBlocksError

COMMON = {"deadline": None, "derandomize": True, "database": None, "suppress_health_check": list(HealthCheck)}
LONGEST = 48
SYSTEM = [90 + i for i in range(10)]


def prompt(questions, length):
    """A system prompt, or a part of it, with a path of questions behind it: any two prompts agree up to a point."""
    path = [20 * question + i % 4 for question in questions for i in range(5)]
    return (SYSTEM + path)[:length] or [5]


PROMPTS = st.builds(prompt, st.lists(st.integers(0, 1), max_size=3), st.sampled_from([25, 22, 18, 14, 12, 8, 3, 1]))


class GroupMachine(RuleBasedStateMachine):
    """Requests and rows in lockstep over few prompts, in pools that are sometimes too small."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]), room=st.sampled_from([16, 30, 100, 200]), num_seqs=st.integers(1, 8),
        budget=st.sampled_from([12, 40]), caching=st.sampled_from([True, True, True, False]), overlap=st.booleans(),
    )
    def start(self, block_size, room, num_seqs, budget, caching, overlap):
        sizes = config(block_size=block_size, num_blocks=1 + room // block_size, max_num_seqs=num_seqs,
                       max_num_batched_tokens=budget, max_model_len=LONGEST, enable_prefix_caching=caching)
        self.driver = Driver(sizes, overlap=overlap, vocab=3)  # rows with few tokens to choose from agree for long
        self.scheduler, self.model = self.driver.scheduler, self.driver.model
        self.scheduler._on_few_slots, self.scheduler._on_stuck = self.more_slots, self.give_way
        self.batches, self.asking = [], []
        self.driver.lent = lambda: [seq.block_table for rows in self.batches for seq in rows.sequences]
        self.driver.joining, self.driver.give_back = self.decode_plans, self.give_back
        self.seqs, self.num_added = [], 0

    def more_slots(self, wanted):
        self.model.tables += [[] for _ in range(wanted - len(self.model.tables))]
        self.model.tokens += [[] for _ in range(wanted - len(self.model.tokens))]
        return wanted

    def give_way(self):
        """The scheduler has nobody left to preempt: those who wait for a step keep their blocks, others do not."""
        idle = [rows for rows in self.batches if rows not in self.asking]
        if idle:
            self.end_batch(idle[0])
        return bool(idle or self.batches)

    def give_back(self):
        for rows in self.asking:
            if rows in self.batches:
                self.end_batch(rows)

    # -- requests ---------------------------------------------------------------------------------------------------

    @rule(prompt=PROMPTS, samples=st.integers(1, 4), new=st.sampled_from([1, 4, 15, 15]),
          reads=st.sampled_from([True, True, False]))
    def add(self, prompt, samples, new, reads):
        for _ in range(samples):
            self.seqs.append(self.driver.add(str(self.num_added), prompt, new, read_cache=reads))
            self.num_added += 1

    @precondition(lambda self: self.seqs)
    @rule(data=st.data())
    def next_turn(self, data):
        """A prompt that goes on from what a request has said so far, which may still run."""
        seq = data.draw(st.sampled_from(self.seqs))
        turn = [*seq.token_ids, *data.draw(st.sampled_from([[], [1], [2, 2]]))][: LONGEST - 1]
        self.add(turn, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 6)), True)

    @precondition(lambda self: self.seqs)
    @rule(data=st.data(), how=st.sampled_from(["abort", "stop", "nan"]))
    def end_one(self, data, how):
        seq = data.draw(st.sampled_from(self.seqs))
        if how == "nan":
            self.model.bad_requests.add(seq.request_id)
        elif how == "stop":
            self.scheduler.finish(seq, "stop")
        else:
            abort(self.scheduler, seq.request_id)

    @rule()
    def preempt(self):
        self.scheduler.make_room(1)

    @rule()
    def start_over(self):
        self.driver.drain()
        self.scheduler.preempt_all()

    # -- rows in lockstep -------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.batches) < 2)
    @rule(prompts=st.lists(PROMPTS, min_size=1, max_size=3), beams=st.integers(1, 3))
    def begin_batch(self, prompts, beams):
        arrivals = [Sequence("row", prompt, max_new_tokens=1) for prompt in prompts for _ in range(beams)]
        self.driver.drain()
        rows = LockstepRows(self.scheduler, arrivals, LONGEST)
        self.batches.append(rows)
        self.asking = [rows]
        try:
            for plan in rows.prompt_plans():
                self.model.launch(plan)
            if (moves := rows.fork()) is not None:
                self.follow(rows, moves)
        except OutOfBlocksError:
            self.end_batch(rows)
        self.asking = []

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def reorder(self, data):
        rows = data.draw(st.sampled_from(self.batches))
        parents = st.integers(0, len(rows) - 1)
        try:
            moves = rows.reorder(data.draw(st.lists(parents, min_size=len(rows), max_size=len(rows))))
        except OutOfBlocksError:
            self.end_batch(rows)
        else:
            self.follow(rows, moves)
            for slot in rows.slots.tolist():  # what its caller chose
                self.model.tokens[slot][-1] = data.draw(st.integers(0, 2))

    def follow(self, rows, moves):
        """What the engine does on the device."""
        self.model.memory[moves.targets] = self.model.memory[moves.sources]
        tokens = [list(self.model.tokens[slot]) for slot in rows.slots.tolist()]
        for slot, seq, parent in zip(rows.slots.tolist(), rows.sequences, moves.parents.tolist(), strict=True):
            self.model.tables[slot], self.model.tokens[slot] = list(seq.block_table), list(tokens[parent])

    def decode_plans(self):
        """Rows of all batches that still may grow join the next step; one without blocks ends."""
        plans = []
        for rows in list(self.batches):
            if int(rows.lengths.max()) < LONGEST and rows in self.batches:
                self.asking.append(rows)
                try:
                    plans.append(rows.decode_plan())
                except OutOfBlocksError:
                    self.end_batch(rows)
        return plans

    @precondition(lambda self: self.batches)
    @rule(data=st.data(), publishes=st.booleans())
    def close(self, data, publishes):
        rows = data.draw(st.sampled_from(self.batches))
        if publishes:
            tokens = [self.model.tokens[slot] for slot in rows.slots.tolist()]
            longest = max(map(len, tokens))
            rows.publish(np.array([row + [0] * (longest - len(row)) for row in tokens], np.int32))
        self.end_batch(rows)

    def end_batch(self, rows):
        self.batches.remove(rows)
        rows.free()

    # -- steps ------------------------------------------------------------------------------------------------------

    @rule(n=st.integers(1, 6))
    def steps(self, n):
        for _ in range(n):
            self.driver.step()
            self.asking = []
        for seq in [seq for seq in self.seqs if seq.status is Status.FINISHED]:
            self.seqs.remove(seq)
            self.driver.check_output(seq)

    @rule()
    def failing_launch(self):
        self.model.fail_next = True
        self.driver.step()
        self.model.fail_next, self.asking = False, []

    @rule(data=st.data())
    def groups_of_any_rows(self, data):
        tables = self.scheduler.prefix_tree._tables
        slots = data.draw(st.permutations(sorted(tables)))[: data.draw(st.integers(0, len(tables)))]
        groups = self.scheduler.prefix_tree.groups(np.array(slots, np.int32))
        check_groups(groups, [tables[slot] for slot in slots], self.driver.config.block_size)

    @invariant()
    def books_agree(self):
        if hasattr(self, "driver"):
            invariants.check(self.scheduler, self.driver.lent())

    def teardown(self):
        if hasattr(self, "driver"):
            for rows in list(self.batches):
                self.end_batch(rows)
            self.driver.run()
            for seq in self.seqs:
                self.driver.check_output(seq)
            assert not self.scheduler.prefix_tree._tables


TestGroups = GroupMachine.TestCase
TestGroups.settings = settings(max_examples=120, stateful_step_count=30, **COMMON)


@pytest.mark.slow
class TestGroupsAtLength(GroupMachine.TestCase):
    settings = settings(max_examples=1500, stateful_step_count=40, **COMMON)
