"""The throttle that limits how often lockstep rows join steps of requests, so that these do not wait for long calls."""

from __future__ import annotations

# A step of requests alone reduces the debt (the extra time of a joined step) by this fraction of its own time.
_PAID = 0.4
_MEMORY = 0.8  # weight of earlier joined steps in the running mean of their time
_FORGOTTEN = 1.01  # growth per step of the shortest time of a step alone, so that it follows longer sequences


class LockstepThrottle:
    """Times of steps with and without joining rows, and the debt to the requests.

    A step with many rows takes longer than one with few. If every other step had lockstep rows, a single request would
    wait for them most of its time. So the extra time of a step with joining rows is paid off by steps without them.
    """

    def __init__(self) -> None:
        self._alone: float | None = None
        self._joined: float | None = None
        self._debt = 0.0

    def may_join(self) -> bool:
        """Return whether rows may join the next step of requests."""
        return self._debt <= 0.0

    def took(self, seconds: float, *, joined: bool) -> None:
        """Note the time of a step in which all requests decoded, with or without joined rows."""
        if joined:
            self._joined = seconds if self._joined is None else _MEMORY * self._joined + (1.0 - _MEMORY) * seconds
            if self._alone is not None:
                self._debt = max(0.0, self._joined - self._alone)
        else:
            self._alone = seconds if self._alone is None else min(seconds, _FORGOTTEN * self._alone)
            self._debt -= _PAID * self._alone

    def rest(self) -> None:
        """Clear the debt, since no request decodes."""
        self._debt = 0.0
