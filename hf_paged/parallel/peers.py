"""Symmetric memory of the GPUs of one host, which all of them read and write, for `kernels/comm/all_reduce.py`."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hf_paged.device.cuda import compute_capability
from hf_paged.kernels._triton import triton
from hf_paged.kernels.comm._peers import MAX_PROGRAMS, MAX_RANKS, Peers, buffer_bytes, empty_buffer
from hf_paged.parallel.group import ENVIRONMENT, ParallelGroup

# 6,144 rows of 8192 half-precision columns.
CAPACITY = 96 << 20
# Time that an exchange waits for another rank's message, which never comes if torch numbers messages otherwise there.
_EXCHANGE_TIMEOUT = timedelta(seconds=60)
# Exchanges of this process; None after a failed exchange: see `_catch_up`.
_num_exchanges: int | None = 0


class PeersUnavailable(RuntimeError):
    """Not all GPUs can reach each other's memory, so that NCCL has to be used: the message says why."""


class PeerBuffers(NamedTuple):
    """Symmetric allocations, one per rank, that all ranks map; made by :func:`open_peers`."""

    peers: Peers  # argument of the kernels
    memory: torch.Tensor  # kept, as is torch's handle, as long as the peers
    handle: Any

    def abort(self) -> None:
        """End this rank's waits for its peers, now and from now on; may be called from any thread.

        Every all-reduce that was not complete returns garbage: raise an error, and do not use these buffers again.
        """
        self.peers.abort.fill_(1)


def open_peers(hosts: dist.ProcessGroup, device: torch.device, capacity: int = CAPACITY) -> PeerBuffers:
    """Allocate and exchange the buffers; all ranks call it together, and all succeed or all fail.

    Args:
        hosts: a gloo group of the ranks.
        device: this rank's GPU.
        capacity: bytes of the largest input of an all-reduce; `buffer_bytes` says how much is allocated.

    Raises:
        ValueError: a capacity that is no positive multiple of 16.
        PeersUnavailable: on every rank, with the reason of the first rank that has one.
    """
    if capacity <= 0 or capacity % 16:
        raise ValueError(f"capacity must be a positive multiple of 16, got {capacity}")
    rank, size = dist.get_rank(hosts), dist.get_world_size(hosts)
    _agree(_obstacle(device, size), hosts)
    own = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    _agree(_obstacle_between(_of_all(own, hosts)), hosts)
    memory, handle, buffers = _share(capacity, device, hosts)
    # A wrongly mapped buffer is found here, and not by wrong outputs of a model.
    memory[-1] = rank + 1
    torch.cuda.synchronize(device)
    dist.barrier(group=hosts)
    stamps = [int(buffer[-1]) for buffer in buffers]
    expected = list(range(1, size + 1))
    _agree(None if stamps == expected else f"peers' memory reads {stamps}, expected {expected}", hosts)
    peers = _peers_of(buffers, rank, capacity, device)
    torch.cuda.synchronize(device)
    return PeerBuffers(peers, memory, handle)


def connect(group: ParallelGroup, device: torch.device, wanted: str, num_bytes: int) -> None:
    """Make `group` sum by peers' memory where that is faster, from now on; all ranks call it together.

    Args:
        wanted: "auto": if it is possible; "peers": in any case; "nccl": never.
        num_bytes: bytes of the largest tensor; NCCL sums tensors beyond `CAPACITY`.

    Raises:
        PeersUnavailable: "peers" is wanted, and impossible.
    """
    if not group.is_parallel or group.peers is not None or wanted == "nccl":
        return
    if wanted == "auto" and device.type != "cuda":
        return
    try:
        group.buffers = open_peers(group.hosts, device, _capacity_for(num_bytes))
    except PeersUnavailable as reason:
        if wanted == "peers":
            raise
        logging.getLogger(__name__).info("all_reduce='auto' takes NCCL: %s", reason)


