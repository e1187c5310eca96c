"""Records the steps and requests of one engine for its metrics; decode rows are counted together, not one by one."""

from __future__ import annotations

from collections import Counter

import numpy as np

from hf_paged.engine.observer import Committed, Launched
from hf_paged.engine.session import Request
from hf_paged.observe import histogram
from hf_paged.observe.histogram import Histogram
from hf_paged.observe.telemetry import Telemetry
from hf_paged.observe.work import ModelSizes, Work
from hf_paged.outputs import StepOutput
from hf_paged.scheduler import Sequence, StepPlan


class Recorder:
    """An `Observer` that counts. The engine's lock must be held while its numbers are read.

    Attributes:
        work: Work of all launched steps.
        finished_by: Number of requests by finish reason.
    """

    def __init__(self, sizes: ModelSizes, telemetry: Telemetry | None) -> None:
        self.work = Work()
        reasons = "eos", "stop", "length", "timeout", "abort", "error"
        self.finished_by: Counter[str] = Counter(dict.fromkeys(reasons, 0))
        self.first_token = Histogram(histogram.FIRST_TOKEN_SECONDS)
        self.inter_token, self.per_token = (Histogram(histogram.TOKEN_SECONDS) for _ in range(2))
        self.latency, self.queue, self.prefill, self.decode = (Histogram(histogram.REQUEST_SECONDS) for _ in range(4))
        self.prompt_tokens, self.generation_tokens = Histogram(histogram.TOKENS), Histogram(histogram.TOKENS)
        self.step_tokens = Histogram(histogram.TOKENS)
        self._sizes, self._telemetry = sizes, telemetry
        self._open: dict[str, Request] = {}  # unfinished requests
        self._awaited: set[str] = set()  # unfinished requests without a token
        self._latest = np.zeros(0)  # by slot: time of its sequence's last token
        self._tenancy = np.zeros(0, np.int64)  # by slot: tenancy of that sequence
        self._tenants: list[Sequence | None] = []  # by slot
        self._left: dict[str, float] = {}  # time of the last token of preempted requests whose slot was reassigned

    # -- Observer methods ---------------------------------------------------------------------------------------------

    def queued(self, request: Request) -> None:
        self._open[request.request_id] = request
        self._awaited.add(request.request_id)

    def launched(self, step: Launched) -> None:
        plans = step.joined if step.plan is None else [step.plan, *step.joined]
        for plan in plans:
            self.work = self.work.plus(self._sizes.of(plan))
        self.step_tokens.add(sum(plan.num_tokens for plan in plans))
        if step.plan is not None and step.plan.admitted:
            self._settle(step.plan)

    def committed(self, step: Committed) -> None:
        plan, rows, now = step.plan, step.accepted, step.ready
        decodes = rows[: rows.searchsorted(plan.num_decode_rows)]
        slots = plan.slots[decodes]
        if slots.size and int(slots.max()) >= len(self._latest):
            self._grow(int(slots.max()) + 1)
        is_known = self._tenancy[slots] == plan.tenancy[decodes]
        if not is_known.all():
            for row in decodes[~is_known].tolist():
                self._count_late(plan, row, now)
            slots = slots[is_known]
        if slots.size:
            gaps = now - self._latest[slots]
            if plan.drafts is not None:  # accepted drafts of one request arrive together, so they share the time
                _, inverse, counts = np.unique(slots, return_inverse=True, return_counts=True)
                gaps /= counts[inverse]
            self.inter_token.add_all(gaps)
            self._latest[slots] = now
        for row in rows[len(decodes) :].tolist():
            self._count_prefill(plan, row, now)

    def delivered(self, plan: StepPlan) -> None:
        """Do nothing: `committed` has counted the step."""

    def finished(self, request: Request, output: StepOutput) -> None:
        assert output.completion is not None
        completion, reason = output.completion, output.finish_reason or "abort"
        self._forget(request.request_id)
        self.finished_by[reason] += 1
        self.prompt_tokens.add(len(completion.prompt_token_ids))
        self.generation_tokens.add(len(completion.token_ids))
        times = completion.timings
        if times is None:
            return
        self.latency.add(times.ended - times.queued)
        if times.started is not None:
            self.queue.add(times.started - times.queued)
            if times.first_token is not None:
                self.prefill.add(times.first_token - times.started)
        if times.first_token is not None:
            self.decode.add(times.ended - times.first_token)
        per_token = None
        made = len(completion.token_ids) - (0 if request.made is None else len(request.made.token_ids))
        if times.first_token is not None and made > 1:
            per_token = (times.ended - times.first_token) / (made - 1)
            self.per_token.add(per_token)
        if self._telemetry is not None:
            self._telemetry.finished(completion, per_token)

    def started_over(self, unfinished: list[Request]) -> None:
        self._tenants, self._left = [None] * len(self._tenants), {}  # so that no token latency spans the interrupt
        self._tenancy[:] = -1
        for request_id in self._open.keys() - {request.request_id for request in unfinished}:
            self._forget(request_id)

    # -- inside -------------------------------------------------------------------------------------------------------

    def _settle(self, plan: StepPlan) -> None:
        """Assign slots to newly admitted sequences and keep the last token's time of preempted ones."""
        new = {id(sequence) for sequence in plan.admitted}
        for row in range(plan.num_decode_rows, len(plan.slots)):
            if id(sequence := plan.sequences[row]) in new:
                self._take_slot(int(plan.slots[row]), int(plan.tenancy[row]), sequence)

    def _forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        self._awaited.discard(request_id)
        self._left.pop(request_id, None)

    def _take_slot(self, slot: int, tenancy: int, sequence: Sequence) -> None:
        if slot >= len(self._tenants):
            self._grow(slot + 1)
        self._give_up(slot)
        if sequence.request_id not in self._awaited and sequence in self._tenants:  # preempted before
            self._give_up(self._tenants.index(sequence))
        self._tenants[slot], self._tenancy[slot], self._latest[slot] = sequence, tenancy, np.nan

    def _give_up(self, slot: int) -> None:
        tenant, time = self._tenants[slot], self._latest[slot]
        request = None if tenant is None else self._open.get(tenant.request_id)
        if request is not None and request.sequence is tenant and not np.isnan(time):
            self._left[request.request_id] = float(time)
        self._tenants[slot], self._tenancy[slot] = None, -1

    def _count_prefill(self, plan: StepPlan, row: int, now: float) -> None:
        """Count the first token of a prompt, or the next token of a preempted request."""
        sequence, slot = plan.sequences[row], int(plan.slots[row])
        request_id = sequence.request_id
        if request_id in self._awaited and (first := self._open[request_id].first_token) is not None:
            self._awaited.discard(request_id)
            self.first_token.add(first - self._open[request_id].queued)
        if slot < len(self._tenancy) and self._tenancy[slot] == plan.tenancy[row]:
            self._latest[slot] = now
            before = self._left.pop(request_id, None)
        else:
            before, self._left[request_id] = self._left.get(request_id), now
        if before is not None:
            self.inter_token.add(now - before)

    def _count_late(self, plan: StepPlan, row: int, now: float) -> None:
        """Count a token of a request that lost its slot after the launch, or that ran before the recorder was
        attached."""
        request_id = plan.sequences[row].request_id
        if (before := self._left.get(request_id)) is not None:
            self.inter_token.add(now - before)
            self._left[request_id] = now
        else:
            slot = int(plan.slots[row])
            if self._tenants[slot] is None:
                self._take_slot(slot, int(plan.tenancy[row]), plan.sequences[row])
                self._latest[slot] = now

    def _grow(self, num_slots: int) -> None:
        more = max(num_slots, 2 * len(self._tenants)) - len(self._tenants)
        self._latest = np.append(self._latest, np.full(more, np.nan))
        self._tenancy = np.append(self._tenancy, np.full(more, -1))
        self._tenants += [None] * more
