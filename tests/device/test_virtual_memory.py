"""Memory behind reserved addresses: whatever is asked for and whatever fails, nothing leaks and nothing goes twice."""

from __future__ import annotations

import gc
import importlib
import os
import weakref

import pytest
import torch
from fake_driver import GRANULARITY, FakeDriver
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hf_paged.device import virtual_memory
from hf_paged.device.virtual_memory import CudaDriver, DriverError, VirtualMemory, find_driver

UNIT = GRANULARITY
RANGES = 3


@pytest.fixture
def driver():
    return FakeDriver()


@pytest.fixture
def memory(driver):
    return VirtualMemory(driver, RANGES, 10 * UNIT)


def failing(name, count=1, error=None):
    """A script that raises at the n-th call of a name."""
    left = [count]

    def script(called):
        if called == name:
            left[0] -= 1
            if left[0] == 0:
                raise error or DriverError(f"{name} fails")

    return script


def test_it_grows_in_place_and_keeps_what_it_holds(driver, memory):
    memory.back(UNIT + 1)
    assert memory.backed == 2 * UNIT and memory.nbytes == driver.in_use == RANGES * 2 * UNIT
    before = memory.tensors(2 * UNIT)
    for i, tensor in enumerate(before):
        tensor.fill_(i + 1)
    memory.back(5 * UNIT)
    after = memory.tensors(5 * UNIT)
    assert [tensor.data_ptr() for tensor in after] == [tensor.data_ptr() for tensor in before]
    assert [tensor[: 2 * UNIT].unique().tolist() for tensor in after] == [[1], [2], [3]]
    assert driver.counts["create"] == 2 * RANGES, "what is there stays"
    memory.back(4 * UNIT)
    assert memory.backed == 5 * UNIT


def test_memory_goes_and_comes_back_to_its_addresses(driver, memory):
    memory.back(3 * UNIT)
    places = [tensor.data_ptr() for tensor in memory.tensors(UNIT)]
    driver.start_work()
    memory.release()
    assert (memory.nbytes, memory.backed, driver.in_use) == (0, 0, 0)
    assert driver.num_finished == 1 and len(driver.reserved) == 1
    with pytest.raises(ValueError, match="nbytes=1: expected at most 0"):
        memory.tensors(1)
    memory.back(3 * UNIT)
    assert [tensor.data_ptr() for tensor in memory.tensors(UNIT)] == places
    assert driver.counts["create"] == 2 * RANGES
    memory.close()
    assert driver.is_empty()
    memory.close()


@pytest.mark.parametrize("seen", [None, 1 << 40])
def test_torchs_cache_is_emptied_before_memory_is_said_to_be_too_little(driver, memory, seen):
    driver.free, driver.cached, driver.seen_free = 4 * UNIT, 2 * UNIT, seen
    memory.back(2 * UNIT)
    assert driver.cached == 0 and driver.free == 0
    assert driver.counts["create"] == (RANGES if seen is None else 3 + RANGES), "what is in vain costs time"
    driver.cached = UNIT
    with pytest.raises(torch.OutOfMemoryError):
        memory.back(3 * UNIT)
    assert memory.backed == 2 * UNIT and driver.free == UNIT and memory.nbytes == driver.in_use


@pytest.mark.parametrize("sizes", [(0, 1), (-1, 1), (1, 0), (1, 1 << 47), (1 << 60, 1 << 60)])
def test_sizes_that_no_gpu_has_are_named(driver, sizes):
    with pytest.raises(ValueError, match=r"num_ranges=|range_bytes="):
        VirtualMemory(driver, *sizes)
    assert driver.is_empty() and not driver.counts


@pytest.mark.parametrize("nbytes", [0, -5, 10 * UNIT + 1])
def test_more_than_a_range_has_addresses_for_is_refused(driver, memory, nbytes):
    with pytest.raises(ValueError, match=f"nbytes={nbytes}: expected .* {10 * UNIT}"):
        memory.back(nbytes)
    assert not driver.handles


