"""`hf_paged.trace`: records the steps, counters and requests of all engines as events of a trace file."""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hf_paged.device.cuda import capture_lock
from hf_paged.engine import engine_registry
from hf_paged.engine.engine import Engine
from hf_paged.engine.observer import Committed, Launched, Observer
from hf_paged.engine.session import Request
from hf_paged.observe.trace_file import RequestTimelines, TraceFile
from hf_paged.outputs import StepOutput
from hf_paged.pictures import CacheView
from hf_paged.runner import device_times
from hf_paged.runner.device_times import TimedSection
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.block_pool import block_columns

PARTS = ("schedule", "launch", "wait", "commit", "emit", "GPU")  # an engine's tracks, numbered from 1
_SCHEDULE, _LAUNCH, _WAIT, _COMMIT, _EMIT, _GPU = range(1, 7)
# Blocks are counted by use again after this multiple of the last count's duration.
_LOOK_EVERY = 50


class Recorder(Observer):
    """Writes events in the thread that steps an engine, whose tracks are named with the first event."""

    def __init__(self, engine: Engine, file: TraceFile) -> None:
        self.engine = weakref.ref(engine)
        self._file = file
        self._pid = 0  # the engine's process id in the file; its requests have the next one
        self._timelines: RequestTimelines | None = None
        self._launched: deque[tuple[StepPlan, int]] = deque()  # undelivered steps and their numbers
        self._clock: DeviceClock | None = None
        self._pieces: deque[TimedSection] = deque()
        self._committed_at = self._look_again = 0.0
        self._bytes = engine.kv_reads.num_bytes, engine.kv_reads.num_saved_bytes

    def queued(self, request: Request) -> None:
        self._own_timelines().begin(request, time.perf_counter())

    def launched(self, step: Launched) -> None:
        timelines = self._own_timelines()
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
            timelines.preempt(step.scheduled)
        if plan is not None:
            self._launched.append((plan, step.number))
            timelines.launch(plan, step.scheduled)
        self._count(step.launched)

    def committed(self, step: Committed) -> None:
        self._committed_at = time.perf_counter()
        number = self._number_of(step.plan)
        if number is not None:
            name = f"step {number}"
            self._file.span(self._pid, _WAIT, name, step.waited, step.ready)
            self._file.span(self._pid, _COMMIT, name, step.ready, self._committed_at, tokens=len(step.accepted))
            self._own_timelines().commit(step.plan, step.ready)
            self._write_pieces()

    def delivered(self, plan: StepPlan) -> None:
        number = self._number_of(plan)
        if number is not None:
            self._launched.popleft()
            self._file.span(self._pid, _EMIT, f"step {number}", self._committed_at, time.perf_counter())

    def finished(self, request: Request, output: StepOutput) -> None:
        if self._timelines is not None:
            self._timelines.end(request, output, time.perf_counter())

    def started_over(self, unfinished: list[Request]) -> None:
        self._launched.clear()
        self._pieces.clear()
        self._clock = None  # the model may have moved to another device
        if self._timelines is not None:
            self._timelines.start_over(unfinished, time.perf_counter())

    def close(self) -> None:
        """Write the end of everything open; no event may follow."""
        self._write_pieces(waits=True)
        if self._timelines is not None:
            self._timelines.close(time.perf_counter())

    def _own_timelines(self) -> RequestTimelines:
        if self._timelines is None:
            number = next(self._file.numbers)
            self._pid = 2 * number - 1
            self._timelines = RequestTimelines(self._file, self._pid + 1, f"requests of engine {number}")
            if (engine := self.engine()) is not None:
                self._file.name_process(self._pid, f"engine {number}: {type(engine.model).__name__}")
                for tid, part in enumerate(PARTS[:-1], 1):
                    self._file.name_track(self._pid, tid, part)
        return self._timelines

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
            users, cached = block_columns(scheduler.kv_cache_manager.block_pool)
            view = CacheView(users[1:], cached[1:], {}, engine.config.block_size)
            file.counters(pid, "KV blocks by use", at, **view.counts)
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


@contextmanager
def trace(path: str | os.PathLike) -> Iterator[None]:
    """Record all engines of this process, in all threads, into a file while the context lasts.

        with hf_paged.trace("steps.json"):
            model.generate(**inputs, max_new_tokens=256)

    The file is in the trace event format, for ui.perfetto.dev and chrome://tracing. Each engine has a track for each
    part of its steps (schedule, launch, wait, commit, emit), one for the time of its CUDA graphs and eager steps on the
    GPU, one for each request (queued, prefill, decode, preempted, end), and counters of blocks, tokens and requests.
    Engines made in the context are recorded too. Requests that arrived before it have no track.

    Traces may be nested and may run in several threads at once: each file has all events in its context. Events are
    written as they occur, and the file of a process that dies can be read. The child of a fork records nothing. For a
    model over several GPUs, rank 0 is recorded, or with a script per rank this script's rank.

    Raises:
        ValueError: If another trace writes to this file.
        OSError: If the file cannot be opened, or, at the end of the context, cannot be written completely.
    """
    file = TraceFile(path)
    recorders: list[Recorder] = []

    def watch(engine: Engine) -> Recorder:
        recorders.append(recorder := Recorder(engine, file))
        return recorder

    device_times.ask(file)
    try:
        engine_registry.watch_all(watch)
        yield
    finally:
        engine_registry.unwatch_all(watch)
        device_times.stop(file)
        try:
            for recorder in recorders:
                if (engine := recorder.engine()) is not None:
                    engine.unwatch(recorder)
            for recorder in recorders:  # after all engines are detached, since writing may raise
                recorder.close()
        finally:
            file.close()
