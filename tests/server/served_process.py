"""A server in a process of its own, as users start it, and OpenAI's client of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

openai = pytest.importorskip("openai")
ROOT = Path(__file__).parents[2]


class ServerProcess:
    """`python -m hf_paged.serve PATH ARGUMENTS` on a free port.

    Args:
        log: a file for what it prints.
    """

    def __init__(self, path: str, *arguments: str, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._log = log
        self.path, self.url = path, f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "hf_paged.serve", path, "--device", "cpu", "--dtype",
                   "float32", "--host", "127.0.0.1", "--port", str(port), *arguments]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=log.parent)
        deadline = time.monotonic() + 120
        while not self._is_up():
            assert self.process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60)

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health") as reply:
                return reply.status == 200
        except (urllib.error.URLError, ConnectionError):
            return False

    def interrupt(self) -> None:
        """As Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def said(self) -> str:
        """What it has printed."""
        return self._log.read_text()

    def close(self) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait()
