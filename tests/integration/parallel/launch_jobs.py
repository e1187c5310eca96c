"""Jobs that the workers of test_launch.py import."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from hf_paged.integration.parallel.group import ParallelGroup, join

CPU = torch.device("cpu")


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
