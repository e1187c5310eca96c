"""The state that a continuous batching manager and its thread share: open requests, and outputs not fetched yet."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from transformers.generation.continuous_batching.requests import GenerationOutput

from hf_paged.integration.continuous_batching.requests import BatchedRequest, failed_output

logger = logging.getLogger(__name__)

QUEUE_TIMEOUT_S = 10.0


class RequestBoard:
    """The open requests of one manager: new, running and cancelled ones. Thread-safe.

    Args:
        changed: returns the condition whose lock guards the board, and which is notified of every change.
    """

    def __init__(self, changed: Callable[[], threading.Condition]) -> None:
        self._changed = changed
        self.outputs = OutputBox(changed)
        self.open: dict[str, BatchedRequest] = {}  # every request that is neither finished nor cancelled
        self._arrivals: list[BatchedRequest] = []
        self._cancelled: list[BatchedRequest] = []

    def check_ids(self, requests: list[BatchedRequest]) -> None:
        """Raise ValueError for an id that an open request has."""
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
                    self.outputs.forget(key)
            self._changed().notify_all()

    def take_changes(self) -> tuple[list[BatchedRequest], list[BatchedRequest]]:
        """Return the requests that were added and the requests that were cancelled since the last call."""
        with self._changed():
            arrivals = [request for request in self._arrivals if not request.is_cancelled]
            cancelled, self._cancelled = self._cancelled, []
            self._arrivals.clear()
            self._changed().notify_all()
        return arrivals, cancelled

    def deliver(self, outputs: list[tuple[BatchedRequest, GenerationOutput]]) -> None:
        """Hand over outputs, except of cancelled requests, and close finished requests."""
        with self._changed():
            kept = [output for request, output in outputs if self.open.get(request.request_id) is request]
            for output in kept:
                if output.is_finished():
                    del self.open[output.request_id]
            self.outputs.deliver(kept)

    def fail(self, requests: Iterable[BatchedRequest], error: str) -> None:
        """Hand over failed outputs of requests, except of cancelled ones."""
        self.deliver([(request, failed_output(request, error)) for request in requests])

    def fail_all(self, error: str) -> None:
        """Fail every open request."""
        with self._changed():
            self.fail(list(self.open.values()), error)
            self._arrivals.clear()
            self._cancelled.clear()


class OutputBox:
    """The outputs of one manager in order. Thread-safe; `changed` as for `RequestBoard`."""

    def __init__(self, changed: Callable[[], threading.Condition]) -> None:
        self._changed = changed
        self._waiting: deque[GenerationOutput] = deque()
        self._handlers: dict[str, tuple[Callable, asyncio.AbstractEventLoop]] = {}

    def deliver(self, outputs: Iterable[GenerationOutput]) -> None:
        """Hand each output to the handler of its request, or keep it for `take`."""
        calls: dict[asyncio.AbstractEventLoop, list[tuple[Callable, GenerationOutput]]] = {}
        with self._changed():
            for output in outputs:
                handler = self._handlers.get(output.request_id)
                if handler is None:
                    self._waiting.append(output)
                    continue
                if output.is_finished():
                    del self._handlers[output.request_id]
                calls.setdefault(handler[1], []).append((handler[0], output))
            for loop, batch in calls.items():
                try:
                    loop.call_soon_threadsafe(_call_all, batch)
                except RuntimeError:  # the loop is closed: no handler will run
                    logger.warning("hf_paged: dropped %d outputs, whose event loop is closed", len(batch))
            self._changed().notify_all()

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

    def forget(self, request_id: str) -> None:
        """Drop the handler and the outputs of a cancelled request, so that the next request of its id gets none."""
        with self._changed():
            self._handlers.pop(request_id, None)
            self._waiting = deque(output for output in self._waiting if output.request_id != request_id)

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
