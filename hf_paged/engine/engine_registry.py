"""Registry of the engines of the process, for observers of all engines, present and future."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from hf_paged.engine import mask_maker
from hf_paged.engine.form_compilers import COMPILERS
from hf_paged.engine.observer import Observer
from hf_paged.models import paged_calls
from hf_paged.process_lock import ProcessLock

Maker = Callable[[Any], Observer]  # makes the observer of an engine

_lock = ProcessLock()  # held for a moment only: never while an engine's lock is waited for
_engines: weakref.WeakSet[Any] = weakref.WeakSet()
_makers: list[Maker] = []


def register(engine: Any) -> None:
    """Register a new engine, and add an observer of each maker to it."""
    with _lock.rlock:
        _engines.add(engine)
        makers = list(_makers)
    for make in makers:
        observer = make(engine)
        engine.watch(observer)
        if not _is_watching(make):  # `unwatch_all` came in between, and its caller may not know this observer
            engine.unwatch(observer)


def watch_all(make: Maker) -> None:
    """Have every engine watched by an observer that `make(engine)` returns, from now until `unwatch_all`."""
    with _lock.rlock:
        _makers.append(make)
        engines = list(_engines)
    for engine in engines:
        engine.watch(make(engine))


def unwatch_all(make: Maker) -> None:
    """Make no more observers by ``make``; its caller removes the observers that were made from their engines."""
    with _lock.rlock:
        _makers[:] = [one for one in _makers if one is not make]


def _is_watching(make: Maker) -> bool:
    with _lock.rlock:
        return any(one is make for one in _makers)


def _start_over_in_child() -> None:
    """Drop threads, processes and requests of the parent, in all engines and in the state that engines share."""
    _makers.clear()
    paged_calls.forget_other_threads()
    COMPILERS.leave_to_parent()
    mask_maker.forget_threads()
    for engine in list(_engines):
        engine.start_over_in_child()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(before=mask_maker.wait_for_all, after_in_child=_start_over_in_child)
