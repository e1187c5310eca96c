"""Handle of rank 0 for the process of one other rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import IO, cast

from hf_paged.python_process import module_process

_TAIL = 40  # lines of a worker's stderr that an error quotes


class WorkerProcess:
    """Process of `worker.main`, with the last lines of its output."""

    def __init__(self, rank: int, environment: dict[str, str]) -> None:
        self.rank = rank
        # A worker's stdout must not mix into the user's stdout: rank 0 forwards it to stderr.
        self.process = subprocess.Popen(
            **module_process("hf_paged.parallel.worker", environment),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        self.tail: deque[str] = deque(maxlen=_TAIL)
        self.ended = threading.Event()
        self._lock = threading.RLock()
        self.reader = threading.Thread(target=self._forward, name=f"hf_paged-stderr-{rank}", daemon=True)
        self.reader.start()

    def send(self, message: bytes) -> None:
        """Send a message; `Workers.check` reports a worker that died meanwhile."""
        with suppress(OSError):
            self._stdin.write(len(message).to_bytes(8, "little") + message)
            self._stdin.flush()

    def end_input(self) -> None:
        with suppress(OSError):
            self._stdin.close()

    def end_reading(self) -> None:
        with suppress(RuntimeError):  # garbage collection may call this in the reader itself
            self.reader.join(1.0)

    def kill(self, number: signal.Signals) -> None:
        with self._lock:
            if not self.ended.is_set():
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)

    def wait(self) -> int:
        """Wait for the process's exit code. It is reaped under the lock, so that no signal meets a reused id."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # processes that it started
            code = self.process.wait()
            self.ended.set()
        self.end_input()
        self.end_reading()
        return code

    def exit_report(self, size: int) -> str:
        code = self.process.returncode
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        words = "".join(self.tail).rstrip() or "(nothing on stderr)"
        return f"rank {self.rank} of {size} (process {self.process.pid}) ended with {how}:\n{words}"

    @property
    def _stdin(self) -> IO[bytes]:
        return cast(IO[bytes], self.process.stdin)

    def _forward(self) -> None:
        with cast(IO[bytes], self.process.stdout) as output:
            while line := output.readline(8192):
                text = line.decode(errors="replace")
                self.tail.append(text)
                with suppress(OSError, ValueError, AttributeError):  # a closed or missing stderr of rank 0
                    sys.stderr.write(f"[rank {self.rank}] {text}")
