"""Who waits for an engine's lock, so that threads that step it in a loop let the others in."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType

# Seconds for which a loop lets others go first at most, and between its looks at whether they have.
_PATIENCE, _NAP = 0.01, 50e-6


class WaitingLine:
    """The threads that wait for a lock, in order of arrival.

        with line.place(after_others=True) as place, lock:
            place.leave()

    A `threading.RLock` alone goes to the loop that has just let go of it: who waits is not awake yet. The lock stays in
    a `with` of its own, which no exception can come into: a lock that was taken or released in Python would now and
    then stay locked after a Ctrl-C. A place that is left behind (Ctrl-C, a fork) costs one loop its patience, once.
    """

    def __init__(self) -> None:
        self._waiting: list[Place] = []

    def place(self, *, after_others: bool = False) -> Place:
        """A context: in line from its start to `leave` or its end. `after_others`: it starts when those before left."""
        return Place(self._waiting, after_others)


class Place:
    """A place in a `WaitingLine`."""

    def __init__(self, waiting: list[Place], after_others: bool) -> None:
        self._waiting, self._after_others = waiting, after_others

    def __enter__(self) -> Place:
        self._waiting.append(self)
        if self._after_others:
            deadline = time.monotonic() + _PATIENCE
            while (first := next(iter(self._waiting), self)) is not self:
                if time.monotonic() > deadline:
                    first.leave()
                else:
                    time.sleep(_NAP)
        return self

    def leave(self) -> None:
        """For who has the lock. Again: nothing."""
        with suppress(ValueError):  # a loop out of patience was first
            self._waiting.remove(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:  # fmt: skip
        self.leave()
