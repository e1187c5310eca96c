"""Properties of a device and its host, and functions of the device's allocator."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache

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


def num_cores() -> int:
    """Return the number of the host's cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def empty_cache() -> None:
    """Free the memory that torch caches; does nothing while another thread captures a graph, when torch refuses."""
    with suppress(RuntimeError):
        torch.cuda.empty_cache()


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Return GPU memory that other code owns as a tensor [nbytes] uint8, which does not keep it alive."""
    return torch.as_tensor(_Bytes(address, nbytes), dtype=torch.uint8, device=device)


class _Bytes:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2,
        }
