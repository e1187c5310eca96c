"""The plan of a step whose rows share prefixes covers what each row sees once, in order, within fixed sizes."""

import random
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_cases import random_groups

from hf_paged.attention import choose_groups as choosing
from hf_paged.attention import plan_decode as planning
from hf_paged.attention.choose_groups import Kernel, choose_groups, group_kernel_of
from hf_paged.attention.plan_decode import plan_groups
from hf_paged.attention.plan_prompts import Prompts
from hf_paged.attention.registry import BACKENDS
from hf_paged.kernels.attention.grouped import MIN_GROUP_SPLIT, grouped_config
from hf_paged.kernels.attention.types import AttentionSpec, GroupedConfig, PartItem, RowEntry
from hf_paged.scheduler.prefix_tree import PrefixGroups

CONFIG = GroupedConfig(64, 64, 2, 64, 2, 4, 3)
NOTHING = PrefixGroups(*(np.zeros(0, np.int32) for _ in range(5)))
SIZES = {"tile_rows": st.sampled_from([2, 5, 16, 32]), "cta_slots": st.sampled_from([1, 9, 49, 200])}


def drawn(seed, most_rows=40, longest=3000, block_size=16):
    """Lengths of rows and their groups, of which there are some."""
    r = random.Random(seed)
    while True:
        count = r.randint(2, most_rows)
        lengths = [r.choice([0, r.randint(1, 40), *[r.randint(1, longest)] * 6]) for _ in range(count)]
        groups = random_groups(r, lengths, block_size)
        if groups is not None:
            return np.array(lengths), groups


def plan(lengths, groups, cta_slots=49, worth=1, tile_rows=32):
    lengths = np.array(lengths)
    choice = choose_groups(groups, len(lengths), Kernel(CONFIG, tile_rows, cta_slots, worth))
    return None if choice is None else plan_groups(lengths, np.arange(len(lengths)) + 7, choice)


