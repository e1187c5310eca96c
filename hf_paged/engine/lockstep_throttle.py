"""How often rows that step together may join the steps of requests, so that no short request waits for long calls."""

from __future__ import annotations

# A step of requests alone pays off this part of its time of what a joined step took longer.
_PAID = 0.4
_MEMORY = 0.8  # of what joined steps took before, in the running mean
_FORGOTTEN = 1.01  # a step alone, with nothing in its way, takes as long as the shortest of late


class LockstepThrottle:
    """Seconds of steps with and without joining rows, and what the requests are owed.

    A step with many rows takes longer than one with few. Were every other step a long one, a single request would wait
    most of its time for others' rows. So the time that joining rows cost is paid off by steps without them.
    """

    def __init__(self) -> None:
        self._alone: float | None = None
        self._joined: float | None = None
        self._debt = 0.0

    def may_join(self) -> bool:
        """May rows join the next step of requests?"""
        return self._debt <= 0.0

    def took(self, seconds: float, *, joined: bool) -> None:
        """A step of requests that decoded only, with or without rows that joined it, took so long."""
        if joined:
            self._joined = seconds if self._joined is None else _MEMORY * self._joined + (1.0 - _MEMORY) * seconds
            if self._alone is not None:
                self._debt = max(0.0, self._joined - self._alone)
        else:
            self._alone = seconds if self._alone is None else min(seconds, _FORGOTTEN * self._alone)
            self._debt -= _PAID * self._alone

    def rest(self) -> None:
        """No request is left that is owed anything."""
        self._debt = 0.0
