"""Ctrl-C between steps: ranks that take a step together cannot go on if one of them leaves it half-way.

Python runs the handler of SIGINT in the main thread, between any two of its instructions. While an engine does what
all ranks have to do alike, a handler of ours stands there, which only remembers the signal; the user's own is called
for it once nothing is half done. In other threads, and where SIGINT is ignored or left to the system, nothing is done.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Seconds after a first Ctrl-C from which on a second one is not held back: something hangs, or takes very long.
_PATIENCE = 2.0


class _Held:
    """SIGINT while it is held back; its `note` is the handler that stands in for the user's.

    Attributes:
        passes: the user's code runs, so that a signal goes to the user's handler at once.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self._since: float | None = None  # when the signal came that waits
        self.passes = False

    def note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.passes or (self._since is not None and now - self._since > _PATIENCE):
            self._deliver(frame)
        elif self._since is None:
            self._since = now

    def check(self) -> None:
        if self._since is not None:
            self._deliver(None)

    def _deliver(self, frame: FrameType | None) -> None:
        # Set first: what its KeyboardInterrupt unwinds is not interrupted a second time.
        passes, self.passes, self._since = self.passes, False, None
        self._handler(signal.SIGINT, frame)
        self.passes = passes


def _handler() -> Any:
    """Of SIGINT, where this thread is the one that it interrupts."""
    return signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None


def _held() -> _Held | None:
    owner = getattr(_handler(), "__self__", None)
    return owner if isinstance(owner, _Held) else None


@contextmanager
def held_back() -> Iterator[None]:
    """No SIGINT interrupts the body; one that came does so at its end, or in `check`."""
    handler = _handler()
    if (outer := _held()) is not None:
        passes, outer.passes = outer.passes, False
        try:
            yield
            if passes:
                outer.check()
        except KeyboardInterrupt:
            raise
        except BaseException:
            outer.passes = passes
            raise
        outer.passes = passes
    elif callable(handler):
        held = _Held(handler)
        signal.signal(signal.SIGINT, held.note)
        is_over = False
        try:
            yield
        except KeyboardInterrupt:
            is_over = True
            raise
        finally:
            signal.signal(signal.SIGINT, handler)
            if not is_over:
                held.check()
    else:
        yield


@contextmanager
def let_through() -> Iterator[None]:
    """The user's code runs in the body, where SIGINT interrupts it as ever; for the inside of `held_back`."""
    held = _held()
    if held is None:
        yield
        return
    held.check()
    held.passes = True
    try:
        yield
    finally:
        held.passes = False


def check() -> None:
    """Be interrupted here, if a signal was held back. Nothing is half done."""
    if (held := _held()) is not None:
        held.check()
