"""Figures of a list of measurements, and which points of a sweep no other point beats."""

from __future__ import annotations

from collections.abc import Sequence

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean and percentiles, between two values in proportion; none of nothing."""
    if not values:
        return {}
    ordered = sorted(values)
    return {"mean": sum(ordered) / len(ordered), **{name: _at(ordered, share) for name, share in SHARES.items()}}


def _at(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Of (cost, gain) points: is there no other with at most the cost and at least the gain, and one of them better?"""
    return [not any(c <= cost and g >= gain and (c, g) != (cost, gain) for c, g in points) for cost, gain in points]
