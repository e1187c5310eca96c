"""Reserved addresses of which a prefix has memory: it grows in place, and goes while the addresses stay.

CUDA graphs hold addresses. What lies here can take more memory, or give all of it back and take it again, and no graph
has to be captured anew.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from hf_paged.device.cuda_driver import DriverError, VirtualMemoryDriver, find_driver

logger = logging.getLogger(__name__)

_MOST_ADDRESSES = 1 << 46  # bytes; a GPU addresses 47 bits or more
# What nobody refers to any more, and could not be given back where that was noticed.
_abandoned: list[VirtualMemory] = []


@dataclass
class _Piece:
    """Memory on its way to its addresses, there (`is_ready`), or on its way back: an interrupt may come at any point.

    Those that are ready come first in their range; the others are taken down before anything else happens there.
    """

    address: int
    nbytes: int
    handle: int | None = None
    may_be_mapped: bool = False
    is_mapped: bool = False
    is_ready: bool = False


def reserve(owner: object, device: torch.device, num_ranges: int, range_bytes: int) -> VirtualMemory | None:
    """Addresses for what `owner` has on a device, which go with it; None where they cannot be had."""
    driver = find_driver(device)
    if driver is None:
        return None
    try:
        memory = VirtualMemory(driver, num_ranges, range_bytes)
    except (DriverError, ValueError) as error:
        logger.warning("hf_paged: torch's memory is taken in place of mapped memory: %s", error)
        return None
    weakref.finalize(owner, memory.abandon).atexit = False  # the driver takes all back by itself then
    return memory


class VirtualMemory:
    """Ranges of addresses of equal size, each of which has memory up to ``backed`` bytes. Not thread-safe.

    Nothing is left half done by an error: `back` gives every range its bytes or leaves all as they were. Where the
    driver refuses to take memory back, it stays known and is tried again by the next `release`.

    Args:
        driver: of the device.
        num_ranges: how many, one after the other.
        range_bytes: addresses of each, rounded up to the driver's granularity.

    Raises:
        ValueError: sizes that are no positive integers, or more addresses than a GPU has.
        DriverError: the driver has none.
    """

    def __init__(self, driver: VirtualMemoryDriver, num_ranges: int, range_bytes: int) -> None:
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
        """Bytes from its beginning on that each range has memory for."""
        return min(sum(piece.nbytes for piece in pieces if piece.is_ready) for pieces in self._pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this holds."""
        return sum(piece.nbytes for pieces in self._pieces for piece in pieces if piece.handle is not None)

    def back(self, nbytes: int) -> None:
        """Give each range memory for its first `nbytes`, and keep what it has.

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
            # torch's allocator may hold what it does not use; asked first, since memory that is created in vain and
            # given back is zeroed before it can be had again.
            if self.num_ranges * nbytes - self.nbytes > self._driver.num_free():
                self._driver.free_cached()
            try:
                self._back(nbytes)
            except torch.OutOfMemoryError:
                self._driver.free_cached()
                self._back(nbytes)

    def tensors(self, nbytes: int) -> list[torch.Tensor]:
        """The first bytes of each range, which have memory: [nbytes] uint8. They own nothing and hold nothing."""
        if nbytes > self.backed:
            raise ValueError(f"nbytes={nbytes}: expected at most {self.backed}, which have memory")
        return [self._driver.tensor(self._start(i), nbytes) for i in range(self.num_ranges)]

    def release(self) -> None:
        """Give all memory back, once the device is done; the addresses stay. No tensor may be used any more.

        Raises:
            DriverError: the driver did not take all of it back.
        """
        with self._driver.current():
            self._driver.finish()
            self._give_back()

    def close(self) -> None:
        """Give memory and addresses back, once the device is done; after an error of the device as far as it goes."""
        self._close(self._driver.finish)

    def abandon(self) -> None:
        """`close` for a finalizer, which may run anywhere and waits for nobody who may wait for it.

        In a forked process nothing happens: the memory is the parent's.
        """
        if os.getpid() == self._process:
            self._close(self._driver.finish_at_once)

    def _close(self, finish: Callable[[], bool]) -> None:
        if self._address is None:
            return
        try:
            with self._driver.current():
                if self.nbytes and not finish():
                    _abandoned.append(self)
                    return
                self._give_back()
                address, self._address = self._address, None
                self._driver.unreserve(address, self.num_ranges * self.range_bytes)
        except Exception as error:  # a device that a kernel has broken answers nothing any more
            logger.warning("hf_paged: memory was not given back to the device: %r", error)

    def _back(self, nbytes: int) -> None:
        """All of them, or none."""
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
            with suppress(DriverError):  # the first error is the one to see
                self._tidy()
            raise

    def _map(self, piece: _Piece) -> None:
        piece.handle = self._driver.create(piece.nbytes)
        piece.may_be_mapped = True
        self._driver.map(piece.address, piece.nbytes, piece.handle)
        piece.is_mapped = True
        self._driver.allow(piece.address, piece.nbytes)

    def _give_back(self) -> None:
        for pieces in self._pieces:
            for piece in pieces:
                piece.is_ready = False
        self._tidy()

    def _tidy(self) -> None:
        """Take down what is not ready; where the driver refuses one, the others all the same."""
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
        if piece.may_be_mapped:
            was_mapped, piece.is_mapped = piece.is_mapped, False  # an interrupt leaves it open whether it is
            try:
                self._driver.unmap(piece.address, piece.nbytes)
            except DriverError:
                piece.is_mapped = was_mapped
                if was_mapped:
                    raise
            piece.may_be_mapped = False
        handle, piece.handle = piece.handle, None  # after an interrupt never twice: it may be somebody else's by then
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
    """Give back what was abandoned where that could not be done."""
    for _ in range(len(_abandoned)):
        with suppress(IndexError):  # another thread sweeps, too
            _abandoned.pop(0).abandon()
