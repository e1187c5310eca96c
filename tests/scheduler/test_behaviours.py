"""The numbered behaviours of docs/design/prefix_cache.md that take a whole scheduler.

Those of the pool alone are tested in test_block_pool.py and test_kv_cache_manager.py.
"""

import invariants
import pytest
from fake_model import Driver, abort, config

from hf_paged.scheduler import Sequence, Status, block_pool

both = pytest.mark.parametrize("overlap", [False, True])


def prompt(n, first=0):
    return [first + i for i in range(n)]


@both
def test_b05_a_fully_cached_prompt_computes_its_last_token_without_writing_it(overlap):
    driver = Driver(config(), overlap=overlap)
    first = driver.add("a", prompt(8), max_new_tokens=20)
    driver.step()
    second = driver.add("b", prompt(8), max_new_tokens=6)
    plan = driver.step()
    row = plan.sequences.index(second)
    assert (plan.start[row], plan.num_new_tokens[row], plan.write_from[row]) == (7, 1, 8)
    assert plan.samples[row]
    assert row >= plan.num_decode_rows
    assert second.block_table == first.block_table[:2]
    assert second.num_cached_tokens == 7
    driver.run()
    driver.check_output(first)
    driver.check_output(second)


def test_b09_hits_survive_until_their_blocks_are_needed():
    driver = Driver(config(num_blocks=9))
    driver.add("a", prompt(8), max_new_tokens=1)
    driver.run()
    driver.add("b", prompt(20, 50), max_new_tokens=1)  # five of the six blocks that cache nothing
    driver.run()
    assert driver.add("c", prompt(9), max_new_tokens=1).num_cached_tokens == 0  # not admitted yet
    driver.run()
    assert driver.finished[-1].num_cached_tokens == 8
    driver.add("d", prompt(32, 50), max_new_tokens=1)  # takes every block
    driver.run()
    driver.add("e", prompt(9), max_new_tokens=1)
    driver.run()
    assert driver.finished[-1].num_cached_tokens == 0


@both
def test_b11_a_written_block_table_entry_never_changes(overlap):
    driver = Driver(config(num_blocks=40), overlap=overlap)
    seqs = [driver.add(str(i), prompt(7), max_new_tokens=12) for i in range(3)]  # equal output, too
    tables = {seq.request_id: [] for seq in seqs}
    while (driver.scheduler.num_waiting + driver.scheduler.num_running):
        driver.step()
        for seq in seqs:
            if seq.status is Status.RUNNING:
                before = tables[seq.request_id]
                assert seq.block_table[: len(before)] == before
                tables[seq.request_id] = list(seq.block_table)
    driver.run()
    # The second blocks were computed three times over, and all are findable.
    pool = driver.scheduler.kv_cache_manager.block_pool
    twins = [pool.blocks[table[1]] for table in tables.values()]
    assert len({block.block_id for block in twins}) == 3
    assert len({block.prefix_id for block in twins}) == 1
    assert all(block.digest is not None for block in twins)


@both
def test_b12_an_identical_prompt_in_the_same_step_hits(overlap):
    driver = Driver(config(), overlap=overlap)
    first, second = driver.add("a", prompt(10)), driver.add("b", prompt(10))
    plan = driver.step()
    assert plan.admitted == [first, second]
    assert plan.num_new_tokens.tolist() == [10, 2]
    assert second.num_cached_tokens == 8
    assert second.block_table[:2] == first.block_table[:2]
    driver.run()
    driver.check_output(first)
    driver.check_output(second)


def test_b12_chunks_are_published_as_they_are_scheduled():
    driver = Driver(config(max_num_batched_tokens=6))
    driver.add("a", prompt(11))
    driver.step()
    cached = driver.scheduler.kv_cache_manager.get_computed_blocks
    assert cached(Sequence("x", prompt(11), max_new_tokens=1))[1] == 4
    driver.step()
    assert cached(Sequence("x", prompt(11), max_new_tokens=1))[1] == 8


