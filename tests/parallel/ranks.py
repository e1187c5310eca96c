"""Runs a function in several processes that have met over gloo, and hands back what each of them returned."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any


def run_ranks(target: str, size: int, *args: Any, timeout: float = 240.0) -> list[Any]:
    """`module:function` called as `function(group, *args)` on each of `size` ranks -> their results, by rank.

    Raises:
        RuntimeError: a rank raised, ended without a result, or took longer than `timeout` seconds; with the traceback.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder, "call")
        call.write_bytes(pickle.dumps((sys.path, target, size, args)))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        processes = []
        for rank in range(size):
            with Path(folder, f"log{rank}").open("wb") as log:
                processes.append(subprocess.Popen([sys.executable, __file__, folder, str(rank)], env=environment,
                                                  stdout=log, stderr=subprocess.STDOUT))
        try:
            _wait(processes, folder, time.monotonic() + timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(size)]


def _wait(processes: list[subprocess.Popen], folder: str, deadline: float) -> None:
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes) or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    states = [process.poll() for process in processes]
    if any(state != 0 for state in states):
        logs = (Path(folder, f"log{rank}").read_text()[-6000:] for rank in range(len(states)))
        ends = ("is still running" if state is None else f"ended with {state}" for state in states)
        ranks = zip(range(len(states)), ends, logs, strict=True)
        raise RuntimeError("\n".join(f"rank {rank} {end}:\n{log}" for rank, end, log in ranks))


def _main(folder: str, rank: int) -> None:
    path, target, size, args = pickle.loads(Path(folder, "call").read_bytes())
    sys.path[:] = path
    import importlib

    import torch

    from hf_paged.parallel.group import join

    torch.set_num_threads(1)
    module, _, function = target.partition(":")
    try:
        store = torch.distributed.FileStore(str(Path(folder, "store")), size)
        group = join(rank, size, torch.device("cpu"), store=store)
        result = getattr(importlib.import_module(module), function)(group, *args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a rank that waits for the others would hold up the interpreter's end
    Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
    if size > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
