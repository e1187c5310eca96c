"""Requests of one engine as tracks of a trace file: the phases of each, from its arrival to its end."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from hf_paged.engine.session import Request
from hf_paged.observe.trace_file import TraceFile
from hf_paged.outputs import StepOutput
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.sequence import Sequence, Status

_WAITING = ("queued", "preempted")


class _Chunk(NamedTuple):
    """Part of a prompt that a step computes; ``ends`` marks the last part."""

    plan: StepPlan
    start: int
    num_tokens: int
    launched: float
    ends: bool


@dataclass(slots=True)
class _Life:
    """A request's phase ("queued", "prefill", "decode", "preempted"), its begin, and the chunks in flight."""

    sequence: Sequence
    tid: int
    since: float
    phase: str = "queued"
    num_preemptions: int = 0
    chunks: deque[_Chunk] = field(default_factory=deque)


class RequestTimelines:
    """Tracks of requests that arrived while recorded, each with a span that contains the spans of its phases.

    Args:
        pid: Process id of the tracks in the file.
        title: Name of that process.
    """

    def __init__(self, file: TraceFile, pid: int, title: str) -> None:
        self._file, self._pid, self._title = file, pid, title
        self._lives: dict[str, _Life] = {}
        self._tids = itertools.count(1)

    def begin(self, request: Request, at: float) -> None:
        """Begin the track of a request that waits."""
        tid = next(self._tids)
        if tid == 1:
            self._file.name_process(self._pid, self._title)
        self._lives[request.request_id] = _Life(request.sequence, tid, at)
        self._file.name_track(self._pid, tid, request.request_id)
        self._file.begin(self._pid, tid, request.request_id, at, prompt_tokens=request.sequence.num_prompt_tokens)

    def launch(self, plan: StepPlan, at: float) -> None:
        """Begin prefill of a step's admitted sequences, and add a chunk per prefill row."""
        for sequence in plan.admitted:
            if (life := self._of(sequence)) is not None:
                if life.phase not in _WAITING:  # preempted between two steps because the model changed
                    self._send_back(life, at)
                self._turn(life, "prefill", at)
        for row in range(plan.num_decode_rows, len(plan.sequences)):
            if (life := self._of(plan.sequences[row])) is not None:
                chunk = _Chunk(plan, int(plan.start[row]), int(plan.num_new_tokens[row]), at, bool(plan.samples[row]))
                life.chunks.append(chunk)

    def commit(self, plan: StepPlan, at: float) -> None:
        """End the chunks of a finished step."""
        for sequence in plan.sequences[plan.num_decode_rows :]:
            life = self._of(sequence)
            if life is not None and life.chunks and life.chunks[0].plan is plan:
                chunk = life.chunks.popleft()
                self._file.span(self._pid, life.tid, "prefill", max(life.since, chunk.launched), at,
                                start=chunk.start, tokens=chunk.num_tokens)
                life.since, life.phase = at, "decode" if chunk.ends else "prefill"

    def preempt(self, at: float) -> None:
        """Move running requests whose sequence waits again to the phase "preempted"."""
        for life in self._lives.values():
            if life.phase not in _WAITING and life.sequence.status is Status.WAITING:
                self._send_back(life, at)

    def end(self, request: Request, output: StepOutput, at: float) -> None:
        """End the track of a finished request."""
        life = self._of(request.sequence)
        completion = output.completion
        if life is None or completion is None:
            return
        del self._lives[request.request_id]
        self._close_phase(life, at)
        self._file.instant(self._pid, life.tid, "end", at, finish_reason=completion.finish_reason)
        self._file.end(self._pid, life.tid, request.request_id, at, finish_reason=completion.finish_reason,
                       output_tokens=len(completion.token_ids), cached_tokens=completion.num_cached_tokens,
                       preemptions=life.num_preemptions)

    def start_over(self, unfinished: list[Request], at: float) -> None:
        """Move unfinished requests back to the phase "queued" and end the tracks of all others."""
        again = {request.request_id: request for request in unfinished}
        for request_id, life in list(self._lives.items()):
            if request_id not in again:
                self._abandon(request_id, "gone", at)
                continue
            life.sequence = again[request_id].sequence
            if life.phase not in _WAITING:
                self._close_phase(life, at)
                life.phase, life.since = "queued", at

    def close(self, at: float) -> None:
        """End the tracks of unfinished requests, since recording ends."""
        for request_id in list(self._lives):
            self._abandon(request_id, "unfinished", at)

    def _of(self, sequence: Sequence) -> _Life | None:
        life = self._lives.get(sequence.request_id)
        return life if life is not None and life.sequence is sequence else None  # a finished request's id may be reused

    def _send_back(self, life: _Life, at: float) -> None:
        self._turn(life, "preempted", at)
        life.num_preemptions += 1

    def _turn(self, life: _Life, phase: str, at: float) -> None:
        self._close_phase(life, at)
        life.phase, life.since = phase, at

    def _close_phase(self, life: _Life, at: float) -> None:
        """Write the span of the current phase and drop uncommitted chunks."""
        if life.phase != "prefill" or life.chunks:
            self._file.span(self._pid, life.tid, life.phase, min(life.since, at), at)
        life.chunks.clear()

    def _abandon(self, request_id: str, why: str, at: float) -> None:
        life = self._lives.pop(request_id)
        self._close_phase(life, at)
        self._file.instant(self._pid, life.tid, "end", at, finish_reason=why)
        self._file.end(self._pid, life.tid, request_id, at, finish_reason=why, preemptions=life.num_preemptions)
