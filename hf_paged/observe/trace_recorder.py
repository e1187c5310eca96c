"""Records the parts of one engine's steps, its counters and its requests as events of a trace file."""

from __future__ import annotations

import time
import weakref
from collections import deque

import torch

from hf_paged.device.captures import capture_lock
from hf_paged.engine.engine import Engine
from hf_paged.engine.observer import Committed, Launched, Observer
from hf_paged.engine.session import Request
from hf_paged.observe.request_timelines import RequestTimelines
from hf_paged.observe.trace_file import TraceFile
from hf_paged.outputs import StepOutput
from hf_paged.runner.device_times import TimedSection
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.block_use import block_use

PARTS = ("schedule", "launch", "wait", "commit", "emit", "GPU")  # an engine's tracks, numbered from 1
_SCHEDULE, _LAUNCH, _WAIT, _COMMIT, _EMIT, _GPU = range(1, 7)
# Blocks are counted by use again after this multiple of the last count's duration.
_LOOK_EVERY = 50


class Recorder(Observer):
    """Writes events in the thread that steps. Its number and its tracks' names are written with the first event.

    Args:
        engine: The recorded engine; referenced weakly.
        file: The trace file.
    """

    def __init__(self, engine: Engine, file: TraceFile) -> None:
        self.engine = weakref.ref(engine)
        self._file = file
        self._number = 0
        self._lives: RequestTimelines | None = None
        self._launched: deque[tuple[StepPlan, int]] = deque()  # undelivered steps and their numbers
        self._is_named = False
        self._clock: DeviceClock | None = None
        self._pieces: deque[TimedSection] = deque()
        self._committed_at = self._look_again = 0.0
        self._bytes = engine.kv_reads.num_bytes, engine.kv_reads.num_saved_bytes

    def queued(self, request: Request) -> None:
        self._first_lives().begin(request, time.perf_counter())

    def launched(self, step: Launched) -> None:
        lives = self._first_lives()
        self._name_tracks()
        file, pid, plan = self._file, self._pid, step.plan
        decodes = prompts = 0
        if plan is not None:
            decodes, prompts = plan.num_decode_rows, int(plan.num_new_tokens[plan.num_decode_rows :].sum())
        others, name = sum(rows.num_tokens for rows in step.joined), f"step {step.number}"
        file.span(pid, _SCHEDULE, name, step.began, step.scheduled, preempted=step.num_preempted)
        file.span(pid, _LAUNCH, name, step.scheduled, step.launched, decode_rows=decodes, prompt_tokens=prompts,
                  lockstep_tokens=others)
        file.counters(pid, "tokens per step", step.launched, decode=decodes, prompt=prompts, lockstep=others)
        self._take_pieces(step.pieces)
        if step.num_preempted:
            lives.preempt(step.scheduled)
        if plan is not None:
            self._launched.append((plan, step.number))
            lives.launch(plan, step.scheduled)
        self._count(step.launched)

    def committed(self, step: Committed) -> None:
        self._committed_at = time.perf_counter()
        number = self._number_of(step.plan)
        if number is not None:
            name = f"step {number}"
            self._file.span(self._pid, _WAIT, name, step.waited, step.ready)
            self._file.span(self._pid, _COMMIT, name, step.ready, self._committed_at, tokens=len(step.accepted))
            self._first_lives().commit(step.plan, step.ready)
            self._write_pieces()

    def delivered(self, plan: StepPlan) -> None:
        number = self._number_of(plan)
        if number is not None:
            self._launched.popleft()
            self._file.span(self._pid, _EMIT, f"step {number}", self._committed_at, time.perf_counter())

    def finished(self, request: Request, output: StepOutput) -> None:
        if self._lives is not None:
            self._lives.end(request, output, time.perf_counter())

    def started_over(self, unfinished: list[Request]) -> None:
        self._launched.clear()
        self._pieces.clear()
        self._clock = None  # the model may have moved to another device
        if self._lives is not None:
            self._lives.start_over(unfinished, time.perf_counter())

    def close(self) -> None:
        """Write the end of everything open; no event may follow."""
        self._write_pieces(waits=True)
        if self._lives is not None:
            self._lives.close(time.perf_counter())

    @property
    def _pid(self) -> int:
        """Return the engine's process id in the file; its requests have the next one."""
        return 2 * self._number - 1

    def _first_lives(self) -> RequestTimelines:
        if self._lives is None:
            self._number = self._file.next_number()
            self._lives = RequestTimelines(self._file, self._pid + 1, f"requests of engine {self._number}")
        return self._lives

    def _name_tracks(self) -> None:
        engine = self.engine()
        if not self._is_named and engine is not None:
            self._is_named = True
            self._file.name_process(self._pid, f"engine {self._number}: {type(engine.model).__name__}")
            for tid, part in enumerate(PARTS[:-1], 1):
                self._file.name_track(self._pid, tid, part)

    def _number_of(self, plan: StepPlan) -> int | None:
        """Return the number of a step; None if it was launched before recording began."""
        return self._launched[0][1] if self._launched and self._launched[0][0] is plan else None

    # -- the device -------------------------------------------------------------------------------------------------

    def _take_pieces(self, taken: tuple[TimedSection, ...]) -> None:
        engine = self.engine()
        if not taken or engine is None:
            return
        if self._clock is None:  # making it waits for the device, once
            self._file.name_track(self._pid, _GPU, PARTS[-1])
            self._clock = DeviceClock(engine.model.device)
        self._pieces.extend(taken)
        self._write_pieces()

    def _write_pieces(self, *, waits: bool = False) -> None:
        """Write the pieces that the device has finished, or with ``waits`` all pieces."""
        while self._pieces and self._clock is not None:
            piece = self._pieces[0]
            if waits:
                piece.end.synchronize()
            elif not piece.end.query():
                return
            self._pieces.popleft()
            self._file.span(self._pid, _GPU, piece.name, self._clock.time(piece.begin), self._clock.time(piece.end))

    # -- counters ---------------------------------------------------------------------------------------------------

    def _count(self, at: float) -> None:
        engine = self.engine()
        if engine is None or (scheduler := engine.scheduler) is None:
            return
        file, pid, before = self._file, self._pid, self._bytes
        read, saved = self._bytes = engine.kv_reads.num_bytes, engine.kv_reads.num_saved_bytes
        file.counters(pid, "KV bytes per step", at, read=read - before[0], saved_by_groups=saved - before[1])
        file.counters(pid, "requests", at, running=scheduler.num_running, waiting=scheduler.num_waiting)
        num_free = scheduler.num_free_blocks
        file.counters(pid, "KV blocks", at, used=scheduler.num_blocks - 1 - num_free, free=num_free)
        if at >= self._look_again:
            use = block_use(scheduler.kv_cache_manager.block_pool)
            file.counters(pid, "KV blocks by use", at, **use._asdict())
            self._look_again = at + _LOOK_EVERY * (time.perf_counter() - at)


class DeviceClock:
    """Converts CUDA events of a device to times of `time.perf_counter`; `__init__` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device), capture_lock(device):
            self._zero = torch.cuda.Event(enable_timing=True)
            self._zero.record()
            self._zero.synchronize()
        self._at = time.perf_counter()

    def time(self, event: torch.cuda.Event) -> float:
        """Return the time of an event that has occurred."""
        return self._at + self._zero.elapsed_time(event) / 1e3
