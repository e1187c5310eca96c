"""Commands to the engine, and how all ranks of a sharded model carry them out after the same step.

Every rank runs the same scheduler on the same requests, so that nothing need be sent while they run. Rank 0 keeps
commands in a queue. While nothing runs, the other ranks wait for its broadcast. Otherwise rank 0 sets a control flag in
the next step that it launches; every rank reads the flag at the commit of that step, and rank 0 broadcasts there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hf_paged.device.cuda import empty_cache
from hf_paged.engine.loop import EngineCore
from hf_paged.engine.ranks.interrupts import held_back
from hf_paged.engine.ranks.weight_transfer import receive
from hf_paged.engine.session import Request, Session
from hf_paged.errors import EngineClosedError, WorkerDiedError
from hf_paged.options.request_spec import RequestSpec
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.named_weights import NamedWeights, gather

LOST = (
    "this engine's ranks lost each other (an error in a step, or a dead worker): expected a new PagedGenerator"
)


@dataclass(frozen=True)
class End:
    """A command to end the unfinished requests among these ids."""

    request_ids: tuple[str, ...]
    reason: str
    error: str | None = None


@dataclass(frozen=True)
class Build:
    """A command to build the KV pool."""


@dataclass(frozen=True)
class ResetCache:
    """A command to empty the prefix cache."""


@dataclass(frozen=True)
class BeginWeightUpdate:
    """A command to run no step while callers write the weights. Ranks that only follow receive them from rank 0."""


@dataclass(frozen=True)
class GatherWeights:
    """A command to gather whole weights by name, on rank 0."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class UseVocabulary:
    """A command to compile grammars of later requests for this vocabulary (`Grammars.vocabulary`)."""

    vocabulary: str


@dataclass(frozen=True)
class Release:
    """A command to free the KV pool, and with ``graphs`` everything else on the device."""

    graphs: bool


@dataclass(frozen=True)
class Stop:
    """A command to ranks that follow: rank 0 shuts its engine down."""


Command = (
    RequestSpec | End | Build | ResetCache | BeginWeightUpdate | GatherWeights | UseVocabulary | Release | Stop
)


