"""Processes of the ranks above 0: rank 0 starts, watches and ends them."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group, _world

from hf_paged.errors import EngineClosedError, WorkerDiedError
from hf_paged.parallel.group import ARRIVED, ENVIRONMENT, ParallelGroup
from hf_paged.parallel.worker import WorkerProcess

# All ranks are on this host, and it is `launch` that ends the process of a rank, not NCCL's watchdogs.
_LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}

# Seconds: from a connection's error to the report of the death that caused it; for rank 0 to leave a step once a rank
# is dead; for workers to end after each signal; for communicators to be aborted, during which the end of the
# interpreter may crash.
_NEWS, _STUCK, _PATIENCE, _ABORT = 3.0, 6.0, 1.5, 4.0


class _State:
    """State that the threads share. They hold no `Workers`, so that its last reference ends the processes.

    Locks are reentrant, since garbage collection may end a `Workers` in any line of any thread that allocates.
    """

    def __init__(self, size: int, store: dist.Store, device_type: str) -> None:
        self.size, self.device_type = size, device_type
        self.store: dist.Store | None = store
        self.owner = os.getpid()
        self.lock = threading.RLock()
        self.workers: list[WorkerProcess] = []
        self.closed = False
        self.aborted: threading.Event | None = None  # set once aborting has ended; None before it began
        self.closing = threading.Event()
        self.died = threading.Event()
        self.exit_report = ""
        self.step: object = None  # the step that rank 0 is in
        self.meeting: threading.Thread | None = None
        self.world: Any = None  # the default process group, if `Workers.meeting` made it
        self.group: ParallelGroup | None = None


# The default process group that the last `Workers.meeting` made.
_made: weakref.ref | None = None


class Workers:
    """Processes of ranks 1 to `size - 1`, made by `launch`.

    They end with `close`, with the last reference to this object, and with this process, however it ends.
    """

    def __init__(self, state: _State) -> None:
        self._state = state
        self._finalizer = weakref.finalize(self, _close, state, 0.0)

    @property
    def store(self) -> dist.Store:
        """The `TCPStore` of the ranks; raises EngineClosedError after `close`."""
        self.check()
        return cast(dist.Store, self._state.store)

    @property
    def processes(self) -> list[int]:
        """The processes' ids, by rank."""
        return [worker.process.pid for worker in self._state.workers]

    def check(self) -> None:
        """Raise WorkerDiedError if a worker ended on its own; EngineClosedError after `close`, and in a fork."""
        if os.getpid() != self._state.owner:
            raise EngineClosedError("this process is a fork of the one that started the workers: expected that one")
        if self._state.died.is_set():
            raise WorkerDiedError(self._state.exit_report)
        if self._state.closing.is_set():
            raise EngineClosedError("the workers were closed: expected a PagedGenerator that is open")

    @contextmanager
    def meeting(self, device: torch.device) -> Iterator[ParallelGroup]:
        """Meet the workers, whose jobs call `ParallelGroup.meet` with their store, while the body runs.

        Layers can take the group at once; its ranks have met when the context is left. After an error of the body
        `close` ends the meeting.

        Raises:
            WorkerDiedError: a worker ended before all have met; raised after the body, which may call `check`.
        """
        self.check()
        state, met = self._state, Future[None]()
        group = ParallelGroup(0, state.size, driven=True)
        with _environment_of_ranks():
            # A thread waits: the wait for a peer that died while it met this rank cannot be interrupted.
            state.meeting = threading.Thread(target=_meet, args=(state, group, device, met), name="hf_paged-meet",
                                             daemon=True)
            state.meeting.start()
            yield group
            while not wait([met], timeout=0.05).done:
                self.check()
        self.check()
        with self._reporting_exits():
            met.result()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Enclose all code in which rank 0 waits for other ranks, on the device or the host; one thread at a time.

        After the death of a worker, either the wait ends with an error within seconds, or this process ends.

        Raises:
            WorkerDiedError: a worker died; raised in place of the error that this caused inside, or of a wrong result.
        """
        self.check()
        state = self._state
        with self._reporting_exits():
            outer, state.step = state.step, object()
            try:
                # Again: a worker may have died since `check`, when the watcher found no step to end.
                if state.died.is_set():
                    raise WorkerDiedError(state.exit_report)
                yield
            finally:
                state.step = outer
        self.check()

    @contextmanager
    def _reporting_exits(self) -> Iterator[None]:
        """Raise a worker's death in place of the error that it caused, which may come before its report."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RuntimeError) and not isinstance(error, WorkerDiedError):
                self._state.died.wait(_NEWS)
            if self._state.died.is_set():
                raise WorkerDiedError(self._state.exit_report) from error
            raise

    def close(self, timeout: float = 0.0) -> None:
        """End all workers, the process group that `meeting` made, and the store; does nothing when called again.

        CUDA graphs that hold collectives have to be dropped before: ending NCCL waits for them.

        Args:
            timeout: seconds that workers have to return from their jobs before they are ended.
        """
        _close(self._state, timeout)


