"""Locks and thread caches that are renewed in the child of a fork.

The child of a fork has its parent's memory, but of its threads only the one that forked. A plain lock that another
thread held at the moment of the fork would stay locked in the child for ever.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import _lru_cache_wrapper, lru_cache
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_all: weakref.WeakSet[ProcessLock | ProcessCondition] = weakref.WeakSet()


class ProcessLock:
    """A re-entrant lock, used as ``with one.rlock:``, which is replaced in the child of a fork.

    A lock that the forking thread itself holds is not replaced: that thread releases it in the child, too.
    """

    def __init__(self) -> None:
        self.rlock = threading.RLock()
        _all.add(self)

    def is_held_here(self) -> bool:
        return self.rlock._is_owned()  # type: ignore[attr-defined]  # which threading.Condition asks, too

    def take(self, seconds: float) -> None:
        """Acquire the lock if it becomes free within ``seconds``; `is_held_here` tells."""
        self.rlock.acquire(timeout=seconds)

    def renew(self) -> None:
        """Replace the lock, which a thread of the parent may hold, unless this thread holds it."""
        if not self.is_held_here():
            self.rlock = threading.RLock()


class ProcessCondition:
    """A `threading.Condition`, used as ``with one.condition:``, which is replaced in the child of a fork."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        _all.add(self)

    def renew(self) -> None:
        """Replace the condition, as `ProcessLock.renew` does."""
        if not self.condition._is_owned():  # type: ignore[attr-defined]
            self.condition = threading.Condition()


def once_a_process(function: Callable[P, T]) -> _lru_cache_wrapper[T]:
    """Wrap a function that starts a thread in an `lru_cache` that is cleared in the child of a fork, which lacks it."""
    cached = lru_cache(maxsize=64)(function)
    _in_child(cached.cache_clear)
    return cached


def _in_child(function: Callable[[], None]) -> None:
    if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
        os.register_at_fork(after_in_child=function)


@_in_child
def _renew_all() -> None:
    for one in list(_all):
        one.renew()
