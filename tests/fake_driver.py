"""A `CudaDriver` without a GPU: addresses and memory of this process, CUDA's rules checked, errors on demand."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from hf_paged.device import virtual_memory
from hf_paged.device.virtual_memory import DriverError

GRANULARITY = 4096


class FakeDriver:
    """Addresses are a private mapping of the process; memory that is unmapped loses its content.

    Attributes:
        free: bytes that `create` may still hand out.
        cached: bytes that come free when torch empties its cache.
        script: called with the name of every call that may fail, before it does anything; may raise.
        after: the same, when it is done.
    """

    granularity = GRANULARITY

    def __init__(self, free: int = 1 << 30, granularity: int = GRANULARITY) -> None:
        self.free, self.cached, self.granularity = free, 0, granularity
        self.reserved: dict[int, tuple[int, mmap.mmap]] = {}
        self.handles: dict[int, int] = {}  # that are not released, with their bytes
        self.mapped: dict[int, tuple[int, int]] = {}  # address: bytes, handle
        self.allowed: set[int] = set()
        self.memory: dict[int, int] = {}  # bytes of memory that a handle or a mapping keeps, by handle
        self.seen_free: int | None = None  # where `num_free` is mistaken
        self.counts: dict[str, int] = {}
        self.tensors: list[tuple[int, int, weakref.ref]] = []
        self.num_finished = 0
        self.busy: set[int] = set()  # addresses that something enqueued may use
        self.may_wait, self.in_finalizer = True, False
        self.script = self.after = lambda name: None
        self._next = 1

    @property
    def in_use(self) -> int:
        return sum(self.memory.values())

    def reserve(self, nbytes):
        self._begin("reserve", nbytes)
        self.in_finalizer = False
        memory = mmap.mmap(-1, nbytes)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        self.reserved[address] = nbytes, memory
        self.after("reserve")
        return address

    def unreserve(self, address, nbytes):
        self._begin("unreserve", nbytes)
        assert self.reserved[address][0] == nbytes, "of another size than was reserved"
        assert not [a for a in self.mapped if address <= a < address + nbytes], "something is mapped there"
        assert self.in_finalizer or not self.living(address, nbytes), "a tensor lies there"
        del self.reserved[address]
        self.after("unreserve")

    def create(self, nbytes):
        self._begin("create", nbytes)
        if nbytes > self.free:
            raise torch.OutOfMemoryError(f"{nbytes} of {self.free}")
        self.free -= nbytes
        handle, self._next = self._next, self._next + 1
        self.handles[handle] = self.memory[handle] = nbytes
        self.after("create")
        return handle

    def release(self, handle):
        self._begin("release")
        del self.handles[handle]  # KeyError: twice, or never there
        self._collect()
        self.after("release")

    def map(self, address, nbytes, handle):
        self._begin("map", nbytes)
        assert self.handles[handle] == nbytes
        assert any(start <= address and address + nbytes <= start + size for start, (size, _) in self.reserved.items())
        overlapping = [a for a, (size, _) in self.mapped.items() if a < address + nbytes and address < a + size]
        assert not overlapping, "something is mapped there"
        self.mapped[address] = nbytes, handle
        self.after("map")

    def allow(self, address, nbytes):
        self._begin("allow", nbytes)
        assert self.mapped[address][0] == nbytes
        self.allowed.add(address)
        self.after("allow")

    def unmap(self, address, nbytes):
        self._begin("unmap", nbytes)
        if address not in self.mapped:
            raise DriverError("nothing is mapped there")
        assert self.mapped[address][0] == nbytes, "only whole pieces can be unmapped"
        assert address not in self.busy, "the device still uses it"
        assert self.in_finalizer or not self.living(address, nbytes), "a tensor lies there"
        self._bytes(address, nbytes)[:] = 0xFF  # NaN, in every format
        del self.mapped[address]
        self.allowed.discard(address)
        self._collect()
        self.after("unmap")

    def tensor(self, address, nbytes):
        end = address
        while end < address + nbytes:
            assert end in self.allowed, "not all of it is mapped"
            end += self.mapped[end][0]
        memory = self._bytes(address, nbytes)
        self.tensors.append((address, nbytes, weakref.ref(memory)))
        return torch.from_numpy(memory)

    def finish(self, *, at_once=False):
        if at_once:
            self.in_finalizer = True  # of an object whose attributes go right after it
            if not self.may_wait:
                return False
        self.script("finish")
        self.num_finished += 1
        self.busy.clear()
        return True

    def num_free(self):
        return self.seen_free if self.seen_free is not None else self.free

    def free_cached(self):
        self.free, self.cached = self.free + self.cached, 0

    def current(self):
        return nullcontext()

    def start_work(self):
        """Enqueue something that uses all memory that there is."""
        self.busy |= set(self.mapped)

    def living(self, address, nbytes):
        """Tensors that lie there, at least in part."""
        self.tensors = [entry for entry in self.tensors if entry[2]() is not None]
        return [entry for entry in self.tensors if entry[0] < address + nbytes and address < entry[0] + entry[1]]

    def is_empty(self):
        """Was everything given back?"""
        return not (self.reserved or self.handles or self.mapped or self.memory)

    def _begin(self, name, nbytes=0):
        assert nbytes % self.granularity == 0 and nbytes >= 0
        self.counts[name] = self.counts.get(name, 0) + 1
        self.script(name)

    def _collect(self):
        """Memory is free once neither a handle nor a mapping keeps it."""
        kept = {*self.handles, *(handle for _, handle in self.mapped.values())}
        for handle in [handle for handle in self.memory if handle not in kept]:
            self.free += self.memory.pop(handle)

    def _bytes(self, address, nbytes):
        start, (_, memory) = next(item for item in self.reserved.items() if item[0] <= address < item[0] + item[1][0])
        return np.frombuffer(memory, np.uint8, nbytes, address - start)


def lent_driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """What a fixture yields: reserved memory of any device is this driver's, which has all of it back in the end."""
    fake = FakeDriver()
    monkeypatch.setattr(virtual_memory, "find_driver", lambda device: fake)
    yield fake
    gc.collect()
    assert fake.is_empty()
