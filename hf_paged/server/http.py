"""HTTP layer of the server: cancellation when the client disconnects, cache salts from headers, error bodies."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import JSONResponse

from hf_paged.server.calls import CURRENT, ServedCall
from hf_paged.server.ending import REASON, OpenAnswers
from hf_paged.server.errors import error_body
from hf_paged.server.metrics import ServedMetrics


def add_middleware(app: Any, answers: OpenAnswers) -> None:
    """Add middleware, `/metrics` and error handlers to transformers' FastAPI app; call before its first request.

    Args:
        answers: Registry of running answers, which end when the server stops.
    """
    from fastapi.exceptions import RequestValidationError
    from starlette.exceptions import HTTPException

    async def with_status(request: Any, error: HTTPException) -> JSONResponse:
        return JSONResponse(error_body(str(error.detail), error.status_code), error.status_code, error.headers)

    async def unreadable(request: Any, error: RequestValidationError) -> JSONResponse:
        # Without the input, which FastAPI would include: it may hold NaN, which JSON cannot.
        found = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        return JSONResponse(error_body(f"{found} (expected a JSON object)", 422), 422)

    app.add_exception_handler(HTTPException, with_status)
    app.add_exception_handler(RequestValidationError, unreadable)
    metrics = ServedMetrics()
    app.add_route("/metrics", metrics.answer, include_in_schema=False)
    app.add_middleware(EndsWithItsClient, metrics=metrics, answers=answers)


def cache_salt_of(headers: Headers) -> str | None:
    """Return a digest of ``X-Cache-Salt``, else of the API key, else None; the key itself is never kept."""
    if own := headers.get("x-cache-salt"):
        return _digest("header", own)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return _digest("key", key.strip()) if scheme.lower() == "bearer" and key.strip() else None


def _digest(kind: str, value: str) -> str:
    return hashlib.sha256(f"{kind}:{value}".encode("utf-8", "surrogatepass")).hexdigest()


class EndsWithItsClient:
    """ASGI middleware that cancels a POST and its work in the engine when the client disconnects.

    A streamed answer does not start before its first token, so that a request that cannot be carried out still gets its
    own status and reason. When the server stops, a running answer ends with that reason.
    """

    def __init__(self, app: Any, metrics: ServedMetrics, answers: OpenAnswers) -> None:
        self._app = app
        self._metrics = metrics
        self._answers = answers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with self._answers.one() as ends:
            await self._answer(ends, scope, receive, send)

    async def _answer(self, ends: asyncio.Event, scope: Any, receive: Any, send: Any) -> None:
        self._metrics.watch()
        call = ServedCall(cache_salt_of(Headers(scope=scope)), self._metrics.watch)
        client, answer = _Client(receive), _Answer(call, send)
        token = CURRENT.set(call)
        app = asyncio.ensure_future(self._app(scope, client.receive, answer.send))  # copies the context
        CURRENT.reset(token)
        watches = [asyncio.ensure_future(watch()) for watch in (client.left, answer.refused.wait, ends.wait)]
        try:
            await asyncio.wait((app, *watches), return_when=asyncio.FIRST_COMPLETED)
            is_cut = ends.is_set() and not answer.is_complete and not watches[0].done()
            if not app.done() and answer.is_complete and not answer.refused.is_set():
                await asyncio.wait((app,))  # the app finishes its own clean-up after a complete answer
            if not app.done():
                app.cancel()
                await asyncio.wait((app,))
                if is_cut:
                    await answer.cut()
            if not app.cancelled():
                app.result()
        finally:
            app.cancel()
            for task in watches:
                task.cancel()
            call.end()
            self._metrics.watch()


class _Client:
    """Receiver of the client's messages that reads ahead, so that a disconnect is seen while the app is busy."""

    def __init__(self, receive: Any) -> None:
        self._receive = receive
        self._messages: asyncio.Queue[Any] = asyncio.Queue()

    async def left(self) -> None:
        """Return when the client has disconnected."""
        while True:
            message = await self._receive()
            self._messages.put_nowait(message)
            if message["type"] == "http.disconnect":
                return

    async def receive(self) -> Any:
        return await self._messages.get()


class _Answer:
    """Sender of the answer that withholds a stream until the engine has accepted the request."""

    def __init__(self, call: ServedCall, send: Any) -> None:
        self._call = call
        self._send = send
        self.is_complete = False
        self.refused = asyncio.Event()
        self._begun: list[tuple[bytes, bytes]] | None = None  # headers that were sent

    async def send(self, message: Any) -> None:
        starts = message["type"] == "http.response.start" and self._call.streams
        if starts and (reason := await self._call.verdict()) is not None:
            await self._refuse(reason, message["headers"])
        await self._send(message)
        if message["type"] == "http.response.start":
            self._begun = message["headers"]
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_complete = True

    async def cut(self) -> None:
        """End the answer because the server stops; the app's task is already cancelled."""
        body = error_body(REASON, 503)
        if self._begun is None:
            whole = JSONResponse(body, 503)
            await self._send({"type": "http.response.start", "status": 503, "headers": whole.raw_headers})
            await self._send({"type": "http.response.body", "body": whole.body})
        elif any(name.lower() == b"content-type" and value.startswith(b"text/event-stream")
                 for name, value in self._begun):
            await self._send({"type": "http.response.body", "body": f"data: {json.dumps(body)}\n\n".encode()})

    async def _refuse(self, reason: str, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the refusal in place of the app's answer; the middleware then cancels the app."""
        body = JSONResponse(error_body(reason, 400), 400)
        own = [pair for pair in headers if pair[0].lower() not in (b"content-type", b"content-length")]
        await self._send({"type": "http.response.start", "status": 400, "headers": [*own, *body.raw_headers]})
        await self._send({"type": "http.response.body", "body": body.body})
        self.refused.set()
        await asyncio.Event().wait()
