"""The engine core: schedule, launch and commit a step at a time, and recovery after an interrupt."""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_paged.config import PagedConfig
from hf_paged.engine import form_rows, log_probs
from hf_paged.engine.endings import PLAIN_ENDING, Ending
from hf_paged.engine.frozen_heap import HeapHold
from hf_paged.engine.grammars import Grammars
from hf_paged.engine.lockstep import LockstepBatch, Way
from hf_paged.engine.mask_maker import MaskMaker
from hf_paged.engine.observer import Committed, Launched, Observers
from hf_paged.engine.pace import Pace
from hf_paged.engine.request_table import RequestTable
from hf_paged.engine.session import BARRED, NewRequest, Request, Session, TopAsked, failed_output
from hf_paged.engine.speculation import COSTS, Speculation
from hf_paged.engine.stopping import ended
from hf_paged.errors import EngineClosedError
from hf_paged.guards.capturing import no_capturing
from hf_paged.models import ModelExecutor
from hf_paged.models.tuners import AdapterCounts
from hf_paged.options.settings import RequestSettings
from hf_paged.outputs import StepOutput, VersionRun
from hf_paged.runner import device_times
from hf_paged.runner.device import DevicePool
from hf_paged.runner.model_runner import ModelRunner, StepHandle
from hf_paged.runner.prompt_scores import NOTHING
from hf_paged.runner.request_state import SlotParameters
from hf_paged.runner.weights import ModelMark, WeightsGuard
from hf_paged.sampling.token_log_probs import RAW
from hf_paged.sampling.top_log_probs import top_name
from hf_paged.scheduler import Scheduler, SchedulerConfig, Sequence, StepPlan
from hf_paged.scheduler.drafts import NO_DRAFTS, Drafts, confirmed
from hf_paged.scheduler.lockstep_rows import OutOfBlocksError

logger = logging.getLogger(__name__)

NAN_ERROR = "the model's logits hold NaN, or no finite value to sample from"


