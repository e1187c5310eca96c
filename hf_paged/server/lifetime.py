"""How an HTTP request ends: answered, left by its client, or cut by the end of the server; and how the server ends."""

from __future__ import annotations

import asyncio
import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import uvicorn
from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from hf_paged.options.arguments import salt_digest
from hf_paged.server.errors import DONE, error_body, event

SECONDS = 4.0  # maximum time from the signal to the end of the process
MAX_BODY_BYTES = 64 << 20  # room for the data URLs of `ImageLimits`
REASON = "the server was told to stop while this answer was being made"


class Exchange:
    """One HTTP request, from its arrival to its end.

    Attributes:
        cache_salt: the request shares cached prefixes only with requests of the same salt.
        over: set when the HTTP request has ended, answered or abandoned by its client.
        at_end: actions that the event loop runs then.
    """

    def __init__(self, headers: Headers) -> None:
        self.cache_salt = cache_salt_of(headers)
        self.over = threading.Event()
        self.at_end = ExitStack()

    def end(self) -> None:
        """End the request, since the client has its answer or does not wait for it any more."""
        self.over.set()
        self.at_end.close()


def cache_salt_of(headers: Headers) -> bytes:
    """Return the `salt_digest` of ``X-Cache-Salt``, else of the API key, else of None; the key itself is never kept."""
    if own := headers.get("x-cache-salt"):
        return salt_digest(f"header:{own}")
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return salt_digest(f"key:{key.strip()}" if scheme.lower() == "bearer" and key.strip() else None)


class OpenAnswers:
    """Registry of running answers, each with an event that is set when the server receives a signal to stop."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}
        self.is_over = False  # True after the signal to stop

    @contextmanager
    def one(self) -> Iterator[asyncio.Event]:
        """Register one answer for the duration of the context; call on the answer's event loop."""
        stop = asyncio.Event()
        self._open[stop] = asyncio.get_running_loop()
        if self.is_over:
            stop.set()
        try:
            yield stop
        finally:
            del self._open[stop]

    def end(self) -> None:
        """Set the events of all current and later answers; safe in any thread and in a signal handler."""
        self.is_over = True
        for stop, loop in list(self._open.items()):
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(stop.set)


class EndsWithItsClient:
    """ASGI middleware that cancels a POST and its work in the engine when the client disconnects.

    The routes find the request's `Exchange` in ``request.state.exchange``. When the server stops, a running answer ends
    with that reason. A body of more than ``max_body_bytes`` is refused (413) without being kept.
    """

    def __init__(self, app: Any, answers: OpenAnswers, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._app, self._answers, self._max_body_bytes = app, answers, max_body_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with self._answers.one() as ends:
            await self._answer(ends, scope, receive, send)

    async def _answer(self, ends: asyncio.Event, scope: Any, receive: Any, send: Any) -> None:
        headers, most = Headers(scope=scope), self._max_body_bytes
        exchange = scope.setdefault("state", {})["exchange"] = Exchange(headers)
        client, answer = _Client(receive, int(headers.get("content-length", 0)), most), _Answer(send)
        app = asyncio.ensure_future(self._app(scope, client.receive, answer.send))
        left, stops = watches = [asyncio.ensure_future(watch()) for watch in (client.left, ends.wait)]
        try:
            await asyncio.wait((app, left, stops), return_when=asyncio.FIRST_COMPLETED)
            is_cut = stops.done() and not answer.is_complete and not left.done()
            if not app.done() and answer.is_complete:
                await asyncio.wait((app,))  # the app finishes its own clean-up after a complete answer
            if not app.done():
                app.cancel()
                await asyncio.wait((app,))
                if client.num_bytes > most:
                    expected = f"expected at most {most:,} (--max-body-bytes)"
                    await answer.cut(scope, receive, f"a body of {client.num_bytes:,} or more bytes, {expected}", 413)
                elif is_cut:
                    await answer.cut(scope, receive, REASON, 503)
            if not app.cancelled():
                app.result()
        finally:
            app.cancel()
            for task in watches:
                task.cancel()
            exchange.end()


class _Client:
    """Receiver of the client's messages that reads ahead, so that a disconnect is seen while the app is busy.

    Attributes:
        num_bytes: those of the body that have come, or that its header announced if these are more.
    """

    def __init__(self, receive: Any, announced: int, max_bytes: int) -> None:
        self._receive = receive
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._max_bytes, self.num_bytes = max_bytes, announced

    async def left(self) -> None:
        """Return when the client has disconnected, or its body is too long."""
        num_come = 0
        while self.num_bytes <= self._max_bytes:
            message = await self._receive()
            num_come += len(message.get("body", b""))
            self.num_bytes = max(self.num_bytes, num_come)
            if self.num_bytes <= self._max_bytes:
                self._messages.put_nowait(message)
            if message["type"] == "http.disconnect":
                return

    async def receive(self) -> Any:
        return await self._messages.get()


class _Answer:
    """Sender of an answer that notes what was sent."""

    def __init__(self, send: Any) -> None:
        self._send = send
        self.is_complete = False
        self._begun: Headers | None = None  # headers that were sent

    async def send(self, message: Any) -> None:
        await self._send(message)
        if message["type"] == "http.response.start":
            self._begun = Headers(raw=message["headers"])
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_complete = True

    async def cut(self, scope: Any, receive: Any, reason: str, status: int) -> None:
        """End the answer with an error; the app's task is already cancelled."""
        body = error_body(reason, status)
        if self._begun is None:
            await JSONResponse(body, status)(scope, receive, self._send)
        elif self._begun.get("content-type", "").startswith("text/event-stream"):
            await self._send({"type": "http.response.body", "body": (event(body) + DONE).encode()})


class EndingServer(uvicorn.Server):
    """A server that ends running answers with a reason at the first signal, and exits at once at a second one."""

    def __init__(self, config: uvicorn.Config, answers: OpenAnswers) -> None:
        super().__init__(config)
        self._answers = answers

    def run(self, *args: Any, **kwargs: Any) -> None:
        super().run(*args, **kwargs)
        if self._answers.is_over:
            # Tearing torch and transformers down takes seconds, in which the watchdog thread cannot run.
            atexit._run_exitfuncs()
            _leave(0)

    def handle_exit(self, sig: int, frame: Any) -> None:
        if self.should_exit:
            _leave(128 + sig)
        self.should_exit = True
        self._answers.end()
        # Ends the process although a step of a large model or a thread is still running.
        watchdog = threading.Timer(SECONDS, _leave, (0,))
        watchdog.daemon = True
        watchdog.start()


def _leave(code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)