class CommandQueue:
    """The queue of commands, which steps the engine and carries commands out alike on every rank. With one rank it only
    carries commands out.

    Not thread-safe: the engine holds its lock around every call.

    Attributes:
        around: makes a context that is entered around all code that waits for other ranks.
        on_break: called when an exception left a step that other ranks may have finished, so that the ranks differ.
        busy_thread: the thread that is in a step or a broadcast; a command from inside would mix two broadcasts.
        followers: the session of requests that callers of other ranks made.
        expected: requests of this rank's own callers that no command has added yet.
        over: why this rank cannot go on with the others, or None.
        stopped: rank 0 has shut its engine down.
    """

    def __init__(self, group: ParallelGroup, core: EngineCore) -> None:
        self.group = group
        self.on_break: Callable[[], None] = lambda: None
        self.around: Callable[[], AbstractContextManager] = nullcontext
        self.over: str | None = None
        self.busy_thread: int | None = None
        self._core = core
        self.stopped = False
        self.followers = Session(stream=False, text=False)
        self.expected: dict[str, Request] = {}
        self._queue: list[Command] = []
        self._is_held = False  # this rank waits for weights that rank 0 sends
        # By id and finish reason the end of ``timeout`` or ("length") ``max_time``, by `time.monotonic`.
        self._limits: dict[tuple[str, str], float] = {}

    def enqueue(self, command: Command) -> None:
        """Queue a command of rank 0, to be carried out before the next step or after a later one."""
        if self.group.rank == 0:
            self._queue.append(command)

    def carry_out(self, command: Command) -> Any:
        """Carry a command out at once, running steps if need be; returns its result.

        Ranks > 0 that run the same script as rank 0 wait for rank 0's command of the same kind.
        """
        if not self.group.is_parallel:
            return self._apply(command)
        if self.group.rank == 0:
            self._queue.append(command)
        results: list[Any] = []
        while not results:
            carried_out = self.follow()
            results = [result for done, result in carried_out if type(done) is type(command)]
        return results[-1]

    def close(self, session: Session, carry_out: Callable[[Command], Any]) -> None:
        """End the open requests of a session. ``carry_out``: of the engine, which also runs deferred actions."""
        if self.over is None:
            carry_out(End(tuple(session.open), "abort"))
        for request_id in session.open:
            self.expected.pop(request_id, None)
        session.open.clear()
        session.outbox.clear()

    def shut_down(self, carry_out: Callable[[Command], Any], why: str) -> None:
        """Free this rank's requests and memory, and stop ranks that only follow."""
        requests = {**self._core.requests, **self.expected}
        try:
            if self.group.driven and self.group.rank == 0 and self.over is None:
                carry_out(End(tuple(requests), "abort"))
                carry_out(Stop())
        except WorkerDiedError:
            pass  # the ranks end in any case
        finally:
            self._core.abandon()
            self.over = self.over or why
        self.expected.clear()
        for request in requests.values():
            request.session.open.clear()
            request.session.outbox.clear()

    def step(self) -> list[tuple[Command, Any]]:
        """Step a sharded model once; carry commands out before it if the engine is idle, or after it if flagged."""
        carried_out: list[tuple[Command, Any]] = []
        with self.together():
            # Ranks > 0 that run the same script as rank 0 have added the same requests.
            if self._core.is_idle and self.expected:
                carried_out += self._exchange()
            elif self._core.is_idle:
                self._queue = []  # only `End` of requests that have ended: other ranks would not meet in a broadcast
            self._core.step(control_flag=bool(self._queue))
            if self._core.control_flag:
                carried_out += self._exchange()
            self._look_after_requests()
        return carried_out

    def follow(self) -> list[tuple[Command, Any]]:
        """Wait for commands of rank 0 if the engine is idle, else run a step."""
        if not self._core.is_idle:
            return self.step()
        with self.together():
            return self._exchange()

    def tell(self, what: Any) -> None:
        """Send an item to ranks that only follow and wait in a `BeginWeightUpdate`; None ends the update."""
        if self.group.driven and self.group.rank == 0 and self.over is None:
            with self.together():
                self.group.broadcast(what)

    def _exchange(self) -> list[tuple[Command, Any]]:
        """Take part in a broadcast, and in further ones as long as commands commit a step whose control flag is set."""
        carried_out: list[tuple[Command, Any]] = []
        while True:
            self._core.control_flag = False
            commands, self._queue = self._queue, []
            for command in self.group.broadcast(commands):
                carried_out.append((command, self._apply(command)))
            if not self._core.control_flag:
                break
        if self._is_held:  # only here: a command may have committed a step that announces one more broadcast
            self._is_held = False
            receive(self._core.model, self.group)
            self._core.weights_written()
        return carried_out

    def _apply(self, command: Command) -> Any:
        """Carry a command out on this rank, and return its result."""
        core = self._core
        if isinstance(command, RequestSpec):
            core.add(self._request(command))
        elif isinstance(command, End):
            core.drain()
            for request in [core.requests[i] for i in command.request_ids if i in core.requests]:
                core.end(request, command.reason, request.error or command.error)
        elif isinstance(command, Build):
            core.scheduler_or_build()
        elif isinstance(command, ResetCache):
            core.features.call("forget")
            return core.scheduler.reset_prefix_cache() if core.scheduler else True
        elif isinstance(command, UseVocabulary):
            core.grammars.share(command.vocabulary)
        elif isinstance(command, BeginWeightUpdate):
            core.drain()
            self._is_held = self.group.driven and self.group.rank > 0
        elif isinstance(command, GatherWeights):
            weights = NamedWeights(core.model)
            return [gather(weights, name, self.group) for name in command.names]
        else:
            if isinstance(command, Release) and not command.graphs:
                core.release_pool()
            else:
                core.drop_pool()
            if torch.cuda.is_initialized():
                empty_cache()
            self.stopped |= isinstance(command, Stop)
        return None

    def _request(self, command: RequestSpec) -> Request:
        """Return this rank's request, without a deadline: clocks of other ranks would end it after other tokens.

        Raises:
            ValueError: this rank's own caller made another request than rank 0's.
        """
        assert command.request_id is not None
        for reason in ("length", "timeout"):
            self._limits.pop((command.request_id, reason), None)  # of an earlier request with this id
        own, stop = self.expected.pop(command.request_id, None), command.stop
        if stop is not None and stop.deadline is not None:
            if self.group.rank == 0:
                self._limits[command.request_id, "length"] = time.monotonic() + stop.deadline - time.time()
            stop = stop.without_deadline()
        session = self.followers if own is None else own.session
        request = self._core.make_request(command.but(stop=stop), session)
        if own is not None:
            request.queued, request.deadline = own.queued, own.deadline
        if request.deadline is not None and self.group.rank == 0:
            self._limits[command.request_id, "timeout"] = request.deadline
        if own is not None and _common(own.spec) != _common(request.spec):
            raise ValueError(f"rank {self.group.rank} was given another prompt or other settings than rank 0: expected "
                             f"the same calls on all {self.group.size} ranks of a model")
        return request

    def _look_after_requests(self) -> None:
        """Queue the end of requests that only this rank knows to be late or failed, for all ranks."""
        requests = self._core.requests
        for request_id in [i for i in self._core.failed_here if i in requests]:
            self._queue.append(End((request_id,), "error", requests[request_id].error))
        self._core.failed_here = []
        now = time.monotonic() if self._limits else 0.0
        for (request_id, reason), limit in list(self._limits.items()):
            request = requests.get(request_id)
            is_late = now >= limit
            if request is None or (is_late and (reason == "timeout" or request.sequence.num_output_tokens)):
                del self._limits[request_id, reason]  # ``max_time`` ends no request before its first token
                if request is not None:
                    self._queue.append(End((request_id,), reason))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run collectives in the block, which other ranks run at the same time; an exception parts the ranks."""
        if self.over is not None:
            raise EngineClosedError(self.over)
        with held_back():
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


def _common(spec: RequestSpec) -> RequestSpec:
    """Return what must be equal on all ranks: not the seed, which rank 0 draws, nor what depends on a rank's clock, nor
    what a rank's tower made of images."""
    output = None if spec.previous is None else spec.previous.token_ids
    return spec.but(seed=0, max_time=None, timeout=None, stop=None, grammar=None, previous=output, fed=None)
