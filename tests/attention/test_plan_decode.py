"""The plan of a decode step covers every position once, is balanced and fits the fixed number of items."""

from bisect import bisect_left

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import expected, make_case, run_poisoned, worst_error

from hf_paged.attention.plan_decode import (
    JOINING,
    num_items,
    plan_items,
    split_length,
)
from hf_paged.kernels.attention.decode import MAX_SPLITS, MIN_SPLIT, DecodeConfig, even_work, paged_attention_decode
from hf_paged.kernels.attention.types import DecodeWork

LENGTHS = st.lists(st.one_of(st.just(0), st.integers(1, 300), st.integers(1, 40000)), min_size=1, max_size=64)


def plan(lengths, cta_slots=66):
    lengths = np.array(lengths)
    return plan_items(lengths, np.arange(len(lengths)) + 7, cta_slots)


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.sampled_from([1, 2, 16, 49, 528]))
def test_plan_holds_every_row_once_with_all_its_pieces(lengths, cta_slots):
    items = plan(lengths, cta_slots)
    assert len(items) == num_items(len(lengths), cta_slots)
    used = items[items[:, 0] >= 0]
    assert (items[len(used) :] == -1).all(), "unused items come last"
    seen = []
    at = 0
    while at < len(used):
        row, _, splits, length, slot = used[at]
        assert 1 <= splits <= MAX_SPLITS
        mine = used[at : at + splits]
        assert mine[:, 0].tolist() == [row] * splits, "the splits of a row follow each other"
        assert mine[:, 1].tolist() == list(range(splits))
        assert (mine[:, 2:] == (splits, length, slot)).all()
        assert length == lengths[row]
        assert slot == row + 7
        seen.append(row)
        at += splits
    assert sorted(seen) == list(range(len(lengths)))


@settings(max_examples=100, deadline=None)
@given(LENGTHS)
def test_plan_starts_with_the_longest_pieces_and_cuts_no_shorter_than_worth_it(lengths):
    used = plan(lengths)
    used = used[used[:, 0] >= 0]
    size = -(-used[:, 3] // used[:, 2])
    assert (np.diff(size) <= 0).all()
    assert (size[used[:, 2] > 1] > MIN_SPLIT // 2).all()


@settings(max_examples=200, deadline=None)
@given(LENGTHS, st.sampled_from([64, 66, 200]))
def test_few_rows_run_at_the_same_time_in_splits_as_short_as_that_allows(lengths, cta_slots):
    items = plan(lengths, cta_slots)
    used = items[items[:, 0] >= 0]
    lengths = np.maximum(np.array(lengths), 1)
    split = split_length(lengths, cta_slots)
    assert (-(-lengths // split)).sum() <= cta_slots
    share, longest = -(-lengths.sum() // cta_slots), lengths.max()
    shortest = MIN_SPLIT + bisect_left(range(MIN_SPLIT, longest), True,
                                       key=lambda piece: (-(-lengths // piece)).sum() <= cta_slots)
    if split == longest > shortest:
        piece = (-(-lengths // np.minimum(-(-lengths // shortest), MAX_SPLITS))).max()
        assert (longest - piece) * cta_slots < JOINING * lengths.sum() / longest
    if split < longest:
        longest_split = (-(-used[:, 3] // used[:, 2])).max()
        assert (longest - longest_split) * cta_slots >= JOINING * lengths.sum() / longest
        assert split == MIN_SPLIT or split <= share or (-(-lengths // (split - 1))).sum() > cta_slots


def test_rows_stay_whole_where_cutting_saves_less_than_joining_takes():
    for lengths in ([384] * 32, [256] * 24, [150] * 16):
        assert plan(lengths)[:, 2].max() == 1
    for lengths in ([640] * 32, [384] * 24, [384] * 16, [100] * 31 + [700], [256], [256] * 8):
        assert plan(lengths)[:, 2].max() > 1
    # 33 rows of 66 slots, in two pieces each.
    assert JOINING // 2 == 210
    assert plan([420] * 33)[0, 2] == 2 > plan([419] * 33)[0, 2]


def test_rows_of_unlike_lengths_are_cut_for_what_that_saves_of_the_longest_split_of_all():
    for lengths in ([500] + [320] * 40, [384] * 16 + [0] * 16, [790] + [450] * 20):
        assert plan(lengths)[:, 2].max() > 1, "shorter rows, or padding, leave the memory to the longest one"
    for lengths in ([400] + [320] * 40, [420] + [330] * 40):
        assert plan(lengths)[:, 2].max() == 1, "rows that stay whole are nearly as long as the longest"


def test_plan_cuts_long_rows_and_leaves_short_ones():
    assert plan([1000] * 256)[:, 2].max() == 1
    assert plan([32768])[:, 2].max() == MAX_SPLITS
    few = plan([4000] + [100] * 20)
    assert few[few[:, 3] == 4000][0, 2] > 4
    assert few[few[:, 3] == 100][:, 2].max() <= 2
    many = plan([100] * 99 + [20000])
    assert many[many[:, 3] == 20000][0, 2] > 16, "one long row among many keeps nobody waiting"


@pytest.mark.interpreted
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("window", [None, 70])
def test_attention_over_a_plan(seed, window):
    """Ragged rows, an empty one among them, some cut and some not, and items left over."""
    r = np.random.default_rng(seed)
    lengths = [0, 900, *r.integers(1, 300, 4).tolist()]
    case = make_case([(1, n) for n in lengths], seed=seed, window=window)
    items = plan_items(np.array(lengths), case.meta.slots.numpy(), 9)
    assert 1 in items[:, 2]
    assert items[:, 2].max() > 1
    work = DecodeWork(torch.from_numpy(items), torch.zeros(12, dtype=torch.int32))
    case = case._replace(meta=case.meta._replace(work=work))
    for _ in range(2):  # the second call finds the counters as it needs them
        out = run_poisoned(paged_attention_decode, case, config=DecodeConfig(16, 4, 1, 4))
        assert worst_error(out, expected(case)) < 5e-6
        assert not work.arrivals.any()


def test_even_work_describes_the_rows():
    case = make_case([(1, 5), (1, 90)], seed=0)
    items = even_work(case.meta, 2, 3).items
    slots = case.meta.slots.tolist()
    assert items.tolist() == [[0, p, 3, 5, slots[0]] for p in range(3)] + [[1, p, 3, 90, slots[1]] for p in range(3)]