@contextmanager
def rehearsed_peers(group: ParallelGroup, device: torch.device, wanted: str, num_bytes: int) -> Iterator[None]:
    """Let dry runs see the kernels that sum by peers' memory, in a ``with`` block before the ranks have met.

    Arguments as for `connect`. Has no effect if `connect` is going to find an obstacle on this rank. A stand-in of a
    few bytes is in the place of peers: the block must be inside of `ParallelGroup.alone`, where no sum is launched.
    """
    is_wanted = group.is_parallel and group.peers is None and wanted != "nccl"
    if not is_wanted or _obstacle(device, group.size) is not None:
        yield
        return
    memory = torch.empty(16, dtype=torch.uint8, device=device)
    peers = _peers_of((memory,) * group.size, group.rank, _capacity_for(num_bytes), device)
    group.buffers = PeerBuffers(peers, memory, None)
    try:
        yield
    finally:
        group.buffers = None


def _capacity_for(num_bytes: int) -> int:
    return min(CAPACITY, -(-num_bytes // 16) * 16)


def _peers_of(buffers: tuple[torch.Tensor, ...], rank: int, capacity: int, device: torch.device) -> Peers:
    return Peers(
        buffers=buffers,
        epochs=torch.zeros(MAX_PROGRAMS, dtype=torch.int64, device=device),
        abort=torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=True),
        rank=rank,
        capacity=capacity,
    )


def _share(capacity: int, device: torch.device, hosts: dist.ProcessGroup) -> tuple[torch.Tensor, Any, tuple]:
    """Make an empty buffer on every rank; returns this rank's, torch's handle of all, and all buffers by rank."""
    num_bytes = buffer_bytes(capacity)
    rank, size = dist.get_rank(hosts), dist.get_world_size(hosts)
    counts = _of_all(_num_exchanges, hosts)
    try:
        _catch_up(counts, rank, device)
        # The buffer is empty on all ranks before any rank gets the address of another's.
        memory = _symmetric_memory(num_bytes, device)
        empty_buffer(memory, capacity)
        torch.cuda.synchronize(device)
        problem = None
    except Exception as error:  # a build without symmetric memory, out of memory, a driver that cannot share
        problem = f"no symmetric memory: {error}"
    _agree(problem, hosts)
    with _folder_of_all(hosts) as folder:
        try:
            handle = _exchange(memory, folder, rank, size)
            buffers = tuple(handle.get_buffer(r, (num_bytes,), torch.uint8) for r in range(size))
            problem = _mismatch(memory, handle, buffers, rank)
        except Exception:
            problem = f"no exchange of symmetric memory: {traceback.format_exc(limit=1)}"
        _agree(problem, hosts)
    return memory, handle, buffers


def _symmetric_memory(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Allocate memory that can be exchanged, and that is freed with the tensor.

    `symmetric_memory.empty` takes memory from a pool that keeps it, with the mappings of all exchanges, and reuses it
    for smaller buffers: a process that had a larger buffer before would exchange another size than other ranks.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, device)


def _catch_up(counts: list[int | None], rank: int, device: torch.device) -> None:
    """Exchange memory with no other rank until this process has made as many exchanges as any rank's process.

    torch numbers the messages of exchanges by process, and ranks wait for messages of the same number: without this, a
    process that held a model over ranks before would never meet new workers.
    """
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        raise RuntimeError(f"an earlier exchange of rank {counts.index(None)}'s process failed")
    for _ in range(max(known) - known[rank]):
        with tempfile.TemporaryDirectory(prefix="hf_paged-") as folder:
            _exchange(_symmetric_memory(16, device), folder, 0, 1)


@contextmanager
def _folder_of_all(hosts: dist.ProcessGroup) -> Iterator[str]:
    """Make a folder that is the same on all ranks, which have to meet before any of them leaves the context."""
    folder, problem = None, None
    if dist.get_rank(hosts) == 0:
        try:
            folder = tempfile.mkdtemp(prefix="hf_paged-")
        except OSError as error:
            problem = f"no temporary folder: {error}"
    try:
        _agree(problem, hosts)
        shared = _of_all(folder, hosts)[0]
        # On a rank that does not see the folder, torch's store would retry for 300 s.
        _agree(None if os.path.isdir(shared) else f"does not see rank 0's folder {shared}", hosts)
        yield shared
    finally:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


def _exchange(memory: torch.Tensor, folder: str, rank: int, size: int) -> Any:
    """Run `symmetric_memory.rendezvous` over a group of its own, with a name that no group had before.

    torch keeps the store of a group by the group's name until the process ends, while groups that are made after a
    `destroy_process_group` get the same names again; and a store of sockets would stay open.
    """
    from torch._C._distributed_c10d import (
        ProcessGroup,
        _register_process_group,
        _SymmetricMemory,
        _unregister_process_group,
    )

    global _num_exchanges
    assert _num_exchanges is not None
    before, _num_exchanges = _num_exchanges, None
    store = dist.FileStore(os.path.join(folder, "store"), size)
    store.set_timeout(_EXCHANGE_TIMEOUT)
    name: Any = os.path.basename(folder)  # a str; newer torch has a type for it
    group = ProcessGroup(store, rank, size)  # torch's registry does not keep it alive
    _register_process_group(name, group)
    try:
        handle = _SymmetricMemory.rendezvous(memory, name)
    finally:
        _unregister_process_group(name)
    _num_exchanges = before + 1
    return handle


def _agree(problem: str | None, hosts: dist.ProcessGroup) -> None:
    """Raise PeersUnavailable on every rank if any rank has a problem."""
    for rank, reason in enumerate(_of_all(problem, hosts)):
        if reason is not None:
            raise PeersUnavailable(f"rank {rank}: {reason}")


def _of_all(thing: Any, hosts: dist.ProcessGroup) -> list[Any]:
    """Return each rank's `thing`, by rank."""
    things: list[Any] = [None] * dist.get_world_size(hosts)
    dist.all_gather_object(things, thing, group=hosts)
    return things


def _obstacle(device: torch.device, size: int) -> str | None:
    capability = compute_capability(device)
    if capability is None:
        return f"expected an NVIDIA GPU, got {device}"
    if triton is None:
        return "triton is not installed"
    if not 2 <= size <= MAX_RANKS:
        return f"expected 2 to {MAX_RANKS} ranks, got {size}"
    if capability < (9, 0):
        return f"expected compute capability 9.0 or later, got {capability}"
    # The exchange itself would create a multicast object otherwise.
    if os.environ.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") != ENVIRONMENT["TORCH_SYMM_MEM_DISABLE_MULTICAST"]:
        return "TORCH_SYMM_MEM_DISABLE_MULTICAST is not 1"
    others = [d for d in range(torch.cuda.device_count()) if d != device.index]
    if not all(torch.cuda.can_device_access_peer(device, d) for d in others):
        return f"{device} cannot reach the memory of all of {others}"
    return None


def _obstacle_between(hosts_and_devices: list[tuple[str, str]]) -> str | None:
    if len({host for host, _ in hosts_and_devices}) > 1:
        return f"expected ranks of one host, got {sorted({host for host, _ in hosts_and_devices})}"
    if len(set(hosts_and_devices)) < len(hosts_and_devices):
        return "several ranks share a GPU"
    return None


def _mismatch(memory: torch.Tensor, handle: Any, buffers: tuple[torch.Tensor, ...], rank: int) -> str | None:
    if (handle.rank, handle.world_size) != (rank, len(buffers)):
        return f"the exchange numbers ranks otherwise: {handle.rank} of {handle.world_size}, not {rank}"
    if buffers[rank].data_ptr() != memory.data_ptr():
        return "the exchange gave another address for this rank's own memory"
    if any(buffer.data_ptr() % 16 for buffer in buffers):
        return "peers' memory is not 16-byte aligned"
    if handle.multicast_ptr:
        return "the exchange mapped a multicast address"
    return None