def is_leading() -> bool:
    """Return whether this process is in a process group that `Workers.meeting` made here."""
    world = _made and _made()
    return world is not None and world is dist.group.WORLD


def launch(size: int, job: Any, device_type: str) -> Workers:
    """Start ranks 1 to `size - 1`, each running `job.run(rank, size, store)`; this process is rank 0.

    Args:
        size: number of ranks, at least 2.
        job: object that is sent pickled; its class has to be importable. `run` ends when rank 0 ends the job; `store`
            is the `TCPStore` of all ranks. Garbage collection is off until the job enables it, after loading.
        device_type: "cuda" (one device for each rank) or "cpu".

    Raises:
        ValueError: `size` below 2, fewer devices than ranks, or this process is in a process group already.
    """
    if size < 2:
        raise ValueError(f"size={size}: expected at least 2 ranks")
    if device_type == "cuda" and (devices := torch.cuda.device_count()) < size:
        raise ValueError(f"tensor_parallel_size={size}: expected at most {devices}, the number of GPUs")
    if dist.is_initialized():
        raise ValueError(
            f"tensor_parallel_size={size}: expected no default process group, where workers are to be started; this "
            f"process is in one of {dist.get_world_size()} ranks (close the other PagedGenerator, or start every rank "
            "with torchrun)"
        )
    pickled = pickle.dumps(job)
    with socket.create_server(("127.0.0.1", 0)) as server:  # by itself the store would listen on all interfaces
        port = server.getsockname()[1]
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False,
                              master_listen_fd=server.detach())
    state = _State(size, store, device_type)
    workers = Workers(state)
    environment = {**os.environ, **ENVIRONMENT, **_LOCAL}
    try:
        for rank in range(1, size):
            worker = WorkerProcess(rank, environment)
            state.workers.append(worker)
            threading.Thread(target=_watch, args=(state, worker), name=f"hf_paged-watch-{rank}", daemon=True).start()
        for worker in state.workers:
            worker.send(pickle.dumps((worker.rank, size, port, os.getpid(), pickled)))
    except BaseException:
        workers.close()
        raise
    return workers


def _meet(state: _State, group: ParallelGroup, device: torch.device, met: Future[None]) -> None:
    store = state.store
    others = [ARRIVED.format(rank=rank) for rank in range(1, state.size)]
    failure: BaseException | None = None
    try:
        # Polled: a wait for the store would not end when a worker has died, or when all are to end.
        while not cast(dist.Store, store).check(others):
            if state.died.is_set() or state.closing.wait(0.02):
                raise EngineClosedError("the workers ended before all have met")
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own current device
        hook = sys.excepthook
        try:
            group.meet(device, store)
        finally:
            sys.excepthook = hook  # torch's hook marks the user's tracebacks with a rank
    except BaseException as error:
        failure = error
    with state.lock:
        # After an error, too: the default group may have been made before it. After an error that follows `close`, the
        # default group may be another meeting's.
        if failure is None or not state.closed:
            _own(state)
            state.group = group
    if failure is not None or state.closing.is_set():
        _leave(state)
    if failure is None:
        met.set_result(None)
    else:
        met.set_exception(failure)


