"""Communication of the ranks that hold one model together: on the device in every forward, on the host rarely."""

from __future__ import annotations

import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from hf_paged.errors import EngineClosedError
from hf_paged.kernels.build.compiling import is_dry
from hf_paged.kernels.comm._peers import Peers
from hf_paged.kernels.comm.all_reduce import all_reduce, all_reduce_add_rms_norm, choose_algorithm_for

# Multicast of NVLink switches can take a shared host down, and no collective used here gains from it.
ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
# Timeout of ranks above 0, which wait on the host until rank 0 has a request.
_WAIT = timedelta(days=365)
# Last name in torch's table of groups, which are ended in the reverse order of their names.
_LAST_NAME = "~hf_paged"
# Key of the store for a rank that waits in `ParallelGroup.meet`.
ARRIVED = "hf_paged/arrived/{rank}"


class ParallelGroup:
    """Group of the ranks of one model. A group of one (`SINGLE`) runs the same code without communication.

    Layers may hold the group before `meet`; its collectives raise RuntimeError before `meet` and after `leave`.

    Args:
        rank, size: this process's rank, and the number of ranks.
        driven: only rank 0 runs user code, and the other ranks follow its engine: collectives outside an engine's step
            would wait for ever, so they raise.
    """

    def __init__(self, rank: int = 0, size: int = 1, *, driven: bool = False) -> None:
        self.rank, self.size = rank, size
        self.driven = driven
        self._devices: Any = None  # process group of the device collectives: NCCL on CUDA, gloo on a CPU
        self._hosts: Any = None  # gloo group of the collectives on the host
        self.buffers: Any = None  # a `peers.PeerBuffers`, over which to sum where that is faster
        self._together: list[int] = []  # threads that are inside `together`
        self._alone: Callable[[], None] | None = None  # inside `alone`: called in place of collectives
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._process = os.getpid()

    def __deepcopy__(self, memo: dict) -> ParallelGroup:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a model that is sharded over several ranks cannot be pickled: expected its checkpoint")

    @property
    def is_parallel(self) -> bool:
        return self.size > 1

    def meet(self, device: torch.device, store: Any = None) -> None:
        """Wait for all other ranks, and make the process groups. May run in any thread.

        Args:
            device: NCCL is used for a CUDA device, gloo for a CPU.
            store: store by which the ranks meet; None: the process group that exists, or torchrun's environment.

        Raises:
            ValueError: the process group that exists, or torchrun's, has another size.
        """
        if store is None or dist.is_initialized():
            check_world(self.size)
        os.environ.update({name: value for name, value in ENVIRONMENT.items() if os.environ.get(name) != value})
        if not dist.is_initialized():
            if store is not None:
                store.set(ARRIVED.format(rank=self.rank), b"")
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size,
                                    device_id=device if device.type == "cuda" else None)
        hosts = dist.new_group(backend="gloo", timeout=_WAIT)
        self._devices = dist.new_group(backend="nccl") if device.type == "cuda" else hosts
        if device.type == "cuda":
            _connect(self._devices, device, self.size)
        self._hosts = hosts
        _world.pg_names[_ShutdownHook(self)] = _LAST_NAME  # type: ignore[index, assignment]

    def holds(self, graphs: Any) -> None:
        """Remember CUDA graphs (`StepGraphs`), which may hold this group's collectives."""
        if self.is_parallel:
            self._graphs.add(graphs)

    def drop_graphs(self) -> None:
        """Drop all graphs before the process groups end: aborting or destroying NCCL's waits for graphs that use it."""
        for graphs in list(self._graphs):
            graphs.drop("ranks ended")

    def leave(self) -> None:
        """Release the process groups, which hold the store's sockets open: collectives raise from now on."""
        self._devices = self._hosts = None

    @property
    def hosts(self) -> Any:
        """Process group of the collectives on the host."""
        return self._met(self._hosts)

    def _met(self, ranks: Any) -> Any:
        if self.is_parallel and os.getpid() != self._process:  # the other ranks listen to the parent
            raise EngineClosedError(
                f"this process is a fork of rank {self.rank}: expected a collective of the process that met the others"
            )
        # torch takes None for the default group, which may exist already, or belong to another model.
        if ranks is None:
            raise RuntimeError(
                f"rank {self.rank} of {self.size} has not met the others yet, or has left them: expected a collective "
                "between `meet` and `leave`"
            )
        return ranks

    @property
    def peers(self) -> Peers | None:
        """Argument of the kernels of `all_reduce`; None if the GPUs do not reach each other's memory."""
        return None if self.buffers is None else self.buffers.peers

    def abort(self) -> None:
        """End this rank's kernels that wait for a dead rank; may be called from any thread."""
        if self.buffers is not None:
            self.buffers.abort()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Allow collectives of the device in this thread, in a ``with`` block that all ranks run."""
        self._together.append(threading.get_ident())
        try:
            yield
        finally:
            self._together.remove(threading.get_ident())

    @contextmanager
    def alone(self, check: Callable[[], None]) -> Iterator[None]:
        """Let collectives of the device return this rank's values in the right shape, before the ranks have met.

        Args:
            check: called by each collective; may raise.
        """
        self._alone = check
        try:
            yield
        finally:
            self._alone = None

    # -- on the device ----------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks of a contiguous tensor, which may be overwritten."""
        peers = self.peers
        algorithm = None if peers is None else choose_algorithm_for(tensor, peers)
        if not self._others_come(tensor, by_kernel=algorithm is not None):
            return tensor
        if peers is not None and algorithm is not None:
            return all_reduce(tensor, peers, algorithm)
        dist.all_reduce(tensor, group=self._met(self._devices))
        return tensor

    def all_reduce_add_rms_norm(self, tensor: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor,
                                eps: float) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Compute `add_rms_norm`, see there, of the sum over ranks in one kernel; None if impossible or slower."""
        algorithm = None if self.peers is None else choose_algorithm_for(tensor, self.peers)
        if self.peers is None or algorithm is None or not self._others_come(tensor, by_kernel=True):
            return None
        return all_reduce_add_rms_norm(tensor, residual, weight, eps, self.peers, algorithm)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Compute the maximum over ranks, in place."""
        if self._others_come(tensor):
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._met(self._devices))
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Gather [...] of every rank -> [size, ...], by rank."""
        if not self._others_come(tensor):
            return tensor.expand(self.size, *tensor.shape)
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        dist.all_gather(list(gathered), tensor.contiguous(), group=self._met(self._devices))
        return gathered

    def broadcast_tensor(self, tensor: torch.Tensor) -> None:
        """Write rank 0's values into a contiguous tensor of the same shape and dtype on every rank."""
        if self._others_come(tensor):  # bytes, which every backend carries
            dist.broadcast(tensor.view(torch.uint8), group_src=0, group=self._met(self._devices))

    def exchange_rows(self, columns: torch.Tensor) -> torch.Tensor:
        """Exchange all rows of this rank's columns [R, V / size] -> all columns of this rank's rows [R / size, V].

        Rank r gets rows r * R / size onwards; R has to be a multiple of `size`.
        """
        if not self._others_come(columns):
            return columns[: len(columns) // self.size].repeat(1, self.size) if self.is_parallel else columns
        received = torch.empty((self.size, len(columns) // self.size, columns.shape[1]), dtype=columns.dtype,
                               device=columns.device)
        dist.all_to_all_single(received.flatten(0, 1), columns.contiguous(), group=self._met(self._devices))
        return received.transpose(0, 1).flatten(1)

    def _others_come(self, tensor: torch.Tensor, *, by_kernel: bool = False) -> bool:
        """Return whether other ranks make the same call; raises if there are other ranks, and they do not.

        In a dry run, which other ranks do not make, only a call of hf_paged's kernels goes on: none is launched.
        """
        if not self.is_parallel:
            return False
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise RuntimeError("a model that is sharded by hf_paged only generates: expected a forward under no_grad")
        if is_dry():
            return by_kernel
        if self._alone is not None:
            self._alone()
            return False
        if self.driven and threading.get_ident() not in self._together:
            raise RuntimeError(
                "a forward outside of generate on a model whose other ranks only follow PagedGenerator: expected "
                "tensor_parallel_size=1, or every rank to run the script (torchrun)"
            )
        return True

    # -- on the host ------------------------------------------------------------------------------------------------

    def broadcast(self, thing: Any = None) -> Any:
        """Return rank 0's `thing`, which has to pickle, on every rank; waits for rank 0.

        Takes a third of the time of torch's `broadcast_object_list`: it runs whenever requests arrive.
        """
        if not self.is_parallel:
            return thing
        if self.rank == 0:
            data = torch.frombuffer(bytearray(pickle.dumps(thing)), dtype=torch.uint8)
            dist.broadcast(torch.tensor([len(data)], dtype=torch.int64, device="cpu"), group_src=0, group=self.hosts)
            dist.broadcast(data, group_src=0, group=self.hosts)
            return thing
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        dist.broadcast(length, group_src=0, group=self.hosts)
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        dist.broadcast(data, group_src=0, group=self.hosts)
        return pickle.loads(data.numpy().tobytes())

    def smallest(self, number: int) -> int:
        """Return the minimum of the ranks' numbers."""
        if not self.is_parallel:
            return number
        tensor = torch.tensor([number], dtype=torch.int64, device="cpu")
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.hosts)
        return int(tensor)

    def all_gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Return every rank's numbers, equally many, by rank."""
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own, group=self.hosts)
        return [tensor.tolist() for tensor in every]

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is True on any rank."""
        return not self.smallest(not flag)


SINGLE = ParallelGroup()


class _ShutdownHook:
    """Entry in torch's table of groups, by which a user's `destroy_process_group` drops hf_paged's graphs first."""

    def __init__(self, group: ParallelGroup) -> None:
        self._group = weakref.ref(group)

    def shutdown(self) -> None:
        if (group := self._group()) is not None:
            group.drop_graphs()
            group.leave()

    def abort(self) -> None:
        """Do nothing: an abort comes from another thread than the graphs' owning thread, which drops them."""