class EngineCore:
    """Scheduler and device pool of one engine. Not thread-safe: the engine holds its lock around every call."""

    def __init__(self, executor: ModelExecutor, config: PagedConfig, tokenizer: Any, *, owns_device: bool) -> None:
        self._executor = executor
        self._config = config
        self.tokenizer = tokenizer
        self.pool = DevicePool(executor, config, owns_device=owns_device)
        core = weakref.proxy(self)
        self._guard = WeightsGuard(executor, lambda version: core._end_version_runs(version))
        self.scheduler: Scheduler | None = None
        self._resting: tuple[ModelRunner, Scheduler] | None = None  # of a pool that was released
        self._table = RequestTable()
        self.requests = self._table.by_id
        self.observers = Observers()
        self._heap_hold = HeapHold()
        self.batches: list[LockstepBatch] = []  # rows of callers who pick their tokens themselves
        self._batch_numbers = itertools.count()
        self._in_flight: tuple[StepPlan, StepHandle] | None = None
        # True while scheduler or runner may be half-way through a change: an interrupt leaves it set.
        self.dirty = False
        self.weights_in_doubt = False  # from where somebody writes to them to the end of `weights_written`
        self.stepping_thread: int | None = None
        self.control_flag = False  # of a sharded model: a committed step announced commands of rank 0
        self.failed_here: list[str] = []  # requests of a sharded model that fail on this rank alone
        self._joined_logits: torch.Tensor | None = None  # [N, V] of the rows that joined the last step
        self._pace = Pace()
        self._launched_before = False, False  # did the last step only decode requests' rows; did others join it?
        self._state_key = b""  # of the model, when the runner was prepared
        # Did a request come, since there was none at all, that streams; with a stop rule; that wants log-probabilities;
        # that names an adapter; that follows a grammar?
        self._any_stream = self._any_stop = self._any_logprobs = self._any_adapter = self._any_grammar = False
        self.grammars = Grammars(executor.num_logits, config)
        self._masks: MaskMaker | None = None
        self._committing: tuple[StepPlan, np.ndarray] | None = None  # and the rows whose tokens were taken
        self._pending: form_rows.PendingMasks | None = None  # of the step in flight, whose tokens are not drawn yet
        self._waited: tuple[float, float] | None = None  # for the step in flight, where observers are to know when
        self.speculation = Speculation()
        self._adapter_counts = AdapterCounts(())  # when the runner was prepared
        # Totals; those that a scheduler counts hold what schedulers that are gone had counted.
        self.totals = dict.fromkeys(
            ("preemptions", "generated", "prefill", "steps", "queries", "hits", "drafts", "accepted drafts"), 0
        )

    def make_request(self, new: NewRequest, session: Session) -> Request:
        """What becomes of a request that is asked for, in its caller's session.

        Raises:
            ValueError: settings that the device's tables cannot hold.
        """
        assert new.request_id is not None
        settings, prompt_length, made = new.settings, len(new.prompt), new.made
        eos = tuple(t for t in settings.eos_token_ids if 0 <= t < self._executor.vocab_size)  # others never come
        parameters = SlotParameters(
            **settings.drawing(), seed=new.seed, min_length=prompt_length + settings.min_new_tokens, eos_token_ids=eos,
            max_length=min(prompt_length + settings.max_new_tokens, self.pool.max_model_len),
            prompt_length=prompt_length, edits=settings.edits, adapter=settings.adapter_name,
            stop_token_ids=settings.stop_token_ids, with_top=settings.top_logprobs is not None,
        )
        _ = parameters.lines  # encoded here, where what cannot be encoded is its caller's error
        grammar = new.grammar
        if grammar is None and settings.structured is not None:
            grammar = self.grammars.compile(settings.structured, self.tokenizer)
        ends = (*eos, *settings.stop_token_ids)
        sequence = Sequence(new.request_id, new.prompt, max_new_tokens=settings.max_new_tokens, eos_token_ids=ends,
                            priority=new.priority, read_cache=not settings.prompt_logprobs,
                            cache_salt=settings.cache_salt, adapter=settings.adapter_name,
                            keeps_computed=(settings.on_weight_change or self._config.on_weight_change) == "keep",
                            output_token_ids=() if made is None else made.token_ids)
        is_decoded = session.stream and session.text and self.tokenizer is not None
        ending, prompt_top = _ending_of(settings), _top_of(RAW, settings.prompt_top_logprobs)
        request = Request(
            sequence, parameters, session, stop=new.stop, made=made, ending=ending, grammar=grammar,
            matcher=None if grammar is None else grammar.matcher(ends),
            text=ending.stream(self.tokenizer) if is_decoded else None,
            logprobs=[] if settings.logprobs else None, logprobs_kind=settings.logprobs,
            prompt_logprobs=[None] * prompt_length if settings.prompt_logprobs else None,
            top=_top_of(settings.logprobs, settings.top_logprobs), prompt_top=prompt_top,
            prompt_top_logprobs=[None] * prompt_length if prompt_top is not None else [],
        )
        # A grammar says after each token what may follow; plans of ranks have to agree.
        if self._config.speculation and grammar is None and not self._executor.group.is_parallel:
            request.draft_tokens = settings.draft_tokens
        if settings.timeout is not None:
            request.deadline = request.queued + settings.timeout
        if made is not None:
            request.num_emitted, request.version_runs = len(made.token_ids), made.known_versions()
            request.logprobs = made.known_logprobs() if settings.logprobs else None
            request.top_logprobs = made.known_top_logprobs()
        return request

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.dirty = True
        scheduler = self.scheduler_or_build()
        end = None if request.made is None else self._resumed_end(request)
        if end is None:
            scheduler.add(request.sequence)
        self._any_stream = request.session.stream or (self._any_stream and bool(self.requests))
        self._any_stop = request.stop is not None or (self._any_stop and bool(self.requests))
        asks = request.logprobs is not None or request.prompt_logprobs is not None
        self._any_logprobs = asks or (self._any_logprobs and bool(self.requests))
        self._any_adapter = request.sequence.adapter is not None or (self._any_adapter and bool(self.requests))
        self._any_grammar = request.grammar is not None or (self._any_grammar and bool(self.requests))
        # Ranks of a sharded model end requests together: rank 0's clock counts (`CommandQueue`).
        self._table.add(request, arrives=end is None, is_timed=not self._executor.group.is_parallel)
        if self.observers:
            self.observers.tell("queued", request)
        if end is not None:
            request.sequence.end(end)
            self.end(request, end)
        self.dirty = False

    def _resumed_end(self, request: Request) -> str | None:
        """Why a request that goes on from output of before is over already, if so."""
        try:
            return request.resume(self.pool.max_model_len)
        except Exception as error:
            request.error, request.text = f"this request failed: {error!r}", None
            return "error"

    @property
    def owes_requests(self) -> bool:
        """Have rows that step together to wait until requests had steps of their own?"""
        return bool(self.requests) and not self._pace.may_join()

    @property
    def is_in_use(self) -> bool:
        """Do requests run, or rows of calls that pick their tokens themselves?"""
        return bool(self.requests) or any(not batch.is_orphan for batch in self.batches)

    def note_use(self) -> None:
        """Requests or rows may have come or gone: what belongs to the process as a whole follows."""
        self._heap_hold.note(self.is_in_use)

    @property
    def is_idle(self) -> bool:
        """No request, and nothing in flight."""
        return not self.requests and self._in_flight is None

    def end(self, request: Request, reason: str, error: str | None = None) -> None:
        """End a request, wherever it is, and hand out its completion; one that has ended stays as it was.

        No other code makes completions. Tokens that are in flight are dropped, and the blocks of such a request are
        free once the step is committed (see `drain`).
        """
        if request not in self._table:
            return
        if error is not None:
            request.error = error
        with self._undivided():
            if self.scheduler is not None:
                self.scheduler.finish(request.sequence, reason)
            output = self._last_output(request)
            request.session.hand_out(request, output, request.num_emitted + len(output.new_token_ids))
            self.drop(request)
            if self.observers:
                self.observers.tell("finished", request, output)

    @contextmanager
    def _undivided(self) -> Iterator[None]:
        """For what has to happen as a whole: after an interrupt in here, the next entry recovers.

        Code of the user (a tokenizer, what garbage collection runs) that comes back to the engine from in here is
        treated as inside of a step.
        """
        was_dirty, outer = self.dirty, self.stepping_thread
        self.dirty, self.stepping_thread = True, threading.get_ident()
        try:
            yield
            self.dirty = was_dirty
        finally:
            self.stepping_thread = outer

    def _last_output(self, request: Request) -> StepOutput:
        try:
            return request.completed(self.tokenizer, self._guard.version)
        except Exception as failure:
            message = request.error or f"this request failed at its end: {failure!r}"
            return failed_output(request.sequence, request.num_emitted, message)

    def drop(self, request: Request) -> None:
        """Take a request out without a completion: its caller is gone, or has the completion already."""
        self._table.remove(request)
        if self.speculation:
            self.speculation.remove(request.request_id)

    def refuse(self, request: Request, error: str) -> None:
        """End a request that came and cannot run."""
        self.drain()
        self.end(request, "error", error)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """For code that runs the device beside `step`: an exception in here makes the next entry start afresh."""
        self.dirty = True
        with self._at_work():
            yield
        self.dirty = False

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """The state that a step runs in, outside of one."""
        with torch.inference_mode(False), torch.no_grad(), _ambient(self._executor.kv_spec().device):
            yield

    def end_orphans(self) -> None:
        """End rows whose call is gone without having ended them: an interrupt came in its very end."""
        for batch in [batch for batch in self.batches if batch.is_orphan]:
            batch.close()
            self.batches.remove(batch)

    def count_batch(self) -> int:
        """A number above those given out before."""
        return next(self._batch_numbers)

    @property
    def model(self) -> Any:
        """Whose modules the steps run."""
        return self._executor.model

    @property
    def device(self) -> torch.device:
        """The model's."""
        return self._executor.kv_spec().device

    @property
    def runner(self) -> ModelRunner:
        """What runs steps, once there is a pool."""
        assert self.pool.runner is not None
        return self.pool.runner

    @property
    def weights_version(self) -> int:
        """Goes up whenever the weights, active adapters or constants were found to be others than before."""
        return self._guard.version

    def compute_under(self, autocast: torch.dtype | None) -> bool:
        """Let what comes next be computed under this autocast; False where what runs now needs another.

        Keys and values of another dtype, and all that belongs to them, go.
        """
        if autocast == self._executor.autocast:
            return True
        self.recover_if_dirty()
        self.end_orphans()
        if self.requests or self.batches:
            return False
        self._executor.autocast = autocast
        if self.pool.moved():
            self.drop_pool()
        return True

    def receive_rows(self, prompts: list[Sequence]) -> None:
        """Prepare the runner for prompts that come beside the requests; sets their cache key."""
        self._receive_sequences(self.scheduler_or_build(), prompts)

    def model_changed(self) -> bool:
        """Prepare the runner anew where the model computes something else than when prompts were last received."""
        if self._executor.state_key(compares_tensors=False) == self._state_key:
            if not self._executor.copies_are_stale():
                return False
            self._refresh_copies()
            return True
        self._leave_old_model(self.scheduler_or_build())
        self._prepare()
        return True

    def weights_written(self) -> None:
        """The weights are others since the last `drain`, whatever storages and counters say."""
        if not self._executor.group.is_parallel:
            self.recover_if_dirty()  # what the writer's own calls of the engine left
        self._state_key = b""  # whatever else of the model changed with them is no version of its own
        if self.scheduler is None:
            self._guard.announce(None, is_busy=False)
        elif self.pool.moved():
            self._guard.announce(None, is_busy=False)
            self.restart_over_a_new_pool()
        else:
            with self.changing(), self._executor.compared_once():
                self._leave_old_model(self.scheduler)
                is_busy = bool(self.requests or self.batches)
                pool = self.scheduler.kv_cache_manager.block_pool
                self._guard.announce(pool, is_busy=is_busy and self._config.enable_prefix_caching)
                if is_busy:
                    self._prepare()
                    self._executor.refresh(None)
        self.weights_in_doubt = False

    def settle(self) -> None:
        """Before a step: recover from an interrupt, also from one in the end of an update of the weights."""
        self.recover_if_dirty()
        if self.weights_in_doubt:
            self.weights_written()

    def trust_cache(self) -> None:
        """Wait for the checksum that `receive_rows` started."""
        if self._guard.pending:
            assert self.scheduler is not None
            self._guard.verify(self.scheduler.kv_cache_manager.block_pool)

    def model_mark(self) -> ModelMark:
        """What the model computed when prompts were last received."""
        config = self._config
        options = {"merge_weights": config.merge_weights, "fused_kernels": config.fused_kernels,
                   "one_launch": config.one_launch}
        with self._at_work():
            return ModelMark(options, self._executor.autocast, self._state_key, self._guard.checksum())

    def weights_moved(self) -> bool:
        """Do storage and version counters say that the weights are others than when prompts were received?"""
        return self._guard.changed(full=False)

    @torch.inference_mode(False)  # tensors made under inference mode could not be written outside it later
    @torch.no_grad()
    def step(self, *, look_at_model: bool = False, control_flag: bool = False) -> bool:
        """Schedule, launch and commit once; False where there was nothing to do, or it has to wait for others.

        Args:
            look_at_model: has it changed under the running requests?
            control_flag: the step that is launched announces to all ranks that rank 0 has commands.
        """
        self.settle()
        self.end_orphans()
        waiting = [batch for batch in self.batches if batch.is_waiting]
        if self.is_idle and not waiting:
            return False
        if not self.requests:
            self._pace.rest()
        if self.owes_requests:
            waiting = []
        started = time.perf_counter()
        if self.pool.moved():
            self.restart_over_a_new_pool()
        runner = self.pool.runner  # its device is the model's: that was just compared
        device = runner.device if runner is not None else self._executor.kv_spec().device
        self.dirty, self.stepping_thread = True, threading.get_ident()
        try:
            with _ambient(device):
                scheduler = self.scheduler_or_build()
                for request in self._table.late():
                    self.end(request, "timeout")
                num_preempted = scheduler.num_preemptions
                with self._executor.compared_once():
                    self._receive(scheduler)
                    # Where requests run, the device has a step to compute meanwhile; rows alone look afterwards.
                    look_now = look_at_model or (bool(waiting) and bool(self.requests))
                    if self._any_adapter and not self._adapter_counts.hold():
                        self._executor.compare_again()
                        look_now = True
                    if look_now:
                        self.model_changed()
                    if waiting and self._pending is not None:
                        self._draw_in_flight()
                    joining = self._prepare_rows(waiting)
                if joining is None:
                    return True
                is_busy = self._in_flight is not None
                plan = scheduler.schedule(self._drafts(scheduler)) if self.speculation else scheduler.schedule()
                scheduled = time.perf_counter() if self.observers else 0.0
                if self._pending is not None:
                    self._draw_before(plan, joining)
                if self.pool.runner is not None and self.pool.runner.sharded is not None:
                    self.pool.runner.sharded.say(control_flag)
                is_busy |= plan is not None
                launched = self._launch(plan, joining) if plan is not None or joining else None
                if self.observers and (plan is not None or joining):
                    step = Launched(plan, self.totals["steps"], [rows for _, rows in joining],
                                    scheduler.num_preemptions - num_preempted, started, scheduled, time.perf_counter(),
                                    device_times.take())
                    self.observers.tell("launched", step)
                previous, self._in_flight = self._in_flight, launched
                self.note_use()  # a look at what a call has made takes a while: the device has work meanwhile
                overlaps = launched is not None and self._overlaps(device)
                if not overlaps:
                    self._commit(previous)
                    previous = None
                if launched is not None and launched[1].unsampled is not None:
                    self._begin_masks(launched[0], previous, joining, beside=overlaps)
                if overlaps:
                    self._commit(previous)
                else:
                    self._commit_in_flight()
                self._note_pace(plan, joined=bool(joining), overlapped=self._in_flight is not None,
                                seconds=time.perf_counter() - started)
                if joining:
                    self._answer_rows(joining, has_looked=look_now)
                self._end_requests_of(scheduler.take_failed())
                if not self.requests:
                    self._commit_in_flight()  # no request needs the step that ran ahead: its blocks go back now
            self.dirty = False
        finally:
            self.stepping_thread = None
        return is_busy or any(not batch.is_waiting or batch.is_computing for batch in waiting)

    def _drafts(self, scheduler: Scheduler) -> Drafts:
        """What may follow in requests that guess. Where that pays, the step in flight is waited for."""
        costs = COSTS.get(self.runner.device.type, COSTS["cuda"])
        if self._in_flight is not None:
            has_drafts = self._in_flight[0].drafts is not None
            if not has_drafts and not self.speculation.drafts(scheduler.num_running, costs):
                return NO_DRAFTS
            self._commit_in_flight()
        return self.speculation.drafts(scheduler.num_running, costs)

    def _note_pace(self, plan: StepPlan | None, *, joined: bool, overlapped: bool, seconds: float) -> None:
        """What was waited for in this step: with overlap, the step before it."""
        if plan is None:
            self._pace.rest()
        decodes = plan is not None and plan.num_decode_rows == len(plan.slots)
        before, self._launched_before = self._launched_before, (decodes, joined)
        decodes, joined = before if overlapped else self._launched_before
        if decodes:
            self._pace.took(seconds, joined=joined)

    def _prepare_rows(self, waiting: list[LockstepBatch]) -> list[tuple[LockstepBatch, StepPlan]] | None:
        """Bring those who wait for logits closer to them; returns whose decode rows are to join the step.

        What goes wrong here is the caller's of the rows, who gets the exception. None: it left the books in doubt, and
        everybody started over.
        """
        joining, others_wait = [], False
        for batch in sorted(waiting, key=lambda batch: batch.arrival):
            if others_wait and batch.rows is None:
                continue  # who came first gets the blocks first
            if not batch.has_checked_adapters:
                if (error := next(iter(self._adapter_errors(batch.adapters).values()), None)) is not None:
                    batch.give_back()
                    batch.fail(ValueError(error))
                    continue
                batch.has_checked_adapters = True
            try:
                if (plan := self._prepare_batch(batch)) is not None:
                    joining.append((batch, plan))
            except torch.OutOfMemoryError as error:
                batch.give_back()
                batch.fail(error)
            except Exception as error:
                batch.fail(error)
                self.recover_if_dirty()
                return None
            others_wait |= batch.is_short
        return [(batch, plan) for batch, plan in joining if batch.rows is not None]  # some gave way to others

    def _prepare_batch(self, batch: LockstepBatch) -> StepPlan | None:
        """`LockstepBatch.prepare`, with blocks of others where it needs them."""
        while True:
            try:
                return batch.prepare()
            except OutOfBlocksError as error:
                way = self.make_way(batch)
                if way is Way.NONE:
                    raise torch.OutOfMemoryError(str(error)) from error
                batch.is_short = True
                if way is Way.WAIT:
                    return None

    def make_way(self, asking: LockstepBatch | None) -> Way:
        """Have others' rows give blocks back, if they may lose them.

        Args:
            asking: for whom; None: for the scheduler's own sequences.
        """
        if asking is not None and self._in_flight is not None:
            self._commit_in_flight()  # requests that have ended hold blocks until then
            return Way.FREE
        holding = [batch for batch in self.batches if batch.rows is not None and batch is not asking]
        for batch in holding:
            if batch.may_lose(asking):
                batch.give_back()
                return Way.FREE
        return Way.WAIT if holding else Way.NONE

    def _answer_rows(self, joining: list[tuple[LockstepBatch, StepPlan]], *, has_looked: bool) -> None:
        """Hand out the logits of a launched step. Where the model has changed since the last one, once more."""
        logits, self._joined_logits = self._joined_logits, None
        assert logits is not None
        if not has_looked and self.model_changed():  # looked at while the device computes
            for batch, _ in joining:
                if batch.rows is not None:
                    batch.uncount(batch.rows, 1)
            return
        pieces = logits.split([len(plan.slots) for _, plan in joining])
        for (batch, _), piece in zip(joining, pieces, strict=True):
            self._attempt_for(batch, partial(batch.answer, piece))
        if len(joining) == 1 and not self.requests:
            batch = joining[0][0]
            self._attempt_for(batch, batch.plan_ahead)  # the device still computes

    def _attempt_for(self, batch: LockstepBatch, action: Callable[[], None]) -> None:
        """Do what belongs to one caller's rows: where it raises, that caller gets the exception, and nobody else."""
        try:
            action()
        except Exception as error:
            batch.give_back()
            batch.fail(error)

    def _launch(self, plan: StepPlan | None,
                joining: list[tuple[LockstepBatch, StepPlan]]) -> tuple[StepPlan, StepHandle] | None:
        """Start a step of the scheduler's plan, if any, and of the rows that join it."""
        assert self.scheduler is not None
        rows = [rows for _, rows in joining]
        try:
            if plan is None:
                self._joined_logits = self.runner.logits(rows[-1].behind(rows[:-1]), [], of_every_token=True)
            else:
                parameters = self._parameters(plan.admitted) if plan.admitted else []
                wanted = log_probs.wanted_by(plan, self.requests, self._attempt) if self._any_logprobs else NOTHING
                awaits_masks = self._any_grammar and form_rows.any_follows(plan, self.requests)
                launch = self.runner.launch_unsampled if awaits_masks else self.runner.launch
                handle = launch(plan, parameters, wanted, rows)
                self._joined_logits = handle.logits
        except Exception:
            self._take_launch_back(plan, joining)
            raise
        self.totals["steps"] += 1
        if plan is None:
            return None
        self.totals["prefill"] += int(plan.num_new_tokens[plan.num_decode_rows :].sum())
        return plan, handle._replace(logits=None)

    def _take_launch_back(self, plan: StepPlan | None, joining: list[tuple[LockstepBatch, StepPlan]]) -> None:
        """Everything is where it was before this step: nothing of it may stay published, and what ran runs anew."""
        assert self.scheduler is not None
        self._commit_in_flight()
        if plan is not None:
            self.scheduler.rollback(plan)
        for batch, _ in joining:
            batch.give_back()
        self._tell_of_new_start()
        self.dirty = False

    def _begin_masks(self, plan: StepPlan, previous: tuple[StepPlan, StepHandle] | None,
                     joining: list[tuple[LockstepBatch, StepPlan]], *, beside: bool) -> None:
        """Begin to make the masks of a launched step, which is to draw its tokens under them (`_draw_in_flight`).

        They need the tokens of the step before, ``previous`` where that is not committed yet, and not its commit.

        Args:
            beside: while this thread goes on.
        """
        try:
            if previous is not None:
                waited = time.perf_counter() if self.observers else 0.0
                tokens = previous[1].wait()
                self._waited = (waited, time.perf_counter()) if self.observers else None
                form_rows.go_ahead(previous[0], tokens, self._request_of)
            if self._masks is None:
                self._masks = MaskMaker(self._executor.num_logits, self.runner.device)
            is_parallel = self._executor.group.is_parallel
            self._pending = form_rows.PendingMasks(plan, self._masks, self._request_of, self._attempt,
                                                   beside=beside and not is_parallel)
            if is_parallel:
                self._draw_in_flight()  # which all ranks do at one place, whatever they do between steps
        except Exception:
            self._in_flight, self._pending, self._joined_logits = previous, None, None
            self._take_launch_back(plan, joining)
            raise

    def _draw_before(self, plan: StepPlan | None, joining: list[tuple[LockstepBatch, StepPlan]]) -> None:
        """Draw the tokens of the step in flight, which the next one begins with."""
        assert self.scheduler is not None
        try:
            if plan is not None and not joining:
                self.runner.foresee(plan)  # while the masks are made
            self._draw_in_flight()
        except Exception:
            self._in_flight = None
            self.scheduler.preempt_all()
            self._take_launch_back(None, joining)
            raise

    def _draw_in_flight(self) -> None:
        """Have the step in flight draw its tokens under the masks that it waits for."""
        assert self._in_flight is not None and self._pending is not None
        plan, handle = self._in_flight
        pending, self._pending = self._pending, None
        with nullcontext() if self.stepping_thread is not None else self._at_work():
            self._in_flight = plan, self.runner.sample(handle, pending.take())

    def _parameters(self, admitted: list[Sequence]) -> list[SlotParameters]:
        """What the device has to know of requests that get their slot, which start now."""
        now, parameters = time.monotonic(), []
        for sequence in admitted:
            request = self.requests[sequence.request_id]
            parameters.append(request.parameters)
            if request.started is None:  # else it runs again
                request.started = now
            if request.draft_tokens:
                self.speculation.add(request)
        return parameters

    def follow_stream(self) -> None:
        """Work that this thread enqueues from now on runs behind the last step, and the next step behind it."""
        if self.pool.runner is not None:
            self.pool.runner.follow_stream()

    def _commit_in_flight(self) -> None:
        if self._pending is not None:
            self._draw_in_flight()
        launched, self._in_flight = self._in_flight, None
        self._commit(launched)

    def _commit(self, launched: tuple[StepPlan, StepHandle] | None) -> None:
        if launched is None:
            return
        assert self.scheduler is not None
        plan, handle = launched
        assert handle.unsampled is None
        waited = time.perf_counter() if self.observers else 0.0
        tokens = handle.wait()
        ready = time.perf_counter() if self.observers else 0.0
        if self._waited is not None:
            (waited, ready), self._waited = self._waited, None
        self.control_flag |= handle.heard is not None and bool(handle.heard)
        if self._guard.pending:
            self._guard.verify(self.scheduler.kv_cache_manager.block_pool)
        stopped = self._stopped(plan, tokens) if self._any_stop else {}
        result = self.scheduler.commit(plan, tokens, [row for row, _ in stopped.values()])
        self._committing = plan, result.accepted
        for sequence in result.finished:
            request = self._request_with(sequence)
            if sequence.finish_reason == "error" and request is not None:
                request.error = NAN_ERROR if request.grammar is None else f"{NAN_ERROR}; {BARRED}"
        self.totals["generated"] += len(result.accepted)
        if plan.drafts is not None:
            self.totals["drafts"] += int((plan.drafts >= 0).sum())
            self.totals["accepted drafts"] += int((plan.drafts[result.accepted] >= 0).sum())
        if plan.num_decode_rows < len(plan.slots):
            self._note_first_tokens(plan, result.accepted)
        if self.observers:
            self.observers.tell("committed", Committed(plan, tokens, result.accepted, waited, ready))
        log_probs.keep(plan, handle, result.accepted, tokens, self._request_of, self._attempt)
        if self._any_grammar:
            self._match(plan, result.accepted, tokens)
        for request_id, (_, reason) in stopped.items():
            self._stop(request_id, reason)
        runs = (VersionRun(self._guard.version, 1),) if self._any_stream else ()  # of each row's token
        for row in result.accepted if self._any_stream else ():
            request = self._request_of(plan, row)
            if request is not None and request.session.stream:
                position = int(plan.start[row]) + int(plan.num_new_tokens[row])
                self._attempt(request, request.emit, position, int(tokens[row]), runs)
        self._end_requests_of(result.finished)
        self._committing = None
        if self.observers:
            self.observers.tell("delivered", plan)

    def _note_first_tokens(self, plan: StepPlan, accepted: np.ndarray) -> None:
        """The rows that computed the end of a prompt have their first token, but for those that run again."""
        now = time.monotonic()
        for row in accepted[accepted >= plan.num_decode_rows].tolist():
            request = self._request_of(plan, row)
            if request is not None and request.first_token is None:
                request.first_token = now

    def _match(self, plan: StepPlan, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Let the requests that follow grammars go on in them by their new tokens, and end where these do."""
        assert self.scheduler is not None
        for row in rows.tolist():
            request = self._request_of(plan, row)
            if request is not None and request.matcher is not None:
                self._attempt(request, request.match, int(tokens[row]))
                is_open = request.error is None and request.sequence.finish_reason is None
                if is_open and request.matcher.is_over:
                    self.end(request, "stop")

    def _stopped(self, plan: StepPlan, tokens: np.ndarray) -> dict[str, tuple[int, str | Exception]]:
        """The requests that one of a step's tokens ends, since it completes a stop string or their time is over.

        By their ids: the row of that token, behind which no guess counts, and the reason.
        """
        sampled = plan.samples if plan.drafts is None else plan.samples & confirmed(plan, tokens)
        watched: dict[str, list[int]] = {}
        for row in np.flatnonzero(sampled & (tokens >= 0)).tolist():
            request = self._request_of(plan, row)
            if request is not None and request.stop is not None:
                watched.setdefault(request.request_id, []).append(row)
        stopped: dict[str, tuple[int, str | Exception]] = {}
        while watched:  # a token of each
            found = ended((key, self.requests[key].stop, int(tokens[rows[0]])) for key, rows in watched.items())
            stopped |= {key: (watched[key][0], reason) for key, reason in found.items()}
            watched = {key: rows[1:] for key, rows in watched.items() if key not in found and len(rows) > 1}
        return stopped

    def _stop(self, request_id: str, reason: str | Exception) -> None:
        """End a request that its stop rule ends, if nothing else has."""
        if (request := self.requests.get(request_id)) is None:
            return
        if isinstance(reason, Exception):
            self._fail(request, reason)
        elif request.sequence.finish_reason is None:
            self.end(request, reason)

    def _end_requests_of(self, sequences: list[Sequence]) -> None:
        """End the requests whose sequences the scheduler has ended."""
        for sequence in sequences:
            if (request := self._request_with(sequence)) is not None:
                self.end(request, sequence.finish_reason or "error")

    def _request_of(self, plan: StepPlan, row: int) -> Request | None:
        """The request of a row, unless it has ended."""
        return self._request_with(plan.sequences[row])

    def _request_with(self, sequence: Sequence) -> Request | None:
        """The request of a sequence, unless it has ended: another may have its id by now."""
        request = self.requests.get(sequence.request_id)
        return request if request is not None and request.sequence is sequence else None

    def _attempt(self, request: Request, action: Callable[..., None], *args: Any) -> None:
        """Do what belongs to one request: where it raises, that request ends with the error, and no other."""
        try:
            action(*args)
        except Exception as error:
            self._fail(request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request with what was raised in its own part of a step."""
        if request.error is not None:
            return  # of a sharded model, and on its way to the other ranks already
        logger.warning("hf_paged: request %s ends: %r", request.request_id, error, exc_info=error)
        request.error, request.text = f"this request failed: {error!r}", None
        kept = request.sequence.num_output_tokens - self._num_taken(request.sequence)
        request.num_kept = max(kept, request.num_emitted)
        if self._executor.group.is_parallel:  # to be ended on every rank
            self.failed_here.append(request.request_id)
        else:
            self.end(request, "error")

    def _num_taken(self, sequence: Sequence) -> int:
        """Tokens that the commit under way has given to a sequence."""
        if self._committing is None:
            return 0
        plan, rows = self._committing
        return sum(plan.sequences[row] is sequence for row in rows.tolist())

    def _receive(self, scheduler: Scheduler) -> None:
        """Prompts arrived: is the runner ready for the model as it is now, and may older cache content be used?"""
        if arrivals := self._table.take_arrivals():
            if self._any_adapter:
                self._end_without_adapter(arrivals)
            self._receive_sequences(scheduler, [request.sequence for request in arrivals if request in self._table])

    def _receive_sequences(self, scheduler: Scheduler, arrivals: list[Sequence]) -> None:
        manager, caching = scheduler.kv_cache_manager, self._config.enable_prefix_caching
        key = self._executor.state_key()
        self._use_keys(arrivals, key)
        if scheduler.num_running or self._in_flight is not None:
            would_hit = any(manager.get_computed_blocks(sequence)[0] for sequence in arrivals)
            assert self.pool.runner is not None
            changed = key != self._state_key or not self.pool.runner.is_current()
            changed = changed or (caching and self._guard.changed(full=would_hit))
            if not self._executor.group.any(changed):  # all ranks compute anew, or none
                if self._executor.has_copies:  # what comes is computed with the weights as they are
                    self._refresh_copies()
                return
            self._leave_old_model(scheduler)
        self._prepare()
        if caching:
            self._guard.begin(manager.block_pool)
        if self._executor.has_copies:
            self.runner.follow_stream()
            self._executor.refresh(self._guard.latest)
        if caching:
            sequences = [*(request.sequence for request in self.requests.values()), *arrivals]
            if any(manager.has_older_hit(s.ids_between(0, manager.block_size), s.cache_key) for s in sequences):
                self._guard.verify(manager.block_pool)

    def _refresh_copies(self) -> None:
        """Renew copies of weights in the middle of requests, which go on with the new ones as without copies."""
        if self._executor.copies_are_stale():
            self._commit_in_flight()  # other layers may need other copies
            self._prepare()
        self.runner.follow_stream()
        self._executor.refresh(self._guard.fresh())

    def _leave_old_model(self, scheduler: Scheduler) -> None:
        """The model changed under running requests: they compute their keys and values again, or keep what they have.

        Everyone after computes with the new one.
        """
        self._commit_in_flight()
        self._executor.compare_again()  # a tokenizer or a stop rule may have run
        scheduler.preempt_all(but_keepers=True)
        for batch in self.batches:
            batch.distrust()

    def _prepare(self) -> None:
        assert self.pool.runner is not None
        self.pool.runner.prepare()
        before, self._state_key = self._state_key, self._executor.state_key()
        if self._state_key != before:
            self.runner.look_at_windows()
        if before and self._state_key != before:
            self._guard.found_change()
        for batch in self.batches if self._state_key != before else ():
            batch.distrust()
        if self._any_adapter:
            self._end_without_adapter(list(self.requests.values()))
        self._adapter_counts = self._executor.adapter_counts()
        self._use_keys([request.sequence for request in self.requests.values()], self._state_key)

    def _use_keys(self, sequences: list[Sequence], state_key: bytes) -> None:
        """Under which the prefix cache keeps their blocks: of the model as it is, or of the adapter that they name."""
        keys: dict[str | None, bytes] = {None: state_key}
        for sequence in sequences:
            if (name := sequence.adapter) not in keys:
                keys[name] = self._executor.state_key(name)
            sequence.use_model_key(keys[name])

    def _adapter_errors(self, names: Iterable[str | None]) -> dict[str | None, str]:
        """What is wrong with those of these adapters that rows cannot name, as the model is now."""
        reasons = {name: self._executor.adapter_reason(name) for name in dict.fromkeys(names) if name is not None}
        return {name: f"adapter_name={name!r}: {reason.with_remedy}" for name, reason in reasons.items() if reason}

    def _end_without_adapter(self, requests: list[Request]) -> None:
        """End those whose adapter is gone, or cannot be named any more; nothing of them is in flight."""
        errors = self._adapter_errors(request.sequence.adapter for request in requests)
        for request in requests if errors else ():
            if (error := errors.get(request.sequence.adapter)) is not None:
                self.end(request, "error", error)

    def _end_version_runs(self, version: int) -> None:
        """Tokens that are known were made with the weights of this version, and later ones are not."""
        for request in list(self.requests.values()):
            self._attempt(request, request.end_version_run, version)

    def scheduler_or_build(self) -> Scheduler:
        if self.scheduler is None:
            with self._at_work():
                runner = self.pool.build()
            resting, self._resting = self._resting, None
            if resting is not None and resting[0] is runner and resting[1].num_blocks == runner.cache.num_blocks:
                self.scheduler = resting[1]  # to make a hundred thousand blocks takes longer than to map them
            else:
                self.scheduler = self._new_scheduler(runner.cache.num_blocks)
        return self.scheduler

    def _new_scheduler(self, num_blocks: int) -> Scheduler:
        config = SchedulerConfig(
            block_size=self._config.block_size, num_blocks=num_blocks, max_num_seqs=self._config.max_num_seqs,
            max_num_batched_tokens=self._config.max_num_batched_tokens, max_model_len=self.pool.max_model_len,
            enable_prefix_caching=self._config.enable_prefix_caching, group_prefixes=self._config.group_prefixes,
        )
        core = weakref.proxy(self)  # which holds the scheduler
        return Scheduler(config, on_shortage=self.pool.grow, on_few_slots=self.runner.grow_slots,
                         on_stuck=lambda: core.make_way(None) is not Way.NONE)

    def abandon(self) -> None:
        """Give everything up where it stands: of a sharded model whose other ranks are not asked any more."""
        self._table.clear()
        self.speculation.keep(())
        self._in_flight, self._pending, self.dirty = None, None, False
        self._tell_of_new_start()
        self.note_use()
        self.drop_pool()

    def drop_pool(self) -> None:
        """Everything on the device goes."""
        self._forget_pool()
        self._guard.release()
        self.pool.drop()

    def release_pool(self) -> None:
        """The pool's memory goes; its addresses and the graphs stay where that can be (see `DevicePool.release`)."""
        runner, scheduler = self.pool.runner, self.scheduler
        self._forget_pool()
        self.pool.release()
        if runner is not None and self.pool.runner is runner and scheduler is not None and scheduler.start_over():
            self._resting = runner, scheduler

    def _forget_pool(self) -> None:
        self._lose_rows()
        self._retire_scheduler()
        self._resting = self._masks = None
        self._guard.forget()

    def _retire_scheduler(self) -> None:
        if self.scheduler is not None:
            manager = self.scheduler.kv_cache_manager
            totals = {**self.totals}
            totals["preemptions"] += self.scheduler.num_preemptions
            totals["queries"] += manager.prefix_cache_queries
            totals["hits"] += manager.prefix_cache_hits
            self.totals, self.scheduler = totals, None  # together: an interrupt has nothing counted twice

    def recover_if_dirty(self) -> None:
        """After an interrupt at an unknown point: a fresh scheduler over the same pool, unfinished requests anew.

        Requests of other callers go on behind the tokens that these were given, or from their beginning.
        """
        if not self.dirty:
            return
        if self._executor.group.is_parallel:
            raise EngineClosedError("a step of a sharded model was interrupted: expected a new PagedGenerator")
        self._in_flight = self._pending = self._waited = self._committing = None
        self._masks = None  # a thread may still write to its buffer
        self._guard.forget()
        self._lose_rows()
        self._retire_scheduler()
        self.scheduler = self._new_scheduler(self.pool.num_blocks) if self.pool.num_blocks else None
        for request in list(self.requests.values()):  # one may have been half added, or half ended
            if (last := request.session.last_of(request)) is not None:
                request.num_emitted = last[1]
            if (last is not None and last[0].completion is not None) or not request.is_open:
                self.drop(request)
        self.speculation.keep(self.requests)
        for request in list(self.requests.values()):
            self._start_again(request)
        self._table.arrive_again()
        self._tell_of_new_start()
        self.dirty = False

    def _tell_of_new_start(self) -> None:
        if self.observers:
            self.observers.tell("started_over", list(self.requests.values()))

    def _lose_rows(self) -> None:
        """Slots and blocks go, with the scheduler that lent them."""
        for batch in self.batches:
            batch.lose()

    def _start_again(self, request: Request) -> None:
        try:
            request.restart()
        except Exception as error:  # the scheduler does not know it any more
            self.end(request, "error", f"this request failed: {error!r}")
        else:
            self.scheduler_or_build().add(request.sequence)

    def restart_over_a_new_pool(self) -> None:
        """The model went to another dtype or device under running requests: as after an interrupt."""
        self._in_flight = self._pending = None
        self.drop_pool()
        self.dirty = True
        self.recover_if_dirty()

    def drain(self) -> None:
        """Commit what is in flight, so that blocks can be freed."""
        self.recover_if_dirty()
        if self._in_flight is not None:
            self.dirty = True
            self._commit_in_flight()
            self.dirty = False

    def _overlaps(self, device: torch.device) -> bool:
        return device.type == "cuda" if self._config.overlap is None else self._config.overlap


def _ending_of(settings: RequestSettings) -> Ending:
    """What is said of a request's end, but for what `stopping` watches."""
    if not settings.stop_strings and not settings.stop_token_ids and settings.keeps_stop and settings.skips_special:
        return PLAIN_ENDING
    own = tuple(token for token in settings.stop_token_ids if token not in settings.eos_token_ids)
    return Ending(settings.stop_strings, own, settings.keeps_stop, settings.skips_special)


def _top_of(kind: str | None, count: int | None) -> TopAsked | None:
    """How many of the likeliest tokens of one of `LOGPROBS` a request wants, if any."""
    return None if kind is None or count is None else TopAsked(top_name(kind, count), count)


@contextmanager
def _ambient(device: torch.device) -> Iterator[None]:
    """The state the engine runs in, whatever its caller's: the model's GPU current, autocast, default device and
    collectors of outputs off.

    No tensor of ours depends on the default dtype, which all threads share, so that it cannot be set here.
    """
    # A default device costs every call of torch some microseconds, so it is only set against one of the caller's.
    has_default = torch.utils._device.CURRENT_DEVICE is not None
    default = torch.device(device) if has_default else nullcontext()
    casts = torch.is_autocast_enabled(device.type)
    autocast = torch.autocast(device.type, enabled=False) if casts else nullcontext()
    with autocast, default, no_capturing():
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield
