"""Files that several processes use: written as a whole, or locked while one of them works."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no process waits for another
    fcntl = None  # type: ignore[assignment]

_POLL_S = 0.02


def write_whole(path: Path, text: str) -> None:
    """Write a file, and its folder if there is none; no process reads a part of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def alone(path: Path | None, most_seconds: float) -> Iterator[bool]:
    """Hold the lock of a file in a ``with`` block, to which it gives whether it is held.

    It is not without a file, on a file system without locks, and if another process holds it for so many seconds. The
    end of a process releases its locks.
    """
    file = None
    if path is not None and fcntl is not None:
        with suppress(OSError):
            file = path.open("a")
    if file is None:
        yield False
        return
    with file:
        is_held = False
        try:
            with suppress(OSError):
                is_held = _lock(file.fileno(), most_seconds)
            yield is_held
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # a fork may have the file open, too


def _lock(descriptor: int, most_seconds: float) -> bool:
    deadline = time.monotonic() + most_seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