def sizes(rows, cta_slots):
    """Of the arrays of a plan: as many items, and places for parts, whatever the lengths and groups."""
    return rows + max(rows // 2, min(rows, 16)) + cta_slots, rows + cta_slots + 2 * rows + 512


def cut(begin, end, split, splits, tile=16):
    """The kernel's arithmetic, with tiles as small as they may be."""
    tiles = max(-(-(-(-end // tile) - begin // tile) // splits), 1)
    first = (begin // tile + split * tiles) * tile
    return max(first, begin), min(first + tiles * tile, end)


def pieces_of(plan, rows):
    """[(place of the piece's part, begin, end)] of each row, and what items and members say of the row."""
    pieces, said = [[] for _ in range(rows)], [set() for _ in range(rows)]
    table = [RowEntry(*values) for values in plan.rows.tolist()]
    for values in plan.items.tolist():
        item = PartItem(*values)
        if item.rows < 0:
            assert values == [-1] * len(values)
            continue
        begin, end = cut(item.begin, item.end, item.split, item.splits)
        if item.rows == 0:
            assert item.slot == item.first + 7
            said[item.first].add(item.length)
            pieces[item.first].append((item.part, begin, end))
            continue
        members = table[item.first : item.first + item.rows]
        assert item.slot - 7 in [entry.member for entry in members], "the positions are those of one of the rows"
        for entry in members:
            assert entry.member_part == table[entry.member].part
            said[entry.member].add(entry.member_length)
            pieces[entry.member].append((entry.member_part + item.part, begin, end))
    return pieces, said


def check(plan, lengths, size, most_parts):
    assert len(plan.items) == size
    assert plan.num_parts == most_parts
    assert len(plan.rows) == len(lengths)
    pieces, said = pieces_of(plan, len(lengths))
    parts = []
    for row, length in enumerate(lengths.tolist()):
        mine, entry = sorted(pieces[row]), RowEntry(*plan.rows[row].tolist())
        assert len(mine) == entry.pieces
        wanted = range(entry.part, entry.part + entry.pieces)
        if entry.pieces == 1:
            assert mine[0][0] == -1, "it is the result at once"
        else:
            assert [part for part, _, _ in mine] == list(wanted), "one after the other, each once"
        at = 0
        for _, begin, end in mine:
            if begin < end:
                assert begin == at, "every position once, in order"
                at = end
        assert at == length
        assert said[row] == {length}
        parts.extend(wanted)
    assert len(set(parts)) == len(parts)
    assert max(parts) < most_parts


@pytest.fixture
def every_group_pays(monkeypatch):
    """However little it saves of what is read."""
    monkeypatch.setattr(planning, "MIN_SAVED_SHARE", 0.0)
    monkeypatch.setattr(choosing, "PIECE_COST", 0)


@pytest.mark.usefixtures("every_group_pays")
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6), **SIZES)
def test_every_position_of_every_row_is_in_one_piece(seed, tile_rows, cta_slots):
    lengths, groups = drawn(seed)
    found = plan(lengths, groups, cta_slots, tile_rows=tile_rows)
    assert (found.items[:, 0] > 0).any()
    assert found.items[:, 0].max() <= tile_rows
    check(found, lengths, *sizes(len(lengths), cta_slots))


def group_of(rows, shared):
    """Rows that share their beginning."""
    numbers = np.array([[0], [rows], [0], [shared]], np.int32)
    return PrefixGroups(np.arange(rows, dtype=np.int32), *numbers)


def test_what_saves_little_is_read_row_by_row():
    assert plan([144] * 2, group_of(2, 16)) is None, "joining costs more than 16 positions"
    assert plan([4000] * 16, group_of(16, 2048)) is not None
    assert plan([4000] * 16, group_of(16, 2048), worth=16 * 2048) is None, "a step has to save enough as a whole"
    assert plan([2000] * 16, group_of(16, 1024)) is not None
    assert plan([9000] * 16, group_of(16, 1024)) is None, "most of what is read is a row's own"


def test_a_group_in_a_group_may_be_all_that_pays():
    """Two pairs of four rows share much, the four have one block in common: the pairs read that, too."""
    groups = PrefixGroups(np.arange(4, dtype=np.int32), *np.array(
        [(0, 4, 0, 16), (0, 2, 16, 2048), (2, 2, 16, 2048)], np.int32).T)
    items = [PartItem(*values) for values in plan([2100] * 4, groups).items.tolist()]
    assert {(item.first, item.begin, item.end) for item in items if item.rows == 2} == {(0, 0, 2048), (2, 0, 2048)}
    assert not [item for item in items if item.rows == 4]


def test_groups_in_groups_number_their_rows_pieces_from_the_outermost_on():
    """Three levels, each cut, beside a group that does not pay."""
    groups = PrefixGroups(np.array([5, 0, 1, 2, 3, 4, 6, 7], np.int32), *np.array(
        [(0, 6, 0, 1024), (0, 4, 1024, 2048), (0, 2, 2048, 3072), (6, 2, 0, 32)], np.int32).T)
    lengths = np.array([3200, 3200, 2100, 1100, 1050, 3300, 40, 50])
    found = plan(lengths, groups, cta_slots=200)
    check(found, lengths, *sizes(8, 200))
    items = [PartItem(*values) for values in found.items.tolist()]
    assert {(item.first, item.rows, item.begin, item.end) for item in items if item.rows > 0} == {
        (0, 6, 0, 1024), (0, 4, 1024, 2048), (0, 2, 2048, 3072)}
    assert max(item.part for item in items if item.rows > 0) > 6


def test_splits_are_fewer_where_parts_run_out():
    lengths = np.full(30, 60100)
    found = plan(lengths, group_of(30, 60000), cta_slots=2000)
    check(found, lengths, *sizes(30, 2000))
    splits = int(found.items[0, PartItem._fields.index("splits")])
    assert splits == (2 * 30 + 512) // 30


def test_tiles_of_a_large_group_have_about_equal_rows_and_follow_each_other():
    items = [PartItem(*values) for values in plan([1100] * 70, group_of(70, 1024)).items.tolist()]
    tiles = [item for item in items if item.rows > 0]
    assert [item.rows for item in tiles[:3]] == [24, 24, 22]
    assert [item.first for item in tiles[:3]] == [0, 24, 48]
    assert [item.split for item in tiles] == sorted(item.split for item in tiles)


def test_few_rows_are_cut_until_all_programs_have_work_but_no_shorter_than_worth_it():
    items = plan([20000] * 2, group_of(2, 16384)).items
    assert 40 <= (items[:, 0] >= 0).sum() <= 49
    splits = [item for item in map(PartItem._make, plan([1100] * 2, group_of(2, 1024)).items.tolist()) if item.rows > 0]
    assert len(splits) == 1024 // MIN_GROUP_SPLIT
    longer = map(PartItem._make, plan([2200] * 2, group_of(2, 2048)).items.tolist())
    assert len([item for item in longer if item.rows > 0]) == 8, "as many as are joined at a time"


def test_many_groups_of_two_fit():
    """As many as there can be outside of each other."""
    rows = 300
    pairs = np.array([(i, 2, 0, 512) for i in range(0, rows, 2)], np.int32).T
    items = plan([600] * rows, PrefixGroups(np.arange(rows, dtype=np.int32), *pairs)).items
    assert (items[:, 0] == 2).sum() == rows // 2


@pytest.mark.usefixtures("every_group_pays")
def test_deep_nesting_is_cut_off_where_there_is_no_room():
    """Each row shares with all rows before it, and a group is kept for what it saves."""
    rows = 600
    chain = np.array([(i, rows - i, i * 16, i * 16 + 16) for i in range(rows - 1)], np.int32).T
    lengths = [16 * min(i + 1, rows - 1) + 5 for i in range(rows)]
    groups = PrefixGroups(np.arange(rows, dtype=np.int32), *chain)
    check(plan(lengths, groups), np.array(lengths), *sizes(rows, 49))


def test_choosing_among_nested_groups_takes_memory_for_each_group_and_not_for_each_pair_of_them():
    """The beginnings of one long text, each a row: every row shares with all longer ones."""
    peaks = []
    for rows in (500, 1000):
        chain = np.array([(i, rows - i, i * 64, i * 64 + 64) for i in range(rows - 1)], np.int32).T
        groups = PrefixGroups(np.arange(rows, dtype=np.int32), *chain)
        tracemalloc.start()
        choose_groups(groups, rows, Kernel(CONFIG, 32, 49, 1))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 3 * peaks[0]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_hold_a_row_at_least(itemsize):
    for head_dim_pad in (16, 32, 64, 128, 256):
        for group in (1, 3, 16, 71, 200):
            for shared in (99 << 10, 227 << 10):
                config = grouped_config(head_dim_pad, itemsize, group, shared)
                assert config.block_m >= group
                assert config.block_m // group >= 1


def test_a_device_has_its_own_plan():
    """On a CPU one multiprocessor, whose slots two rows fill: nothing is cut."""
    kernel = group_kernel_of(AttentionSpec(4, 2, 64, torch.float16, torch.device("cpu"), 16))
    found = plan_groups(np.array([2100] * 2), np.arange(2), choose_groups(group_of(2, 2048), 2, kernel))
    assert found.items[:, PartItem._fields.index("splits")].max() <= 2


@pytest.mark.parametrize(("changes", "is_grouped"), [
    ({}, True), ({"has_value_dim": True}, True), ({"are_calls_alike": False}, False), ({"head_dim": 512}, False),
], ids=str)
def test_calls_of_unlike_sizes_and_wide_heads_are_read_row_by_row(changes, is_grouped, monkeypatch):
    """One plan holds for all calls of a step, and for tiles of one size."""
    for name in ("choose_groups", "plan_prompts"):
        monkeypatch.setattr(f"hf_paged.attention.triton_backend.{name}", lambda *_: "a plan")
    spec = AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cpu"), 16)._replace(**changes)
    prompts = Prompts(*[np.full(4, 64)] * 3, 64, 128)
    found = (BACKENDS["triton"].choose_groups(NOTHING, 4, spec),
             BACKENDS["triton"].plan_prompts(NOTHING, prompts, spec, 1.0))
    assert found == (("a plan",) * 2 if is_grouped else (None, None))
