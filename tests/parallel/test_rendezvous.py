"""Ranks meet, or learn within the timeout that they do not: here as threads over one store."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import together

from hf_paged.errors import RankAloneError
from hf_paged.parallel.rendezvous import Rendezvous

FLAGS = ("changed", "stock")


def series(size: int, store: Any = None) -> list[Rendezvous]:
    store = dist.HashStore() if store is None else store
    return [Rendezvous(store, "model", rank, range(size), FLAGS) for rank in range(size)]


@pytest.mark.parametrize("make", [dist.HashStore, lambda: dist.TCPStore("127.0.0.1", 0, 1, True)],
                         ids=["hash", "tcp"])
def test_all_learn_what_one_brings_and_the_store_is_left_small(make):
    store = make()
    meetings = series(3, store)
    before = store.num_keys()
    for turn in range(4):
        brought = [{FLAGS[turn % 2]} if rank == turn % 3 else set() for rank in range(3)]
        found = together(*(lambda m=m, b=b: m.meet(b, 30, "T") for m, b in zip(meetings, brought, strict=True)))
        assert found == [frozenset({FLAGS[turn % 2]})] * 3
        sizes = store.num_keys() - before
    assert together(*(lambda m=m: m.meet((), 30, "T") for m in meetings)) == [frozenset()] * 3
    assert store.num_keys() - before <= sizes + len(FLAGS)


def test_one_that_waits_in_vain_names_the_others_and_the_setting():
    first, _, third = series(3)
    started = time.monotonic()
    found = together(lambda: first.meet((), 0.3, "PagedConfig.x"), lambda: third.meet((), 20, "PagedConfig.x"))
    assert time.monotonic() - started < 10  # the third does not wait for its own end
    for rank, error in zip((0, 2), found, strict=True):
        assert isinstance(error, RankAloneError)
        assert f"rank {rank} would generate alone: rank 1 did not come within 0.3 seconds (PagedConfig.x)" in str(error)


def test_after_one_left_all_meet_again_whatever_they_missed():
    meetings = series(2)
    for _ in range(3):
        with pytest.raises(RankAloneError):
            meetings[0].meet((), 0.05, "T")
    assert together(*(lambda m=m: m.meet({"stock"}, 30, "T") for m in meetings)) == [{"stock"}] * 2
    with pytest.raises(RankAloneError):
        meetings[1].meet((), 0.05, "T")
    assert together(*(lambda m=m: m.meet((), 30, "T") for m in meetings)) == [frozenset()] * 2


def test_a_refusal_reaches_those_who_wait_and_those_who_come_later():
    meetings = series(3)
    waiting = lambda: meetings[0].meet((), 30, "T")  # noqa: E731
    later = lambda: time.sleep(0.3) or meetings[2].meet((), 30, "T")  # noqa: E731
    found = together(waiting, lambda: meetings[1].refuse(MemoryError("none left")), later)
    assert found[1] is None
    for error in (found[0], found[2]):
        assert isinstance(error, RankAloneError) and "rank 1 raised MemoryError: none left" in str(error)
    assert together(*(lambda m=m: m.meet((), 30, "T") for m in meetings)) == [frozenset()] * 3


def test_an_interrupt_while_waiting_is_told_to_the_others(monkeypatch):
    first, second = series(2)

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(time, "sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            first.meet((), 30, "T")
    found = together(lambda: first.meet((), 30, "T"), lambda: second.meet((), 30, "T"))
    assert found == [frozenset()] * 2


def test_two_models_do_not_meet_each_other():
    store = dist.HashStore()
    one, other = Rendezvous(store, "a", 0, [0, 1], FLAGS), Rendezvous(store, "b", 1, [0, 1], FLAGS)
    found = together(lambda: one.meet((), 0.2, "T"), lambda: other.meet((), 0.2, "T"))
    assert all(isinstance(error, RankAloneError) for error in found)


PLANS = st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.01, 0.06]), st.booleans()), max_size=4)


@settings(max_examples=15)
@given(st.lists(PLANS, min_size=2, max_size=3))
def test_whatever_the_ranks_do_all_come_to_a_meeting_or_nobody(plans):
    """Each rank naps, then meets for a short while or refuses; who ended in which meeting as "all came"?"""
    meetings, came = series(len(plans)), defaultdict(set)

    def live(rank: int) -> None:
        for nap, refuses in plans[rank]:
            time.sleep(nap)
            if refuses:
                meetings[rank].refuse(ValueError("no"))
                continue
            try:
                meetings[rank].meet((), 0.03, "T")
            except RankAloneError:
                continue
            came[meetings[rank].num_meetings - 1].add(rank)

    assert together(*(lambda r=r: live(r) for r in range(len(plans)))) == [None] * len(plans)
    assert all(ranks == set(range(len(plans))) for ranks in came.values()), came
