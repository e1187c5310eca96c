"""The state that a continuous batching manager and its thread share, and the manager's requests in that thread."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_paged.engine.driver import EngineThread, OutputSink
from hf_paged.integration.continuous_batching.requests import BatchedRequest, failed_output, spec_of
from hf_paged.options.request_spec import RequestSpec
from hf_paged.outputs import StepOutput

logger = logging.getLogger(__name__)

QUEUE_TIMEOUT_S = 10.0
BROKE = "the engine broke while this request ran: "
_NO_ROOM = "stopped after {} new tokens: the model or the KV pool has no room for more"
_DISABLED = "the model was disabled, or enabled anew, while this request ran"


class RequestBoard:
    """The open requests of one manager (new, running and cancelled ones), and outputs not fetched yet. Thread-safe.

    Args:
        changed: returns the condition whose lock guards the board, and which is notified of every change.
    """

    def __init__(self, changed: Callable[[], threading.Condition]) -> None:
        self._changed = changed
        self.open: dict[str, BatchedRequest] = {}  # every request that is neither finished nor cancelled
        self._arrivals: list[BatchedRequest] = []
        self._cancelled: list[BatchedRequest] = []
        self._waiting: deque[GenerationOutput] = deque()
        self._handlers: dict[str, tuple[Callable, asyncio.AbstractEventLoop]] = {}

    def check_ids(self, requests: list[BatchedRequest]) -> None:
        for request in requests:
            if request.request_id in self.open:
                raise ValueError(f"request_id={request.request_id!r}: expected an id that is not in use")

    def add(self, requests: list[BatchedRequest], limit: int) -> None:
        """Queue requests; raises queue.Full if `limit` requests (0 for no limit) wait for ten seconds."""
        with self._changed():
            if limit > 0 and not self._changed().wait_for(lambda: len(self._arrivals) < limit, QUEUE_TIMEOUT_S):
                raise queue.Full
            self.check_ids(requests)
            for request in requests:
                self.open[request.request_id] = request
                self._arrivals.append(request)
            self._changed().notify_all()

    def cancel(self, request_id: str) -> None:
        """Cancel a request and its children, which get no further output."""
        with self._changed():
            children = [key for key in self.open if key.startswith(f"{request_id}__child#")]
            for key in (request_id, *children):
                request = self.open.pop(key, None)
                if request is not None:
                    request.is_cancelled = True
                    self._cancelled.append(request)
                    self._handlers.pop(key, None)
                    self._waiting = deque(output for output in self._waiting if output.request_id != key)
            self._changed().notify_all()

    def take_changes(self) -> tuple[list[BatchedRequest], list[BatchedRequest]]:
        """Return the requests that were added, and those that were cancelled, since the last call."""
        with self._changed():
            arrivals = [request for request in self._arrivals if not request.is_cancelled]
            cancelled, self._cancelled = self._cancelled, []
            self._arrivals.clear()
            self._changed().notify_all()
        return arrivals, cancelled

    def deliver(self, outputs: list[tuple[BatchedRequest, GenerationOutput]]) -> None:
        """Hand each output to the handler of its request, or keep it for `take`; not those of cancelled requests."""
        calls: dict[asyncio.AbstractEventLoop, list[tuple[Callable, GenerationOutput]]] = {}
        with self._changed():
            for request, output in outputs:
                if self.open.get(request.request_id) is not request:
                    continue
                handler = self._handlers.get(output.request_id)
                if output.is_finished():
                    del self.open[output.request_id]
                    self._handlers.pop(output.request_id, None)
                if handler is None:
                    self._waiting.append(output)
                else:
                    calls.setdefault(handler[1], []).append((handler[0], output))
            for loop, batch in calls.items():
                try:
                    loop.call_soon_threadsafe(_call_all, batch)
                except RuntimeError:  # the loop is closed: no handler will run
                    logger.warning("hf_paged: dropped %d outputs, whose event loop is closed", len(batch))
            self._changed().notify_all()

    def fail(self, requests: Iterable[BatchedRequest], error: str) -> None:
        """Hand over failed outputs of requests, except of cancelled ones."""
        self.deliver([(request, failed_output(request, error)) for request in requests])

    def fail_all(self, error: str) -> None:
        with self._changed():
            self.fail(list(self.open.values()), error)
            self._arrivals.clear()
            self._cancelled.clear()

    def register(self, request_id: str, callback: Callable) -> None:
        """Send this request's outputs, waiting ones included, to `callback` on the running event loop."""
        loop = asyncio.get_running_loop()
        with self._changed():
            early = [output for output in self._waiting if output.request_id == request_id]
            if early:
                self._waiting = deque(output for output in self._waiting if output.request_id != request_id)
                loop.call_soon(_call_all, [(callback, output) for output in early])
            if not any(output.is_finished() for output in early):
                self._handlers[request_id] = callback, loop

    def forget_handlers(self) -> None:
        """Remove all handlers in the child of a fork, which lacks their event loops; outputs are kept for `take`."""
        self._handlers.clear()

    def take(self, request_id: str | None, timeout: float | None,
             may_come: Callable[[], bool]) -> GenerationOutput | None:
        """Return the oldest output (of `request_id`); None after `timeout` seconds, or once `may_come()` is False."""
        end = None if timeout is None else time.monotonic() + timeout
        with self._changed():
            while True:
                for i, output in enumerate(self._waiting):
                    if request_id is None or output.request_id == request_id:
                        del self._waiting[i]
                        return output
                left = None if end is None else end - time.monotonic()
                if not may_come() or (left is not None and left <= 0):
                    return None
                self._changed().wait(left)


