"""The lock of CUDA graph captures on a device, for operations that must not run during a capture."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch


@cache
def captures(device: torch.device) -> tuple[list[torch.cuda.Stream], Any]:
    """Return streams of a device that no engine captures on any more, and the lock that a capture holds.

    The lock is re-entrant: code that holds it may map memory, which frees abandoned memory under the same lock.
    """
    return [], threading.RLock()


def capture_lock(device: torch.device) -> AbstractContextManager:
    """Return a context that excludes captures of other threads, for changes of memory pools and emptying the cache."""
    return captures(device)[1] if device.type == "cuda" else nullcontext()