def test_b12_decode_blocks_are_published_at_commit():
    driver = Driver(config())
    scheduler = driver.scheduler
    seq = driver.add("a", prompt(6), max_new_tokens=20)
    for _ in range(2):
        driver.step()
    plan = scheduler.schedule()  # computes position 7, the last of the second block
    assert plan.start.tolist() == [7]
    probe = Sequence("x", [*seq.token_ids, 1], max_new_tokens=1)
    assert scheduler.kv_cache_manager.get_computed_blocks(probe)[1] == 4
    scheduler.commit(plan, driver.model.launch(plan))
    assert scheduler.kv_cache_manager.get_computed_blocks(probe)[1] == 8
    driver.run()


def test_b12_an_answer_is_cached_for_the_next_turn():
    driver = Driver(config())
    seq = driver.add("a", prompt(6), max_new_tokens=8)
    driver.run()
    follow_up = driver.add("b", [*seq.token_ids, 1, 2], max_new_tokens=2)
    driver.run()
    assert follow_up.num_cached_tokens == 12  # of 14 tokens 13 were computed: three full blocks
    driver.check_output(follow_up)


@both
def test_b13_a_shared_block_is_never_written(overlap):
    # The fake model asserts it at every write; here everything is shared that can be.
    driver = Driver(config(max_num_seqs=6), overlap=overlap)
    seqs = [driver.add(str(i), prompt(n), max_new_tokens=9) for i, n in enumerate([8, 8, 12, 12, 10, 4])]
    shared = 0
    for _ in range(3):
        driver.step()
        shared += any(block.ref_count > 1 for block in driver.scheduler.kv_cache_manager.block_pool.blocks)
    assert shared
    driver.run()
    for seq in seqs:
        driver.check_output(seq)


def test_b14_preemption_resets_computed_tokens_and_keeps_output():
    driver = Driver(config(num_blocks=7, enable_prefix_caching=False))
    old, new = driver.add("old", prompt(8), max_new_tokens=16), driver.add("new", prompt(8, 50), max_new_tokens=16)
    while not new.num_preemptions:
        driver.step()
    assert (new.status, new.slot, new.block_table, new.num_computed_tokens) == (Status.WAITING, -1, [], 0)
    assert new.num_output_tokens == 5
    assert new.token_ids == prompt(8, 50) + new.output_token_ids
    assert old.num_preemptions == 0
    assert driver.scheduler.num_preemptions == 1
    driver.run()
    readmitted = [plan for plan in driver.plans if new in plan.admitted][1]
    assert readmitted.start[readmitted.sequences.index(new)] == 0
    driver.check_output(old)
    driver.check_output(new)


def test_b14_the_newest_is_preempted_and_goes_to_the_front():
    driver = Driver(config(num_blocks=10))
    seqs = [driver.add(str(i), prompt(8, 20 * i), max_new_tokens=12, priority=p) for i, p in enumerate([0, 2, 1])]
    driver.step()
    late = driver.add("late", [96], max_new_tokens=1, priority=2)
    while not driver.scheduler.num_preemptions:
        driver.step()
    assert [seq.num_preemptions for seq in seqs] == [0, 1, 0]
    driver.run()
    order = [seq for plan in driver.plans for seq in plan.admitted]
    assert order.index(late) > max(i for i, seq in enumerate(order) if seq is seqs[1])
    for seq in [*seqs, late]:
        driver.check_output(seq)


def test_b14_its_own_cached_blocks_hit_again():
    driver = Driver(config(num_blocks=9))
    old, new = driver.add("old", prompt(11), max_new_tokens=14), driver.add("new", prompt(11, 50), max_new_tokens=14)
    driver.run()
    assert new.num_preemptions == 1
    readmitted = [plan for plan in driver.plans if new in plan.admitted][1]
    assert readmitted.start[readmitted.sequences.index(new)] >= 8
    assert new.num_cached_tokens == 0
    driver.check_output(old)
    driver.check_output(new)


