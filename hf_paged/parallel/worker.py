"""A process of a rank above 0 (`python -m hf_paged.parallel.worker`), and rank 0's handle for it."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import IO, NoReturn, cast

from hf_paged.python_process import module_process

_TAIL = 40  # lines of a worker's stderr that an error quotes


def main() -> NoReturn:
    """Run the job that comes in over stdin, and end with stdin: exit code 0 when it returns, 1 when it raises."""
    gc.disable()  # with it importing torch and transformers, for which rank 0 waits, takes a seventh longer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The job gets an empty stdin, so that it cannot read rank 0's messages.
    parent = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    with os.fdopen(os.dup(parent), "rb") as stream:
        message = stream.read(int.from_bytes(stream.read(8), "little"))
    if not message:
        os._exit(1)
    rank, size, port, parent_id, job = pickle.loads(message)
    threading.Thread(target=_end_with, args=(parent, parent_id), name="hf_paged-stdin", daemon=True).start()
    try:
        from torch.distributed import TCPStore

        store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        pickle.loads(job).run(rank, size, store)
    except BaseException:
        _fail()
    _end(0)


@contextmanager
def meanwhile(work: Callable[[], object]) -> Iterator[None]:
    """Run `work` in a thread while the body runs; both are done when the context is left.

    The first error of either, which has to be a worker's job, ends this process as an error of the job does.
    """
    def run() -> None:
        try:
            work()
        except BaseException:
            _fail()

    thread = threading.Thread(target=run, name="hf_paged-meanwhile", daemon=True)
    thread.start()
    yield
    thread.join()


def _fail() -> NoReturn:
    traceback.print_exc()
    _end(1)


def _end(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: destructors of NCCL wait for the other ranks, and so may other threads.
    os._exit(code)


def _end_with(parent: int, parent_id: int) -> NoReturn:
    """End this process when the pipe `parent` is closed, whatever the main thread is blocked in."""
    # A fork of rank 0 (a DataLoader's worker) keeps the pipe open after rank 0 ended: the parent's id shows that end.
    while os.getppid() == parent_id:
        readable, _, _ = select.select([parent], [], [], 1.0)
        if readable and not os.read(parent, 1):
            break
    os._exit(1)


class WorkerProcess:
    """Process of `worker.main`, with the last lines of its output."""

    def __init__(self, rank: int, environment: dict[str, str]) -> None:
        self.rank = rank
        # A worker's stdout must not mix into the user's stdout: rank 0 forwards it to stderr.
        self.process = subprocess.Popen(
            **module_process("hf_paged.parallel.worker", environment),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        self._stdin = cast(IO[bytes], self.process.stdin)
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

    def _forward(self) -> None:
        with cast(IO[bytes], self.process.stdout) as output:
            while line := output.readline(8192):
                text = line.decode(errors="replace")
                self.tail.append(text)
                with suppress(OSError, ValueError, AttributeError):  # a closed or missing stderr of rank 0
                    sys.stderr.write(f"[rank {self.rank}] {text}")


if __name__ == "__main__":
    main()
