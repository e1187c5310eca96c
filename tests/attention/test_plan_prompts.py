"""The plan of prompts that share prefixes covers what each token sees ahead of its row once, where that pays."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_cases import random_groups
from test_plan_groups import CONFIG, cut, group_of

from hf_paged.attention import hopper_backend, triton_backend
from hf_paged.attention import plan_prompts as module
from hf_paged.attention.choose_groups import Kernel
from hf_paged.attention.hopper_backend import HopperBackend
from hf_paged.attention.plan_prompts import (
    PromptKernel,
    Prompts,
    RowPrograms,
    most_items,
    most_parts,
    padded,
    plan_prompts,
)
from hf_paged.attention.triton_backend import TritonBackend
from hf_paged.kernels.attention.types import AttentionSpec, PartItem, PromptWork, RowEntry

EVERY = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def every_group_pays(monkeypatch):
    for name, value in (("PIECE_COST", 0.0), ("LAUNCH", 0.0), ("MOST", 9.0), ("MOST_ELSEWHERE", 9.0)):
        monkeypatch.setattr(module, name, value)


def prompts_of(start, num_new):
    start, num_new = np.array(start), np.array(num_new)
    return Prompts(start, num_new, np.arange(len(start)) + 7, int(num_new.max()), int((start + num_new).max()))


# As on an H200, with two query heads to each of eight KV heads.
SIXTEEN, FULL = RowPrograms(8, 99, 1.6, 0.45), RowPrograms(64, 33, 1.06, 0.7)


def plan(groups, prompts, tile_tokens=32, cta_slots=49, *, rows=SIXTEEN, own=None, share_of_layers=1.0):
    kernel = PromptKernel(Kernel(CONFIG, tile_tokens, cta_slots, 1), rows, own or rows)
    return plan_prompts(groups, prompts, kernel, share_of_layers)


def check(found, prompts, groups):
    """Every token's pieces are what lies ahead of its row's own positions, in order, each in a place of its own."""
    row_of = np.repeat(np.arange(len(prompts.start)), prompts.num_new)
    place = np.concatenate([np.arange(n) for n in prompts.num_new])
    table = [RowEntry(*values) for values in found.rows.tolist()]
    pieces = [[] for _ in row_of]
    for values in found.items.tolist():
        item = PartItem(*values)
        if item.rows < 0:
            continue
        members = [entry.member for entry in table[item.first : item.first + item.rows]]
        assert item.slot - 7 in row_of[members], "the positions are those of one of the rows"
        for entry in table[item.first : item.first + item.rows]:
            assert entry.member_part == table[entry.member].part
            assert entry.member_length == prompts.start[row_of[entry.member]] + place[entry.member] + 1
            pieces[entry.member].append((item.part, *cut(item.begin, item.end, item.split, item.splits)))
    places = []
    for token, row in enumerate(row_of.tolist()):
        mine = sorted(pieces[token])
        assert [number for number, _, _ in mine] == list(range(table[token].pieces))
        at = 0
        for _, begin, end in mine:
            if begin < end:
                assert begin == at, "every position once, in order"
                at = end
        assert at == found.own_begin[row] <= prompts.start[row]
        places += range(table[token].part, table[token].part + table[token].pieces)
    assert len(set(places)) == len(places) == found.num_parts <= most_parts(len(row_of))
    assert max(places) < found.num_parts
    assert set(found.own_begin[np.unique(row_of)].tolist()) <= {0, *groups.end.tolist()}


@pytest.mark.usefixtures("every_group_pays")
@settings(max_examples=100, deadline=None, suppress_health_check=EVERY)
@given(seed=st.integers(0, 10**6), tile_tokens=st.sampled_from([2, 5, 32]), cta_slots=st.sampled_from([1, 9, 200]))
def test_every_position_ahead_of_a_row_is_in_one_piece_of_its_tokens(seed, tile_tokens, cta_slots):
    r, groups = random.Random(seed), None
    while groups is None:
        start = [r.choice([0, r.randint(1, 40), *[r.randint(1, 3000)] * 6]) for _ in range(r.randint(2, 20))]
        groups = random_groups(r, [s + 1 for s in start], 16)
    prompts = prompts_of(start, [r.choice([1, r.randint(1, 60)]) for _ in start])
    found = plan(groups, prompts, tile_tokens, cta_slots, rows=RowPrograms(1, 1, 50.0, 1.0))
    if found is None:  # more groups in groups than there is room for
        return
    assert 0 < found.items[:, 0].max() <= tile_tokens
    check(found, prompts, groups)
    tokens, rows = int(prompts.num_new.sum()) + 5, len(start) + 3
    wide = padded(found, tokens, rows)
    assert (len(wide.items), len(wide.rows), len(wide.own_begin), wide.num_parts) == (
        most_items(tokens, found.kernel), tokens, rows, most_parts(tokens))
    assert np.array_equal(wide.items[: len(found.items)], found.items)
    assert (wide.items[len(found.items) :] == -1).all()
    assert not wide.rows[len(found.rows) :].any()
    assert not wide.own_begin[len(start) :].any(), "rows of padding read for themselves"


def test_few_new_tokens_behind_a_long_prefix_are_grouped():
    found = plan(group_of(256, 2048), prompts_of([2048] * 256, [8] * 256))
    assert found is not None
    assert (found.own_begin == 2048).all()
    # 256 rows would read it, 64 tiles do.
    assert found.saved_positions == (256 - 64) * 2048


@pytest.mark.parametrize(("rows", "shared", "new"), [(128, 2048, 64), (256, 16, 8), (2, 16, 1), (8, 8192, 200)])
def test_rows_that_fill_their_tiles_or_share_little_read_for_themselves(rows, shared, new):
    assert plan(group_of(rows, shared), prompts_of([shared] * rows, [new] * rows), rows=FULL) is None


def test_few_rows_are_cut_so_that_they_fill_the_machine():
    found = plan(group_of(4, 16384), prompts_of([16384] * 4, [16] * 4))
    assert len(found.items) > 20


def test_layers_that_see_nothing_of_it_count_against_it():
    groups, prompts = group_of(256, 2048), prompts_of([2048] * 256, [8] * 256)
    assert plan(groups, prompts, share_of_layers=0.5) is not None
    assert plan(groups, prompts, share_of_layers=0.1) is None
    assert plan(groups, prompts, share_of_layers=0.0) is None


def test_what_was_not_measured_has_to_save_more(monkeypatch):
    groups, prompts = group_of(256, 2048), prompts_of([2048] * 256, [8] * 256)
    kernel = PromptKernel(Kernel(CONFIG, 32, 49, 1), SIXTEEN, SIXTEEN, is_measured=False)
    assert plan_prompts(groups, prompts, kernel) is not None
    monkeypatch.setattr(module, "MOST_ELSEWHERE", 0.4)
    assert plan_prompts(groups, prompts, kernel) is None
    assert plan_prompts(groups, prompts, kernel._replace(is_measured=True)) is not None


def test_rows_beside_a_group_are_left_alone():
    prompts = prompts_of([2048] * 256 + [900, 0], [8] * 256 + [30, 2000])
    found = plan(group_of(256, 2048), prompts)
    assert found.own_begin[-2:].tolist() == [0, 0]
    assert not found.rows[256 * 8 :, 1].any()


@pytest.fixture
def h200(monkeypatch):
    """What the planner is told of an H200."""
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(module, "shared_memory", lambda device: 227 << 10)


def planned_by(backend, rows, shared, new, longest=None):
    """Rows of a model with 16 query heads and 8 KV heads of 128; `longest`: bound of a captured step."""
    prompts = prompts_of([shared] * rows, [new] * rows)._replace(max_query_len=longest or new)
    spec = AttentionSpec(16, 8, 128, torch.bfloat16, torch.device("cpu"), 16)
    return backend.plan_prompts(group_of(rows, shared), prompts, spec, share_of_layers=1.0)


# Of steps timed on an H200: rows, shared, new; is an eager step faster packed, is a captured one?
TIMED = [(256, 2048, 8, 1, 1), (256, 2048, 24, 0, 1), (128, 2048, 64, 0, 0), (32, 2048, 64, 0, 0), (32, 2048, 16, 1, 1),
         (16, 2048, 8, 1, 1), (4, 16384, 16, 1, 1), (64, 512, 8, 1, 1), (2, 1024, 8, 1, 1), (128, 1024, 40, 0, 0),
         (256, 512, 16, 1, 1), (16, 256, 8, 0, 0), (8, 8192, 200, 0, 0)]


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize(("rows", "shared", "new", "eager", "captured"), TIMED)
def test_steps_are_packed_where_that_was_faster(rows, shared, new, eager, captured):
    for longest, faster in ((None, eager), (max(128, rows * new), captured)):
        found = planned_by(TritonBackend(), rows, shared, new, longest)
        assert (found is not None) == bool(faster), longest
        assert found is None or found.kernel.tile_rows == 32


@pytest.mark.usefixtures("h200")
def test_the_kernel_for_hopper_leaves_less_to_gain_in_the_steps_that_it_takes():
    hopper = HopperBackend(measured_only=True)
    assert planned_by(hopper, 256, 2048, 24, 6144) is None
    assert planned_by(hopper, 256, 2048, 8, 2048) is not None, "an eighth of its tiles"
    assert planned_by(hopper, 4, 16384, 16, 128) is not None, "most multiprocessors would be idle"
    assert planned_by(hopper, 128, 2048, 64) is None
    few = [planned_by(backend, 256, 2048, 8) for backend in (hopper, TritonBackend())]
    assert np.array_equal(few[0].items, few[1].items), "an eager step of few new tokens is none of its"


def test_what_prompts_share_never_reaches_the_kernel_for_hopper(monkeypatch):
    """It would read it again for every row."""
    for name in ("takes", "_hopper_kernel"):
        monkeypatch.setattr(hopper_backend, name, lambda *_: pytest.fail("asked"))
    monkeypatch.setattr(triton_backend, "paged_attention_grouped_prefill", lambda *_, out: out)
    meta = SimpleNamespace(max_query_len=200, work=PromptWork(None, None))
    out = q = torch.zeros(4, 2, 128, dtype=torch.bfloat16)
    assert HopperBackend().run(q, q, q, meta, None, out) is out