def test_no_admission_in_a_step_that_preempted():
    def run(urgent_at):
        driver = Driver(config(num_blocks=7))
        driver.add("old", prompt(8), max_new_tokens=16)
        driver.add("new", prompt(8, 50), max_new_tokens=16)
        while not driver.scheduler.num_preemptions:
            if len(driver.plans) == urgent_at:  # it would go first, and what was taken from "new" suffices for it
                driver.add("urgent", [96], max_new_tokens=1, priority=-1)
            driver.step()
        return driver

    steps = len(run(None).plans)
    driver = run(steps - 1)
    assert len(driver.plans) == steps
    assert driver.plans[-1].admitted == []
    assert driver.scheduler.num_free_blocks >= 1
    assert [seq.request_id for seq in driver.step().admitted] == ["urgent"]
    driver.run()


def test_a_preempted_sequence_still_takes_in_its_token_in_flight():
    driver = Driver(config(num_blocks=7), overlap=True)
    scheduler = driver.scheduler
    old, new = driver.add("old", prompt(8), max_new_tokens=16), driver.add("new", prompt(7, 50), max_new_tokens=16)
    taken_in = 0
    while (scheduler.num_waiting + scheduler.num_running):
        before = new.num_output_tokens
        driver.step()
        if new.status is Status.WAITING and new.num_preemptions:
            taken_in += new.num_output_tokens > before
    driver.run()
    assert taken_in == 1
    driver.check_output(old)
    driver.check_output(new)


def test_a_stopping_sequences_extra_token_preempts_nobody():
    # With overlap the old one asks for a third block for what would follow its EOS before anyone has seen the EOS.
    probe = Driver(config())
    answer = probe.add("x", prompt(4), max_new_tokens=5)
    probe.run()
    driver = Driver(config(num_blocks=5), overlap=True)
    old = driver.add("old", prompt(4), max_new_tokens=20, eos_token_ids=(answer.output_token_ids[4],))
    new = driver.add("new", prompt(3, 50), max_new_tokens=8)
    for _ in range(5):
        driver.step()
    assert (len(old.block_table), len(new.block_table), driver.scheduler.num_free_blocks) == (2, 2, 0)
    driver.run()
    assert (old.finish_reason, old.num_tokens) == ("eos", 9)
    assert driver.scheduler.num_preemptions == 0
    driver.check_output(old)
    driver.check_output(new)


def contended(driver):
    seqs = [
        driver.add(str(i), prompt(n, 7 * i), max_new_tokens=m, eos_token_ids=(i,), priority=i % 2)
        for i, (n, m) in enumerate([(9, 20), (3, 30), (17, 9), (8, 25), (1, 30), (12, 12)])
    ]
    driver.run()
    return seqs


