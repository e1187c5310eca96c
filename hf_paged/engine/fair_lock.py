"""A lock for which threads wait in order of arrival, so that a thread that steps the engine in a loop starves none."""

from __future__ import annotations

import time
from contextlib import suppress
from types import TracebackType

from hf_paged.process_lock import ProcessLock

# The most seconds that a loop waits for earlier turns, and the seconds between its checks of them.
_PATIENCE, _NAP = 0.01, 50e-6


class FairLock(ProcessLock):
    """A `ProcessLock` with turns for the threads that wait for it.

        with lock.turn(after_others=True) as turn, lock.rlock:
            turn.leave()

    An RLock alone is taken again by the loop that has just released it, before a waiting thread wakes up. The RLock has
    a `with` item of its own, whose C code no exception interrupts: a lock that Python code takes or releases would
    sometimes stay locked after a Ctrl-C. A turn that is never left (Ctrl-C, a fork) delays one loop once, by _PATIENCE.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Turn] = []

    def turn(self, *, after_others: bool = False) -> Turn:
        """Return a context that counts as waiting until `leave` or its end; with `after_others` it begins after
        earlier turns have left."""
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
        """End the turn, once the lock is held, so that the next turn may begin; a second call does nothing."""
        with suppress(ValueError):  # a loop whose _PATIENCE was over has removed the turn
            self._waiting.remove(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.leave()
