"""Pace: rows that step together cost requests a bounded part of their time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged.engine.features.lockstep import LockstepThrottle


@given(st.floats(1e-4, 0.1), st.floats(1.0, 20.0), st.integers(1, 400))
def test_requests_take_at_most_half_as_long_again_beside_any_number_of_rows(alone, factor, num_steps):
    """Rows join whenever they may; what the last joined step cost is not paid off yet."""
    pace, taken = LockstepThrottle(), 0.0
    pace.took(alone, joined=False)
    for _ in range(num_steps):
        joins = pace.may_join()
        seconds = alone * (factor if joins else 1.0)
        pace.took(seconds, joined=joins)
        taken += seconds
    assert taken <= 1.5 * num_steps * alone + (factor - 1.0) * alone


def test_rows_that_cost_nothing_join_every_step():
    pace = LockstepThrottle()
    for _ in range(100):
        assert pace.may_join()
        pace.took(0.01, joined=True)


@given(st.floats(1.01, 20.0))
def test_rows_join_again_and_again(factor):
    pace, joined = LockstepThrottle(), 0
    pace.took(0.01, joined=False)
    for _ in range(2000):
        joins = pace.may_join()
        joined += joins
        pace.took(0.01 * (factor if joins else 1.0), joined=joins)
    assert joined >= 2000 / (1.0 + (factor - 1.0) / 0.4 + 1.0) - 1.0


def test_nothing_is_owed_once_no_request_is_left():
    pace = LockstepThrottle()
    pace.took(0.01, joined=False)
    pace.took(0.10, joined=True)
    assert not pace.may_join()
    pace.rest()
    assert pace.may_join()


def test_one_slow_step_does_not_count_as_the_time_of_a_step_alone():
    """Else rows would seem to cost nothing after it."""
    pace = LockstepThrottle()
    pace.took(0.01, joined=False)
    pace.took(5.0, joined=False)
    pace.took(0.02, joined=True)
    assert not pace.may_join()


@pytest.mark.parametrize("alone", [None, 0.01])
def test_the_first_joined_step_is_let_in(alone):
    pace = LockstepThrottle()
    if alone is not None:
        pace.took(alone, joined=False)
    assert pace.may_join()
