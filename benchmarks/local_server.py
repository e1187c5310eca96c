"""A server of `hf-paged serve` in a thread of this process, on a free port, for benchmarks that also run other work."""

from __future__ import annotations

import socket
import threading
import time

import uvicorn

from hf_paged.server.app import build_app
from hf_paged.server.lifetime import OpenAnswers
from hf_paged.server.served_model import ServedModel, load_model


class LocalServer:
    """The server of a checkpoint.

    Args:
        model: a folder, which is also the model's name.
    """

    def __init__(self, model: str, device: str, dtype: str) -> None:
        served = ServedModel(*load_model(model, device=device, dtype=dtype), [model])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        app = build_app(served, OpenAnswers())
        self._server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=self.port, log_level="error"))
        self._thread = threading.Thread(target=self._server.run, name="server")
        self._thread.start()
        while not self._server.started:
            time.sleep(0.02)

    def close(self) -> None:
        """End the server, and disable the model."""
        self._server.should_exit = True
        self._thread.join()
