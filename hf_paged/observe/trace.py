"""`hf_paged.trace`: a context that records all engines into a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from hf_paged.engine import engine_registry
from hf_paged.engine.engine import Engine
from hf_paged.observe.trace_file import TraceFile
from hf_paged.observe.trace_recorder import Recorder
from hf_paged.runner import device_times


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
