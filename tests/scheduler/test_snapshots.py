"""Snapshots of recurrent states in the books of a scheduler: where they stand, and who may go on from them."""

from __future__ import annotations

import numpy as np
import pytest
from fake_model import Spans, config

from hf_paged.scheduler import Scheduler, Sequence
from hf_paged.scheduler.block_pool import NULL_BLOCK_ID

PROMPT = list(range(10, 20))


@pytest.fixture
def scheduler():
    return Scheduler(config(num_snapshots=8, group_prefixes=False))


def add(scheduler, name, prompt, **options):
    seq = Sequence(name, prompt, **({"max_new_tokens": 3} | options))
    scheduler.add(seq)
    return seq


def commit(scheduler, plan, token=7):
    scheduler.commit(plan, np.full(len(plan.slots), token))


def run(scheduler):
    """Steps until nothing is left; returns their plans."""
    plans = []
    while (plan := scheduler.schedule()) is not None:
        plans.append(plan)
        commit(scheduler, plan)
    return plans


def places(moves):
    return [move.snapshot.position for move in moves]


def test_a_prompt_is_saved_before_its_last_token_and_an_answer_at_its_end(scheduler):
    seq = add(scheduler, "a", PROMPT)
    first, *_ = run(scheduler)
    move, = first.states.saves[0]
    assert (move.snapshot.position, move.block_id != NULL_BLOCK_ID) == (9, True)
    assert not first.states.ended and not first.states.loads
    again, longer = add(scheduler, "b", PROMPT), add(scheduler, "c", [*seq.token_ids, 1, 2])
    plan = scheduler.schedule()
    assert plan.start.tolist() == [9, 12]
    assert places(plan.states.ended) == [12]
    assert places(plan.states.loads.values()) == [9, 12]
    assert (again.num_cached_tokens, longer.num_cached_tokens) == (9, 12)


def test_a_tail_is_loaded_into_a_block_of_the_row_alone(scheduler):
    add(scheduler, "a", PROMPT)
    run(scheduler)
    own = add(scheduler, "b", PROMPT[:9] + [1])
    plan = scheduler.schedule()
    move = plan.states.loads[own.slot]
    assert (move.snapshot.position, move.block_id) == (9, own.block_table[2])
    commit(scheduler, plan)
    run(scheduler)
    add(scheduler, "c", PROMPT + [1, 2])  # fills the block
    run(scheduler)
    sharing = add(scheduler, "d", PROMPT + [1, 2], max_new_tokens=1)
    scheduler.snapshots.drop([one for one in scheduler.snapshots._kept if one.position > 9])
    plan = scheduler.schedule()
    move = plan.states.loads[sharing.slot]
    assert (move.snapshot.position, move.block_id, plan.write_from.tolist()) == (9, NULL_BLOCK_ID, [12])


def test_a_branch_is_saved_where_cached_blocks_end(scheduler):
    add(scheduler, "a", PROMPT)
    run(scheduler)
    add(scheduler, "b", PROMPT[:9] + [1, 2, 3])
    plan = scheduler.schedule()
    assert plan.start.tolist() == [9]  # behind the snapshot of the first prompt, which is further than its blocks
    commit(scheduler, plan)
    add(scheduler, "c", PROMPT[:8] + [4, 5, 6])
    plan = scheduler.schedule()
    row = plan.slots.tolist().index(next(seq.slot for seq in plan.sequences if seq.request_id == "c"))
    assert (plan.start[row], plan.write_from[row]) == (0, 8)
    assert places(plan.states.saves[int(plan.slots[row])]) == [8, 10]


def test_a_prompt_in_chunks_is_saved_in_the_chunk_that_computes_it():
    scheduler = Scheduler(config(num_snapshots=8, max_num_batched_tokens=6))
    add(scheduler, "a", PROMPT + PROMPT)
    plans = run(scheduler)
    assert [plan.states and places(plan.states.saves.get(0, [])) for plan in plans[:4]] == [None, None, None, [19]]


def test_a_sequence_whose_token_in_flight_is_dropped_is_not_saved(scheduler):
    seq = add(scheduler, "a", PROMPT[:9], max_new_tokens=9)
    commit(scheduler, scheduler.schedule())
    plans = [scheduler.schedule(), scheduler.schedule()]
    scheduler.finish(seq, "abort")
    for plan in plans:
        commit(scheduler, plan)
    assert places_of(scheduler) == [8]


def places_of(scheduler):
    return [snapshot.position for snapshot in scheduler.snapshots._kept]


def test_what_a_failed_launch_should_have_saved_is_dropped(scheduler):
    add(scheduler, "a", PROMPT)
    run(scheduler)
    seq = add(scheduler, "b", PROMPT[:8] + [1, 2, 3])
    plan = scheduler.schedule()
    assert sorted(places_of(scheduler)) == [8, 9, 10, 12]
    scheduler.rollback(plan)
    assert places_of(scheduler) == [9]
    plan = scheduler.schedule()
    assert places(plan.states.saves[seq.slot]) == [8, 10]


