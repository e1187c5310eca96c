"""While requests run, Python's full garbage collections leave out the objects that were there before.

The heap of torch and transformers has some 430,000 objects, which a full collection looks through in a fifth of a
second and more, while the GPU has nothing to do. `gc.freeze` puts these objects aside behind a first step. They stay
aside until a full collection begins while no engine is busy: that collection takes them back with `gc.unfreeze` first,
and looks through all of them. Objects that are made in between are never put aside, so that what a busy process leaves
out does not grow. Both calls only join lists.

`gc.unfreeze` takes back everything, whichever code froze it. So nothing is frozen where the program has frozen objects
itself, and nothing is taken back where the program has called `gc.freeze` since.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

# Seconds without a step after which an engine counts as idle: its caller may itself be garbage that is frozen.
_PATIENCE = 5.0


class FrozenHeap:
    """The heap of the process, and which engines are busy in it.

    Attributes:
        is_frozen: an engine has frozen the heap.
    """

    def __init__(self) -> None:
        self.is_frozen = False
        self._busy: set[int] = set()
        self._last_step = 0.0  # by `time.monotonic`
        self._marker: list | None = None  # made behind `gc.freeze`: it is frozen only where the program froze again
        self._may_try = True  # False: objects of others were frozen at the last look, which takes 30 ms for all
        self._lock = threading.Lock()  # for which no thread waits: garbage collections come anywhere

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
            if self._before_collection not in gc.callbacks:  # where it stays: Python walks this list by number
                gc.callbacks.append(self._before_collection)
            self._may_try = self.is_frozen or not gc.get_freeze_count()
            if self._may_try and not self.is_frozen:
                gc.collect(1)  # else young garbage would be taken for old, and wait for a full collection
                self.is_frozen = True  # first: what an interrupt leaves frozen here is taken back, too
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
    """An engine's part in the frozen heap."""

    def note(self, is_busy: bool) -> None:
        """Say whether the engine is busy now; to say the same again costs next to nothing."""
        if is_busy:
            heap.hold(id(self))
        else:
            heap.let_go(id(self))

    def __del__(self) -> None:
        if heap is not None:  # at the end of the process the module may be gone
            heap.let_go(id(self))


heap = FrozenHeap()
