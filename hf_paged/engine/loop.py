"""The loop of an engine: a step is scheduled, launched, and committed while the next one runs.

Rules for the code of this file:

* The loop knows requests, rows and steps. A feature (stop strings, log-probabilities, grammars, time limits, streaming,
  ...) is a `StepFeature` in `engine/features/`, whose hooks the loop calls through its `FeatureSet`. No flag, field or
  function of a single feature is in this file.
* No code of a feature runs for a request that does not use it: `FeatureSet` keeps the features that unfinished requests
  use, and a step checks ``features.having[hook]`` before it prepares anything for a hook.
* An exception of a hook for a request ends that request alone; only `FeatureSet.attempt` does this. An exception of any
  other code leaves `dirty` set, and the next entry starts over (`EngineState`).
* State that outlasts a step is in `EngineState` (requests, pool, recovery) and `PreparedModel` (the model).

A step, in order: late requests end; prompts are received, and the model is compared with what it was (`PreparedModel`);
the scheduler makes a plan, which is launched; the step before it is committed: features say which rows end (at a stop
string), the scheduler takes the tokens, features hand results out. Without overlap a step is committed at once.
"""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import numpy as np
import torch

from hf_paged.engine.engine_state import ambient
from hf_paged.engine.features import CommittedStep
from hf_paged.engine.features.lockstep import Joined
from hf_paged.engine.lockstep import LockstepBatch
from hf_paged.engine.observer import Committed, Launched
from hf_paged.engine.prepared_model import PreparedModel
from hf_paged.engine.session import NAN_ERROR, Request
from hf_paged.runner import device_times
from hf_paged.runner.model_runner import StepHandle
from hf_paged.runner.prompt_scores import NOTHING
from hf_paged.sampling.slot_row import SlotRow
from hf_paged.scheduler import Scheduler, Sequence, StepPlan
from hf_paged.scheduler.plan import NO_DRAFTS, Drafts

Step = tuple[StepPlan, StepHandle]  # a launched step


