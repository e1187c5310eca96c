"""Order, budget, limits and endings."""

import invariants
import numpy as np
import pytest
from fake_model import Driver, Spans, abort, alone, config

from hf_paged.scheduler import Scheduler, SchedulerConfig, Sequence, Status, StepPlan
from hf_paged.scheduler.plan import BlockUpdates

both = pytest.mark.parametrize("overlap", [False, True])


def test_a_config_leaves_room_for_a_prompt_and_an_output():
    with pytest.raises(ValueError, match="max_model_len is 1"):
        config(max_model_len=1)


@both
def test_a_prompt_that_waits_for_blocks_is_looked_up_again_when_it_may_fit(overlap, monkeypatch):
    """Its cached prefix may be long, and others decode meanwhile."""
    driver = Driver(config(num_blocks=30, max_model_len=120), overlap=overlap)
    first = driver.add("first", list(range(3, 83)), max_new_tokens=1)
    driver.run()
    driver.add("runs", [1, 2, 1], max_new_tokens=70)
    for _ in range(3):
        driver.step()
    driver.add("waits", first.prompt_token_ids + [1] * 36, max_new_tokens=1)
    looked, own = [], driver.scheduler.kv_cache_manager.get_computed_blocks

    def get_computed_blocks(seq):
        looked.append(len(driver.plans))
        return own(seq)

    monkeypatch.setattr(driver.scheduler.kv_cache_manager, "get_computed_blocks", get_computed_blocks)
    monkeypatch.setattr(invariants, "check", lambda *args: None)  # it looks, too
    while driver.scheduler.num_waiting:
        driver.step()
    assert len(driver.plans) - looked[0] > 40
    assert len(looked) < 10
    monkeypatch.undo()
    driver.run()
    for seq in driver.finished:
        driver.check_output(seq)


@both
def test_chunks_end_where_no_token_sees_a_later_one(overlap):
    driver = Driver(config(max_num_batched_tokens=12, max_num_seqs=4), overlap=overlap)
    spans = {"a": Spans((2, 7), (9, 17)), "b": Spans((5, 14)), "c": Spans((0, 8), (8, 16), (16, 24)),
             "d": Spans((1, 6))}
    sequences = {name: driver.add(name, list(range(3, 28)), 6, fed=fed) for name, fed in spans.items()}
    driver.add("text", list(range(3, 28)), 6)
    driver.run()
    chunks = {name: [(int(plan.start[row]), int(plan.start[row] + plan.num_new_tokens[row])) for plan in driver.plans
                     for row in range(plan.num_decode_rows, len(plan.slots)) if plan.sequences[row] is sequence]
              for name, sequence in sequences.items()}
    assert all(end in spans[name].places for name, found in chunks.items() for _, end in found)
    assert all(found[-1][1] == 25 and [end for _, end in found[:-1]] == [first for first, _ in found[1:]]
               for found in chunks.values())
    assert max(map(len, chunks.values())) > 2 and all(len(seq.output_token_ids) == 6 for seq in driver.finished)
    for seq in driver.finished:
        driver.check_output(seq)


def test_add_refuses_a_taken_id_and_a_prompt_without_room_for_an_answer():
    driver = Driver(config(max_model_len=8))
    driver.add("a", [1])
    with pytest.raises(ValueError, match="'a' belongs to an unfinished request"):
        driver.add("a", [1])
    with pytest.raises(ValueError, match="the prompt has 8 tokens"):
        driver.add("b", [1] * 8)
    driver.add("c", [1] * 7)
    driver.run()
    assert [seq.num_tokens for seq in driver.finished if seq.request_id == "c"] == [8]
    driver.add("a", [1])  # the id is free again
    driver.run()


def test_nothing_to_do_is_no_plan():
    assert Scheduler(config()).schedule() is None


def test_a_plan_puts_decodes_first_and_says_what_each_row_is():
    driver = Driver(config(max_num_batched_tokens=10))
    a = driver.add("a", [1, 2, 3])
    first = driver.step()
    b = driver.add("b", list(range(12)))
    second, third = driver.step(), driver.step()
    assert first.admitted == [a]
    assert (first.num_decode_rows, first.num_new_tokens.tolist(), first.samples.tolist()) == (0, [3], [True])
    assert second.sequences == third.sequences == [a, b]
    assert second.admitted == [b]
    assert third.admitted == []
    assert second.num_decode_rows == third.num_decode_rows == 1
    assert second.num_new_tokens.tolist() == [1, 9]  # all the budget there is
    assert third.num_new_tokens.tolist() == [1, 3]
    assert second.start.tolist() == [3, 0]
    assert third.start.tolist() == [4, 9]
    assert second.samples.tolist() == [True, False]
    assert third.samples.tolist() == [True, True]
    for plan in (first, second, third):
        assert plan.write_from.tolist() == plan.start.tolist()
        assert plan.slots.dtype == plan.start.dtype == plan.num_new_tokens.dtype == plan.write_from.dtype == np.int32
    driver.run()
    driver.check_output(a)
    driver.check_output(b)


