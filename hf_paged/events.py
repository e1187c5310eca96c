"""What comes to the engine from outside, and how all ranks of a sharded model take it in after the same step.

Every rank runs the same scheduler on the same requests, so that nothing need be sent while they run. Rank 0 keeps what
comes from outside in a queue. While nothing runs, the other ranks wait for it; otherwise rank 0 says so in the next
step that it launches (`ShardedSampling.said`), every rank hears it at the commit of that step, and there they meet.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from hf_paged.errors import EngineClosedError
from hf_paged.integration.parallel.group import ParallelGroup
from hf_paged.loop import StepLoop
from hf_paged.session import Request
from hf_paged.settings import RequestSettings
from hf_paged.stopping import StopRule

LOST = (
    "this engine's ranks lost each other (an interrupt, an error or a dead worker): expected a new PagedGenerator"
)


@dataclass(frozen=True)
class Add:
    """A checked request."""

    request_id: str
    prompt: list[int]
    settings: RequestSettings
    seed: int
    priority: int
    stop: StopRule | None


@dataclass(frozen=True)
class End:
    """Requests that end now, those among them that are unfinished."""

    request_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Build:
    """The KV pool is wanted."""


@dataclass(frozen=True)
class ResetCache:
    """Forget cached prefixes."""


@dataclass(frozen=True)
class Release:
    """Give the KV pool back."""


@dataclass(frozen=True)
class Stop:
    """Rank 0 ends its engine: the ranks that follow it are done."""


Event = Add | End | Build | ResetCache | Release | Stop


class Events:
    """Steps a loop and has events carried out, on every rank alike. With one rank `now` is at once, `soon` not used.

    Not thread-safe: the engine holds its lock around every call.

    Args:
        carry_out: what an event does to this rank's engine.

    Attributes:
        around: entered for everything that waits for other ranks.
        on_break: called when an exception left a step that other ranks may have finished: they cannot go on together.
        busy_thread: steps or meets other ranks right now: an event from inside would mix two broadcasts.
        expected: requests of this rank's own callers that no event has brought yet.
        over: why this rank cannot go on with the others, if so.
    """

    def __init__(self, group: ParallelGroup, loop: StepLoop, carry_out: Callable[[Event], Any]) -> None:
        self.group = group
        self.on_break: Callable[[], None] = lambda: None
        self.around: Callable[[], AbstractContextManager] = nullcontext
        self.over: str | None = None
        self.busy_thread: int | None = None
        self._loop = loop
        self._carry_out = weakref.WeakMethod(carry_out)  # no cycle with the engine
        self.expected: dict[str, Request] = {}
        self._queue: list[Event] = []
        self._deadlines: dict[str, float] = {}

    def soon(self, event: Event) -> None:
        """Carry an event of rank 0 out before the next step, or after one that is launched from now on."""
        if self.group.rank == 0:
            self._queue.append(event)

    def now(self, event: Event) -> Any:
        """Carry an event out before this returns, if need be by running steps; returns what it gives.

        Ranks > 0 that run the same script as rank 0 wait for rank 0's event of the same kind.
        """
        if not self.group.is_parallel:
            return self._take_in(event)
        if self.group.rank == 0:
            self._queue.append(event)
        results: list[Any] = []
        while not results:
            carried_out = self.follow()
            results = [result for done, result in carried_out if type(done) is type(event)]
        return results[-1]

    def end_at(self, request_id: str, deadline: float) -> None:
        """End a request of this rank with "length" once `time.time` has passed `deadline` and it has a token."""
        self._deadlines[request_id] = deadline

    def step(self, *, look_at_model: bool = False) -> list[tuple[Event, Any]]:
        """What waits, if nothing runs; one step; and what its ranks have to say to each other after it."""
        if not self.group.is_parallel:
            self._loop.step(look_at_model=look_at_model)
            return []
        carried_out: list[tuple[Event, Any]] = []
        with self._guarded():
            # Ranks > 0 that run the same script as rank 0 added what it added.
            if self._loop.is_idle and self.expected:
                carried_out += self._meet()
            elif self._loop.is_idle:
                self._queue = []  # ends of requests that have ended: other ranks may know nothing of them
            self._loop.step(says=bool(self._queue))
            if self._loop.heard:
                carried_out += self._meet()
            self._look_after_requests()
        return carried_out

    def follow(self) -> list[tuple[Event, Any]]:
        """Wait for rank 0 where nothing runs, else step."""
        if not self._loop.is_idle:
            return self.step()
        with self._guarded():
            return self._meet()

    def _meet(self) -> list[tuple[Event, Any]]:
        """Take part in one broadcast, and again while carrying it out commits a step in which rank 0 says more."""
        carried_out: list[tuple[Event, Any]] = []
        while True:
            self._loop.heard = False
            events, self._queue = self._queue, []
            for event in self.group.broadcast(events):
                carried_out.append((event, self._take_in(event)))
            if not self._loop.heard:
                return carried_out

    def _take_in(self, event: Event) -> Any:
        carry_out = self._carry_out()
        assert carry_out is not None
        return carry_out(event)

    def _look_after_requests(self) -> None:
        """End, on every rank, what only this one knows to be over."""
        requests, now = self._loop.requests, time.time()
        if self._loop.failed_here:
            self._queue.append(End(tuple(self._loop.failed_here), "error"))
            self._loop.failed_here = []
        for request_id in [i for i, deadline in self._deadlines.items() if i not in requests or now > deadline]:
            if request_id not in requests:
                del self._deadlines[request_id]
            elif requests[request_id].sequence.num_output_tokens:
                del self._deadlines[request_id]
                self._queue.append(End((request_id,), "length"))

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        if self.over is not None:
            raise EngineClosedError(self.over)
        outer, self.busy_thread = self.busy_thread, threading.get_ident()
        try:
            with self.around(), self.group.together():
                yield
        except BaseException:
            self.over = LOST
            self.on_break()
            raise
        finally:
            self.busy_thread = outer