def _connect(devices: Any, device: torch.device, size: int) -> None:
    """Make NCCL's communicator and connections, which it makes at first use, while ranks load, not in a first step."""
    numbers = torch.zeros(size, dtype=torch.float32, device=device)
    dist.all_reduce(numbers, group=devices)
    dist.all_to_all_single(torch.empty_like(numbers), numbers, group=devices)
    torch.cuda.synchronize(device)


def group_of(model: Any) -> ParallelGroup:
    """Return the group over which a causal LM's layers are sharded; `SINGLE` if they are not."""
    group: ParallelGroup = getattr(model, "parallel_group", SINGLE)
    return group


def check_world(size: int) -> None:
    """Raise ValueError if the process group that exists, or the one of torchrun's environment, has another size."""
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", size))
    if world != size:
        raise ValueError(f"tensor_parallel_size={size}: expected 1 or {world}, the number of processes of this job")


def join(rank: int, size: int, device: torch.device, *, store: Any = None, driven: bool = False) -> ParallelGroup:
    """Return the group after meeting the other ranks; arguments and errors are those of `ParallelGroup` and `meet`."""
    if size == 1:
        return SINGLE
    group = ParallelGroup(dist.get_rank() if dist.is_initialized() else rank, size, driven=driven)
    group.meet(device, store)
    return group