def test_block_updates_name_only_new_entries_of_running_sequences():
    driver = Driver(config())
    a = driver.add("a", [1, 2, 3], max_new_tokens=10)
    updates = [driver.step().block_updates for _ in range(7)]
    assert [len(u.slots) for u in updates] == [0, 0, 1, 0, 0, 0, 1]
    assert [(u.slots[0], u.columns[0], u.block_ids[0]) for u in updates if len(u.slots)] == [
        (a.slot, 1, a.block_table[1]),
        (a.slot, 2, a.block_table[2]),
    ]


@both
def test_a_decode_never_starves(overlap):
    driver = Driver(config(max_num_batched_tokens=4, num_blocks=200, max_model_len=120), overlap=overlap)
    running = [driver.add(str(i), [i + 1], max_new_tokens=60) for i in range(3)]
    driver.step()
    long = driver.add("long", list(range(100)), max_new_tokens=2)
    for _ in range(30):
        plan = driver.step()
        assert plan.sequences[:3] == running
        assert plan.num_decode_rows == 3
        assert plan.num_tokens == 4
    assert long.num_computed_tokens == 30
    driver.run()
    for seq in [*running, long]:
        driver.check_output(seq)


def test_admission_goes_by_priority_then_arrival():
    driver = Driver(config(max_num_seqs=1))
    for i, priority in enumerate([1, 0, 0, -1]):
        driver.add(str(i), [i], max_new_tokens=2, priority=priority)
    driver.run()
    assert [seq.request_id for seq in driver.finished] == ["3", "1", "2", "0"]


def test_nobody_overtakes_the_first_in_line():
    driver = Driver(config(num_blocks=8))
    old = driver.add("old", [1] * 4, max_new_tokens=9)
    driver.step()
    big = driver.add("big", list(range(24)), max_new_tokens=1)
    small = driver.add("small", [2], max_new_tokens=1)
    driver.step()
    assert (big.status, small.status) == (Status.WAITING, Status.WAITING)
    driver.run()
    assert driver.finished == [old, big, small]


@both
@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
def test_a_known_end_costs_no_extra_step(overlap, max_new_tokens):
    driver = Driver(config(), overlap=overlap)
    seq = driver.add("a", [1, 2, 3], max_new_tokens=max_new_tokens)
    driver.run()
    assert len(driver.plans) == max_new_tokens
    assert seq.finish_reason == "length"
    driver.check_output(seq)


@both
def test_max_model_len_ends_a_sequence(overlap):
    driver = Driver(config(max_model_len=10), overlap=overlap)
    seq = driver.add("a", [1, 2, 3], max_new_tokens=100)
    driver.run()
    assert (seq.num_tokens, seq.finish_reason) == (10, "length")
    assert len(driver.plans) == 7


def eos_of(driver, prompt, step):
    """The token that this prompt's output has at a step, for use as EOS; it must be new there."""
    output, _ = alone(Sequence("x", prompt, max_new_tokens=step + 1), driver.config.max_model_len)
    assert output.index(output[step]) == step
    return output[step]


@both
def test_eos_is_kept_and_ends_the_sequence(overlap):
    driver = Driver(config(), overlap=overlap)
    eos = eos_of(driver, [1, 2, 3], 3)
    seq = driver.add("a", [1, 2, 3], max_new_tokens=20, eos_token_ids=(96_000, eos))
    other = driver.add("b", [4, 5], max_new_tokens=20)
    driver.run()
    assert (seq.num_output_tokens, seq.finish_reason) == (4, "eos")
    driver.check_output(seq)
    driver.check_output(other)


