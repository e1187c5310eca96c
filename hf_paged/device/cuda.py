"""What there is to know of a device and its host, and to ask of the device's allocator."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache

import torch


@lru_cache(maxsize=64)
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; 1 for a CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Of an NVIDIA GPU; None for all else. Under HIP an AMD GPU is a "cuda" device, too, and an MI200 says (9, 0)."""
    if device.type != "cuda" or torch.version.hip:
        return None
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=64)
def shared_memory(device: torch.device) -> int:
    """Bytes a block may have; 0 where the GPU does not say, and for AMD's, for which no tiles are chosen.

    A large GPU's for a CPU (the interpreter has no limit).
    """
    if device.type != "cuda":
        return 227 << 10
    if compute_capability(device) is None:
        return 0
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


def num_cores() -> int:
    """Cores of the host that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def empty_cache() -> None:
    """Give memory that torch caches back to the driver; not while another thread captures a graph: torch refuses."""
    with suppress(RuntimeError):
        torch.cuda.empty_cache()


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Memory of somebody else's on a GPU as a tensor [nbytes] uint8, which owns nothing."""
    return torch.as_tensor(_Bytes(address, nbytes), dtype=torch.uint8, device=device)


class _Bytes:
    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2,
        }