def test_a_reset_drops_all(scheduler):
    add(scheduler, "a", PROMPT[:3])
    run(scheduler)
    assert len(scheduler.snapshots) == 2
    assert scheduler.reset_prefix_cache()
    assert not len(scheduler.snapshots)
    add(scheduler, "b", [5])
    plan = scheduler.schedule()
    assert plan.states is None


def test_prompts_shorter_than_a_block_hit_under_their_key_and_generation(scheduler):
    pool = scheduler.kv_cache_manager.block_pool
    cached = []
    for name, key, change in (("a", b"x", None), ("b", b"y", None), ("c", b"x", pool.new_generation),
                              ("d", b"x", None), ("e", b"x", pool.trust_older)):
        if change is not None:
            change()
        seq = add(scheduler, name, PROMPT[:3], cache_key=key)
        run(scheduler)
        cached.append(seq.num_cached_tokens)
    assert cached == [0, 0, 0, 2, 2]
    pool.new_generation()
    pool.drop_older()
    pool.trust_older()
    seq = add(scheduler, "f", PROMPT[:3], cache_key=b"x")
    run(scheduler)
    assert seq.num_cached_tokens == 0


def test_states_of_several_weights_are_not_saved(scheduler):
    seq = add(scheduler, "a", PROMPT[:2], max_new_tokens=2, keeps_computed=True)
    commit(scheduler, scheduler.schedule())
    scheduler.preempt_all(but_keepers=True)
    run(scheduler)
    assert seq.num_output_tokens == 2 and places_of(scheduler) == [1]


def test_states_behind_blocks_with_invalid_logits_are_not_saved(scheduler):
    for name in ("a", "b"):
        add(scheduler, name, PROMPT[:8])
    plan = scheduler.schedule()
    scheduler.commit(plan, np.array([-1, 7]))
    run(scheduler)
    assert places_of(scheduler) == []


def test_the_snapshot_used_longest_ago_makes_way():
    scheduler = Scheduler(config(num_snapshots=3))
    for name, prompt in (("a", PROMPT), ("b", PROMPT), ("c", PROMPT[5:9]), ("d", PROMPT)):
        add(scheduler, name, prompt, max_new_tokens=0)
        run(scheduler)
    assert places_of(scheduler) == [3, 9]  # nothing is behind a prompt without an answer
    add(scheduler, "e", PROMPT[3:])
    run(scheduler)
    assert places_of(scheduler) == [9, 6, 9]


def test_whole_prompts_have_a_step_that_they_fit_or_one_of_their_own():
    scheduler = Scheduler(config(num_snapshots=8, max_num_batched_tokens=12, whole_prompts=True, group_prefixes=False))
    for name, prompt in (("a", PROMPT), ("b", PROMPT[:4]), ("c", PROMPT * 2), ("d", PROMPT), ("e", [*PROMPT, 7, 7, 7])):
        add(scheduler, name, prompt)
    rows = [plan.num_new_tokens[plan.num_decode_rows :].tolist() for plan in run(scheduler)]
    assert rows == [[10], [4], [20], [1, 1], [], []]  # the last two have snapshots in front of their last tokens


class Image:
    """What is fed of a prompt of which one token stands for an image."""

    def __init__(self, place, pixels):
        self.place, self.pixels = place, pixels

    def chunk_end(self, first, end):
        return end

    def block_key(self, first, end):
        return self.pixels if first <= self.place < end else b""


@pytest.mark.parametrize(("place", "cached"), [(8, [0, 0, 9, 8]), (1, [0, 0, 9, 0])])
def test_a_state_is_found_by_what_was_fed(scheduler, place, cached):
    """Behind the last full block, or before it, where the block is another one."""
    found = []
    for name, pixels in (("a", b"1"), ("b", b"2"), ("c", b"1"), ("d", b"")):
        seq = add(scheduler, name, PROMPT, fed=Image(place, pixels))
        run(scheduler)
        found.append(seq.num_cached_tokens)
    assert found == cached


def test_what_was_fed_is_no_token(scheduler):
    """Of prompts shorter than a block, the first of which has a token in place of the other's key."""
    for name, prompt, pixels in (("a", [3, 4, 5], b""), ("b", [3, 5], np.int32(4).tobytes())):
        seq = add(scheduler, name, prompt, fed=Image(0, pixels), max_new_tokens=0)
        run(scheduler)
    assert seq.num_cached_tokens == 0


def test_no_state_is_saved_where_a_token_sees_a_later_one(scheduler):
    """Neither where cached blocks end nor in front of the last token."""
    found = []
    for name, prompt, spans in (("a", PROMPT, [(3, 6)]), ("b", [*PROMPT[:7], 1, 2, 3], [(3, 6)]),
                                ("c", PROMPT[::-1], [(6, 10)])):
        seq = add(scheduler, name, prompt, fed=Spans(*spans), max_new_tokens=0)
        plan = scheduler.schedule()
        found.append(places(plan.states.saves[seq.slot]) if plan.states else [])
        commit(scheduler, plan)
    assert found == [[9], [9], []]