def test_with_overlap_the_extra_token_is_dropped_and_the_blocks_stay_until_it_is():
    driver = Driver(config(), overlap=True)
    scheduler = driver.scheduler
    eos = eos_of(driver, [1, 2, 3], 1)
    seq = driver.add("a", [1, 2, 3], max_new_tokens=20, eos_token_ids=(eos,))
    first = scheduler.schedule()
    tokens = driver.model.launch(first)
    second = scheduler.schedule()
    more = driver.model.launch(second)
    assert scheduler.commit(first, tokens).accepted.tolist() == [0]
    third = scheduler.schedule()
    extra = driver.model.launch(third)
    result = scheduler.commit(second, more)
    assert result.finished == [seq]
    assert seq.status is Status.FINISHED
    assert not (scheduler.num_waiting + scheduler.num_running)
    assert scheduler.schedule() is None
    assert scheduler.num_free_blocks < scheduler.num_blocks - 1
    result = scheduler.commit(third, extra)
    assert result.accepted.tolist() == []
    assert result.finished == []
    assert scheduler.num_free_blocks == scheduler.num_blocks - 1
    assert seq.num_output_tokens == 2
    driver.check_output(seq)


def test_plans_are_committed_in_order_and_at_most_one_waits():
    driver = Driver(config())
    scheduler = driver.scheduler
    driver.add("a", [1, 2, 3])
    first = scheduler.schedule()
    tokens = driver.model.launch(first)
    second = scheduler.schedule()
    with pytest.raises(RuntimeError, match="two plans wait"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="in the order"):
        scheduler.commit(second, tokens)
    scheduler.commit(first, tokens)
    with pytest.raises(ValueError, match="once each"):
        scheduler.commit(first, tokens)
    with pytest.raises(ValueError, match="not in flight"):
        scheduler.rollback(first)


@both
def test_invalid_logits_end_one_sequence_alone(overlap):
    driver = Driver(config(), overlap=overlap)
    seqs = [driver.add(str(i), [i] * 9, max_new_tokens=9) for i in range(3)]
    driver.step()
    driver.step()
    driver.model.bad_requests.add("1")
    driver.run()
    assert [seq.finish_reason for seq in seqs] == ["length", "error", "length"]
    assert -1 not in seqs[1].output_token_ids
    for seq in seqs:
        driver.check_output(seq)
    blocks, _ = driver.scheduler.kv_cache_manager.get_computed_blocks(Sequence("x", [1] * 9, max_new_tokens=1))
    assert blocks == []  # what gave invalid logits is not in the cache


@both
def test_abort_in_every_state(overlap):
    driver = Driver(config(max_num_seqs=2, max_num_batched_tokens=8), overlap=overlap)
    seqs = [driver.add(str(i), [i] * 12, max_new_tokens=9) for i in range(4)]
    driver.step()
    assert abort(driver.scheduler, "0") is seqs[0]  # in the middle of its prefill
    assert abort(driver.scheduler, "3") is seqs[3]  # waiting
    for _ in range(4):
        driver.step()
    driver.scheduler.finish(seqs[1], "stop")  # decoding
    driver.scheduler.finish(seqs[1], "again")
    assert abort(driver.scheduler, "1") is None
    driver.run()
    assert [seq.finish_reason for seq in seqs] == ["abort", "stop", "length", "abort"]
    assert driver.finished == [seqs[2]]  # the others ended by the caller's own hand
    for seq in seqs:
        driver.check_output(seq)


@both
def test_a_prompt_that_can_never_fit_fails_and_blocks_nobody(overlap):
    driver = Driver(config(num_blocks=4), overlap=overlap)
    seqs = [driver.add("big", [1] * 13), driver.add("fits", [2] * 12, max_new_tokens=1)]
    driver.run()
    assert [seq.finish_reason for seq in seqs] == ["error", "length"]
    assert seqs[0].num_output_tokens == 0


@both
def test_a_lone_sequence_that_outgrows_the_pool_ends_with_error(overlap):
    driver = Driver(config(num_blocks=4), overlap=overlap)
    seq = driver.add("a", [1] * 6, max_new_tokens=50)
    driver.run()
    assert (seq.finish_reason, seq.num_tokens, seq.num_preemptions) == ("error", 13, 0)
    driver.check_output(seq)


@both
def test_the_pool_grows_before_anyone_is_preempted_or_refused(overlap):
    driver = Driver(config(num_blocks=3), overlap=overlap, max_blocks=40)
    seqs = [driver.add(str(i), [i] * 7, max_new_tokens=20) for i in range(3)]
    assert driver.step().admitted == seqs
    driver.run()
    assert driver.asked[0] == 2  # four blocks for the first two prompts, two are there
    assert driver.scheduler.num_preemptions == 0
    for seq in seqs:
        driver.check_output(seq)


def test_growth_that_is_refused_leads_to_preemption():
    driver = Driver(config(num_blocks=7), max_blocks=8)
    seqs = [driver.add(str(i), [i] * 7, max_new_tokens=12) for i in range(3)]
    driver.run()
    assert driver.scheduler.num_blocks == 8
    assert driver.scheduler.num_preemptions > 0
    for seq in seqs:
        driver.check_output(seq)


