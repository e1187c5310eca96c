"""All engines of the process, for those who watch whatever runs: the engines that are there, and those to come."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from hf_paged import at_fork
from hf_paged.engine.observer import Observer

Maker = Callable[[Any], Observer]  # of an engine

_lock = threading.Lock()  # held for a moment only: never while an engine's lock is waited for
_engines: weakref.WeakSet[Any] = weakref.WeakSet()
_makers: list[Maker] = []


def register(engine: Any) -> None:
    """An engine was made: whoever watches all of them watches it."""
    with _lock:
        _engines.add(engine)
        makers = list(_makers)
    for make in makers:
        observer = make(engine)
        engine.watch(observer)
        if not _is_watching(make):  # it has ended meanwhile, perhaps without having seen this engine
            engine.unwatch(observer)


def watch_all(make: Maker) -> None:
    """Have every engine watched by an observer that `make(engine)` returns, from now until `unwatch_all`."""
    with _lock:
        _makers.append(make)
        engines = list(_engines)
    for engine in engines:
        engine.watch(make(engine))


def unwatch_all(make: Maker) -> None:
    """Make no more of these observers; those that were made are unwatched by who made them."""
    with _lock:
        _makers[:] = [one for one in _makers if one is not make]


def _is_watching(make: Maker) -> bool:
    with _lock:
        return any(one is make for one in _makers)


@at_fork.in_child
def _renew_in_child() -> None:
    global _lock
    _lock = threading.Lock()
    _makers.clear()
