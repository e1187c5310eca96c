"""What the engines of a process share: their registry, for observers of all engines, and their hold on Python's heap.

The heap of torch and transformers has some 430,000 objects, which a full collection traverses in a fifth of a second
and more, while the GPU has nothing to do. `gc.freeze` exempts these objects behind the first step of a busy engine, and
`gc.unfreeze` takes them back when the last engine is idle. Both only join lists. Objects that are made in between are
not frozen, so that the frozen heap of a process that is always busy does not grow.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from hf_paged.engine.observer import Observer
from hf_paged.engine.structured import mask_maker
from hf_paged.engine.structured.form_compilers import COMPILERS
from hf_paged.models import paged_calls
from hf_paged.process_lock import ProcessLock

# Python 3.12 starts with some hundred frozen objects of its own; the heap of the smallest program has thousands.
_FROZEN_BY_PYTHON = 1_000
_FORK_PATIENCE = 1.0  # the most seconds that a fork waits for the steps of other threads
Maker = Callable[[Any], Observer]  # makes the observer of an engine

_lock = ProcessLock()  # held for a moment only: never while an engine's lock is waited for
_engines: weakref.WeakSet[Any] = weakref.WeakSet()
_makers: list[Maker] = []
_busy: set[int] = set()  # ids of the holds of busy engines
_is_frozen = False
_fork = threading.local()  # locks: what `_wait_for_steps` took for a fork of this thread


def register(engine: Any) -> None:
    """Register a new engine, and add an observer of each maker to it."""
    with _lock.rlock:
        _engines.add(engine)
        makers = list(_makers)
    for make in makers:
        observer = make(engine)
        engine.watch(observer)
        with _lock.rlock:
            is_watching = any(one is make for one in _makers)
        if not is_watching:  # `unwatch_all` came in between, and its caller may not know this observer
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


@functools.cache
def is_left_to_program() -> bool:
    """Return whether the program had frozen its heap before the first step: `gc.unfreeze` would thaw it as well."""
    return gc.get_freeze_count() > _FROZEN_BY_PYTHON


class HeapHold:
    """One engine's hold on the frozen heap."""

    def __init__(self) -> None:
        self._is_busy = False

    def note(self, is_busy: bool) -> None:
        """Note whether the engine is busy now; cheap if nothing has changed."""
        global _is_frozen
        if is_busy == self._is_busy:
            return
        self._is_busy = is_busy
        (_busy.add if is_busy else _busy.discard)(id(self))
        if is_busy and not _is_frozen and gc.isenabled() and gc.get_threshold()[0] and not is_left_to_program():
            gc.collect(1)  # else young garbage would be frozen, and freed only by a later full collection
            _is_frozen = True  # first, so that the heap is thawed also if an interrupt comes behind `freeze`
            gc.freeze()
        elif _is_frozen and not _busy:
            gc.unfreeze()
            _is_frozen = False

    def __del__(self) -> None:
        if _busy is not None:  # globals may be None when the interpreter shuts down
            self.note(False)


def _wait_for_steps() -> None:
    """Let no other thread be inside of a step at a fork, nor change a matcher: the child would keep it half done.

    Libraries have locks of their own. MKL's, around its buffers, would stay taken in the child, whose first product
    would wait for ever. A step that takes longer than ``_FORK_PATIENCE`` is not waited for.
    """
    _fork.locks, deadline = [], time.monotonic() + _FORK_PATIENCE
    _lock.take(_FORK_PATIENCE)
    engines = sorted(_engines, key=id)  # two threads that fork take the locks in the same order
    if _lock.is_held_here():
        _lock.rlock.release()
    for engine in engines:
        lock = engine.lock_for_fork
        if lock is not None and not lock.is_held_here():  # else this thread releases it itself
            _fork.locks.append(lock)
            lock.take(max(0.0, deadline - time.monotonic()))
    mask_maker.wait_for_all()


def _let_steps_go_on() -> None:
    for lock in _fork.locks:
        if lock.is_held_here():
            lock.rlock.release()
    _fork.locks = []


def _start_over_in_child() -> None:
    """Drop threads, processes and requests of the parent, in all engines and in the state that engines share."""
    try:
        _makers.clear()
        paged_calls.forget_other_threads()
        COMPILERS.leave_to_parent()
        mask_maker.forget_threads()
        for engine in list(_engines):
            engine.start_over_in_child()
    finally:
        _let_steps_go_on()


if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(before=_wait_for_steps, after_in_parent=_let_steps_go_on, after_in_child=_start_over_in_child)