@pytest.mark.each_value
@pytest.mark.parametrize("error", [DriverError("no"), KeyboardInterrupt()])
@pytest.mark.parametrize("when", ["script", "after"])
@pytest.mark.parametrize("name", ["create", "map", "allow"])
@pytest.mark.parametrize("count", [1, 2, RANGES])
def test_growth_that_fails_half_way_changes_nothing(driver, memory, name, when, count, error):
    if (name, when) == ("create", "after"):
        pytest.skip("nobody has the handle then")
    memory.back(2 * UNIT)
    setattr(driver, when, failing(name, count, error))
    with pytest.raises(type(error)):
        memory.back(6 * UNIT)
    setattr(driver, when, lambda name: None)
    assert memory.backed == 2 * UNIT and memory.nbytes == driver.in_use == RANGES * 2 * UNIT
    memory.back(6 * UNIT)
    assert len(memory.tensors(6 * UNIT)) == RANGES
    memory.close()
    assert driver.is_empty()


def test_a_piece_that_is_mapped_and_cannot_be_used_is_no_memory(driver):
    """Neither access to it nor its unmapping worked: it is not counted as there, and taken down later."""
    memory = VirtualMemory(driver, 1, 4 * UNIT)
    driver.script = lambda name: failing(name)(name) if name in ("allow", "unmap") else None
    with pytest.raises(DriverError, match="allow"):
        memory.back(UNIT)
    assert memory.backed == 0 and memory.nbytes == UNIT
    driver.script = failing("unmap")
    with pytest.raises(DriverError, match="unmap"):
        memory.back(UNIT)
    memory.back(UNIT)
    assert memory.backed == UNIT == driver.in_use
    memory.close()
    assert driver.is_empty()


@pytest.mark.parametrize("when", ["script", "after"])
def test_release_that_the_driver_refuses_in_part_goes_on_and_is_tried_again(driver, memory, when):
    memory.back(2 * UNIT)
    driver.script = failing("unmap", 2)
    with pytest.raises(DriverError, match="unmap"):
        memory.release()
    driver.script = lambda name: None
    assert memory.backed == 0 and memory.nbytes == driver.in_use == 2 * UNIT
    memory.back(3 * UNIT)
    assert memory.backed == 3 * UNIT and driver.in_use == RANGES * 3 * UNIT
    memory.close()
    assert driver.is_empty()


