"""Captures of CUDA graphs on a device, and what must not meet one."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch


@cache
def captures(device: torch.device) -> tuple[list[torch.cuda.Stream], Any]:
    """Streams of a device that no engine captures on any more, and the lock that a capture holds.

    Re-entrant: what must not meet a capture may take memory that is mapped, and that gives memory of others back.
    """
    return [], threading.RLock()


def capture_lock(device: torch.device) -> AbstractContextManager:
    """For what a capture in another thread must not meet: memory pools that come and go, a cache that is emptied."""
    return captures(device)[1] if device.type == "cuda" else nullcontext()
