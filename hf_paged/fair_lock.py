"""The lock of an engine, between threads that step it in a loop and threads that come now and then."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# Seconds for which a loop lets others in at most, and between its looks at whether it has.
_PATIENCE, _NAP = 0.01, 50e-6


class FairLock:
    """Re-entrant. A `threading.RLock` alone goes to the loop that has just let go of it: who waits is not awake yet.

    Held by a generator, not by `acquire`: an exception that comes between the lock and the body (Ctrl-C) releases it.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[object] = []  # a ticket each, in order of arrival

    @contextmanager
    def held(self, *, after_others: bool = False) -> Iterator[None]:
        """Hold the lock; `after_others`: once those have had it that waited before."""
        ticket = object()
        try:
            self._waiting.append(ticket)
            if after_others:
                deadline = time.monotonic() + _PATIENCE
                while self._waiting[0] is not ticket and time.monotonic() < deadline:
                    time.sleep(_NAP)
            with self._lock:
                self._waiting.remove(ticket)
                yield
        finally:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
