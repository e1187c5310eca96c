"""File of trace events for Chrome and Perfetto, written as they occur, and the requests of an engine as tracks in it.

The file is the JSON array of the trace event format. The field ``ph`` is the kind of an event ("X" a span, "B" and "E"
the begin and end of one, "i" an instant, "C" counters, "M" a name). Viewers also read an array without the closing
bracket, such as the file of a process that died.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from hf_paged.engine.session import Request
from hf_paged.outputs import StepOutput
from hf_paged.process_lock import ProcessLock
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.sequence import Sequence, Status

_BUFFER = 256  # events
# For spans that would have similar colors; Chrome's viewer knows these names, Perfetto has colors of its own.
COLORS = {"queued": "grey", "prefill": "rail_response", "decode": "thread_state_running", "preempted": "terrible"}
_open: set[TraceFile] = set()
_WAITING = ("queued", "preempted")


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
        self.numbers = itertools.count(1)  # of engines
        self._lines: list[str] = []
        self._owner: int | None = os.getpid()  # the process that writes; None once it is closed
        self._file.write(b"[\n")
        self._separator = b""
        _open.add(self)

    def span(self, pid: int, tid: int, name: str, begin: float, end: float, **args: Any) -> None:
        """Write an event with a duration."""
        color = {"cname": COLORS[name]} if name in COLORS else {}
        duration = max(self._ns(end) - self._ns(begin), 0) / 1e3
        self._add("X", pid, tid, name, begin, dur=duration, **color, args=args)

    def begin(self, pid: int, tid: int, name: str, at: float, **args: Any) -> None:
        """Write the begin of a span, which encloses later spans of its track until `end`."""
        self._add("B", pid, tid, name, at, args=args)

    def end(self, pid: int, tid: int, name: str, at: float, **args: Any) -> None:
        """Write the end of the track's last open span."""
        self._add("E", pid, tid, name, at, args=args)

    def instant(self, pid: int, tid: int, name: str, at: float, **args: Any) -> None:
        """Write an event without a duration."""
        self._add("i", pid, tid, name, at, s="t", args=args)

    def counters(self, pid: int, name: str, at: float, **values: float) -> None:
        """Write new values of counters, which viewers stack."""
        self._add("C", pid, 0, name, at, args=values)

    def name_process(self, pid: int, name: str) -> None:
        """Name a group of tracks; viewers sort groups by number."""
        self._add("M", pid, 0, "process_name", args={"name": name})
        self._add("M", pid, 0, "process_sort_index", args={"sort_index": pid})

    def name_track(self, pid: int, tid: int, name: str) -> None:
        """Name a track; viewers sort tracks by number."""
        self._add("M", pid, tid, "thread_name", args={"name": name})
        self._add("M", pid, tid, "thread_sort_index", args={"sort_index": tid})

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

    def _add(self, ph: str, pid: int, tid: int, name: str, at: float | None = None, **fields: Any) -> None:
        event = {"ph": ph, "pid": pid, "tid": tid, "name": name, **fields}
        if at is not None:
            event["ts"] = self._ns(at) / 1e3
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


@dataclass(slots=True)
class _Timeline:
    """A request's phase ("queued", "prefill", "decode", "preempted"), its begin, and its prompt's steps in flight."""

    sequence: Sequence
    tid: int
    since: float
    phase: str = "queued"
    num_preemptions: int = 0
    chunks: deque[tuple[StepPlan, float]] = field(default_factory=deque)  # with the times of their launches