@contextmanager
def _environment_of_ranks() -> Iterator[None]:
    """Set the ranks' environment in a ``with`` block only: the user's next process group may span several hosts."""
    before = {name: os.environ.get(name) for name in _LOCAL}
    # Everything that `meet` writes is set here, not in its thread: C code of other threads may read the environment.
    os.environ.update({**ENVIRONMENT, **_LOCAL})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _own(state: _State) -> None:
    """Record the default process group, if any, as made by this meeting."""
    global _made
    state.world = dist.group.WORLD
    _made = state.world and weakref.ref(state.world)


def _leave(state: _State) -> None:
    """End the process group that `Workers.meeting` made, without the other ranks; NCCL's in a thread (`aborted`)."""
    with state.lock:
        world, state.world = state.world, None
        group, state.group = state.group, None
        made = world is not None and world is dist.group.WORLD
        aborts = made and state.device_type == "cuda"
        if aborts:
            state.aborted = threading.Event()
    if aborts:
        try:
            threading.Thread(target=_abort, args=(state, group), name="hf_paged-abort", daemon=True).start()
        except RuntimeError:  # Python 3.12.1 starts no thread when it ends
            _abort(state, group)
        return
    if made:
        dist.destroy_process_group()
    if group is not None:
        group.leave()


def _abort(state: _State, group: ParallelGroup | None) -> None:
    """Abort NCCL's communicators: destroying them would wait for other ranks; aborting waits for graphs with them."""
    try:
        _abort_process_group()
    finally:
        if group is not None:
            group.leave()
        cast(threading.Event, state.aborted).set()


def _watch(state: _State, worker: WorkerProcess) -> None:
    code = worker.wait()
    # A worker that ended without an error got the request to end, and `close` follows.
    if code == 0 and state.closing.wait(1.0):
        return
    with state.lock:
        if state.closing.is_set() or state.exit_report:
            return
        state.exit_report = worker.exit_report(state.size)
    state.died.set()
    stuck = state.step
    for other in state.workers:
        other.kill(signal.SIGKILL)  # breaks gloo's connections to this process, too
    if state.group is not None:
        state.group.abort()
    if state.device_type == "cuda":
        _leave(state)
    deadline = time.monotonic() + _STUCK
    while stuck is not None and state.step is stuck:
        if time.monotonic() > deadline:
            # Aborting ended NCCL's kernels. A kernel of hf_paged that spins for a dead peer's flag cannot be stopped:
            # CUDA has no call that ends a running kernel, resetting the device waits for it, and no signal or exception
            # reaches a thread in that wait. Only the end of the process frees the device.
            end = "a kernel waits for that rank, ending rank 0"
            os.write(2, f"hf_paged: {state.exit_report}\nhf_paged: {end}\n".encode())
            os._exit(1)
        time.sleep(0.05)


def _close(state: _State, timeout: float) -> None:
    if state.closed or os.getpid() != state.owner:  # a fork of rank 0 must not end the workers
        return
    with state.lock:
        state.closing.set()
    _all_ended(state, timeout)
    for worker in state.workers:
        worker.end_input()
    for number in (signal.SIGTERM, signal.SIGKILL):
        if _all_ended(state, _PATIENCE):
            break
        for worker in state.workers:
            worker.kill(number)
    _all_ended(state, _PATIENCE)
    for worker in state.workers:
        worker.end_reading()
    if state.meeting is not None:
        with suppress(RuntimeError):  # garbage collection may call this in that thread itself
            state.meeting.join(_PATIENCE)
        if state.meeting.is_alive():  # it waits for a dead rank, and may have made the default group
            _own(state)
            if state.world is None:  # or begun to: the next group's number must be the same on all ranks
                _world.group_count = 0
    _leave(state)
    if state.aborted is not None:
        state.aborted.wait(_ABORT)
    state.store = None
    state.closed = True


def _all_ended(state: _State, timeout: float) -> bool:
    deadline = time.monotonic() + timeout
    return all(worker.ended.wait(max(deadline - time.monotonic(), 0)) for worker in state.workers)
