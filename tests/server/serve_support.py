"""A server in this process, and clients of it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

import hf_paged

openai = pytest.importorskip("openai")
pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")


class Server:
    """A server in a thread of this process, on a free port, with OpenAI's client of it."""

    def __init__(self, path, config=None, adapters=None, **options):
        from hf_paged.server.app import build_app
        from hf_paged.server.lifetime import OpenAnswers
        from hf_paged.server.served_model import ServedModel, load_model

        model, processor = load_model(path, device="cpu", dtype="float32", adapters=adapters)
        self.path, self.model = path, model
        self.served = ServedModel(model, processor, options.pop("names", None) or [path], config, **options)
        self.tokenizer = self.served.tokenizer
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        app = build_app(self.served, OpenAnswers())
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="critical"))
        self._thread = threading.Thread(target=self._server.run, name="uvicorn")
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def get(self, path, headers=None):
        """Status and text of an answer to a GET."""
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{self.url}{path}", headers=headers or {})) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def health(self):
        return self.get("/health")[0]

    def chat(self, messages, **kwargs):
        return self.client.chat.completions.create(model=self.path, messages=messages, **kwargs)

    def streamed(self, messages, **kwargs):
        """The text of a streamed answer, and its number of pieces."""
        pieces = [c.choices[0].delta.content for c in self.chat(messages, stream=True, **kwargs)]
        pieces = [piece for piece in pieces if piece]
        return "".join(pieces), len(pieces)

    def post(self, path, body, headers=None):
        """Status and JSON (else text) of what the server says to these bytes."""
        connection = self.send(path, body, headers)
        reply = connection.getresponse()
        said = reply.read().decode()
        connection.close()
        try:
            return reply.status, json.loads(said)
        except ValueError:
            return reply.status, said

    def send(self, path, body, headers=None):
        """A connection that has sent a body and not read the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, body, {"Content-Type": "application/json", **(headers or {})})
        return connection

    def engine(self):
        return hf_paged.get_engine(self.model)

    def settles(self, seconds=20):
        """Whether the engine has nothing to do and all its blocks are free, before this time is over."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            stats = self.engine().stats()
            if stats.num_running == stats.num_waiting == 0 and stats.num_free_blocks >= stats.num_blocks - 1:
                return True
            time.sleep(0.02)
        return False

    def close(self):
        self.client.close()
        self._server.should_exit = True
        self._thread.join(30)
        assert not self._thread.is_alive()


@contextmanager
def served(path, config=None, **options):
    """A server of a model; options as of `ServedModel`."""
    server = Server(path, config, **options)
    try:
        yield server
    finally:
        server.close()


def events_of(said):
    """The JSON of a stream's events, which end with `data: [DONE]`."""
    lines = [line.removeprefix("data: ") for line in said.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
