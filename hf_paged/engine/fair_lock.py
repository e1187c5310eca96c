"""A lock for which threads wait in order of arrival, so that threads that step the engine in a loop let others in."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType

from hf_paged.process_lock import ProcessLock

# Seconds for which a loop lets others go first at most, and between its looks at whether they have.
_PATIENCE, _NAP = 0.01, 50e-6


class FairLock(ProcessLock):
    """A `ProcessLock` and the turns of the threads that wait for it.

        with lock.turn(after_others=True) as turn, lock.rlock:
            turn.leave()

    An RLock alone goes to the loop that has just released it: the threads that wait are not awake yet. It is taken in a
    `with` of its own, which no exception can come into: a lock that was taken or released in Python would now and then
    stay locked after a Ctrl-C. A turn that is left behind (Ctrl-C, a fork) costs one loop its patience, once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Turn] = []

    def turn(self, *, after_others: bool = False) -> Turn:
        """A context: waits from its start to `leave` or its end. `after_others`: starts when earlier ones have left."""
        return Turn(self._waiting, after_others)


class Turn:
    """A thread's turn in a `FairLock`."""

    def __init__(self, waiting: list[Turn], after_others: bool) -> None:
        self._waiting, self._after_others = waiting, after_others

    def __enter__(self) -> Turn:
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
        """Called once the lock is held, so that the next turn may start; a second call does nothing."""
        with suppress(ValueError):  # a loop out of patience was first
            self._waiting.remove(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.leave()
