"""File of trace events for Chrome and Perfetto, written as they occur.

The file is the JSON array of the trace event format. The field ``ph`` is the kind of an event ("X" a span, "B" and "E"
the begin and end of one, "i" an instant, "C" counters, "M" a name). Viewers also read an array without the closing
bracket, such as the file of a process that died.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from typing import Any

from hf_paged.process_lock import ProcessLock

_BUFFER = 256  # events
# For spans that would have similar colors; Chrome's viewer knows these names, Perfetto has colors of its own.
COLORS = {"queued": "grey", "prefill": "rail_response", "decode": "thread_state_running", "preempted": "terrible"}
_open: set[TraceFile] = set()


class TraceFile:
    """Thread-safe trace file. Times are seconds of `time.perf_counter`; the file has microseconds since it was opened.

    Raises:
        ValueError: If another open trace writes to this file.
        OSError: If the file cannot be opened; later methods raise it if the file cannot be written.
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = os.path.realpath(path)
        if any(one.path == self.path and one._owner == os.getpid() for one in _open):
            raise ValueError(f"path={os.fspath(path)!r}: expected a file that no other trace writes to")
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115  # closed by `close`
        self._lock = ProcessLock()
        self._began = time.perf_counter()
        self._numbers = itertools.count(1)
        self._lines: list[str] = []
        self._owner: int | None = os.getpid()  # the process that writes; None once it is closed
        self._file.write(b"[\n")
        self._separator = b""
        _open.add(self)

    def next_number(self) -> int:
        """Return 1, 2, ..., each once."""
        return next(self._numbers)

    def span(self, pid: int, tid: int, name: str, begin: float, end: float, **args: Any) -> None:
        """Write an event with a duration."""
        ts = self._ns(begin)
        dur = max(self._ns(end) - ts, 0)
        color = {"cname": COLORS[name]} if name in COLORS else {}
        self._add({"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts / 1e3, "dur": dur / 1e3, **color,
                   "args": args})

    def begin(self, pid: int, tid: int, name: str, at: float, **args: Any) -> None:
        """Write the begin of a span, which encloses later spans of its track until `end`."""
        self._add({"ph": "B", "pid": pid, "tid": tid, "name": name, "ts": self._ns(at) / 1e3, "args": args})

    def end(self, pid: int, tid: int, name: str, at: float, **args: Any) -> None:
        """Write the end of the track's last open span."""
        self._add({"ph": "E", "pid": pid, "tid": tid, "name": name, "ts": self._ns(at) / 1e3, "args": args})

    def instant(self, pid: int, tid: int, name: str, at: float, **args: Any) -> None:
        """Write an event without a duration."""
        self._add({"ph": "i", "s": "t", "pid": pid, "tid": tid, "name": name, "ts": self._ns(at) / 1e3, "args": args})

    def counters(self, pid: int, name: str, at: float, **values: float) -> None:
        """Write new values of counters, which viewers stack."""
        self._add({"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": self._ns(at) / 1e3, "args": values})

    def name_process(self, pid: int, name: str) -> None:
        """Name a group of tracks; viewers sort groups by number."""
        self._add({"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": name}})
        self._add({"ph": "M", "pid": pid, "tid": 0, "name": "process_sort_index", "args": {"sort_index": pid}})

    def name_track(self, pid: int, tid: int, name: str) -> None:
        """Name a track; viewers sort tracks by number."""
        self._add({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}})
        self._add({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})

    def close(self) -> None:
        """Write buffered events and close the file; later events are dropped."""
        with self._lock.rlock:
            if self._owner != os.getpid():
                return
            self._owner = None
            _open.discard(self)
            try:
                self._flush()
                self._file.write(b"\n]\n")
            finally:
                self._file.close()

    def _ns(self, at: float) -> int:
        return max(round((at - self._began) * 1e9), 0)  # the file's start for earlier times

    def _add(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, separators=(",", ":"))
        with self._lock.rlock:
            if self._owner == os.getpid():  # the file is the parent's in the child of a fork
                self._lines.append(line)
                if len(self._lines) >= _BUFFER:
                    self._flush()

    def _flush(self) -> None:
        if self._lines:
            lines, self._lines = self._lines, []
            left = memoryview(self._separator + ",\n".join(lines).encode())
            while left:
                left = left[self._file.write(left) :]
            self._separator = b",\n"
