"""Cases made by `every_pair` leave no two values apart."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairs import every_pair, slow_but


def test_every_two_values_meet():
    lists = [[0, 1], ["a", "b", "c"], [True, False], [3, 4, 5, 6]]
    cases = [case.values for case in every_pair(*lists)]
    for (a, first), (b, second) in combinations(enumerate(lists), 2):
        assert {(case[a], case[b]) for case in cases} == set(product(first, second))
    assert 12 <= len(cases) < 20  # of 48


def test_params_keep_their_marks_and_their_arguments():
    cases = every_pair([pytest.param(1, 2, marks=pytest.mark.gpu), pytest.param(3, 4)], [5])
    assert [case.values for case in cases] == [(1, 2, 5), (3, 4, 5)]
    assert [[mark.name for mark in case.marks] for case in cases] == [["gpu"], []]


def test_values_that_are_not_core_are_slow():
    first, *others = slow_but(["a", "b", "c"], "a")
    assert first == "a" and [other.values for other in others] == [("b",), ("c",)]
    assert {mark.name for other in others for mark in other.marks} == {"slow"}


def test_a_core_value_that_is_none_of_the_values():
    with pytest.raises(ValueError, match="core=\\['d'\\]: expected some of \\['a'\\]"):
        slow_but(["a"], "d")
