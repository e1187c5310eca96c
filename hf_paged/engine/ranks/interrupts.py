"""Ctrl-C between steps: ranks that take a step together cannot go on if one of them leaves it half-way.

Python runs the handler of SIGINT in the main thread, between any two instructions. While an engine does work that all
ranks have to do alike, a handler of hf_paged replaces the user's: it only notes the signal, and the user's handler is
called when the work is complete. In other threads, and if SIGINT has no Python handler, nothing is replaced.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Seconds after a first Ctrl-C from which a second one is not held back, so that a hanging step can be interrupted.
_PATIENCE = 2.0


class _Held:
    """SIGINT while it is held back; the method `note` is the handler that replaces the user's.

    Attributes:
        passes: code of the user runs, so that a signal goes to the user's handler at once.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self._since: float | None = None  # `time.monotonic` of the signal that is held back
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
        # Set first, so that no second signal interrupts the cleanup while KeyboardInterrupt unwinds the stack.
        passes, self.passes, self._since = self.passes, False, None
        self._handler(signal.SIGINT, frame)
        self.passes = passes


def _handler() -> Any:
    """Return the handler of SIGINT in the main thread, None in other threads, which SIGINT does not interrupt."""
    return signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None


def _held() -> _Held | None:
    owner = getattr(_handler(), "__self__", None)
    return owner if isinstance(owner, _Held) else None


@contextmanager
def held_back() -> Iterator[None]:
    """Hold SIGINT back in the block; a signal that came interrupts at the block's end, or in `check`."""
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
    """Let SIGINT interrupt the block, which runs code of the user inside of `held_back`."""
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
    """Deliver a signal that was held back; for a place where no work is half done."""
    if (held := _held()) is not None:
        held.check()
