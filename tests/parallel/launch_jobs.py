"""Jobs that the workers of test_launch.py import, and what the tests beside them share."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hf_paged.parallel.group import ARRIVED, ParallelGroup, join
from hf_paged.parallel.launch import Workers
from hf_paged.parallel.worker import meanwhile

CPU = torch.device("cpu")


def meet(workers: Workers) -> ParallelGroup:
    """Rank 0's group, once all have met."""
    with workers.meeting(CPU) as group:
        pass
    return group


def children() -> set[int]:
    """The processes that this one started."""
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
            found |= set(map(int, (task / "children").read_text().split()))
    return found


@dataclass(frozen=True)
class Follower:
    """Does what rank 0 says: `order` is its part."""

    failure: str = ""

    def run(self, rank: int, size: int, store: Any) -> None:
        if self.failure:
            raise OSError(self.failure)
        group = join(rank, size, CPU, store=store, driven=True)
        while (what := group.broadcast()) != "end":
            obey(group, what)


def order(group: ParallelGroup, what: str) -> Any:
    return obey(group, group.broadcast(what)) if what != "end" else group.broadcast(what)


def obey(group: ParallelGroup, what: str) -> Any:
    if group.rank and what == "speak":
        print(f"out of {group.rank}", flush=True)
    if group.rank and what == "raise":
        raise ValueError("no such tensor: lm_head.weight")
    if group.rank and what == "hang":
        print("hangs", file=sys.stderr, flush=True)
        time.sleep(600)
    with group.together():
        return int(group.all_reduce(torch.tensor([group.rank + 1])))


@dataclass(frozen=True)
class Meeting:
    """Meets the others while it does something else; `failing` ("meeting", "loading") says which of them fails."""

    failing: str

    def run(self, rank: int, size: int, store: Any) -> None:
        both = threading.Barrier(2)

        def meet() -> None:
            both.wait()
            if self.failing == "meeting":
                raise OSError("no route to rank 0")
            store.wait(["never"])  # in C++, as a meeting does

        with meanwhile(meet):
            both.wait()
            if self.failing == "loading":
                raise ValueError("no such tensor: lm_head.weight")
            time.sleep(600)


@dataclass(frozen=True)
class Half:
    """Makes the default group with the others, and no further one."""

    def run(self, rank: int, size: int, store: Any) -> None:
        store.set(ARRIVED.format(rank=rank), b"")
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        time.sleep(3)  # rank 0 has the group by then, too
        os.kill(os.getpid(), signal.SIGKILL)
