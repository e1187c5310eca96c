"""Percentiles and the points that no other beats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_paged.cli.figures import pareto, percentiles

numbers = st.floats(0, 100, allow_nan=False)


@given(st.lists(numbers, min_size=1, max_size=30))
def test_percentiles_are_numpys(values):
    found = percentiles(values)
    assert found["mean"] == pytest.approx(np.mean(values))
    for name, share in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert found[name] == pytest.approx(np.percentile(values, share))


def test_nothing_measured_has_no_percentiles():
    assert percentiles([]) == {}


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=12))
def test_the_best_points_beat_all_others_and_none_of_themselves(points):
    marks = pareto(points)
    best = {point for point, mark in zip(points, marks, strict=True) if mark}
    for cost, gain in points:
        beaten_by = {(c, g) for c, g in best if c <= cost and g >= gain and (c, g) != (cost, gain)}
        assert ((cost, gain) in best) == (not beaten_by)
    assert (min(points)[0] == min(c for c, _ in best)) and max(g for _, g in points) == max(g for _, g in best)