def test_preempt_all_keeps_output_and_cache():
    driver = Driver(config())
    seqs = [driver.add(str(i), [i] * 9, max_new_tokens=9) for i in range(3)]
    for _ in range(3):
        driver.step()
    driver.scheduler.preempt_all()
    invariants.check(driver.scheduler)
    assert driver.scheduler.num_free_blocks == driver.scheduler.num_blocks - 1
    assert [(seq.status, seq.num_output_tokens) for seq in seqs] == [(Status.WAITING, 3)] * 3
    plan = driver.step()
    assert plan.admitted == seqs
    assert plan.start.tolist() == [8, 8, 8]
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0, 0]  # that tells of the first admission
    driver.run()
    for seq in seqs:
        driver.check_output(seq)


def test_it_starts_over_when_nothing_is_left():
    """Its cache is forgotten, as the memory of the pool may be, and its counts are those of a new one."""
    driver = Driver(config(num_blocks=7), max_blocks=8)
    scheduler = driver.scheduler
    for name, count in (("three", 3), ("one", 1), ("again", 1)):
        for i in range(count):
            driver.add(f"{name} {i}", [i] * 9, max_new_tokens=8)
            assert not scheduler.start_over()
        driver.step()
        assert not scheduler.start_over()
        driver.run()
    assert scheduler.num_preemptions > 0 and scheduler.kv_cache_manager.prefix_cache_hits > 0
    slots = scheduler.take_slots(1)
    assert not scheduler.start_over()
    scheduler.give_slots(slots)
    assert scheduler.start_over()
    counts = (scheduler.num_preemptions, scheduler.kv_cache_manager.prefix_cache_queries,
              scheduler.kv_cache_manager.prefix_cache_hits)
    assert counts == (0, 0, 0)
    driver.model.memory[:] = -1
    seq = driver.add("last", [0] * 9, max_new_tokens=8)
    driver.run()
    driver.check_output(seq)
    assert seq.num_cached_tokens == 0
    invariants.check(scheduler)


def test_counts():
    driver = Driver(SchedulerConfig(4, 20, 2, 8, 32))
    for i in range(3):
        driver.add(str(i), [i] * 5)
    scheduler = driver.scheduler
    assert (scheduler.num_waiting, scheduler.num_running, len(scheduler._requests)) == (3, 0, 3)
    driver.step()
    assert (scheduler.num_waiting, scheduler.num_running) == (1, 2)
    assert (scheduler.num_blocks, scheduler.num_free_blocks) == (20, 15)


def test_token_columns_of_a_plan_are_its_tokens_row_after_row():
    """A decode row, a chunk from inside a prompt, and a cached prompt whose one token is computed but not written."""
    none = np.empty(0, np.int32)
    plan = StepPlan(
        sequences=[], slots=np.array([3, 1, 2]), num_new_tokens=np.array([1, 3, 1]), start=np.array([7, 4, 31]),
        write_from=np.array([7, 5, 32]), samples=np.ones(3, bool), num_decode_rows=1, admitted=[],
        block_updates=BlockUpdates(none, none, none), tenancy=np.zeros(3, np.int64), published=[],
    )
    expected = [[3, 1, 1, 1, 2], [7, 4, 5, 6, 31], [7, 5, 5, 5, 32]]
    assert plan.token_columns().tolist() == expected
    assert plan.token_columns(1).tolist() == [line[1:] for line in expected]
    assert plan.token_columns(3).shape == (3, 0)


def test_what_waiting_sequences_wait_for():
    driver = Driver(config(num_blocks=10, max_num_seqs=3))
    scheduler = driver.scheduler
    def waiting(**numbers):
        return {"slots": 0, "blocks": 0, "step": 0, "preempted": 0, "kernels": 0} | numbers

    assert scheduler.waiting_by_reason() == waiting()
    for i in range(5):
        driver.add(str(i), [20 * i + k for k in range(8)], max_new_tokens=12)
    assert scheduler.waiting_by_reason() == waiting(step=5)
    driver.step()
    assert scheduler.waiting_by_reason() == waiting(slots=2)
    scheduler.hold(scheduler._requests["4"])
    assert scheduler.waiting_by_reason() == waiting(slots=1, kernels=1)
    abort(scheduler, "4")
    assert scheduler.waiting_by_reason() == waiting(slots=1)
    while not scheduler.num_preemptions:
        driver.step()
    assert scheduler.waiting_by_reason() == waiting(blocks=1, preempted=1)
    assert scheduler.num_waiting == 2
