"""Properties of a device and its host, copies to the device, its allocator, and the lock of CUDA graph captures."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch


@lru_cache(maxsize=64)
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the capability of an NVIDIA GPU, else None: under HIP an AMD GPU is a "cuda" device, too (MI200: 9.0)."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int:
    """Return the most bytes of shared memory of a block; 0 if unknown, and for AMD GPUs, for which no tiles are chosen.

    For a CPU, the value of a large GPU (Triton's interpreter has no limit).
    """
    if device.type != "cuda":
        return 227 << 10
    if compute_capability(device) is None:
        return 0
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of a GPU, what torch has cached but does not use among them, or of the host.

    0 if unknown.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    names = getattr(os, "sysconf_names", {})
    if device.type != "cpu" or "SC_AVPHYS_PAGES" not in names:
        return 0
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def num_cores() -> int:
    """Return the number of the host's cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy a host array to the device without waiting: on CUDA from pinned memory, which torch keeps until then."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host, from CUDA to pinned memory, and wait for it; one on the host is returned unchanged."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor)


@cache
def captures(device: torch.device) -> tuple[list[torch.cuda.Stream], Any]:
    """Return streams of a device that no engine captures on any more, and the lock that a capture holds.

    The lock is re-entrant: code that holds it may map memory, which frees abandoned memory under the same lock.
    """
    return [], threading.RLock()


def capture_lock(device: torch.device) -> AbstractContextManager:
    """Return a context that excludes captures of other threads, for changes of memory pools and emptying the cache."""
    return captures(device)[1] if device.type == "cuda" else nullcontext()


def empty_cache() -> None:
    """Free the memory that torch caches; does nothing while another thread captures a graph, when torch refuses."""
    with suppress(RuntimeError):
        torch.cuda.empty_cache()


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return GPU memory that other code owns as a tensor [nbytes] uint8, which does not keep it alive."""
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2}
    memory = SimpleNamespace(__cuda_array_interface__=interface)
    return torch.as_tensor(memory, dtype=torch.uint8, device=device)
