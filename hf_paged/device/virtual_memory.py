"""Reserved addresses whose first part is backed by memory, which can grow in place, and be freed and allocated again.

CUDA graphs contain addresses. Tensors at reserved addresses can grow, or be freed and allocated again, and no graph has
to be captured again.
"""

from __future__ import annotations

import importlib
import logging
import os
import weakref
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from hf_paged.device.cuda import bytes_at, capture_lock, captures, empty_cache

logger = logging.getLogger(__name__)

_MOST_ADDRESSES = 1 << 46  # bytes; a GPU addresses 47 bits or more
# Memory whose owner was garbage-collected during a capture, when it could not be freed; `sweep` frees it later.
_abandoned: list[VirtualMemory] = []


class DriverError(RuntimeError):
    """An error of a driver call other than a lack of memory; the message names the call and its arguments."""


class CudaDriver:
    """CUDA's virtual memory management (cuMem...). Sizes and addresses are multiples of ``granularity`` bytes.

    Raises:
        DriverError: the device cannot map memory; of a method, an error of the driver.
        torch.OutOfMemoryError: of a method, a lack of memory.
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
        """Reserve addresses, and return the first."""
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def unreserve(self, address: int, nbytes: int) -> None:
        """Free a whole reservation without mapped memory."""
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> int:
        """Allocate memory without an address, and return its handle."""
        return int(self._call("cuMemCreate", nbytes, self._properties, 0))

    def release(self, handle: int) -> None:
        """Free memory, at once or, if it is mapped, when it is unmapped."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Map memory to reserved addresses. It must not be accessed before `allow`."""
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def allow(self, address: int, nbytes: int) -> None:
        """Let the device read and write the memory mapped there, of one or several `map` calls."""
        self._call("cuMemSetAccess", address, nbytes, [self._access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo one `map`. No running kernel may use the memory."""
        self._call("cuMemUnmap", address, nbytes)

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        return bytes_at(address, nbytes, self._device)

    def finish(self, *, at_once: bool = False) -> bool:
        """Wait for all work of the device, which a capture forbids. With ``at_once``, return False while one runs."""
        if not at_once:
            with capture_lock(self._device):
                torch.cuda.synchronize(self._device)
            return True
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
def find_driver(device: torch.device) -> CudaDriver | None:
    """Return the device's driver; None if it cannot map memory (CPU, ROCm, no `cuda.bindings`, old or shared GPU)."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        return CudaDriver(importlib.import_module("cuda.bindings.driver"), device)
    except (ImportError, AttributeError, RuntimeError) as error:
        logger.info("hf_paged: no memory behind reserved addresses on %s: %s", device, error)
        return None


@dataclass
class _Piece:
    """A piece of memory that is mapped (`is_ready`), or in the middle of mapping or unmapping after an interrupt.

    Ready pieces come first in their range; all others are unmapped and freed before the range changes again.
    """

    address: int
    nbytes: int
    handle: int | None = None
    is_mapped: bool | None = False  # None: unknown
    is_ready: bool = False


def reserve(owner: object, device: torch.device, num_ranges: int, range_bytes: int) -> VirtualMemory | None:
    """Reserve addresses on a device until `owner` is garbage-collected; returns None if that is not possible."""
    driver = find_driver(device)
    if driver is None:
        return None
    try:
        memory = VirtualMemory(driver, num_ranges, range_bytes)
    except (DriverError, ValueError) as error:
        logger.warning("hf_paged: torch's memory is taken in place of mapped memory: %s", error)
        return None
    weakref.finalize(owner, memory.abandon).atexit = False  # at exit the driver frees everything itself
    return memory


class VirtualMemory:
    """Ranges of addresses of equal size, each of which has memory up to ``backed`` bytes. Not thread-safe.

    An error leaves nothing half done: `back` gives every range its bytes or leaves all ranges unchanged. Memory that
    the driver refuses to free is kept in the books, and the next `release` tries again.

    Args:
        range_bytes: size of each range, rounded up to the driver's granularity.

    Raises:
        ValueError: sizes that are no positive integers, or more addresses than a GPU has.
        DriverError: the driver cannot reserve the addresses.
    """

    def __init__(self, driver: CudaDriver, num_ranges: int, range_bytes: int) -> None:
        for name, value in (("num_ranges", num_ranges), ("range_bytes", range_bytes)):
            if value < 1:
                raise ValueError(f"{name}={value!r}: expected a positive integer")
        self._driver = driver
        self.num_ranges = num_ranges
        self.range_bytes = self._whole(range_bytes)
        if num_ranges * self.range_bytes > _MOST_ADDRESSES:
            raise ValueError(f"num_ranges={num_ranges}, range_bytes={range_bytes}: expected at most {_MOST_ADDRESSES} "
                             "bytes together")
        self._pieces: list[list[_Piece]] = [[] for _ in range(num_ranges)]
        self._process = os.getpid()
        sweep()
        with driver.current():
            self._address: int | None = driver.reserve(num_ranges * self.range_bytes)

    @property
    def backed(self) -> int:
        """The number of bytes at the beginning of each range that have memory."""
        return min(sum(piece.nbytes for piece in pieces if piece.is_ready) for pieces in self._pieces)

    @property
    def nbytes(self) -> int:
        """The bytes of memory in all ranges."""
        return sum(piece.nbytes for pieces in self._pieces for piece in pieces if piece.handle is not None)

    def back(self, nbytes: int) -> None:
        """Back the first `nbytes` of each range with memory, in addition to what is backed already.

        Raises:
            ValueError: more than a range has addresses for.
            torch.OutOfMemoryError: too little is free, also after torch has emptied its cache; nothing changed.
            DriverError: the driver refused; nothing changed.
        """
        if not 0 < nbytes <= self.range_bytes:
            raise ValueError(f"nbytes={nbytes}: expected a positive integer of at most {self.range_bytes}, the bytes "
                             "of a range")
        assert self._address is not None, "it was closed"
        sweep()
        nbytes = self._whole(nbytes)
        with self._driver.current():
            # Free torch's cached memory first if it is needed: memory that is created in vain and freed again is zeroed
            # by the driver before its next use, which takes long.
            if self.num_ranges * nbytes - self.nbytes > self._driver.num_free():
                self._driver.free_cached()
            try:
                self._back(nbytes)
            except torch.OutOfMemoryError:
                self._driver.free_cached()
                self._back(nbytes)

    def tensors(self, nbytes: int) -> list[torch.Tensor]:
        """Return the first bytes of each range, which must be backed: [nbytes] uint8, which do not own the memory."""
        if nbytes > self.backed:
            raise ValueError(f"nbytes={nbytes}: expected at most {self.backed}, which have memory")
        return [self._driver.tensor(self._start(i), nbytes) for i in range(self.num_ranges)]

    def release(self) -> None:
        """Wait for the device and free all memory, but no addresses. No tensor of the ranges may be used any more.

        Raises:
            DriverError: the driver did not free all of it.
        """
        with self._driver.current():
            self._driver.finish()
            self._give_back()

    def abandon(self) -> None:
        """Close in a finalizer, which may run inside any code, and so must not wait for a capture of another thread.

        Does nothing in a forked process: the memory belongs to the parent.
        """
        if os.getpid() == self._process:
            self.close(at_once=True)

    def close(self, *, at_once: bool = False) -> None:
        """Wait for the device, and free memory and addresses; after a device error, as many as the driver frees.

        With ``at_once``, `sweep` does so later if the device cannot be waited for.
        """
        if self._address is None:
            return
        try:
            with self._driver.current():
                if self.nbytes and not self._driver.finish(at_once=at_once):
                    _abandoned.append(self)
                    return
                self._give_back()
                address, self._address = self._address, None
                self._driver.unreserve(address, self.num_ranges * self.range_bytes)
        except Exception as error:  # after a fatal error of a kernel all driver calls fail
            logger.warning("hf_paged: memory was not given back to the device: %r", error)

    def _back(self, nbytes: int) -> None:
        """Back the first `nbytes` of all ranges, or change nothing."""
        self._tidy()
        begun: list[_Piece] = []
        try:
            for i, pieces in enumerate(self._pieces):
                if (end := sum(piece.nbytes for piece in pieces)) < nbytes:
                    begun.append(_Piece(self._start(i) + end, nbytes - end))
                    pieces.append(begun[-1])
                    self._map(begun[-1])
            for piece in begun:
                piece.is_ready = True
        except BaseException:
            for piece in begun:
                piece.is_ready = False
            with suppress(DriverError):  # so that the first error is raised
                self._tidy()
            raise

    def _map(self, piece: _Piece) -> None:
        piece.handle = self._driver.create(piece.nbytes)
        piece.is_mapped = None
        self._driver.map(piece.address, piece.nbytes, piece.handle)
        piece.is_mapped = True
        self._driver.allow(piece.address, piece.nbytes)

    def _give_back(self) -> None:
        for pieces in self._pieces:
            for piece in pieces:
                piece.is_ready = False
        self._tidy()

    def _tidy(self) -> None:
        """Unmap and free all pieces that are not ready; raises the first error after trying all of them."""
        errors = []
        for pieces in self._pieces:
            for piece in [piece for piece in reversed(pieces) if not piece.is_ready]:
                try:
                    self._take_down(piece)
                except DriverError as error:
                    errors.append(error)
                else:
                    pieces.remove(piece)
        if errors:
            raise errors[0]

    def _take_down(self, piece: _Piece) -> None:
        if piece.is_mapped is not False:
            was_mapped, piece.is_mapped = piece.is_mapped, None  # unknown after an interrupt, and then not an error
            try:
                self._driver.unmap(piece.address, piece.nbytes)
            except DriverError:
                piece.is_mapped = was_mapped
                if was_mapped:
                    raise
            piece.is_mapped = False
        handle, piece.handle = piece.handle, None  # first: to release it twice may free memory with the same handle
        if handle is not None:
            try:
                self._driver.release(handle)
            except DriverError:
                piece.handle = handle
                raise

    def _start(self, i: int) -> int:
        assert self._address is not None, "it was closed"
        return self._address + i * self.range_bytes

    def _whole(self, nbytes: int) -> int:
        unit = self._driver.granularity
        return -(-nbytes // unit) * unit


def sweep() -> None:
    """Free memory that `abandon` could not free."""
    for _ in range(len(_abandoned)):
        with suppress(IndexError):  # another thread sweeps, too
            _abandoned.pop(0).abandon()
