"""The requests of one engine as tracks of a trace file: what each waited for and did, from its coming to its end."""

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
    """A piece of a prompt that a step computes; ``ends``: the last one."""

    plan: StepPlan
    start: int
    num_tokens: int
    launched: float
    ends: bool


@dataclass(slots=True)
class _Life:
    """A request: what it does ("queued", "prefill", "decode", "preempted"), since when, and its chunks under way."""

    sequence: Sequence
    tid: int
    since: float
    phase: str = "queued"
    num_preemptions: int = 0
    chunks: deque[_Chunk] = field(default_factory=deque)


class Lives:
    """Requests that were seen coming. On its track each has one span, and in it those of its phases.

    Args:
        pid: of the process in the file that holds the tracks.
        title: of that process.
    """

    def __init__(self, file: TraceFile, pid: int, title: str) -> None:
        self._file, self._pid, self._title = file, pid, title
        self._lives: dict[str, _Life] = {}
        self._tids = itertools.count(1)

    def begin(self, request: Request, at: float) -> None:
        """A request waits."""
        tid = next(self._tids)
        if tid == 1:
            self._file.name_process(self._pid, self._title)
        self._lives[request.request_id] = _Life(request.sequence, tid, at)
        self._file.name_track(self._pid, tid, request.request_id)
        self._file.begin(self._pid, tid, request.request_id, at, prompt_tokens=request.sequence.num_prompt_tokens)

    def launch(self, plan: StepPlan, at: float) -> None:
        """A step runs: its new rows wait no more, and its prompts' rows have a chunk each."""
        for sequence in plan.admitted:
            if (life := self._of(sequence)) is not None:
                if life.phase not in _WAITING:  # it lost its blocks between two steps: the model changed
                    self._send_back(life, at)
                self._turn(life, "prefill", at)
        for row in range(plan.num_decode_rows, len(plan.sequences)):
            if (life := self._of(plan.sequences[row])) is not None:
                chunk = _Chunk(plan, int(plan.start[row]), int(plan.num_new_tokens[row]), at, bool(plan.samples[row]))
                life.chunks.append(chunk)

    def commit(self, plan: StepPlan, at: float) -> None:
        """A step is done: so are its chunks."""
        for sequence in plan.sequences[plan.num_decode_rows :]:
            life = self._of(sequence)
            if life is not None and life.chunks and life.chunks[0].plan is plan:
                chunk = life.chunks.popleft()
                self._file.span(self._pid, life.tid, "prefill", max(life.since, chunk.launched), at,
                                start=chunk.start, tokens=chunk.num_tokens)
                life.since, life.phase = at, "decode" if chunk.ends else "prefill"

    def preempt(self, at: float) -> None:
        """Some running requests had to give their blocks back: those that wait by now."""
        for life in self._lives.values():
            if life.phase not in _WAITING and life.sequence.status is Status.WAITING:
                self._send_back(life, at)

    def end(self, request: Request, output: StepOutput, at: float) -> None:
        """A request is over."""
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
        """These wait anew, and all others are gone."""
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
        """The record ends before these do."""
        for request_id in list(self._lives):
            self._abandon(request_id, "unfinished", at)

    def _of(self, sequence: Sequence) -> _Life | None:
        life = self._lives.get(sequence.request_id)
        return life if life is not None and life.sequence is sequence else None  # an id may be used again

    def _send_back(self, life: _Life, at: float) -> None:
        self._turn(life, "preempted", at)
        life.num_preemptions += 1

    def _turn(self, life: _Life, phase: str, at: float) -> None:
        self._close_phase(life, at)
        life.phase, life.since = phase, at

    def _close_phase(self, life: _Life, at: float) -> None:
        """What it did is over; chunks that were not committed are lost."""
        if life.phase != "prefill" or life.chunks:
            self._file.span(self._pid, life.tid, life.phase, min(life.since, at), at)
        life.chunks.clear()

    def _abandon(self, request_id: str, why: str, at: float) -> None:
        life = self._lives.pop(request_id)
        self._close_phase(life, at)
        self._file.instant(self._pid, life.tid, "end", at, finish_reason=why)
        self._file.end(self._pid, life.tid, request_id, at, finish_reason=why, preemptions=life.num_preemptions)