def _call_all(batch: list[tuple[Callable, GenerationOutput]]) -> None:
    for callback, output in batch:
        try:
            callback(output)
        except Exception:  # of one caller's handler, which must not lose the outputs of others in this batch
            logger.exception("hf_paged: the result handler of request %s raised", output.request_id)


class BoardSink(OutputSink):
    """Requests of a manager that share a session; their outputs go to the manager's board."""

    def __init__(self, thread: EngineThread, board: RequestBoard, *, stream: bool) -> None:
        super().__init__(stream=stream, text=False)
        self._thread, self._board = thread, board
        self._running: dict[str, BatchedRequest] = {}  # by the engine's id

    def add(self, request: BatchedRequest, spec: RequestSpec) -> None:
        [added] = self._thread.add(self, [spec])
        if isinstance(added, ValueError):
            raise added
        self._running[added] = request

    def abort(self, requests: list[BatchedRequest]) -> None:
        """Abort the requests among these that run in this call."""
        ids = {id(request) for request in requests}
        for engine_id in [key for key, request in self._running.items() if id(request) in ids]:
            try:
                self._thread.engine.abort(engine_id)
            except KeyError:
                continue  # it has ended, and the next outputs have its completion

    def take(self, outputs: list[StepOutput]) -> None:
        delivered: list[tuple[BatchedRequest, GenerationOutput]] = []
        for output in outputs:
            request = self._running[output.request_id]
            if output.completion is not None:
                del self._running[output.request_id]
            if request.is_failed:
                continue
            try:
                made = _taken(request, output)
            except Exception as error:  # fails this request alone: outputs of others still have to be handed over
                request.is_failed = True
                self.abort([request])
                made = failed_output(request, f"this request failed: {error!r}")
            if made is not None:
                delivered.append((request, made))
        self._board.deliver(delivered)

    def fail(self, error: BaseException | None) -> None:
        if error is not None:
            logger.error("hf_paged: the engine broke in continuous batching: %r", error, exc_info=error)
        failed, self._running = list(self._running.values()), {}
        self._board.fail(failed, _DISABLED if error is None else f"{BROKE}{error!r}")

    def stop(self) -> None:
        self.abort(list(self._running.values()))


class BoardSinks:
    """All requests of one manager; requests with `needs_tokens` have a session that streams."""

    def __init__(self, thread: EngineThread, board: RequestBoard) -> None:
        self._thread, self._board = thread, board
        self._streams, self._others = (BoardSink(thread, board, stream=stream) for stream in (True, False))

    def take_changes(self) -> None:
        """Begin new requests, and abort cancelled ones; runs in the thread."""
        arrivals, cancelled = self._board.take_changes()
        try:
            for call in (self._streams, self._others):
                call.abort(cancelled)
            engine, refused = self._thread.engine, list[tuple[BatchedRequest, GenerationOutput]]()
            reason = engine.unsupported_reason() if arrivals else None
            autocast = engine.autocast_of_call() if arrivals and reason is None else None
            for request in arrivals:
                try:
                    if reason is not None:
                        raise ValueError(f"the model cannot run on the paged engine as it is now: {reason}")
                    spec = spec_of(engine, request, autocast)
                    request.start()
                    (self._streams if request.needs_tokens else self._others).add(request, spec)
                except Exception as error:  # of this request alone
                    refused.append((request, failed_output(request, str(error))))
            self._board.deliver(refused)
        except Exception as error:
            self._board.fail(arrivals, f"{BROKE}{error!r}")
            raise  # the thread fails the requests that run


def _taken(request: BatchedRequest, output: StepOutput) -> GenerationOutput | None:
    """Return the `GenerationOutput` of one output of the engine; None if the request does not stream and goes on."""
    if output.new_token_ids:
        request.extend(output.new_token_ids, output.new_logprobs)
    if output.completion is None:
        return request.output() if request.streaming else None
    if output.finish_reason == "error":
        return request.finish(output.completion.error)
    if output.finish_reason == "abort":
        return request.finish("the manager was stopped before this request was done")
    is_out_of_room = output.finish_reason == "length" and request.is_cut
    return request.finish(_NO_ROOM.format(len(request.tokens)) if is_out_of_room else None)
