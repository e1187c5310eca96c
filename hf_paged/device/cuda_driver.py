"""CUDA's virtual memory management (cuMem...), by the driver bindings that torch's CUDA builds depend on."""

from __future__ import annotations

import importlib
import logging
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Protocol

import torch

from hf_paged.device.captures import capture_lock, captures
from hf_paged.device.cuda import bytes_at, empty_cache

logger = logging.getLogger(__name__)


class DriverError(RuntimeError):
    """An error of a driver call other than a lack of memory; the message names the call and its arguments."""


class VirtualMemoryDriver(Protocol):
    """The protocol of a driver for `VirtualMemory`. Sizes and addresses are multiples of ``granularity`` bytes.

    Methods raise `torch.OutOfMemoryError` for a lack of memory, and `DriverError` for any other error.
    """

    granularity: int

    def reserve(self, nbytes: int) -> int:
        """Reserve addresses, and return the first."""
        ...

    def unreserve(self, address: int, nbytes: int) -> None:
        """Free a whole reservation without mapped memory."""

    def create(self, nbytes: int) -> int:
        """Allocate memory without an address, and return its handle."""
        ...

    def release(self, handle: int) -> None:
        """Free memory, at once or, if it is mapped, when it is unmapped."""

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map memory to reserved addresses. It must not be accessed before `allow`."""

    def allow(self, address: int, nbytes: int) -> None:
        """Let the device read and write the memory mapped there, of one or several `map` calls."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo one `map`. No running kernel may use the memory."""

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Return mapped memory as a tensor [nbytes] uint8, which does not own it."""
        ...

    def finish(self) -> bool:
        """Wait for all work enqueued on the device; returns True."""
        ...

    def finish_at_once(self) -> bool:
        """Call `finish` unless a capture is running, which forbids it; returns False then, without waiting."""
        ...

    def num_free(self) -> int:
        """Return the free bytes of the device."""
        ...

    def free_cached(self) -> None:
        """Free the unused memory that torch's allocator caches."""

    def current(self) -> AbstractContextManager:
        """Return a context in which the device is this thread's current one."""
        ...


class CudaDriver:
    """The `VirtualMemoryDriver` of a CUDA device.

    Raises:
        DriverError: the device cannot map memory.
    """

    def __init__(self, cuda: Any, device: torch.device) -> None:
        self._cuda, self._device = cuda, device
        torch.cuda.mem_get_info(device)  # creates the CUDA context that driver calls need
        attribute = cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        index = torch.cuda.current_device() if device.index is None else device.index
        if not self._call("cuDeviceGetAttribute", attribute, self._call("cuDeviceGet", index)):
            raise DriverError(f"{device} has no virtual memory management")
        self._properties = cuda.CUmemAllocationProp()
        self._properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        location = cuda.CUmemLocation()
        location.type, location.id = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, index
        self._properties.location = location
        self._access = cuda.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        smallest = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self._call("cuMemGetAllocationGranularity", self._properties, smallest))

    def reserve(self, nbytes: int) -> int:
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> int:
        return int(self._call("cuMemCreate", nbytes, self._properties, 0))

    def release(self, handle: int) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def allow(self, address: int, nbytes: int) -> None:
        self._call("cuMemSetAccess", address, nbytes, [self._access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return bytes_at(address, nbytes, self._device)

    def finish(self) -> bool:
        with capture_lock(self._device):  # a capture in another thread would end with an error
            torch.cuda.synchronize(self._device)
        return True

    def finish_at_once(self) -> bool:
        _, lock = captures(self._device)
        if torch.cuda.is_current_stream_capturing() or not lock.acquire(blocking=False):
            return False
        try:
            torch.cuda.synchronize(self._device)
        finally:
            lock.release()
        return True

    def num_free(self) -> int:
        return torch.cuda.mem_get_info(self._device)[0]

    def free_cached(self) -> None:
        with capture_lock(self._device):
            empty_cache()

    def current(self) -> AbstractContextManager:
        return torch.cuda.device(self._device)

    def _call(self, name: str, *args: Any) -> Any:
        status, *values = getattr(self._cuda, name)(*args)
        if status == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY and name != "cuMemAddressReserve":
            raise torch.OutOfMemoryError(f"{name}: no memory for {args[0]:,} bytes on {self._device}")
        if status != self._cuda.CUresult.CUDA_SUCCESS:
            numbers = ", ".join(str(arg) for arg in args if isinstance(arg, int))
            raise DriverError(f"{name}({numbers}) on {self._device}: {status!r}")
        return values[0] if values else None


@lru_cache(maxsize=64)
def find_driver(device: torch.device) -> VirtualMemoryDriver | None:
    """Return the device's driver; None if it cannot map memory (CPU, ROCm, no `cuda.bindings`, old or shared GPU)."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        return CudaDriver(importlib.import_module("cuda.bindings.driver"), device)
    except (ImportError, AttributeError, RuntimeError) as error:
        logger.info("hf_paged: no memory behind reserved addresses on %s: %s", device, error)
        return None
