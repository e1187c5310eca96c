"""Rows that step together: which blocks they hold, share, copy and give back."""

from __future__ import annotations

from collections import Counter

import invariants
import numpy as np
import pytest
from brute_groups import check_plan
from fake_model import Driver, config
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_pool

from hf_paged.scheduler import Scheduler, SchedulerConfig, Sequence
from hf_paged.scheduler.lockstep_rows import LockstepRows, OutOfBlocksError, blocks_together

SIZE = 4


def scheduler(num_blocks=65, caching=True, budget=16, on_shortage=None):
    config = SchedulerConfig(block_size=SIZE, num_blocks=num_blocks, max_num_seqs=16, max_num_batched_tokens=budget,
                             max_model_len=128, enable_prefix_caching=caching)
    return Scheduler(config, on_shortage)


def arriving(prompts, key=b"", adapters=None):
    """Every row as it comes, by default all under the model as it is."""
    return [Sequence("row", prompt, max_new_tokens=1, cache_key=key, adapter=adapter)
            for prompt, adapter in zip(prompts, adapters or [None] * len(prompts), strict=True)]


class Pages:
    """Stands for the device: what token every position of every block was written with."""

    def __init__(self, rows):
        self.rows, self.content = rows, {}

    def write(self, plan, tokens):
        check_plan(plan, SIZE)
        for i, seq in enumerate(plan.sequences):
            for position in range(int(plan.start[i]), int(plan.start[i] + plan.num_new_tokens[i])):
                block = seq.block_table[position // SIZE]
                if position >= plan.write_from[i]:
                    # Prompts of one step may share what that step computes.
                    promised = any(block == published.block_id for published in plan.published)
                    users = self.rows._manager.block_pool.blocks[block].ref_count
                    assert users == 1 or promised, "a shared block is written"
                    self.content[block, position % SIZE] = tokens[i][position]
                else:
                    assert self.content[block, position % SIZE] == tokens[i][position]

    def copy(self, moves):
        assert not set(moves.sources) & set(moves.targets)
        for source, target in zip(moves.sources, moves.targets, strict=True):
            for offset in range(SIZE):
                self.content[target, offset] = self.content.get((source, offset))

    def check(self, tokens, others=None):
        for seq, length, known in zip(self.rows.sequences, self.rows.lengths.tolist(), tokens, strict=True):
            held = [self.content[seq.block_table[i // SIZE], i % SIZE] for i in range(length)]
            assert held == known[:length]
        if others is None:
            uses = Counter(i for seq in self.rows.sequences for i in seq.block_table)
            check_pool(self.rows._manager.block_pool, uses)


def compute_prompts(rows, pages):
    samples = 0
    for plan in rows.prompt_plans():
        pages.write(plan, [seq.prompt_token_ids for seq in plan.sequences])
        samples += int(plan.samples.sum())
    assert samples == len(rows)
    if (moves := rows.fork()) is not None:
        pages.copy(moves)


@settings(max_examples=100)
@given(data=st.data())
def test_rows_hold_what_they_computed_whoever_they_descend_from(data):
    """Random prompts, steps and reorderings against a device that remembers what was written where."""
    caching = data.draw(st.booleans())
    book = scheduler(caching=caching, budget=data.draw(st.sampled_from([16, 17, 64])))
    for _ in range(2):  # the second time over what the first published
        lengths = data.draw(st.lists(st.integers(1, 13), min_size=1, max_size=5))
        prompts = [[(7 * n + i) % 5 for i in range(n)] for n in lengths]
        rows = LockstepRows(book, arriving(prompts, b"key"), 60)
        pages = Pages(rows)
        pages.content = getattr(book, "content", {})
        compute_prompts(rows, pages)
        tokens = [list(prompt) for prompt in prompts]
        pages.check(tokens)
        for step in range(data.draw(st.integers(0, 12))):
            for i, row in enumerate(tokens):
                row.append(100 * step + i)
            pages.write(rows.decode_plan(), tokens)
            pages.check(tokens)
            if data.draw(st.booleans()):
                parents = data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=len(rows), max_size=len(rows)))
                pages.copy(rows.reorder(parents))
                tokens = [list(tokens[parent]) for parent in parents]
                pages.check(tokens)
        longest = max(map(len, tokens))
        rows.publish(np.array([row + [0] * (longest - len(row)) for row in tokens], np.int32))
        pages.check(tokens)
        rows.free()
        book.content = pages.content
        assert book.num_free_slots == 16
        invariants.check(book)
        if caching:
            seq = Sequence("again", [*tokens[0], 1], max_new_tokens=1, cache_key=b"key")
            assert book.kv_cache_manager.get_computed_blocks(seq)[1] == len(tokens[0]) // SIZE * SIZE


@settings(max_examples=50)
@given(length=st.integers(1, 9), drafts=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), max_size=6))
def test_cropped_drafts_leave_the_rest(length, drafts):
    book = scheduler()
    rows = LockstepRows(book, arriving([list(range(length))]), 100)
    pages = Pages(rows)
    compute_prompts(rows, pages)
    tokens = [list(range(length))]
    for number, (count, refused) in enumerate(drafts):
        tokens[0] += [1000 * number + i for i in range(count)]
        pages.write(rows.decode_plan(count), tokens)
        refused = min(refused, count)
        rows.crop(refused)
        del tokens[0][len(tokens[0]) - refused :]
        pages.check(tokens)
    rows.free()
    assert book.num_free_blocks == book.num_blocks - 1


