"""`hf_paged.trace`: a block in which all engines are recorded into a file."""

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
    """Record what all engines of this process do in the block, in whichever thread, and write it to a file.

        with hf_paged.trace("steps.json"):
            model.generate(**inputs, max_new_tokens=256)

    The file is in the trace event format: ui.perfetto.dev and chrome://tracing show it. Each engine has a track for
    each part of its steps (schedule, launch, wait, commit, emit), one for the time of its CUDA graphs and eager steps
    on the GPU, one for each request (queued, prefill, decode, preempted, end), and counters of blocks, tokens and
    requests. Engines that are made in the block are recorded, too. A request that came before the block has no track.

    Traces may be nested and may run in several threads at once: each has a file of its own, in which everything is that
    happens in its block. What is recorded is written as it comes, and the file of a process that dies can be read. In
    the child of a fork nothing is recorded. Of a model over several GPUs rank 0, or the rank whose script this is, is
    recorded.

    Raises:
        ValueError: another trace writes to this file.
        OSError: the file cannot be opened, or not be written to its end (once the block is over).
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
            for recorder in recorders:  # where the file cannot be written, no engine is watched any more
                recorder.close()
        finally:
            file.close()
