"""While requests run, Python's full garbage collections leave out what was there before them.

The heap of torch and transformers has some 430,000 objects, which a full collection looks through in a fifth of a
second and more. The GPU has nothing to do meanwhile. `gc.freeze` puts all of them aside when the first engine of the
process has launched a step, and `gc.unfreeze` takes them back when the last one is idle; both only join lists. What is
made in between is collected as ever.
"""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

from hf_paged import at_fork

# Seconds without a step after which a full collection takes everything back: who was to go on may itself be garbage.
_PATIENCE = 5.0
# Objects that are made, net of those that die at once, after which Python has a full collection over everything again.
_MOST_UNSEEN = 1_000_000
# To count what somebody froze takes tens of milliseconds: so many times as long passes before it is counted again.
_REST = 1000


class FrozenHeap:
    """The heap of the process, and who is busy in it.

    Nobody ever waits for the lock: a garbage collection may come anywhere and run code that comes back here, or waits
    for an engine whose thread would wait for this one. Who finds it taken leaves, and who has it looks again.

    Attributes:
        epoch: goes up where all holds end at once.
        last_use: when a hold last said that it is busy, by `time.monotonic`.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.last_use = 0.0
        self.is_frozen = False  # by us
        self._holders: set[int] = set()
        self._is_busy = False
        self._lock = threading.Lock()
        self._ask_again = 0.0  # whether somebody else's objects are still frozen
        self._full_collections = 0  # when the heap was last taken back, or was not frozen
        self._seen = 0  # `_num_made()` when a full collection last went over everything
        self._num_ours = 0  # collections of young objects that were ours, and these objects
        self._num_young = 0
        at_fork.register(self)

    def hold(self, holder: int) -> None:
        """This one is busy from now on."""
        self._holders.add(holder)
        self._settle()

    def let_go(self, holder: int) -> None:
        """This one is idle, whether it was busy or not."""
        self._holders.discard(holder)
        self._settle()

    def end_all(self) -> None:
        """Take everything back; who goes on says so anew."""
        self._holders.clear()
        self.epoch += 1
        self._settle()

    def after_fork_in_child(self) -> None:
        """Who was busy is so in the parent; a thread that goes on here says so at its next step."""
        self._lock = threading.Lock()
        self.end_all()

    def may_freeze(self) -> bool:
        """Does Python collect garbage at all, has nobody frozen anything, and was all of it looked through lately?"""
        if not gc.isenabled() or not gc.get_threshold()[0]:
            return False
        started = time.monotonic()
        if started < self._ask_again:
            return False
        if gc.get_freeze_count():
            now = time.monotonic()
            self._ask_again = now + _REST * (now - started)
            return False
        full_collections, made = _full_collections(), self._num_made()
        if full_collections != self._full_collections:
            self._full_collections, self._seen = full_collections, made
        return made - self._seen < _MOST_UNSEEN

    def _num_made(self) -> int:
        """About how many objects were made in this process, net of those that died before Python looked at them."""
        num_collections = sum(one["collections"] for one in gc.get_stats()) - self._num_ours
        return gc.get_threshold()[0] * num_collections + self._num_young

    def _settle(self) -> None:
        while bool(self._holders) is not self._is_busy and self._lock.acquire(blocking=False):
            try:
                if self._holders:
                    self._is_busy = True  # first: after a Ctrl-C in here the end of the phase still takes all back
                    self._freeze()
                else:
                    self._thaw()
                    self._is_busy = False
            finally:
                self._lock.release()

    def _freeze(self) -> None:
        if self.may_freeze():
            self._num_ours, self._num_young = self._num_ours + 1, self._num_young + gc.get_count()[0]
            gc.collect(1)  # else young garbage would be taken for old, and wait for a full collection
            if self._before_collection not in gc.callbacks:  # where it stays: Python walks this list by number
                gc.callbacks.append(self._before_collection)
            self.is_frozen = True
            gc.freeze()

    def _thaw(self) -> None:
        if self.is_frozen:
            gc.unfreeze()
            self.is_frozen = False
            self._full_collections = _full_collections()

    def _before_collection(self, phase: str, info: dict[str, Any]) -> None:
        """An abandoned stream may lie in a cycle that is frozen, and keep its engine busy until it is collected."""
        is_full = phase == "start" and info["generation"] == 2
        if self.is_frozen and is_full and time.monotonic() - self.last_use > _PATIENCE:
            self.end_all()


class HeapHold:
    """An engine's part in it. Not thread-safe: the engine holds its lock around every call."""

    def __init__(self) -> None:
        self._epoch = -1  # of `heap` when this became busy

    def note(self, is_busy: bool) -> None:
        """Say whether the engine is busy now; to say the same again costs next to nothing."""
        if is_busy:
            heap.last_use = time.monotonic()
        if is_busy is (self._epoch == heap.epoch):
            return
        if is_busy:
            self._epoch = heap.epoch
            heap.hold(id(self))
        else:
            heap.let_go(id(self))
            self._epoch = -1  # last: after a Ctrl-C before it, it is said again

    def __del__(self) -> None:
        if self._epoch != -1 and heap is not None:  # the engine is gone, whatever ran in it; so may be this module
            self.note(False)


def _full_collections() -> int:
    return gc.get_stats()[2]["collections"]


heap = FrozenHeap()