def test_equal_prompts_are_one_row_until_the_fork():
    book = scheduler(caching=False)
    rows = LockstepRows(book, arriving([[1, 2, 3, 4, 5]] * 3 + [[6, 7]]), 20)
    assert len(rows) == 2
    assert sum(plan.num_tokens for plan in rows.prompt_plans()) == 7
    moves = rows.fork()
    assert moves.parents.tolist() == [0, 0, 0, 1]
    assert len(moves.sources) == 2  # the block of token 5, for two of the three
    assert len({seq.block_table[0] for seq in rows.sequences[:3]}) == 1
    assert len({seq.block_table[1] for seq in rows.sequences[:3]}) == 3


class Spans:
    """Content of a prompt in which the tokens of each span see each other."""

    def __init__(self, *spans):
        self.spans = spans

    def block_key(self, first, end):
        return b""

    def chunk_end(self, first, end):
        inside = next(((start, stop) for start, stop in self.spans if start < end < stop), None)
        if inside is None:
            return end
        return inside[0] if inside[0] > first else inside[1]


def test_tokens_that_see_each_other_are_computed_together():
    """Chunks end in front of a span that has no room in a step, and behind one that no step has room for."""
    book = scheduler(caching=False, budget=8)
    first = Sequence("row", list(range(19)), max_new_tokens=1, fed=Spans((5, 11), (12, 17)))
    second = Sequence("row", list(range(30, 50)), max_new_tokens=1, fed=Spans((1, 13)))
    rows = LockstepRows(book, [first, second], 40)
    found = []
    for plan in rows.prompt_plans():
        chunks = zip(plan.sequences, plan.start.tolist(), plan.num_new_tokens.tolist(), strict=True)
        found.append([(seq is second, start, start + count) for seq, start, count in chunks])
    assert found == [
        [(False, 0, 5)], [(False, 5, 12)], [(False, 12, 19), (True, 0, 1)], [(True, 1, 13)], [(True, 13, 20)]]
    assert [seq is first for seq in rows.sequences] == [True, False]


