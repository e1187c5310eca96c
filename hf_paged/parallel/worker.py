"""Process of a rank above 0: `python -m hf_paged.parallel.worker`, which `launch` starts and ends."""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, Protocol


class Job(Protocol):
    """Job of a worker: a pickled object, whose module the worker has to be able to import."""

    def run(self, rank: int, size: int, store: object) -> None:
        """Run until rank 0 ends the job; `store` is the `TCPStore` of all ranks.

        Garbage collection is off until the job enables it, after importing and loading.
        """


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
    thread = threading.Thread(target=_or_fail, args=(work,), name="hf_paged-meanwhile", daemon=True)
    thread.start()
    yield
    thread.join()


def _or_fail(work: Callable[[], object]) -> None:
    try:
        work()
    except BaseException:
        _fail()


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


if __name__ == "__main__":
    main()
