"""Freezing of Python's heap, so that full garbage collections skip older objects while requests run.

The heap of torch and transformers has some 430,000 objects, which a full collection traverses in a fifth of a second
and more, while the GPU has nothing to do. `gc.freeze` exempts these objects behind a first step. They stay frozen until
a full collection begins while no engine is busy: that collection calls `gc.unfreeze` first, and traverses all of them.
Objects that are made in between are never frozen, so that the frozen heap of a busy process does not grow. Both calls
only join lists.

`gc.unfreeze` thaws everything, whichever code froze it. So the heap is not frozen if the program has frozen objects
itself, and not thawed if the program has called `gc.freeze` since.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

# Seconds without a step after which an engine counts as idle: its caller may be frozen garbage that never ends its use.
_PATIENCE = 5.0


class FrozenHeap:
    """The frozen heap of the process, and the busy engines.

    Attributes:
        is_frozen: an engine has frozen the heap.
    """

    def __init__(self) -> None:
        self.is_frozen = False
        self._busy: set[int] = set()
        self._last_step = 0.0  # by `time.monotonic`
        self._marker: list | None = None  # made behind `gc.freeze`: it is frozen only if the program froze again
        self._may_try = True  # False if the program had frozen objects at the last check, which takes 30 ms
        self._lock = threading.Lock()  # never waited for: a collection inside of its holder would deadlock

    def hold(self, engine: int) -> None:
        """Note that an engine is busy, in each of its steps."""
        self._last_step = time.monotonic()
        self._busy.add(engine)
        if not self.is_frozen and self._may_try:
            self._freeze()

    def let_go(self, engine: int) -> None:
        """Note that an engine is idle, whether it was busy or not."""
        self._busy.discard(engine)

    def _freeze(self) -> None:
        if not gc.isenabled() or not gc.get_threshold()[0] or not self._lock.acquire(blocking=False):
            return
        try:
            if self._before_collection not in gc.callbacks:  # never removed: Python iterates this list by index
                gc.callbacks.append(self._before_collection)
            self._may_try = self.is_frozen or not gc.get_freeze_count()
            if self._may_try and not self.is_frozen:
                gc.collect(1)  # else young garbage would be frozen, and freed only by a later full collection
                self.is_frozen = True  # first, so that the heap is thawed also if an interrupt comes behind `freeze`
                gc.freeze()
                self._marker = []
        finally:
            self._lock.release()

    def _before_collection(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start" and info["generation"] == 2:
            self._may_try = True
            if self.is_frozen and (not self._busy or time.monotonic() - self._last_step > _PATIENCE):
                self._thaw()

    def _thaw(self) -> None:
        marker, self._marker = self._marker, None
        if marker is None or any(one is marker for young in range(3) for one in gc.get_objects(young)):
            gc.unfreeze()
        self.is_frozen = False


class HeapHold:
    """One engine's hold on the frozen heap."""

    def note(self, is_busy: bool) -> None:
        """Note whether the engine is busy now; cheap if nothing has changed."""
        if is_busy:
            heap.hold(id(self))
        else:
            heap.let_go(id(self))

    def __del__(self) -> None:
        if heap is not None:  # globals may be None when the interpreter shuts down
            heap.let_go(id(self))


heap = FrozenHeap()
