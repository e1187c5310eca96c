"""Histograms that add many values in one call."""

from __future__ import annotations

import numpy as np

# Upper bounds in seconds: for the duration of a request, and for the time between two of its tokens.
REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
                   2560.0)
FIRST_TOKEN_SECONDS = (0.001, 0.0025, *REQUEST_SECONDS)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
                 1.0, 2.5, 5.0, 10.0, 40.0, 80.0)
TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))


class Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._edges = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)  # by interval that ends at each bound; the last has no end

    def add(self, value: float) -> None:
        """Count one value."""
        self._counts[self._edges.searchsorted(value)] += 1
        self.sum += value

    def add_all(self, values: np.ndarray) -> None:
        """Count values [N]."""
        if values.size and values.min() == (most := values.max()):  # the usual case: decode rows of one step
            self._counts[self._edges.searchsorted(most)] += values.size
        else:
            self._counts += np.bincount(self._edges.searchsorted(values), minlength=len(self._counts))
        self.sum += float(values.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it) as in Prometheus; the last bound is infinity."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, self._counts.cumsum().tolist(), strict=True))