class RequestTimelines:
    """Tracks of requests that arrived while recorded, each with a span that contains the spans of its phases."""

    def __init__(self, file: TraceFile, pid: int, title: str) -> None:
        self._file, self._pid, self._title = file, pid, title
        self._timelines: dict[str, _Timeline] = {}
        self._tids = itertools.count(1)

    def begin(self, request: Request, at: float) -> None:
        """Begin the track of a request that waits."""
        tid = next(self._tids)
        if tid == 1:
            self._file.name_process(self._pid, self._title)
        self._timelines[request.request_id] = _Timeline(request.sequence, tid, at)
        self._file.name_track(self._pid, tid, request.request_id)
        self._file.begin(self._pid, tid, request.request_id, at, prompt_tokens=request.sequence.num_prompt_tokens)

    def launch(self, plan: StepPlan, at: float) -> None:
        """Begin prefill of a step's admitted sequences, and add a chunk per prefill row."""
        for sequence in plan.admitted:
            if (timeline := self._of(sequence)) is not None:
                if timeline.phase not in _WAITING:  # preempted between two steps because the model changed
                    self._send_back(timeline, at)
                self._turn(timeline, "prefill", at)
        for sequence in plan.sequences[plan.num_decode_rows :]:
            if (timeline := self._of(sequence)) is not None:
                timeline.chunks.append((plan, at))

    def commit(self, plan: StepPlan, at: float) -> None:
        """End the chunks of a finished step."""
        for row in range(plan.num_decode_rows, len(plan.sequences)):
            timeline = self._of(plan.sequences[row])
            if timeline is not None and timeline.chunks and timeline.chunks[0][0] is plan:
                _, launched = timeline.chunks.popleft()
                self._file.span(self._pid, timeline.tid, "prefill", max(timeline.since, launched), at,
                                start=int(plan.start[row]), tokens=int(plan.num_new_tokens[row]))
                timeline.since, timeline.phase = at, "decode" if plan.samples[row] else "prefill"

    def preempt(self, at: float) -> None:
        """Move running requests whose sequence waits again to the phase "preempted"."""
        for timeline in self._timelines.values():
            if timeline.phase not in _WAITING and timeline.sequence.status is Status.WAITING:
                self._send_back(timeline, at)

    def end(self, request: Request, output: StepOutput, at: float) -> None:
        """End the track of a finished request."""
        timeline = self._of(request.sequence)
        completion = output.completion
        if timeline is None or completion is None:
            return
        del self._timelines[request.request_id]
        self._close_phase(timeline, at)
        self._file.instant(self._pid, timeline.tid, "end", at, finish_reason=completion.finish_reason)
        self._file.end(self._pid, timeline.tid, request.request_id, at, finish_reason=completion.finish_reason,
                       output_tokens=len(completion.token_ids), cached_tokens=completion.num_cached_tokens,
                       preemptions=timeline.num_preemptions)

    def start_over(self, unfinished: list[Request], at: float) -> None:
        """Move unfinished requests back to the phase "queued" and end the tracks of all others."""
        again = {request.request_id: request for request in unfinished}
        for request_id, timeline in list(self._timelines.items()):
            if request_id not in again:
                self._abandon(request_id, "gone", at)
                continue
            timeline.sequence = again[request_id].sequence
            if timeline.phase not in _WAITING:
                self._close_phase(timeline, at)
                timeline.phase, timeline.since = "queued", at

    def close(self, at: float) -> None:
        """End the tracks of unfinished requests, since recording ends."""
        for request_id in list(self._timelines):
            self._abandon(request_id, "unfinished", at)

    def _of(self, sequence: Sequence) -> _Timeline | None:
        timeline = self._timelines.get(sequence.request_id)
        is_its = timeline is not None and timeline.sequence is sequence  # the id of a finished request may be reused
        return timeline if is_its else None

    def _send_back(self, timeline: _Timeline, at: float) -> None:
        self._turn(timeline, "preempted", at)
        timeline.num_preemptions += 1

    def _turn(self, timeline: _Timeline, phase: str, at: float) -> None:
        self._close_phase(timeline, at)
        timeline.phase, timeline.since = phase, at

    def _close_phase(self, timeline: _Timeline, at: float) -> None:
        """Write the span of the current phase and drop uncommitted chunks."""
        if timeline.phase != "prefill" or timeline.chunks:
            self._file.span(self._pid, timeline.tid, timeline.phase, min(timeline.since, at), at)
        timeline.chunks.clear()

    def _abandon(self, request_id: str, why: str, at: float) -> None:
        timeline = self._timelines.pop(request_id)
        self._close_phase(timeline, at)
        self._file.instant(self._pid, timeline.tid, "end", at, finish_reason=why)
        self._file.end(self._pid, timeline.tid, request_id, at, finish_reason=why, preemptions=timeline.num_preemptions)
