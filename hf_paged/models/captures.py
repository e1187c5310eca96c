"""Captures of CUDA graphs on a device, and what must not meet one."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch


@cache
def captures(device: torch.device) -> tuple[list[torch.cuda.Stream], threading.Lock]:
    """Streams of a device that no engine captures on any more, and the lock that a capture holds."""
    return [], threading.Lock()


def capture_lock(device: torch.device) -> AbstractContextManager:
    """For what a capture in another thread must not meet: memory pools that come and go, a cache that is emptied."""
    return captures(device)[1] if device.type == "cuda" else nullcontext()
