"""Requests that end with ``finish_reason="timeout"`` after their deadline, also while they wait."""

from __future__ import annotations

import math
import time

from hf_paged.engine.features import StepFeature
from hf_paged.engine.session import Request


class Deadlines(StepFeature):
    """The time limits of requests.

    Args:
        is_own_clock: this process ends late requests by its own clock. Ranks of a sharded model end requests together,
            by the clock of rank 0 (`CommandQueue`).
    """

    def __init__(self, is_own_clock: bool) -> None:
        super().__init__()
        self._is_own_clock = is_own_clock
        self._next = math.inf  # not later than the first deadline, by `time.monotonic`

    def uses(self, request: Request) -> bool:
        return request.spec.timeout is not None

    def admit(self, request: Request) -> None:
        assert request.spec.timeout is not None
        request.deadline = request.queued + request.spec.timeout
        self._next = min(self._next, request.deadline)

    def due(self) -> list[Request]:
        if not self._is_own_clock or (now := time.monotonic()) < self._next:
            return []
        late, deadlines = [], [math.inf]
        for request in self.requests.values():
            assert request.deadline is not None
            if request.deadline <= now:
                late.append(request)
            else:
                deadlines.append(request.deadline)
        self._next = min(deadlines)
        return late