@both
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("block_size", [1, 4, 8])
def test_b15_output_with_forced_preemption_equals_output_without(overlap, caching, block_size):
    sizes = {"block_size": block_size, "max_num_seqs": 6, "max_num_batched_tokens": 16}
    roomy = Driver(config(**sizes, enable_prefix_caching=caching, num_blocks=300), overlap=overlap)
    tight = Driver(config(**sizes, enable_prefix_caching=caching, num_blocks=1 + 48 // block_size), overlap=overlap)
    with_room, without = contended(roomy), contended(tight)
    assert roomy.scheduler.num_preemptions == 0
    assert tight.scheduler.num_preemptions > 0
    assert [seq.output_token_ids for seq in with_room] == [seq.output_token_ids for seq in without]
    for seq in without:
        tight.check_output(seq)


@both
def test_b16_caching_off_runs_without_hashes_and_hits(overlap, monkeypatch):
    def no_hash(parent_digest, content):
        raise AssertionError("nothing is hashed with caching off")

    monkeypatch.setattr(block_pool, "hash_block", no_hash)
    driver = Driver(config(enable_prefix_caching=False), overlap=overlap)
    seqs = [driver.add(str(i), prompt(8), max_new_tokens=9) for i in range(3)]
    driver.run()
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0, 0]
    assert driver.scheduler.kv_cache_manager.prefix_cache_queries == 0
    for seq in seqs:
        driver.check_output(seq)


@both
def test_b17_reset_waits_until_the_last_block_is_free(overlap):
    driver = Driver(config(), overlap=overlap)
    driver.add("a", prompt(8), max_new_tokens=3)
    driver.step()
    assert not driver.scheduler.reset_prefix_cache()
    driver.run()
    assert driver.scheduler.reset_prefix_cache()
    again = driver.add("b", prompt(8), max_new_tokens=3)
    driver.run()
    assert again.num_cached_tokens == 0


@both
def test_b18_after_all_end_or_abort_every_block_is_free(overlap):
    driver = Driver(config(num_blocks=14, max_num_seqs=6), overlap=overlap)
    for i in range(12):
        driver.add(str(i), prompt(1 + i, 5 * (i % 3)), max_new_tokens=1 + 2 * i)
    for i in range(0, 12, 2):
        driver.step()
        abort(driver.scheduler, str(i))
    driver.run()  # asserts it, block by block
    assert driver.scheduler.num_preemptions > 0


@both
def test_b19_prompt_logprobs_compute_every_prompt_token(overlap):
    driver = Driver(config(), overlap=overlap)
    first = driver.add("a", prompt(9), max_new_tokens=2)
    driver.run()
    scored = driver.add("b", prompt(12), max_new_tokens=2, read_cache=False)
    plan = driver.step()
    assert (plan.start.tolist(), plan.num_new_tokens.tolist()) == ([0], [12])
    driver.run()
    third = driver.add("c", prompt(12), max_new_tokens=2)
    driver.run()
    assert (first.num_cached_tokens, scored.num_cached_tokens, third.num_cached_tokens) == (0, 0, 11)
    driver.check_output(scored)


def test_b20_statistics_count_tokens_of_first_admissions():
    driver = Driver(config(num_blocks=9))
    manager = driver.scheduler.kv_cache_manager
    driver.add("old", prompt(11), max_new_tokens=14)
    driver.add("new", prompt(11, 50), max_new_tokens=14)
    driver.run()
    assert driver.scheduler.num_preemptions == 1
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (22, 0)
    driver.add("again", prompt(11), max_new_tokens=1)
    driver.run()
    assert (manager.prefix_cache_queries, manager.prefix_cache_hits) == (33, 8)


@pytest.mark.parametrize("changed", [False, True])
def test_b21_kv_of_changed_weights_is_never_hit(changed):
    driver = Driver(config())
    manager = driver.scheduler.kv_cache_manager
    driver.add("a", prompt(9), max_new_tokens=2)
    driver.run()
    driver.model.weights += changed
    manager.block_pool.new_generation()
    assert manager.has_older_hit(prompt(9))
    early = driver.add("early", prompt(9), max_new_tokens=2)  # admitted before anyone compared the weights
    driver.run()
    assert early.num_cached_tokens == 0
    driver.check_output(early)
    if changed:
        manager.block_pool.drop_older()
    else:
        manager.block_pool.trust_older()
    late = driver.add("late", prompt(9), max_new_tokens=2)
    driver.run()
    assert late.num_cached_tokens == 8
    driver.check_output(late)


def test_b22_a_launch_that_raises_unpublishes_its_blocks():
    driver = Driver(config())
    ready = driver.add("ready", prompt(8), max_new_tokens=9)
    driver.step()
    lost, hitter = (driver.add(name, prompt(9, 50), max_new_tokens=9) for name in ("lost", "hitter"))
    driver.model.fail_next = True
    plan = driver.step()
    assert plan.admitted == [lost, hitter]
    assert driver.scheduler.num_free_blocks == driver.scheduler.num_blocks - 1
    assert [seq.status for seq in (ready, lost, hitter)] == [Status.WAITING] * 3
    cached = driver.scheduler.kv_cache_manager.get_computed_blocks
    assert cached(Sequence("x", prompt(9, 50), max_new_tokens=1)) == ([], 0)
    assert cached(Sequence("x", prompt(8), max_new_tokens=1))[1] == 7  # what ran before is still good
    driver.run()
    for seq in (ready, lost, hitter):
        driver.check_output(seq)


def test_b22_an_older_plan_in_flight_is_dropped_with_it():
    driver = Driver(config())
    scheduler = driver.scheduler
    first = driver.add("a", prompt(9), max_new_tokens=9)
    plan = scheduler.schedule()
    tokens = driver.model.launch(plan)
    second = driver.add("b", prompt(9), max_new_tokens=9)
    scheduler.rollback(scheduler.schedule())
    invariants.check(scheduler)
    assert not scheduler.kv_cache_manager.block_pool.cached
    with pytest.raises(ValueError, match="once each"):
        scheduler.commit(plan, tokens)
    driver.run()
    driver.check_output(first)
    driver.check_output(second)


def test_b22_a_finished_sequence_in_flight_is_let_go():
    driver = Driver(config(), overlap=True)
    seq = driver.add("a", prompt(9), max_new_tokens=9)
    driver.step()
    abort(driver.scheduler, "a")
    assert driver.scheduler.num_free_blocks < driver.scheduler.num_blocks - 1
    driver.scheduler.preempt_all()
    driver.pending = None
    invariants.check(driver.scheduler)
    assert driver.scheduler.num_free_blocks == driver.scheduler.num_blocks - 1
    assert seq.num_output_tokens == 0


# -- 23 a sequence that keeps what it has over a change of the model fills no block that anyone else may hit ---------


def change_model(driver):
    driver.drain()
    driver.scheduler.preempt_all(but_keepers=True)
    pool = driver.scheduler.kv_cache_manager.block_pool
    pool.new_generation()
    pool.drop_older()
    driver.model.weights += 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [2, 6])
def test_b23_a_sequence_of_two_models_publishes_nothing(overlap, length):
    driver = Driver(config(), overlap=overlap)
    seq = driver.add("a", prompt(length), max_new_tokens=20, keeps_computed=True)
    driver.step()
    change_model(driver)
    assert seq.status is Status.RUNNING
    for _ in range(9):
        driver.step()
    assert seq.num_computed_tokens >= length + 9
    assert not driver.scheduler.kv_cache_manager.block_pool.cached
    again = driver.add("b", seq.token_ids[:9], max_new_tokens=4)
    driver.run()
    assert again.num_cached_tokens == 0
    driver.check_output(again)


def test_b23_others_start_over_and_publish_again():
    driver = Driver(config())
    seqs = [driver.add(str(keeps), [9 + keeps] * 6, max_new_tokens=12, keeps_computed=keeps) for keeps in (False, True)]
    driver.step()
    change_model(driver)
    assert [seq.status for seq in seqs] == [Status.WAITING, Status.RUNNING]
    assert [seq.num_output_tokens for seq in seqs] == [1, 1]
    driver.step()
    assert len(driver.scheduler.kv_cache_manager.block_pool.cached) == 1  # of the first
    driver.check_findable()
    driver.run()


def test_b23_a_preempted_one_is_of_one_model_again():
    driver = Driver(config())
    seq = driver.add("a", prompt(6), max_new_tokens=12, keeps_computed=True)
    driver.step()
    change_model(driver)
    driver.scheduler.preempt_all()
    driver.step()
    assert driver.scheduler.kv_cache_manager.block_pool.cached
    driver.check_findable()
    driver.run()
    assert seq.finish_reason == "length"
