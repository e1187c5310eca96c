"""Cases of the core tier have each value of each parameter."""

from __future__ import annotations

from itertools import product

from tiers import covering

SUITE = """
import pytest

@pytest.mark.each_value
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", ["x", "y", pytest.param("z", marks=pytest.mark.slow)])
@pytest.mark.parametrize("c", [pytest.param(0, marks=pytest.mark.gpu), 0])
def test_product(a, b, c): pass

@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", ["x", "y"])
def test_others(a, b): pass

@pytest.mark.each_value
def test_alone(): pass
"""


def test_few_cases_have_all_values():
    values = {case: set(enumerate(case)) for case in product("ab", "cde", "fghi")}
    found = list(covering(values))
    assert set().union(*(values[case] for case in found)) == set().union(*values.values())
    assert len(found) == 4


def test_other_cases_become_slow(pytester):
    pytester.makepyfile(SUITE)
    pytester.makeini("[pytest]\nmarkers = slow\n gpu\n each_value\n")
    options = ["-p", "tiers", "-p", "no:randomly", "-q", "-k", "product or others or alone"]
    pytester.runpytest(*options, "-m", "not slow and not gpu").assert_outcomes(passed=2 + 4 + 1, deselected=10)
    pytester.runpytest(*options, "-m", "slow and not gpu").assert_outcomes(passed=4, deselected=13)