class EngineCore(PreparedModel):
    """The loop of one engine. Not thread-safe: the engine holds its lock around every call."""

    @torch.inference_mode(False)  # tensors made under inference mode could not be written outside it later
    @torch.no_grad()
    def step(self, *, look_at_model: bool = False, control_flag: bool = False) -> bool:
        """Schedule, launch and commit once; returns False if nothing was to do, or other threads have to act first.

        Args:
            look_at_model: check whether the model changed since the last step.
            control_flag: announce to all ranks, with the launched step, that rank 0 has commands.
        """
        self.settle()
        waiting = self.joining.waiting() if self.batches else []
        if self.is_idle and not waiting:
            return False
        if not self.joining.may_join():
            waiting = []
        started = time.perf_counter()
        if self.pool.moved():
            self.restart_over_a_new_pool()
        runner = self.pool.runner  # on the model's device, as `moved` has just checked
        device = runner.device if runner is not None else self._executor.kv_spec().device
        self.dirty, self.stepping_thread = True, threading.get_ident()
        try:
            with self.delays.step(), ambient(device):
                scheduler = self.scheduler_or_build()
                num_preempted = scheduler.num_preemptions
                joining, has_looked = self._get_ready(waiting, look_at_model)
                if joining is None:
                    return True
                for feature in self.features.having["hold"]:
                    feature.hold(scheduler)
                is_busy = self._in_flight is not None
                guesses = self.features.having["drafts"]
                plan = scheduler.schedule(self._drafts(scheduler)) if guesses else scheduler.schedule()
                scheduled = time.perf_counter()
                if self._pending is not None:
                    self._draw_before(plan, joining)
                if self.runner.sharded is not None:
                    self.runner.sharded.say(control_flag)
                is_busy |= plan is not None
                launched = self._launch(plan, joining) if plan is not None or joining else None
                if self.observers.all and (plan is not None or joining):
                    event = Launched(plan, self.totals["steps"], [rows for _, rows in joining],
                                     scheduler.num_preemptions - num_preempted, started, scheduled,
                                     time.perf_counter(), device_times.take())
                    self.observers.tell("launched", event)
                previous, self._in_flight = self._in_flight, launched
                self.note_use()  # a look through young objects (`gc`) takes long: behind the launch the device has work
                self._commit_beside(previous, launched, joining, device)
                self.joining.note_pace(plan, joined=bool(joining), overlapped=self._in_flight is not None,
                                        seconds=time.perf_counter() - started)
                if joining:
                    self.joining.answer(joining, has_looked=has_looked)
                self._end_requests_of(scheduler.take_failed())
                if not self.requests:
                    self.commit_in_flight()  # no request needs the step that ran ahead: its blocks go back now
            self.dirty = False
        finally:
            self.stepping_thread = None
        return is_busy or any(not batch.is_waiting or batch.is_computing for batch in waiting)

    def _get_ready(self, waiting: list[LockstepBatch], look_at_model: bool) -> tuple[Joined | None, bool]:
        """Prepare a step before its plan: end late requests, receive new ones, check the model, prepare joining rows.

        Returns:
            The result of `JoiningRows.prepare`, and whether the model was checked for changes.
        """
        for feature in self.features.having["due"]:
            for request in feature.due():
                self.end(request, "timeout")
        with self._executor.watch.compared_once():
            self._receive_requests()
            # With requests the check runs while the device computes a step; rows alone are checked behind their launch,
            # unless they have states, which no step computes twice.
            look_now = look_at_model or (bool(waiting) and (bool(self.requests) or self._executor.has_states))
            for feature in self.features.having["model_may_differ"]:
                look_now |= feature.model_may_differ()
            if look_now:
                self.model_changed()
            if waiting and self._pending is not None:
                self._draw_in_flight()
            return self.joining.prepare(waiting) if waiting else [], look_now

    def _commit_beside(self, previous: Step | None, launched: Step | None, joining: Joined,
                       device: torch.device) -> None:
        """Commit the previous step while the launched one runs; without overlap, commit the launched one as well."""
        overlaps = launched is not None and (
            device.type == "cuda" if self._config.overlap is None else self._config.overlap)
        if not overlaps:
            self._commit(previous)
            previous = None
        if launched is not None and launched[1].unsampled is not None:
            self._begin_masks(launched[0], previous, joining, beside=overlaps)
        if overlaps:
            self._commit(previous)
        else:
            self.commit_in_flight()

    def _drafts(self, scheduler: Scheduler) -> Drafts:
        """Return guesses of the next tokens; if there are any, commit the step in flight before."""
        device_type = self.runner.device.type
        if self._in_flight is not None:
            has_drafts = self._in_flight[0].drafts is not None
            if not has_drafts and not self.features.drafts(scheduler.num_running, device_type):
                return NO_DRAFTS
            self.commit_in_flight()
        return self.features.drafts(scheduler.num_running, device_type)

    def _launch(self, plan: StepPlan | None, joining: Joined) -> Step | None:
        """Start a step of the scheduler's plan, if any, and of the rows that join it."""
        assert self.scheduler is not None
        rows = [rows for _, rows in joining]
        try:
            if plan is None:
                self.joining.logits = self.runner.logits(rows[-1].behind(rows[:-1]), [], of_every_token=True)
            else:
                slot_rows = self._slot_rows(plan.admitted) if plan.admitted else []
                having = self.features.having
                wanted = self.features.wanted(plan) if having["before"] else NOTHING
                self._masking = self.features.samples_late(plan) if having["samples_late"] else None
                launch = self.runner.launch if self._masking is None else self.runner.launch_unsampled
                handle = launch(plan, slot_rows, wanted, rows)
                self.joining.logits = handle.logits
        except Exception:
            self._take_launch_back(plan, joining)
            raise
        self.totals["steps"] += 1
        if plan is None:
            return None
        self.totals["prefill"] += int(plan.num_new_tokens[plan.num_decode_rows :].sum())
        return plan, handle._replace(logits=None)

    def _take_launch_back(self, plan: StepPlan | None, joining: Joined) -> None:
        """Undo a failed launch: no block of the step stays published, and its rows are computed again."""
        assert self.scheduler is not None
        self.commit_in_flight()
        if plan is not None:
            self.scheduler.rollback(plan)
        self.joining.give_back(joining)
        self._tell_of_new_start()
        self.dirty = False

    def _begin_masks(self, plan: StepPlan, previous: Step | None, joining: Joined, *, beside: bool) -> None:
        """Begin to make the masks under which a launched step is to sample (`_draw_in_flight`).

        Args:
            previous: the step before if it is not committed yet; the masks need its tokens, but not its commit.
            beside: make the masks while this thread goes on.
        """
        assert self._masking is not None
        try:
            before = None
            if previous is not None:
                waited = time.perf_counter()
                before = previous[0], previous[1].wait()
                self._waited = waited, time.perf_counter()
            is_parallel = self._executor.group.is_parallel
            self._pending = self._masking.masks(plan, before, beside=beside and not is_parallel)
            if is_parallel:
                self._draw_in_flight()  # now: later, ranks might run its collectives in different orders
        except Exception:
            self._in_flight, self._pending = previous, None
            self._take_launch_back(plan, joining)
            raise

    def _draw_before(self, plan: StepPlan | None, joining: Joined) -> None:
        """Sample the tokens of the step in flight, which are inputs of the next step."""
        assert self.scheduler is not None
        try:
            if plan is not None and not joining:
                self.runner.prefetch_inputs(plan)  # while the masks are made
            self._draw_in_flight()
        except Exception:
            self._in_flight = None
            self.scheduler.preempt_all()
            self._take_launch_back(None, joining)
            raise

    def _draw_in_flight(self) -> None:
        """Sample the tokens of the step in flight under its masks."""
        assert self._in_flight is not None and self._pending is not None
        plan, handle = self._in_flight
        pending, self._pending = self._pending, None
        with nullcontext() if self.stepping_thread is not None else self._at_work():
            self._in_flight = plan, self.runner.sample(handle, pending.take())

    def _slot_rows(self, admitted: list[Sequence]) -> list[SlotRow]:
        """Return the rows of requests that were just admitted, and note their start."""
        now, rows = time.monotonic(), []
        for sequence in admitted:
            request = self.requests[sequence.request_id]
            rows.append(request.row)
            if request.started is None:  # else the request was preempted and runs again
                request.started = now
            if self.features.having["started"]:
                self.features.started(request)
        return rows

    def commit_in_flight(self) -> bool:
        if self._pending is not None:
            self._draw_in_flight()
        launched, self._in_flight = self._in_flight, None
        self._commit(launched)
        return launched is not None

    def _commit(self, launched: Step | None) -> None:
        """Wait for the tokens of a step, and give them to the scheduler, to features and to callers."""
        if launched is None:
            return
        assert self.scheduler is not None
        plan, handle = launched
        assert handle.unsampled is None
        waited = time.perf_counter()
        tokens = handle.wait()
        ready = time.perf_counter()
        if self._waited is not None:
            (waited, ready), self._waited = self._waited, None
        self.control_flag |= handle.heard is not None and bool(handle.heard)
        if self._guard.pending:
            self._guard.verify(self.scheduler.kv_cache_manager.block_pool)
        features = self.features
        step = CommittedStep(plan, handle, tokens, self._guard.version) if features.having["tokens"] else None
        result = self.scheduler.commit(plan, tokens, () if step is None else features.ends(step))
        self._committing = plan, result.accepted
        for sequence in result.finished:
            request = self._request_with(sequence)
            if sequence.finish_reason == "error" and request is not None:
                request.error = NAN_ERROR
        self._count(plan, result.accepted)
        if self.observers.all:
            self.observers.tell("committed", Committed(plan, tokens, result.accepted, waited, ready))
        if step is not None:
            features.committed(step, result.accepted)
        self._end_requests_of(result.finished)
        self._committing = None
        if self.observers.all:
            self.observers.tell("delivered", plan)

    def _count(self, plan: StepPlan, accepted: np.ndarray) -> None:
        """Add a step's results to the totals, and note the time of first tokens."""
        self.totals["generated"] += len(accepted)
        if plan.drafts is not None:
            self.totals["drafts"] += int((plan.drafts >= 0).sum())
            self.totals["accepted drafts"] += int((plan.drafts[accepted] >= 0).sum())
        if plan.num_decode_rows == len(plan.slots):
            return
        now = time.monotonic()  # a prompt ended in this step; preempted requests keep the time of their first token
        for row in accepted[accepted >= plan.num_decode_rows].tolist():
            request = self._request_with(plan.sequences[row])
            if request is not None and request.first_token is None:
                request.first_token = now

    def _end_requests_of(self, sequences: list[Sequence]) -> None:
        """End the requests whose sequences the scheduler has ended."""
        for sequence in sequences:
            if (request := self._request_with(sequence)) is not None:
                self.end(request, sequence.finish_reason or "error")

    def _request_with(self, sequence: Sequence) -> Request | None:
        """Return the request of a sequence; None if it has ended, also if a new request has its id."""
        request = self.requests.get(sequence.request_id)
        return request if request is not None and request.sequence is sequence else None