def test_a_release_that_is_interrupted_is_finished_later(driver, memory):
    memory.back(2 * UNIT)
    driver.after = failing("unmap", 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        memory.release()
    driver.after = lambda name: None
    memory.release()
    assert driver.in_use == 0 and not driver.handles
    memory.back(UNIT)
    memory.close()
    assert driver.is_empty()


def test_close_survives_a_device_that_is_broken(driver, memory, caplog):
    memory.back(UNIT)
    driver.script = failing("finish", error=RuntimeError("an illegal memory access"))
    memory.close()
    assert "illegal memory access" in caplog.text
    assert driver.mapped and driver.reserved, "what may be in use stays"


def test_what_dies_during_a_capture_is_given_back_later(driver):
    class Owner:
        pass

    memory, owner = VirtualMemory(driver, 1, UNIT), Owner()
    memory.back(UNIT)
    weakref.finalize(owner, memory.abandon)
    del memory
    driver.may_wait = False
    del owner
    gc.collect()
    assert driver.mapped and virtual_memory._abandoned
    driver.may_wait = True
    VirtualMemory(driver, 1, UNIT).close()
    assert driver.is_empty() and not virtual_memory._abandoned


def test_a_forked_process_leaves_the_parents_memory_alone(driver, memory, monkeypatch):
    memory.back(UNIT)
    monkeypatch.setattr("os.getpid", lambda: -1)
    counts = dict(driver.counts)
    memory.abandon()
    assert driver.counts == counts and driver.num_finished == 0


class Machine(RuleBasedStateMachine):
    """Growth, release and return in any order, where any call of the driver may fail."""

    @initialize(ranges=st.integers(1, 4), units=st.integers(1, 9), free=st.integers(0, 30))
    def begin(self, ranges, units, free):
        self.driver = FakeDriver(free * UNIT)
        self.total = free * UNIT
        self.memory = VirtualMemory(self.driver, ranges, units * UNIT)
        self.wanted = 0  # bytes that were asked for with success, since the last release
        self.places = []

    def attempt(self, action, fails, error):
        """Whether it succeeded."""
        left = [fails]

        def script(name):
            left[0] -= 1
            pieces = [piece for pieces in self.memory._pieces for piece in pieces]
            if name == "unmap" and any(piece.is_mapped is None for piece in pieces):
                return  # after an interrupt right there, an error says that it was unmapped
            if left[0] <= 0 < fails:
                left[0] = 1 << 30
                raise error

        self.driver.script = script
        try:
            action()
        except (DriverError, torch.OutOfMemoryError, KeyboardInterrupt):
            return False
        finally:
            self.driver.script = lambda name: None
        return True

    errors = st.sampled_from([DriverError("no"), KeyboardInterrupt()])

    @rule(share=st.floats(0.01, 1), fails=st.integers(0, 20), error=errors)
    def back(self, share, fails, error):
        before, nbytes = self.memory.backed, max(1, int(share * self.memory.range_bytes))
        if self.attempt(lambda: self.memory.back(nbytes), fails, error):
            self.wanted = max(self.wanted, nbytes)
        else:
            assert self.memory.backed == before

    @rule(fails=st.integers(0, 20), error=errors)
    def release(self, fails, error):
        self.driver.start_work()
        if self.attempt(self.memory.release, fails, error):
            assert self.driver.in_use == self.lost() and self.memory.nbytes == 0
            self.wanted = 0
        else:
            self.wanted = self.memory.backed

    @rule(nbytes=st.integers(0, 10 * UNIT))
    def others_take_memory(self, nbytes):
        taken = min(nbytes, self.driver.free)
        self.driver.free -= taken
        self.driver.cached += taken

    @rule()
    def close(self):
        self.driver.start_work()
        lost = self.lost()
        self.memory.close()
        assert not self.driver.mapped and not self.driver.reserved and self.driver.in_use == lost
        self.memory = VirtualMemory(self.driver, self.memory.num_ranges, self.memory.range_bytes)
        self.wanted, self.places = 0, []

    @invariant()
    def nothing_leaks(self):
        driver, memory = self.driver, self.memory
        assert driver.free + driver.cached + driver.in_use == self.total
        assert memory.nbytes >= driver.in_use - self.lost()

    def lost(self):
        """Bytes whose release an interrupt came right before: nobody has the handle any more."""
        known = {piece.handle for pieces in self.memory._pieces for piece in pieces}
        return sum(nbytes for handle, nbytes in self.driver.handles.items() if handle not in known)

    @invariant()
    def what_has_memory_can_be_used(self):
        assert self.memory.backed >= self.wanted
        if backed := self.memory.backed:
            places = [tensor.data_ptr() for tensor in self.memory.tensors(backed)]
            self.places = self.places or places
            assert places == self.places, "the addresses stay"


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=150, stateful_step_count=20, deadline=None)


def test_without_a_gpu_there_is_no_driver():
    assert find_driver(torch.device("cpu")) is None


def test_bindings_that_are_missing_or_refuse_lead_to_torchs_memory(monkeypatch):
    device = torch.device("cuda", 63)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for error in (ImportError("no cuda.bindings"), RuntimeError("no libcuda.so.1"), AttributeError("an old release")):
        def import_module(name, error=error):
            raise error

        find_driver.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(importlib, "import_module", import_module)
            assert find_driver(device) is None
    find_driver.cache_clear()