def test_what_is_promised_to_fit_fits():
    """`blocks_together` counts the worst case: no reordering of these rows needs more."""
    prompts, new = [[1, 2, 3, 4, 5]] * 4, 8
    needed = 1 + 4 * 2
    assert blocks_together(arriving(prompts), new, SIZE) == needed
    book = scheduler(needed + 1)
    rows = LockstepRows(book, arriving(prompts), 13)
    compute_prompts(rows, Pages(rows))
    for _ in range(new - 1):
        rows.decode_plan()
        rows.reorder([0, 0, 0, 0])
        rows.reorder([3, 2, 1, 0])
    with pytest.raises(ValueError, match="made for 13"):
        rows.decode_plan(2)


def test_a_pool_that_does_not_grow_as_promised():
    book = scheduler(3, on_shortage=lambda missing: 3)
    rows = LockstepRows(book, arriving([[1, 2, 3, 4, 5, 6, 7]]), 30)
    compute_prompts(rows, Pages(rows))
    rows.decode_plan()
    with pytest.raises(OutOfBlocksError, match="1 blocks are missing"):
        rows.decode_plan()
    rows.free()
    assert book.num_free_blocks == 2


class Beside:
    """A scheduler with sequences of its own, and at most one group of rows beside them."""

    def __init__(self, **changes):
        self.driver = Driver(config(**changes), overlap=True)
        self.rows, self.gave_way = None, 0
        book = self.book = self.driver.scheduler
        book._on_few_slots, book._on_stuck = self.grow, self.give_way
        self.driver.lent = lambda: [seq.block_table for seq in self.rows.sequences] if self.rows else []

    def grow(self, wanted):
        model = self.driver.model
        model.tables += [[] for _ in range(wanted - len(model.tables))]
        model.tokens += [[] for _ in range(wanted - len(model.tokens))]
        return wanted

    def give_way(self):
        if self.rows is not None:
            self.gave_way += 1
            self.end()
            return True
        return False

    def begin(self, prompts):
        try:
            arrivals = arriving(prompts, b"nobody else hits what only these plans promise")
            self.rows = LockstepRows(self.book, arrivals, 40)
            for _ in self.rows.prompt_plans():
                pass
            self.rows.fork()
        except OutOfBlocksError:
            self.end()

    def end(self):
        self.rows.free()
        self.rows = None


@settings(max_examples=150)
@given(data=st.data())
def test_sequences_of_the_scheduler_beside_rows_in_a_small_pool(data):
    """Rows take slots and blocks whenever they need them; sequences are preempted for them, and end as if alone."""
    beside = Beside(num_blocks=data.draw(st.integers(8, 24)), max_num_seqs=data.draw(st.integers(1, 3)),
                    enable_prefix_caching=data.draw(st.booleans()))
    sequences = []
    for number in range(data.draw(st.integers(3, 25))):
        action = data.draw(st.sampled_from(["add", "step", "step", "begin", "decode", "decode", "reorder", "end"]))
        rows = beside.rows
        if action == "add":
            prompt = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
            sequences.append(beside.driver.add(f"{number}", prompt, data.draw(st.integers(1, 9))))
        elif action == "step":
            beside.driver.step()
        elif action == "begin" and rows is None:
            prompt = st.lists(st.integers(0, 3), min_size=1, max_size=6)
            beside.begin(data.draw(st.lists(prompt, min_size=1, max_size=4)))
        elif rows is not None and action in ("decode", "reorder"):
            try:
                if action == "reorder":
                    rows.reorder(data.draw(st.lists(st.integers(0, len(rows) - 1), min_size=len(rows),
                                                    max_size=len(rows))))
                elif int(rows.lengths.max()) < 40:
                    rows.decode_plan()
            except OutOfBlocksError:
                beside.end()
        elif rows is not None and action == "end":
            beside.end()
        invariants.check(beside.book, beside.driver.lent())
        assert beside.book._table.num_tenants <= beside.book.config.max_num_seqs
    if beside.rows is not None:
        beside.end()
    beside.driver.run()
    for seq in sequences:
        beside.driver.check_output(seq)
    assert beside.book.num_free_slots == beside.book._table.num_slots
