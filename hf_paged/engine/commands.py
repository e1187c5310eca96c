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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_paged.engine.core import StepLoop
from hf_paged.engine.session import Request, Session
from hf_paged.engine.stopping import StopRule
from hf_paged.errors import EngineClosedError, WorkerDiedError
from hf_paged.options.settings import RequestSettings
from hf_paged.parallel.group import ParallelGroup

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
        make_request: the request of an `Add` for a session, or for one of another rank's caller.

    Attributes:
        around: entered for everything that waits for other ranks.
        on_break: called when an exception left a step that other ranks may have finished: they cannot go on together.
        busy_thread: steps or meets other ranks right now: an event from inside would mix two broadcasts.
        expected: requests of this rank's own callers that no event has brought yet.
        over: why this rank cannot go on with the others, if so.
        stopped: rank 0 has ended its engine.
    """

    def __init__(self, group: ParallelGroup, loop: StepLoop, make_request: Callable[..., Request]) -> None:
        self.group = group
        self.on_break: Callable[[], None] = lambda: None
        self.around: Callable[[], AbstractContextManager] = nullcontext
        self.over: str | None = None
        self.busy_thread: int | None = None
        self._loop = loop
        self.stopped = False
        self._make_request = weakref.WeakMethod(make_request)  # no cycle with the engine
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

    def close(self, session: Session, now: Callable[[Event], Any]) -> None:
        """End what is open in a session; `now` is the engine's, which does more than ours."""
        if self.over is None:
            now(End(tuple(session.open), "abort"))
        for request_id in session.open:
            self.expected.pop(request_id, None)
        session.open.clear()
        session.outbox.clear()

    def shut_down(self, now: Callable[[Event], Any], why: str) -> None:
        """Free what this rank has; where the others only follow, tell them that it is over."""
        requests = {**self._loop.requests, **self.expected}
        try:
            if self.group.driven and self.group.rank == 0 and self.over is None:
                now(End(tuple(requests), "abort"))
                now(Stop())
        except WorkerDiedError:
            pass  # it is over in any case
        finally:
            self._loop.abandon()
            self.over = self.over or why
        self.expected.clear()
        for request in requests.values():
            request.session.open.clear()
            request.session.outbox.clear()

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
        """What an event does on this rank."""
        loop = self._loop
        if isinstance(event, Add):
            loop.add(self._request(event))
        elif isinstance(event, End):
            loop.drain()
            for request in [loop.requests[i] for i in event.request_ids if i in loop.requests]:
                loop.end(request, event.reason)
        elif isinstance(event, Build):
            loop.scheduler_or_build()
        elif isinstance(event, ResetCache):
            return loop.scheduler.reset_prefix_cache() if loop.scheduler else True
        else:
            loop.drop_pool()
            if torch.cuda.is_initialized():
                with suppress(RuntimeError):  # while another engine's thread captures a graph, torch refuses to
                    torch.cuda.empty_cache()
            self.stopped |= isinstance(event, Stop)
        return None

    def _request(self, event: Add) -> Request:
        """As rank 0 has it, but for its clock: other ranks would look at theirs after other tokens.

        Raises:
            ValueError: the caller of this rank asked for something else.
        """
        make, own, stop = self._make_request(), self.expected.pop(event.request_id, None), event.stop
        assert make is not None
        if stop is not None and stop.deadline is not None:
            if self.group.rank == 0:
                self._deadlines[event.request_id] = stop.deadline
            stop = StopRule(stop.strings, None, stop.before) if stop.strings is not None else None
        request = make(replace(event, stop=stop), own and own.session)
        if own is not None and _asked(own, event.seed) != _asked(request, event.seed):
            raise ValueError(f"rank {self.group.rank} was given another prompt or other settings than rank 0: expected "
                             f"the same calls on all {self.group.size} ranks of a model")  # fmt: skip
        return request

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
            try:
                self.group.drop_graphs()
            finally:
                self.on_break()
            raise
        finally:
            self.busy_thread = outer


def _asked(request: Request, seed: int) -> tuple:
    """What has to be the same on all ranks; the seed of a call without one is rank 0's."""
    sequence = request.sequence
    return (sequence.token_ids, sequence.max_new_tokens, sequence.priority, sequence.cache_salt,
            replace(request.parameters, seed=seed))  # fmt: skip
