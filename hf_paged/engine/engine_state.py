"""The state of an engine's loop between two steps (requests, scheduler, pool), and its recovery after an interrupt."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from hf_paged.config import PagedConfig
from hf_paged.engine.engine_registry import HeapHold
from hf_paged.engine.features import StepFeature
from hf_paged.engine.features.adapters import Adapters
from hf_paged.engine.features.deadlines import Deadlines
from hf_paged.engine.features.drafts import Speculation
from hf_paged.engine.features.feature_set import FeatureSet
from hf_paged.engine.features.grammars import PendingMasks, StructuredOutput
from hf_paged.engine.features.kernel_waits import KernelWaits
from hf_paged.engine.features.lockstep import JoiningRows
from hf_paged.engine.features.log_probs import LogProbs
from hf_paged.engine.features.routed_experts import RoutedExperts
from hf_paged.engine.features.stop_rules import StopRules
from hf_paged.engine.features.streaming import Streaming
from hf_paged.engine.features.text import Text
from hf_paged.engine.features.versions import Versions
from hf_paged.engine.lockstep import BlockShortage, LockstepBatch
from hf_paged.engine.observer import Observers
from hf_paged.engine.session import Request, Session, failed_output
from hf_paged.engine.structured.grammars import Grammars
from hf_paged.errors import EngineClosedError
from hf_paged.kernels.build.kernel_log import StepDelays
from hf_paged.models import ModelExecutor
from hf_paged.options.request_spec import RequestSpec
from hf_paged.runner.memory import DevicePool
from hf_paged.runner.model_runner import ModelRunner, StepHandle
from hf_paged.runner.weights import WeightsGuard
from hf_paged.scheduler import Scheduler, SchedulerConfig, Sequence, StepPlan

logger = logging.getLogger(__name__)


class EngineState:
    """Requests, scheduler and device pool of one engine, with their changes between steps and after an interrupt.

    Not thread-safe: the engine holds its lock around every call.

    Attributes:
        requests: the unfinished requests by id. Only `drop` and `abandon` take requests out.
        batches: the open lockstep calls, whose callers pick their tokens themselves.
        joining: the part of these rows in steps.
        dirty: the scheduler or the runner may be in the middle of a change; stays set after an interrupt.
        weights_in_doubt: a caller may have written the weights; set from then on until the end of `weights_written`.
        control_flag: (sharded models) a committed step announced commands of rank 0.
        failed_here: (sharded models) ids of requests that failed on this rank alone.
        delays: what steps lost to compiling and capturing.
        totals: counters; for values that the scheduler counts, the sums of earlier schedulers.
    """

    def __init__(self, executor: ModelExecutor, config: PagedConfig, tokenizer: Any, *, owns_device: bool) -> None:
        self._executor = executor
        self._config = config
        self.tokenizer = tokenizer
        self.pool = DevicePool(executor, config, owns_device=owns_device)
        core = weakref.proxy(self)  # weak: no cycle may keep an engine, and its device memory, alive
        self._guard = WeightsGuard(executor, lambda version: core.features.weights_changed(version))
        self.grammars = Grammars(executor.num_logits, config)
        is_parallel = executor.group.is_parallel
        self.features = FeatureSet((
            Deadlines(is_own_clock=not is_parallel),
            Versions(lambda: core.weights_version),
            Adapters(executor),
            LogProbs(),
            RoutedExperts(executor.routes, lambda blocks, count: core.runner.routes_of(blocks, count)),
            Text(lambda: core.tokenizer),
            StructuredOutput(self.grammars, lambda: core.tokenizer, lambda: core.runner.device, executor.num_logits),
            Speculation(is_on=config.speculation and not is_parallel),  # plans of ranks have to agree
            StopRules(),
            Streaming(),
            KernelWaits(lambda needs: core.runner.missing_kernels(
                needs.stages, needs.scored, masked=needs.masked, named=needs.named), lambda: core.may_wait_for_kernels),
        ), lambda request, error: core._fail(request, error), lambda request, reason: core.end(request, reason))
        self.scheduler: Scheduler | None = None
        self._resting: tuple[ModelRunner, Scheduler] | None = None  # of a released pool, to be used again
        self._requests: dict[str, Request] = {}
        self.requests: Mapping[str, Request] = MappingProxyType(self._requests)
        self._arrivals: dict[str, Request] = {}  # requests that no step has received yet
        self.observers = Observers()
        self._heap_hold = HeapHold()
        self.batches: list[LockstepBatch] = []
        self.joining = JoiningRows(core, self.batches, self.features[Adapters])
        self._in_flight: tuple[StepPlan, StepHandle] | None = None
        self.dirty = False
        self.weights_in_doubt = False
        self.stepping_thread: int | None = None
        self.control_flag = False
        self.failed_here: list[str] = []
        self._pending: PendingMasks | None = None  # masks of the step in flight, which has not sampled yet
        self._masking: StepFeature | None = None  # the feature that makes the masks of the step launched last
        self._waited: tuple[float, float] | None = None  # when the wait for the step in flight began and ended
        self._committing: tuple[StepPlan, np.ndarray] | None = None  # the plan, and the rows whose tokens were accepted
        self._state_key = b""  # state key of the model for which the runner was prepared
        self.delays = StepDelays()
        self.totals = dict.fromkeys(
            ("preemptions", "generated", "prefill", "steps", "queries", "hits", "drafts", "accepted drafts"), 0
        )

    def commit_in_flight(self) -> bool:
        """Wait for the step in flight and commit it; returns False if there was none."""
        raise NotImplementedError

    @property
    def owes_requests(self) -> bool:
        """Whether rows of lockstep calls have to wait, since requests are owed steps without them."""
        return bool(self.requests) and not self.joining.may_join()

    def make_request(self, spec: RequestSpec, session: Session) -> Request:
        """Return a request with the features that it uses, which is not queued yet.

        Raises:
            ValueError: settings that the device's tables cannot hold, or that a feature refuses.
        """
        request = Request.of(spec, session, vocab_size=self._executor.vocab_size,
                             max_model_len=self.pool.max_model_len, on_weight_change=self._config.on_weight_change)
        self.features.admit(request)
        return request

    def add(self, request: Request) -> None:
        self.dirty = True
        scheduler = self.scheduler_or_build()
        end = None if request.spec.previous is None else self._resumed_end(request)
        if end is None:
            scheduler.add(request.sequence)
        # The session comes second: after an interrupt in between, a request that no session has open is dropped.
        self._requests[request.request_id] = request.session.open[request.request_id] = request
        if end is None:
            self._arrivals[request.request_id] = request
        self.features.add(request)
        if self.observers.all:
            self.observers.tell("queued", request)
        if end is not None:
            request.sequence.end(end)
            self.end(request, end)
        self.dirty = False

    def _resumed_end(self, request: Request) -> str | None:
        """Return the finish reason of a request whose earlier output is complete already, else None."""
        assert request.spec.previous is not None
        if not request.sequence.max_new_tokens:  # the prompt is to be scored, and there is no output
            return None
        try:
            ends = self.features.start_over(request, request.spec.previous.token_ids)
        except Exception as error:
            request.error = f"this request failed: {error!r}"
            return "error"
        reason = request.sequence.reached_end(self.pool.max_model_len)
        return "stop" if reason is None and ends else reason

    @property
    def is_in_use(self) -> bool:
        """Whether there are unfinished requests or open lockstep calls."""
        return bool(self.requests or (self.batches and any(not batch.is_orphan for batch in self.batches)))

    def note_use(self) -> None:
        """Note that requests or lockstep calls may have come or ended, for what happens while the engine is idle."""
        is_in_use = self.is_in_use
        self._heap_hold.note(is_in_use)
        self.pool.warm_up.saver.note(is_in_use)

    @property
    def is_idle(self) -> bool:
        """Whether there is no unfinished request and no step in flight."""
        return not self.requests and self._in_flight is None

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a waiting or running request, and hand out its completion; does nothing for a request that has ended.

        No other code makes completions. Tokens in flight are dropped; the request's blocks are freed when the step in
        flight is committed (see `drain`).
        """
        if not self.has(request):
            return
        if error is not None:
            request.error = error
        with self._undivided():
            if self.scheduler is not None:
                self.scheduler.finish(request.sequence, reason)
            try:
                output = request.completed()
            except Exception as failure:
                message = request.error or f"this request failed at its end: {failure!r}"
                output = failed_output(request.sequence, request.num_emitted, message)
            request.session.hand_out(request, output, request.num_emitted + len(output.new_token_ids))
            self.drop(request)
            if self.observers.all:
                self.observers.tell("finished", request, output)

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        """Mark the block as one change: after an interrupt inside it, the next entry recovers.

        Code of the user that runs in the block (a tokenizer, finalizers) and calls the engine counts as inside of a
        step.
        """
        was_dirty, outer = self.dirty, self.stepping_thread
        self.dirty, self.stepping_thread = True, threading.get_ident()
        try:
            yield
            self.dirty = was_dirty
        finally:
            self.stepping_thread = outer

    def has(self, request: Request) -> bool:
        """Return whether the request is unfinished; another one may have got its id."""
        return self._requests.get(request.request_id) is request

    def drop(self, request: Request) -> None:
        """Remove a request, whose completion was handed out or is not wanted, from its session and all tables."""
        if request.is_open:
            del request.session.open[request.request_id]  # first, for the same reason as in `add`
        if self.has(request):
            self._arrivals.pop(request.request_id, None)
            del self._requests[request.request_id]
            self.features.remove(request)  # last: an exception of a feature must not end the request a second time

    def refuse(self, request: Request, error: str) -> None:
        """End a new request that cannot run, with an error."""
        self.drain()
        self.end(request, "error", error)

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request with an exception that was raised in the work for it alone."""
        if request.error is not None:
            return  # the failure of a sharded model's request is being sent to the other ranks already
        logger.warning("hf_paged: request %s ends: %r", request.request_id, error, exc_info=error)
        request.error = f"this request failed: {error!r}"
        kept = request.sequence.num_output_tokens - self._num_taken(request.sequence)
        request.num_kept = max(kept, request.num_emitted)
        if self._executor.group.is_parallel:  # rank 0 ends it on every rank, so that their schedulers agree
            self.failed_here.append(request.request_id)
        else:
            self.end(request, "error")

    def _num_taken(self, sequence: Sequence) -> int:
        """Return the number of tokens that the commit under way has appended to a sequence."""
        if self._committing is None:
            return 0
        plan, rows = self._committing
        return sum(plan.sequences[row] is sequence for row in rows.tolist())

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Run device code outside of `step`; after an exception in the block, the next entry starts over."""
        self.dirty = True
        with self._at_work():
            yield
        self.dirty = False

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Set the global state of torch that a step runs in (`ambient`), for code outside of a step."""
        with torch.inference_mode(False), torch.no_grad(), ambient(self._executor.kv_spec().device):
            yield

    @property
    def model(self) -> Any:
        return self._executor.model

    @property
    def device(self) -> torch.device:
        return self._executor.kv_spec().device

    @property
    def runner(self) -> ModelRunner:
        """The runner of steps; there must be a pool."""
        assert self.pool.runner is not None
        return self.pool.runner

    @property
    def may_wait_for_kernels(self) -> bool:
        """Whether a request may wait for its kernels while others run; ranks of a sharded model run all together."""
        runner = self.pool.runner
        return runner is not None and runner.device.type == "cuda" and not self._executor.group.is_parallel

    @property
    def weights_version(self) -> int:
        """A number that goes up whenever a change of weights, active adapters or constants was found."""
        return self._guard.version

    def scheduler_or_build(self) -> Scheduler:
        if self.scheduler is None:
            with self._at_work():
                runner = self.pool.build()
            self.delays.is_ready |= self.pool.warm_up.is_done
            resting, self._resting = self._resting, None
            if resting is not None and resting[0] is runner and resting[1].num_blocks == runner.cache.num_blocks:
                self.scheduler = resting[1]  # reused: making a hundred thousand block objects takes longer than mapping
            else:
                self.scheduler = self._new_scheduler(runner.cache.num_blocks)
        return self.scheduler

    def warm_up(self) -> None:
        """Do what ``warmup="full"`` does once there is a pool; while requests run, nothing."""
        if not self.is_in_use:
            with self.changing():
                self.pool.warm_up.get_ready(self.runner, is_full=True)

    def _new_scheduler(self, num_blocks: int) -> Scheduler:
        runner = self.runner
        config = SchedulerConfig(
            block_size=self._config.block_size, num_blocks=num_blocks, max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens, max_model_len=self.pool.max_model_len,
            enable_prefix_caching=self._config.enable_prefix_caching, group_prefixes=self._config.group_prefixes,
            num_snapshots=runner.num_snapshots, whole_prompts=runner.whole_prompts,
            least_chunk=runner.least_chunk,
        )
        core = weakref.proxy(self)  # weak: this object holds the scheduler
        return Scheduler(config, on_shortage=self.pool.grow, on_few_slots=runner.grow_slots,
                         on_stuck=lambda: core.joining.free_blocks_for(None) is not BlockShortage.NONE)

    def abandon(self) -> None:
        """Drop all requests and the pool at once, for a sharded model that communicates with no other rank any more."""
        self._arrivals.clear()
        self._requests.clear()
        self.features.keep(())
        self._in_flight, self._pending, self.dirty = None, None, False
        self._tell_of_new_start()
        self.note_use()
        self.drop_pool()

    def drop_pool(self) -> None:
        """Free everything that the engine has on the device."""
        self._forget_pool()
        self._guard.release()
        self.pool.drop()

    def release_pool(self) -> None:
        """Free the pool's memory, and keep its addresses and the graphs if possible (see `DevicePool.release`)."""
        runner, scheduler = self.pool.runner, self.scheduler
        self._forget_pool()
        self.pool.release()
        if runner is not None and self.pool.runner is runner and scheduler is not None and scheduler.start_over():
            self._resting = runner, scheduler

    def _forget_pool(self) -> None:
        self.joining.lose()
        self._retire_scheduler()
        self._resting = None
        self.features.call("lose_steps")
        self._guard.forget()

    def _retire_scheduler(self) -> None:
        if self.scheduler is not None:
            manager = self.scheduler.kv_cache_manager
            totals = {**self.totals}
            totals["preemptions"] += self.scheduler.num_preemptions
            totals["queries"] += manager.prefix_cache_queries
            totals["hits"] += manager.prefix_cache_hits
            self.totals, self.scheduler = totals, None  # together: an interrupt in between would count twice

    def recover_if_dirty(self) -> None:
        """Recover from an interrupt at an unknown point: make a new scheduler over the pool and queue requests again.

        Requests continue behind the tokens that were handed out to their callers.
        """
        if not self.dirty:
            return
        if self._executor.group.is_parallel:
            raise EngineClosedError("a step of a sharded model was interrupted: expected a new PagedGenerator")
        self._in_flight = self._pending = self._waited = self._committing = None
        self.features.call("lose_steps")
        self._guard.forget()
        self.joining.lose()
        self._retire_scheduler()
        self.scheduler = self._new_scheduler(self.pool.num_blocks) if self.pool.num_blocks else None
        for request in list(self.requests.values()):  # the interrupt may have come while one was added or ended
            if (last := request.session.last_of(request)) is not None:
                request.num_emitted = last[1]
            if (last is not None and last[0].completion is not None) or not request.is_open:
                self.drop(request)
        self.features.keep(self.requests.values())
        for request in list(self.requests.values()):
            self._start_again(request)
        self._arrivals = dict(self._requests)
        self._tell_of_new_start()
        self.dirty = False

    def _tell_of_new_start(self) -> None:
        if self.observers.all:
            self.observers.tell("started_over", list(self.requests.values()))

    def _start_again(self, request: Request) -> None:
        made = request.sequence.output_token_ids[: request.num_emitted]
        try:
            self.features.start_over(request, made)  # first: if it raises, the completion still has the whole output
            request.restart(made)
        except Exception as error:  # ended here: the new scheduler would never end it
            self.end(request, "error", f"this request failed: {error!r}")
        else:
            self.scheduler_or_build().add(request.sequence)

    def restart_over_a_new_pool(self) -> None:
        """Start over as after an interrupt, since the model has another dtype or device than the pool."""
        self._in_flight = self._pending = None
        self.drop_pool()
        self.dirty = True
        self.recover_if_dirty()

    def drain(self) -> None:
        """Commit the step in flight, so that blocks can be freed."""
        self.recover_if_dirty()
        if self._in_flight is not None:
            self.dirty = True
            self.commit_in_flight()
            self.dirty = False

    def follow_stream(self) -> None:
        """Order this thread's CUDA stream: its next work runs behind the last step, and the next step behind it."""
        if self.pool.runner is not None:
            self.pool.runner.follow_stream()


@contextmanager
def ambient(device: torch.device) -> Iterator[None]:
    """Set the global state that the engine needs, whatever the caller's is: the model's GPU current; autocast and
    default device off.

    The default dtype is not set, since all threads share it; no tensor of the engine depends on it.
    """
    # A default device costs each call of torch some microseconds: set one only to override the caller's.
    has_default = torch.utils._device.CURRENT_DEVICE is not None
    default = torch.device(device) if has_default else nullcontext()
    casts = torch.is_autocast_enabled(device.type)
    autocast = torch.autocast(device.type, enabled=False) if casts else nullcontext()
    with autocast, default:
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield
