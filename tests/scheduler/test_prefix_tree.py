"""Rows that begin with the same blocks are groups, wherever the blocks come from."""

from __future__ import annotations

import itertools

import invariants
import numpy as np
import pytest
from brute_groups import check_groups, check_plan
from fake_model import Driver, config
from hypothesis import given, settings
from hypothesis import strategies as st
from invariants import check_prefix_tree

from hf_paged.scheduler import Sequence
from hf_paged.scheduler.lockstep_rows import LockstepRows
from hf_paged.scheduler.prefix_tree import PrefixTree

SIZE = 4
SYSTEM = list(range(100, 108))  # two blocks
QUESTIONS = [[j] * 8 for j in range(3)]


def driver(**changes):
    return Driver(config(**({"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_blocks": 200} | changes)))


def forked(driver, prompts):
    """Rows in lockstep behind their prompts."""
    rows = LockstepRows(driver.scheduler, [Sequence("row", prompt, max_new_tokens=1) for prompt in prompts], 60)
    for _ in rows.prompt_plans():
        pass
    rows.fork()
    return rows


def shared(plan):
    """{names of the rows: (begin, end)} of a plan's groups."""
    check_plan(plan, SIZE)
    if plan.groups is None:
        return {}
    members, first, count, begin, end = plan.groups
    names = [plan.sequences[row].request_id for row in members.tolist()]
    return {"".join(sorted(names[a : a + n])): (b, e)
            for a, n, b, e in zip(first.tolist(), count.tolist(), begin.tolist(), end.tolist(), strict=True)}


def test_equal_prompts_of_one_batch_share_their_full_blocks():
    d = driver()
    for name in "abc":
        d.add(name, list(range(10)))
    assert d.step().groups is None  # prompts
    assert shared(d.step()) == {"abc": (0, 8)}


def test_equal_prompts_of_full_blocks_share_all_of_them():
    d = driver()
    for name in "abc":
        d.add(name, list(range(8)))
    d.step()
    assert shared(d.step()) == {"abc": (0, 8)}


def test_equal_prompts_that_take_several_steps_share():
    d = driver(max_num_batched_tokens=16)
    for name in "ab":
        d.add(name, list(range(40)))
    assert [shared(d.step()) for _ in range(4)] == [{}, {}, {}, {"ab": (0, 40)}]


def test_a_later_prompt_shares_what_a_running_row_computed():
    d = driver()
    first = d.add("a", list(range(10)), 40)
    for _ in range(10):
        d.step()
    d.add("b", [*first.token_ids, 1])
    assert shared(d.step()) == {}
    assert shared(d.step()) == {"ab": (0, 16)}, "its prompt and output of before"


@pytest.mark.parametrize("in_lockstep", [False, True])
def test_a_later_prompt_shares_what_followed_a_prompt_of_full_blocks(in_lockstep):
    """The rows' tables end where they part, until the step that takes their next blocks."""
    d = driver()
    if in_lockstep:
        rows = forked(d, [list(range(8))] * 2)
        for _ in range(5):
            rows.decode_plan()
        rows.publish(np.array([[*range(8), 1, 2, 3, 4, 5], [*range(8), 1, 1, 1, 1, 1]], np.int32))
        tokens, slots = [*range(8), 1, 2, 3, 4, 5], [int(rows.slots[0])]
        d.lent = lambda: [seq.block_table for seq in rows.sequences]
    else:
        first = d.add("a", list(range(8)), 40)
        d.add("b", list(range(8)), 40)
        for _ in range(6):
            d.step()
        tokens, slots = first.token_ids, [first.slot]
    later = Sequence("c", [*tokens, 9], max_new_tokens=9)
    d.scheduler.add(later)
    d.scheduler.schedule()
    groups = d.scheduler.prefix_tree.groups(np.array([*slots, later.slot], np.int32))
    assert groups.end.tolist() == [12]
    check_prefix_tree(d.scheduler.prefix_tree, d.scheduler.prefix_tree._tables)


def test_a_system_prompt_over_questions_over_samples():
    d = driver()
    for i, question in enumerate(QUESTIONS):
        for j in range(3):
            d.add("abcdefghi"[3 * i + j], SYSTEM + question + [7])
    while not shared(plan := d.step()):
        pass
    while plan.num_decode_rows < 9:
        plan = d.step()
    assert shared(plan) == {"abcdefghi": (0, 8), "abc": (8, 16), "def": (8, 16), "ghi": (8, 16)}


def test_turns_of_a_conversation_share_as_far_as_they_agree():
    d = driver()
    d.add("a", [*range(8), 1, 1, 1, 1, 5], 30)
    d.add("b", [*range(8), 2, 2, 2, 2, 5], 30)
    d.step()
    d.add("c", [*range(8), 2, 2, 2, 2, 3, 3, 3, 3, 5], 30)
    d.add("d", [*range(8), 2, 2, 2, 2, 3, 3, 3, 3, 6], 30)
    assert shared(d.step()) == {"ab": (0, 8)}
    assert shared(d.step()) == {"abcd": (0, 8), "bcd": (8, 12), "cd": (12, 16)}


def test_equal_content_in_other_blocks_is_no_group():
    d = driver()
    d.add("a", list(range(10)), 30)
    d.add("b", list(range(10)), 30, read_cache=False)  # computes blocks of its own, and publishes them
    d.step()
    assert shared(d.step()) == {}
    d.add("c", list(range(10)), 30)
    d.step()
    (group,) = shared(d.step()).items()
    assert group in [("ac", (0, 8)), ("bc", (0, 8))]


def test_blocks_of_two_origins_are_shared_with_each_as_far_as_the_tables_agree():
    """A row that hits a block of one row after a block of another shares only with the one that it begins like."""
    tree, tables = PrefixTree(SIZE), {0: [1, 2], 1: [3, 4], 2: [1, 4, 5], 3: [3, 4, 6]}
    for slot, table in tables.items():
        tree.add(slot, table)
        check_prefix_tree(tree, {s: t for s, t in tables.items() if s <= slot})
    check_groups(tree.groups(np.arange(4, dtype=np.int32)), list(tables.values()), SIZE)


def test_one_row_alone_shares_nothing():
    d = driver()
    first, _ = d.add("a", list(range(10)), 30), d.add("b", list(range(10)), 3)
    d.step()
    assert shared(d.step()) == {"ab": (0, 8)}
    while d.scheduler.num_running == 2:
        d.step()
    assert d.step().groups is None
    assert first.num_output_tokens < 30


def test_groups_are_the_same_object_until_something_changes():
    d = driver()
    for name in "abc":
        d.add(name, list(range(10)), 30)
    d.step()
    groups = d.step().groups
    assert groups is not None
    for _ in range(8):  # new blocks of their own
        assert d.step().groups is groups
    d.scheduler.finish(d.plans[-1].sequences[0], "abort")
    assert d.step().groups is not groups


def test_a_change_is_seen_whatever_rows_were_asked_for_between():
    tables = {0: [1, 2, 4], 1: [1, 3], 2: [1, 2, 5]}
    tree = PrefixTree(SIZE)
    for slot, table in tables.items():
        tree.add(slot, table)
    for _ in range(2):
        for rows in ([0, 1], [0, 2], [1, 2], [0, 1, 2]):
            check_groups(tree.groups(np.array(rows, np.int32)), [tables[row] for row in rows], SIZE)
        tree.remove(1)
        tables[1] = [1, 2, 6]
        tree.add(1, tables[1])


def test_steps_of_others_beside_two_that_share_are_not_kept_for_good():
    tree = PrefixTree(SIZE)
    for slot, table in enumerate([[1, 2], [1, 3], *([100 + i] for i in range(30))]):
        tree.add(slot, table)
    for other in range(2, 32):
        assert tree.groups(np.array([0, 1, other], np.int32)) is not None
    assert len(tree._known) <= 8


def test_nothing_is_shared_without_a_prefix_cache_but_by_rows_of_a_fork():
    d = driver(enable_prefix_caching=False)
    for name in "ab":
        d.add(name, list(range(10)))
    d.step()
    assert shared(d.step()) == {}
    rows = forked(d, [list(range(10))] * 3)
    plan = rows.decode_plan()
    check_plan(plan, SIZE)
    assert (plan.groups.count.tolist(), plan.groups.end.tolist()) == ([3], [8])


def test_no_groups_where_they_are_not_wanted():
    d = driver(group_prefixes=False)
    rows = forked(d, [list(range(10))] * 3)
    d.lent = lambda: [seq.block_table for seq in rows.sequences]
    for name in "ab":
        d.add(name, list(range(10)))
    plans = [d.scheduler.schedule(), rows.decode_plan()]
    d.scheduler.commit(plans[0], d.model.launch(plans[0]))
    plans.append(d.scheduler.schedule())
    assert plans[-1].num_decode_rows == 2
    assert [plan.groups for plan in [*plans, plans[-1].behind([plans[1]])]] == [None] * 4


def test_rows_in_front_share_with_each_other_and_with_the_schedulers():
    """Row numbers are those of the joined plan."""
    d = driver()
    d.add("a", list(range(10)), 30)
    d.add("b", [9] * 10, 30)
    d.add("c", [9] * 10, 30)
    d.step()
    prompts = [list(range(10)), list(range(10)), [5] * 10, [5] * 10]
    rows = forked(d, prompts)
    others = rows.decode_plan()
    for name in "de":
        d.add(name, [9] * 8 + [ord(name)])
    own = d.scheduler.schedule()
    joined = own.behind([others])
    check_plan(joined, SIZE)
    assert [seq.request_id for seq in joined.sequences[4:]] == ["a", "b", "c", "d", "e"]
    assert prompts_shared(joined) == {"de": (0, 8)}
    members, first, count, _, _ = joined.groups
    found = {frozenset(members[a : a + n].tolist()) for a, n in zip(first.tolist(), count.tolist(), strict=True)}
    assert found == {frozenset({0, 1, 4}), frozenset({2, 3}), frozenset({5, 6})}
    assert own.behind([]) is own


def test_rows_that_forget_drafts_share_on():
    """Where their tables are cut off they may end at the end of what they share."""
    d = driver()
    rows = forked(d, [list(range(8))] * 2)
    d.lent = lambda: [seq.block_table for seq in rows.sequences]
    for drafts in (5, 1, 4):
        rows.decode_plan(drafts)
        rows.crop(drafts)
        invariants.check(d.scheduler, d.lent())
    plan = rows.decode_plan()
    check_plan(plan, SIZE)
    assert plan.groups.end.tolist() == [8]


def test_beams_share_what_their_parents_had_in_full_blocks():
    d = driver()
    rows = forked(d, [list(range(6))] * 4)
    for parents in ([0, 0, 1, 2], [1, 0, 2, 2], [3, 3, 3, 0], [2, 2, 1, 0]):
        for _ in range(3):
            check_plan(rows.decode_plan(), SIZE)
        rows.reorder(parents)
        check_prefix_tree(d.scheduler.prefix_tree,
                          {seq.slot: seq.block_table for seq in rows.sequences})
    plan = rows.decode_plan()
    check_plan(plan, SIZE)
    assert len(plan.groups.first) > 1, "beams of one parent share more than all do"


def test_few_rows_of_many_levels():
    """Of groups that have the same rows left, the longest is one, and begins where the next one around it ends."""
    tables = [[*range(1, i + 1), 100 + i] for i in range(12)]
    tree = PrefixTree(SIZE)
    for slot, table in enumerate(tables):
        tree.add(slot, table)
    for count in range(5):
        for chosen in itertools.combinations(range(12), count):
            check_groups(tree.groups(np.array(chosen, np.int32)), [tables[i] for i in chosen], SIZE)


@settings(max_examples=150)
@given(data=st.data())
def test_any_set_of_rows(data):
    """Random tables over few blocks (so that they agree in part), rows that come, grow and go; any part of them."""
    tree, tables, fresh = PrefixTree(SIZE), {}, iter(range(100, 10_000))
    for _ in range(data.draw(st.integers(1, 25))):
        act = data.draw(st.sampled_from(["add", "add", "copy", "grow", "remove"]))
        if act == "remove" and tables:
            slot = data.draw(st.sampled_from(sorted(tables)))
            tree.remove(slot)
            del tables[slot]
        elif act == "grow" and tables:
            tables[data.draw(st.sampled_from(sorted(tables)))].append(next(fresh))
            tree.extended()
        elif act in ("add", "copy"):
            start = []
            if act == "copy" and tables:
                start = tables[data.draw(st.sampled_from(sorted(tables)))]
                start = start[: data.draw(st.integers(0, len(start)))]
            table = start + data.draw(st.lists(st.integers(1, 3), min_size=not start, max_size=3))
            slot = min(set(range(len(tables) + 1)) - tables.keys())
            tables[slot] = table
            tree.add(slot, table)
        check_prefix_tree(tree, tables)
        slots = data.draw(st.permutations(sorted(tables)))
        slots = slots[: data.draw(st.integers(0, len(slots)))]
        groups = tree.groups(np.array(slots, np.int32))
        check_groups(groups, [tables[slot] for slot in slots], SIZE)
        assert tree.groups(np.array(slots, np.int32)) is groups


def prompts_shared(plan):
    """{names of the prompts: (begin, end)} of what a plan's prompts share ahead of their new tokens."""
    rows = plan.num_decode_rows
    check_plan(plan, SIZE)
    if plan.prompt_groups is None:
        return {}
    members, first, count, begin, end = plan.prompt_groups
    names = [plan.sequences[rows + row].request_id for row in members.tolist()]
    return {"".join(sorted(names[a : a + n])): (b, e)
            for a, n, b, e in zip(first.tolist(), count.tolist(), begin.tolist(), end.tolist(), strict=True)}


def test_prompts_behind_a_cached_prefix_share_it_in_the_step_that_computes_them():
    d = driver()
    d.add("a", SYSTEM + [1], 20)
    assert prompts_shared(d.step()) == {}
    for i, name in enumerate("bcd"):
        d.add(name, SYSTEM + QUESTIONS[0][: 4 * (i > 0)] + [i])
    plan = d.step()
    assert plan.num_decode_rows == 1, "which takes no part"
    assert prompts_shared(plan) == {"bcd": (0, 8)}, "c computes what d has behind it"


def test_the_prompt_that_computes_a_prefix_reads_for_itself():
    d = driver()
    for i, name in enumerate("abc"):
        d.add(name, SYSTEM + [i] * 3)
    assert prompts_shared(d.step()) == {"bc": (0, 8)}


def test_prompts_that_are_all_in_the_cache_share_what_is_ahead_of_their_last_token():
    d = driver()
    for name in "abc":
        d.add(name, SYSTEM)
    plan = d.step()
    assert plan.start.tolist() == [0, 7, 7]
    assert prompts_shared(plan) == {"bc": (0, 4)}


def test_a_chunk_shares_with_prompts_behind_it_what_earlier_chunks_computed():
    d = driver(max_num_batched_tokens=16)
    long = list(range(24))
    d.add("a", [*long, 1])
    d.step()
    d.add("b", [*long, 2])
    d.add("c", [*long, 3])
    assert prompts_shared(d.step()) == {"abc": (0, 16), "bc": (16, 24)}


def test_prompts_that_share_nothing_have_no_groups():
    d = driver()
    for name, question in zip("abc", QUESTIONS, strict=True):
        d.add(name, question)
    assert d.step().prompt_groups is None


def test_prompts_in_lockstep_and_their_drafts_share():
    d = driver()
    rows = LockstepRows(d.scheduler, [Sequence("row", SYSTEM + [i], max_new_tokens=1) for i in range(3)], 60)
    plans = list(rows.prompt_plans())
    assert [plan.prompt_groups.count.tolist() for plan in plans] == [[2]]
    draft = rows.decode_plan(3)
    assert (draft.prompt_groups.count.tolist(), draft.prompt_groups.end.tolist()) == ([3], [8])
    assert draft.groups is None
    assert rows.decode_plan().prompt_groups is None
    rows.free()


def test_groups_of_copies_are_not_taken_for_those_of_other_slots():
    """Numbers of copies and positions look like slots."""
    tree, shared = PrefixTree(1), [*range(100, 140)]
    for slot in range(17):
        tree.add(slot, [*shared, slot])
    others = tree.groups(np.array([1, 3, 0, 16], np.int32))
    assert others is not None and others.members.max() == 3
    found = tree.groups_of_copies(np.array([1], np.int32), np.array([3]), np.array([18], np.int32))
    check_groups(found, [shared[:16]] * 3, 1)