gpu = pytest.mark.gpu
MIB = 1 << 20


@pytest.fixture
def alone():
    """For what reads how much memory of the device is free."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        pytest.skip("other tests use the GPU meanwhile: run it without -n")


@pytest.fixture
def cuda_driver():
    found = find_driver(torch.device("cuda", torch.cuda.current_device()))
    if found is None:
        pytest.skip("this GPU, or this build of torch, has no virtual memory management")
    return found


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@gpu
@pytest.mark.usefixtures("alone")
def test_gpu_memory_comes_from_the_device_and_goes_back(cuda_driver):
    assert isinstance(cuda_driver, CudaDriver) and cuda_driver.granularity >= MIB
    ordinary = torch.zeros(4, dtype=torch.uint8, device="cuda").fill_(1)  # code of kernels stays on the device
    ordinary[-1] = int(ordinary.max()) + int(ordinary.min())
    torch.cuda.empty_cache()
    before, allocated = free_bytes(), torch.cuda.memory_allocated()
    memory = VirtualMemory(cuda_driver, 4, 1 << 30)
    assert before - free_bytes() <= MIB, "addresses cost nothing"
    memory.back(300 * MIB)
    assert abs(before - free_bytes() - 1200 * MIB) <= 32 * MIB
    assert torch.cuda.memory_allocated() == allocated
    tensors = memory.tensors(300 * MIB)
    for i, tensor in enumerate(tensors):
        tensor.fill_(i + 1)
    places = [tensor.data_ptr() for tensor in tensors]
    memory.back(700 * MIB)
    tensors = memory.tensors(700 * MIB)
    assert [int(tensor[: 300 * MIB].max()) for tensor in tensors] == [1, 2, 3, 4]
    assert [int(tensor[: 300 * MIB].min()) for tensor in tensors] == [1, 2, 3, 4]
    tensors[3][-1] = 7
    assert int(tensors[3][-1]) == 7
    del tensors, tensor
    memory.release()
    assert before - free_bytes() <= MIB
    memory.back(2 * MIB)
    assert [tensor.data_ptr() for tensor in memory.tensors(1)] == places
    memory.close()
    assert before - free_bytes() <= MIB


@gpu
def test_gpu_a_graph_reads_and_writes_what_was_given_back_and_came_again(cuda_driver):
    memory = VirtualMemory(cuda_driver, 1, 64 * MIB)
    memory.back(2 * MIB)
    (tensor,) = memory.tensors(2 * MIB)
    out = torch.zeros((), dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        tensor.zero_()
        tensor.add_(1)
        tensor.sum()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        tensor.add_(1)
        out.copy_(tensor.sum())
    del tensor
    memory.back(40 * MIB)
    graph.replay()
    assert int(out) == 2 * 2 * MIB
    memory.release()
    memory.back(8 * MIB)
    memory.tensors(2 * MIB)[0].fill_(4)
    graph.replay()
    assert int(out) == 5 * 2 * MIB
    torch.cuda.synchronize()
    memory.close()


@gpu
@pytest.mark.usefixtures("alone")
def test_gpu_more_than_there_is_is_out_of_memory_and_leaves_nothing(cuda_driver):
    torch.cuda.empty_cache()
    before, total = free_bytes(), torch.cuda.mem_get_info()[1]
    memory = VirtualMemory(cuda_driver, 4, total)
    memory.back(2 * MIB)
    held = torch.empty(before // 2, dtype=torch.uint8, device="cuda")
    del held  # torch caches it
    memory.back(before // 6)
    with pytest.raises(torch.OutOfMemoryError, match="cuMemCreate: no memory for"):
        memory.back(before // 2)
    assert memory.backed < before // 6 + 4 * MIB
    memory.close()
    assert before - free_bytes() <= MIB
