"""Masks of a step's rows while other work goes on: whose failure it is, and who is gone meanwhile."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hf_paged.engine.features.grammars import PendingMasks, go_ahead
from hf_paged.engine.structured.mask_maker import MaskMaker


class Follower:
    """A matcher that allows token 1, or raises."""

    is_over = False

    def __init__(self, *, raises=False, accepts=True):
        self.raises, self.accepts, self.taken = raises, accepts, []

    def accept(self, token):
        if self.raises:
            raise ValueError("no")
        self.taken.append(token)
        return self.accepts

    def fill(self, words):
        if self.raises:
            raise RuntimeError("no")
        words.fill_(2)


def requests_of(matchers):
    return [None if matcher is None else SimpleNamespace(matcher=matcher, open_matcher=matcher, grammar=matcher,
                                                         speculative_accept=None) for matcher in matchers]


def plan_of(samples):
    return SimpleNamespace(samples=np.array(samples))


@pytest.mark.parametrize("beside", [False, True])
def test_a_failing_matcher_ends_its_request_unless_that_is_gone(beside):
    requests = requests_of([Follower(), Follower(raises=True), None, Follower(raises=True), Follower()])
    failed = []

    def attempt(request, action, *args):
        try:
            return action(*args)
        except RuntimeError:
            failed.append(request)

    plan, maker = plan_of([True, True, False, True, True]), MaskMaker(40, torch.device("cpu"))
    pending = PendingMasks(plan, maker, lambda _, row: requests[row], attempt, beside=beside)
    gone, requests[3] = requests[3], None
    masks = pending.take()
    assert failed == [requests[1]] and gone not in failed
    assert masks.lines.tolist() == [0, -1, -1, 1]
    assert masks.words.tolist() == [[2, 2], [2, 2]]


def test_no_row_has_a_mask_where_all_that_had_one_failed():
    requests = requests_of([Follower(raises=True), None])

    def attempt(request, action, *args):
        with suppress(RuntimeError):
            return action(*args)

    maker = MaskMaker(40, torch.device("cpu"))
    assert PendingMasks(plan_of([True, True]), maker, lambda _, row: requests[row], attempt, beside=True).take() is None


def test_matchers_take_valid_tokens_of_rows_that_sample_and_keep_what_they_said():
    matchers = [Follower(), Follower(accepts=False), None, Follower(raises=True), Follower(), Follower()]
    requests = requests_of(matchers)
    go_ahead(plan_of([True, True, True, True, False, True]), np.array([5, 6, 7, 8, 9, -1]),
             lambda _, row: requests[row])
    assert [None if matcher is None else matcher.taken for matcher in matchers] == [[5], [6], None, [], [], []]
    assert [requests[row].speculative_accept for row in (0, 1, 4, 5)] == [
        True, False, None, None]
    assert isinstance(requests[3].speculative_accept, ValueError)
