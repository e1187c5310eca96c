"""A server with the two endpoints of the OpenAI API that the sweep asks, whose answers are what a test wants."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class FakeServer:
    """Bodies that came, and how requests are answered: pieces of text, seconds before each, what goes wrong."""

    url: str = ""
    models: tuple[str, ...] = ("a-model",)
    pieces: int = 4
    pause: float = 0.01
    status: int = 200
    breaks_after: int | None = None  # pieces, and then the connection ends
    counts: bool = True
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    _lock: Any = field(default_factory=threading.Lock)


@contextmanager
def fake_server(**settings: Any) -> Iterator[FakeServer]:
    """One on a free port of this machine."""
    state = FakeServer(**settings)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None: ...

        def do_GET(self) -> None:
            self._say(200, json.dumps({"data": [{"id": name} for name in state.models]}))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with state._lock:
                state.bodies.append((self.path, body))
                state.keys.add(self.headers["Authorization"])
            self._answer(body)

        def _answer(self, body: dict[str, Any]) -> None:
            if state.status != 200:
                self._say(state.status, "out of order")
                return
            self.send_response(200)
            self.end_headers()
            for i in range(state.pieces):
                if i == state.breaks_after:
                    return
                time.sleep(state.pause)
                end = "length" if i == state.pieces - 1 else None
                text = {"delta": {"content": "x"}} if "messages" in body else {"text": "x"}
                self._event({"choices": [{**text, "finish_reason": end}]})
            if state.counts:
                self._event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": state.pieces}})
            self.wfile.write(b"data: [DONE]\n\n")

        def _event(self, event: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()

        def _say(self, status: int, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
