"""Processes of ranks, each in a process group of its own, that end together and in time."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence


def wait_or_kill(ranks: Sequence[subprocess.Popen], until: float) -> int:
    """0 where all ended well, 124 where `until` (of `time.monotonic`) came first, else 1; none is left running."""
    try:
        while any(rank.poll() is None for rank in ranks):
            failed = [(i, rank.returncode) for i, rank in enumerate(ranks) if rank.poll() not in (None, 0)]
            if failed:
                print(f"rank {failed[0][0]} ended with status {failed[0][1]}: the others are killed", flush=True)
                return 1
            if time.monotonic() > until:
                print("not done in time: all ranks are killed", flush=True)
                return 124
            time.sleep(0.1)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                os.killpg(rank.pid, signal.SIGKILL)
            rank.wait()
    return int(any(rank.returncode for rank in ranks))
