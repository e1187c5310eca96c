"""The lock around an engine's loop, and what threads have to know before they call into the loop."""

from __future__ import annotations

import dataclasses
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from typing import Any

from transformers import PreTrainedModel

from hf_paged.attention.registry import check_backend
from hf_paged.config import PagedConfig, executor_options
from hf_paged.engine.loop import EngineCore
from hf_paged.engine.ranks import interrupts
from hf_paged.engine.ranks.commands import Build, Command, CommandQueue
from hf_paged.errors import EngineClosedError, UnsupportedModelError
from hf_paged.kernels.weights_checksum import warm_up
from hf_paged.models import ModelExecutor, find_executor, why_no_executor
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.peers import connect, rehearsed_peers
from hf_paged.parallel.replica import Replica
from hf_paged.process_lock import ProcessLock
from hf_paged.runner.memory import DevicePool, config_for

# The most seconds that a loop waits for earlier turns, and the seconds between its checks of them.
_PATIENCE, _NAP = 0.01, 50e-6
# The updates (`LockedCore._update`) that the current context is inside of. A copied context (of a task, for instance)
# keeps the updates of its origin, so that `check_outside_update` can refuse an await that would deadlock.
updates: ContextVar[tuple[object, ...]] = ContextVar("hf_paged_updates", default=())
CLOSED = "this engine is closed: its model was disabled"
_IN_UPDATE = "inside a weight_update() of the same engine, which holds steps off: leave the `with` block first"
_FORKED = "this process is a fork of one whose model is sharded over several ranks: expected that process"


def rehearse(model: PreTrainedModel, config: PagedConfig) -> None:
    """Compile the kernels that an engine with ``owns_device`` runs first; frees what it allocates.

    Raises:
        UnsupportedModelError: the model's class is not supported.
        ValueError: a field of the config that does not suit the model, as from `Engine`.
    """
    executor = executor_of(model, config)
    config = fitting(config, executor)
    core = EngineCore(executor, config, None, owns_device=True)
    device, largest = executor.kv_spec().device, _largest_sum(executor, config)
    with core.changing(), rehearsed_peers(executor.group, device, config.all_reduce, largest):
        core.pool.rehearse()


def executor_of(model: PreTrainedModel, config: PagedConfig) -> ModelExecutor:
    """Return the model's executor after checking that the config suits the model."""
    reason, executor_class = why_no_executor(model, anew=True), find_executor(model)
    if executor_class is None:
        raise UnsupportedModelError(f"model={type(model).__name__}: {reason}")
    warm_up(model.device)
    executor = executor_class(model, **executor_options(config))
    if not executor.group.is_parallel:  # calls probably run under the autocast of this thread: no change of it later
        executor.autocast = executor.autocast_of_call()
    check_backend(config.attention_backend, executor.kv_spec().attention(config.block_size))
    return executor


def _largest_sum(executor: ModelExecutor, config: PagedConfig) -> int:
    """Return the bytes of the largest tensor that ranks sum in a step."""
    itemsize = executor.kv_spec().compute_dtype.itemsize
    return config.max_num_batched_tokens * executor.hidden_size * itemsize


def fitting(config: PagedConfig, executor: ModelExecutor) -> PagedConfig:
    """Return a config whose steps are no larger than those that are known to compute what stock computes."""
    config = config_for(config, executor)
    if (most := executor.max_step_tokens) is None or config.max_num_batched_tokens <= most:
        return config
    return dataclasses.replace(config, max_num_batched_tokens=most, max_num_seqs=min(config.max_num_seqs, most))


class FairLock(ProcessLock):
    """A `ProcessLock` with turns for the threads that wait for it.

        with lock.turn(after_others=True) as turn, lock.rlock:
            turn.leave()

    An RLock alone is taken again by the loop that has just released it, before a waiting thread wakes up. The RLock has
    a `with` item of its own, whose C code no exception interrupts: a lock that Python code takes or releases would
    sometimes stay locked after a Ctrl-C. A turn that is never left (Ctrl-C, a fork) delays one loop once, by _PATIENCE.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiting: list[Turn] = []

    def turn(self, *, after_others: bool = False) -> Turn:
        """Return a context that counts as waiting until `leave` or its end; ``after_others``: it begins after these."""
        return Turn(self._waiting, after_others)

    def take(self, seconds: float) -> None:
        with self.turn():
            super().take(seconds)


class Turn:
    """A thread's turn in a `FairLock`."""

    def __init__(self, waiting: list[Turn], after_others: bool) -> None:
        self._waiting, self._after_others = waiting, after_others

    def __enter__(self) -> Turn:
        self._waiting.append(self)
        if self._after_others:
            deadline = time.monotonic() + _PATIENCE
            while (first := next(iter(self._waiting), self)) is not self:
                if time.monotonic() > deadline:
                    first.leave()
                else:
                    time.sleep(_NAP)
        return self

    def leave(self, *_error: object) -> None:
        """End the turn, once the lock is held, so that the next turn may begin; a second call does nothing."""
        with suppress(ValueError):  # a loop whose _PATIENCE was over has removed the turn
            self._waiting.remove(self)

    __exit__ = leave


