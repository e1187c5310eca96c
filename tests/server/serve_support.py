"""transformers' server in this process, and clients of it."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

import hf_paged
from hf_paged.server import server as serving_module
from hf_paged.server.server import install_serving

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("typer")
openai = pytest.importorskip("openai")


class Server:
    """transformers' own server in this process, on a free port, with its OpenAI client."""

    def __init__(self, path, continuous_batching):
        from transformers.cli.serve import Serve

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = port = probe.getsockname()[1]
        self._serve = Serve(force_model=path, continuous_batching=continuous_batching, device="cpu", dtype="float32",
                            host="127.0.0.1", port=port, non_blocking=True)
        self.path = path
        self.is_continuous = continuous_batching
        self.model = next(iter(self._serve._model_manager.loaded_models.values())).model
        self.url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while not self._serve.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def cb(self):
        manager = self._serve._generation_state._cb_manager
        return manager._cb if manager is not None else None

    def health(self):
        try:
            with urllib.request.urlopen(f"{self.url}/health") as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code

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
        return hf_paged.get_engine(hf_paged.enable(self.model))

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
        self._serve.kill_server()


def uninstall_serving():
    """Put back what `install_serving` replaced, which lasts as long as a server's process."""
    while serving_module._replaced:
        setattr(*serving_module._replaced.pop())


@contextmanager
def served(path, continuous_batching, **overrides):
    """A server with hf_paged installed under it; `overrides`: of `PagedConfig`."""
    hf_paged.install(**overrides)
    install_serving()
    try:
        server = Server(path, continuous_batching)
        try:
            yield server
        finally:
            server.close()
    finally:
        uninstall_serving()
        hf_paged.uninstall()
