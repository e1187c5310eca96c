"""What the child of `os.fork` has to put right: it has the memory of all threads, and only the thread that forked.

A lock that another thread held stays locked there for ever, and what that thread was in the middle of stays half done.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Forked(Protocol):
    """An object with locks, or with a state that other threads would have to bring to an end."""

    def after_fork_in_child(self) -> None:
        """No other thread exists: renew the locks, forget what the others were doing."""


_registered: weakref.WeakSet[Forked] = weakref.WeakSet()


def register(thing: Forked) -> None:
    """Have `thing.after_fork_in_child()` called in every child, as long as `thing` lives."""
    _registered.add(thing)


def renewed(lock: Any) -> Any:
    """A new lock in place of a `threading.RLock` or `Condition`, but for one that the forking thread itself holds."""
    return lock if lock._is_owned() else type(lock)()


def in_child(function: Callable[[], None]) -> Callable[[], None]:
    """Have a module's `function()` called in every child."""
    if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
        os.register_at_fork(after_in_child=function)
    return function


def before(function: Callable[[], None]) -> Callable[[], None]:
    """Have a module's `function()` called by the thread that forks, right before."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=function)
    return function


@in_child
def _renew_registered() -> None:
    for thing in list(_registered):
        thing.after_fork_in_child()