class LockedCore:
    """The loop of one engine behind a lock, which is held for a step at a time.

    Arguments as for `Engine`.
    """

    def __init__(self, model: PreTrainedModel, config: PagedConfig, tokenizer: Any, *, owns_device: bool) -> None:
        self._executor = executor_of(model, config)
        config = fitting(config, self._executor)
        self.group: ParallelGroup = self._executor.group  # the ranks over which the model is sharded
        device, largest = self._executor.kv_spec().device, _largest_sum(self._executor, config)
        connect(self.group, device, config.all_reduce, largest)
        self.config = config
        self.owns_device = owns_device
        self._core = EngineCore(self._executor, config, tokenizer, owns_device=owns_device)
        self._core.pool.warm_up.begin()
        self._commands = CommandQueue(self.group, self._core)
        self._lock, self._on_cpu = FairLock(), device.type == "cpu"
        self._is_shut_down = False
        self._updating_thread: int | None = None  # the thread that is inside of `weight_update`
        self._update: object | None = None  # identifies the update under way in `updates`
        self.tuners: weakref.WeakSet[Any] = weakref.WeakSet()  # PEFT's objects around the model, which name adapters
        self._deferred: list[Callable[[], None]] = []  # actions that must wait for the end of a step

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the engine's lock between two steps."""
        with self._lock.turn() as turn, self._lock.rlock:
            turn.leave()
            if not self.is_reentrant():
                self._core.settle()
                self._core.joining.end_orphans()
            yield

    def after_step(self, action: Callable[[], None]) -> None:
        """Call ``action`` now or, in a thread that is inside a step of this engine, after that step."""
        if self.is_reentrant():
            self._deferred.append(action)
        else:
            action()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that decodes tokens and matches stop strings; another one may be set between calls."""
        return self._core.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._core.tokenizer = tokenizer

    @property
    def model(self) -> PreTrainedModel:
        """The model that this engine runs."""
        return self._executor.source

    @property
    def replica(self) -> Replica | None:
        """The gathered copy of a model sharded by FSDP2, which forwards run; None for other models."""
        return self._executor.replica

    def is_reentrant(self) -> bool:
        """Return whether this thread is inside a step, a command or a `weight_update` of this engine."""
        busy = self._core.stepping_thread, self._commands.busy_thread, self._updating_thread
        return threading.get_ident() in busy

    def is_updating(self) -> bool:
        """Return whether this thread is inside a `weight_update` of this engine."""
        return self._updating_thread == threading.get_ident()

    def check_outside_update(self) -> None:
        """Raise RuntimeError in a task that is inside a `weight_update`: to await a step there would deadlock."""
        if self._update is not None and self._update in updates.get():
            raise RuntimeError(f"agenerate or astream was awaited {_IN_UPDATE}")

    def _refuse_inside(self, what: str) -> None:
        """Raise RuntimeError in a thread that is inside a step or a `weight_update` of this engine."""
        if self.is_updating():
            raise RuntimeError(f"{what} {_IN_UPDATE}")
        if self.is_reentrant():
            raise RuntimeError(f"{what} inside a step of the same engine: a streamer, processor or criterion, and what "
                               "else a step calls, may do so only after the step")

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise EngineClosedError(CLOSED)

    def _pool(self) -> DevicePool:
        if self._core.scheduler is None:
            self._carry_out(Build())
        return self._core.pool

    @property
    def lock_for_fork(self) -> FairLock | None:
        """The lock around the steps where the child of a fork can go on with the engine: on a CPU."""
        return self._lock if self._on_cpu else None

    def start_over_in_child(self) -> None:
        """Start over in the child of a fork, with an empty cache and only the requests of the thread that forked.

        Inside of a step of this thread, the step is finished first.
        """
        if not self._executor.has_source:  # the model is gone, and no call can be made
            return
        self._core.grammars.forget_open()
        if self.group.is_parallel:
            self._commands.over = _FORKED  # the connections to the other ranks belong to the parent
        if self.is_reentrant():
            self._deferred.append(self._forget_other_threads)
        else:
            self._core.stepping_thread = self._commands.busy_thread = self._updating_thread = None
            self._forget_other_threads()

    def _forget_other_threads(self) -> None:
        """Drop the requests of threads that the fork did not copy, and recover from a step that one of them ran."""
        self._core.dirty = not self.group.is_parallel
        unfinished = [*self._core.requests.values(), *self._commands.expected.values()]
        for request in [request for request in unfinished if request.thread != threading.get_ident()]:
            self._core.drop(request)
            self._commands.expected.pop(request.request_id, None)
        for batch in [batch for batch in self._core.batches if batch.thread != threading.get_ident()]:
            self._core.batches.remove(batch)
        self._core.note_use()

    def _carry_out(self, command: Command) -> Any:
        if self.group.is_parallel and self._updating_thread is not None:
            raise RuntimeError("a call that all ranks carry out was made inside a weight_update() of the same engine")
        try:
            return self._commands.carry_out(command)
        finally:
            if not self.is_reentrant():
                self._run_deferred()

    def _run_deferred(self) -> None:
        """Run the actions that waited for the end of a step, and note whether the engine is still in use."""
        try:
            while self._deferred:
                self._deferred.pop()()
        finally:
            self._core.note_use()

    def _uninterrupted(self) -> AbstractContextManager[None]:
        """Return a context in which Ctrl-C is held back for a sharded model, so that no rank is left a step behind."""
        return interrupts.held_back() if self.group.is_parallel else nullcontext()
