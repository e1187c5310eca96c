"""The metrics of engines: the table of all metrics, and the recorder of what an engine does not count itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hf_paged.config import PagedConfig
from hf_paged.engine.engine import Engine
from hf_paged.engine.observer import Committed, Launched
from hf_paged.engine.session import Request
from hf_paged.observe.work import ModelSizes, Work
from hf_paged.outputs import Completion, EngineStats, StepOutput
from hf_paged.scheduler import Sequence, StepPlan

# Upper bounds in seconds: for the duration of a request, and for the time between two of its tokens.
REQUEST_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
                   2560.0)
FIRST_TOKEN_SECONDS = (0.001, 0.0025, *REQUEST_SECONDS)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
                 1.0, 2.5, 5.0, 10.0, 40.0, 80.0)
TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))


class Histogram:
    """Counts of values up to each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._edges = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, np.int64)  # by interval that ends at each bound; the last has no end

    def add(self, value: float) -> None:
        self._counts[self._edges.searchsorted(value)] += 1
        self.sum += value

    def add_all(self, values: np.ndarray) -> None:
        """Count values [N]."""
        if values.size and values.min() == (most := values.max()):  # the usual case: decode rows of one step
            self._counts[self._edges.searchsorted(most)] += values.size
        else:
            self._counts += np.bincount(self._edges.searchsorted(values), minlength=len(self._counts))
        self.sum += float(values.sum())

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, number of values up to it) as in Prometheus; the last bound is infinity."""
        names = [*(str(float(bound)) for bound in self.bounds), "+Inf"]
        return list(zip(names, self._counts.cumsum().tolist(), strict=True))


class Recorder:
    """An `Observer` that counts. The engine's lock must be held while its numbers are read.

    Decode rows are counted together, not one by one.

    Args:
        on_finished: Called with each completion, and its mean seconds per token or None.
    """

    def __init__(self, sizes: ModelSizes, on_finished: Callable[[Completion, float | None], None] | None) -> None:
        self.work = Work()  # of all launched steps
        reasons = "eos", "stop", "length", "timeout", "abort", "error"
        self.finished_by: Counter[str] = Counter(dict.fromkeys(reasons, 0))
        self.first_token = Histogram(FIRST_TOKEN_SECONDS)
        self.inter_token, self.per_token = (Histogram(TOKEN_SECONDS) for _ in range(2))
        self.latency, self.queue, self.prefill, self.decode = (Histogram(REQUEST_SECONDS) for _ in range(4))
        self.prompt_tokens, self.generation_tokens = Histogram(TOKENS), Histogram(TOKENS)
        self.step_tokens = Histogram(TOKENS)
        self._sizes, self._on_finished = sizes, on_finished
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
        previous = request.spec.previous
        made = len(completion.token_ids) - (0 if previous is None else len(previous.token_ids))
        if times.first_token is not None and made > 1:
            per_token = (times.ended - times.first_token) / (made - 1)
            self.per_token.add(per_token)
        if self._on_finished is not None:
            self._on_finished(completion, per_token)

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


class Reading(NamedTuple):
    """Numbers of one engine, all read between the same two steps; ``histograms``: (buckets, sum) by the recorder's
    names."""

    labels: tuple[str, str]
    stats: EngineStats
    waiting: dict[str, int]
    config: PagedConfig
    work: Work
    finished_by: dict[str, int]
    histograms: dict[str, tuple[list[tuple[str, float]], float]]


def read(engine: Engine, recorder: Recorder, labels: tuple[str, str]) -> Reading:
    """Read an engine's numbers; waits for the running step."""
    with engine.between_steps():
        histograms = {name: (value.buckets(), value.sum) for name, value in vars(recorder).items()
                      if isinstance(value, Histogram)}
        return Reading(labels, engine.stats(), engine.waiting_by_reason(), engine.config, recorder.work,
                       dict(recorder.finished_by), histograms)


class Metric(NamedTuple):
    """A metric, with the name and unit of vLLM's where vLLM has it.

    Attributes:
        kind: "gauge", "counter", "histogram" or "info".
        name: Name without the prefix.
        what: Help text.
        value: Returns the value in a reading; with ``labels`` a dict of values by the labels' values. None: that of the
            field of `EngineStats` with the metric's name.
        labels: Labels besides those of the engine.
    """

    kind: str
    name: str
    what: str
    value: Callable[[Reading], Any] | None = None
    labels: tuple[str, ...] = ()

    def of(self, reading: Reading) -> Any:
        return getattr(reading.stats, self.name) if self.value is None else self.value(reading)


def _of_calls(reading: Reading, count: str) -> dict[tuple[str, str], int]:
    return {(path, reason): getattr(counted, count) for path, stats in reading.stats.calls.items()
            for reason, counted in ({"": stats} if path == "native" else stats.by_reason).items()}


def _cache_config(reading: Reading) -> dict[str, str]:
    names = "block_size", "gpu_memory_utilization", "enable_prefix_caching"
    return {name: str(getattr(reading.config, name)) for name in names} | {
        "num_gpu_blocks": str(reading.stats.num_blocks)}


def _histogram(name: str, field: str, what: str) -> Metric:
    return Metric("histogram", name, what, lambda reading: reading.histograms[field])


_gauge, _counter = partial(Metric, "gauge"), partial(Metric, "counter")
METRICS = (
    _gauge("num_requests_running", "Requests that have a row in every step.", lambda of: of.stats.num_running),
    _gauge("num_requests_waiting", "Requests that wait for a row.", lambda of: of.stats.num_waiting),
    _gauge("kv_cache_usage_perc", "Part of the KV pool's blocks that requests use; 1 is all of them.",
           lambda of: of.stats.num_used_blocks / max(of.stats.num_blocks - 1, 1)),  # block 0 is never used
    _gauge("kv_cache_bytes", "Memory of the KV pool."),
    _gauge("shadow_bytes", "Memory of copies of weights in the dtype of autocast, or gathered from ranks."),
    _gauge("weights_version", "Goes up when the weights were found to be others."),
    _gauge("longest_delay_seconds", "Most time that compiling and capturing took in one step."),
    _gauge("num_requests_waiting_by_reason", "Requests that wait, by what keeps them.",
           lambda of: {(reason,): count for reason, count in of.waiting.items()}, ("reason",)),
    _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    _counter("num_preemptions", "Requests that had to give their blocks back."),
    _counter("prompt_tokens", "Prompt tokens computed, or found in the prefix cache.",
             lambda of: of.stats.num_prefill_tokens + of.stats.prefix_cache_hits),
    _counter("generation_tokens", "Tokens made.", lambda of: of.stats.num_generated_tokens),
    _counter("num_steps", "Steps launched."),
    _counter("num_steps_delayed", "Steps of more than 50 ms that compiled a kernel or captured a CUDA graph."),
    _counter("compile_wait_seconds", "Time that steps waited for kernels."),
    _counter("capture_seconds", "Time in which steps captured CUDA graphs."),
    _counter("kernels_compiled", "Kernels that the process compiled.", lambda of: of.stats.num_kernels_compiled),
    _counter("kernels_loaded", "Kernels that the process found in Triton's cache on the disk.",
             lambda of: of.stats.num_kernels_loaded),
    _counter("spec_decode_num_draft_tokens", "Guesses at tokens that steps computed.",
             lambda of: of.stats.num_draft_tokens),
    _counter("spec_decode_num_accepted_tokens", "Guesses that came true.",
             lambda of: of.stats.num_accepted_draft_tokens),
    _counter("kv_bytes_read", "Bytes of keys and values that attention read, on this device; a prompt's once."),
    _counter("kv_bytes_saved", "Bytes that it did not read again, since rows shared a prefix."),
    _counter("estimated_flops_per_gpu",
             "Floating-point operations of all steps, estimated from their plans, on this device.",
             lambda of: of.work.flops),
    _counter("estimated_read_bytes_per_gpu", "Bytes of weights, keys and values of all steps, of each row its own.",
             lambda of: of.work.read),
    _counter("estimated_write_bytes_per_gpu", "Bytes of keys and values that all steps wrote.",
             lambda of: of.work.written),
    _counter("request_success", "Requests that ended, by the reason.",
             lambda of: {(reason,): count for reason, count in of.finished_by.items()}, ("finished_reason",)),
    _counter("calls", "Calls of generate, generate_batch and a PagedGenerator, by the path that they took and why it "
             "was not the native one.", lambda of: _of_calls(of, "num_calls"), ("path", "reason")),
    _counter("call_tokens", "New tokens of those calls.", lambda of: _of_calls(of, "num_tokens"),
             ("path", "reason")),
    _histogram("time_to_first_token_seconds", "first_token", "From a request's arrival to its first token."),
    _histogram("inter_token_latency_seconds", "inter_token", "Between two tokens of a request."),
    _histogram("request_time_per_output_token_seconds", "per_token", "Mean of a request's tokens behind its first."),
    _histogram("e2e_request_latency_seconds", "latency", "From a request's arrival to its end."),
    _histogram("request_queue_time_seconds", "queue", "From a request's arrival to its first step."),
    _histogram("request_prefill_time_seconds", "prefill", "From a request's first step to its first token."),
    _histogram("request_decode_time_seconds", "decode", "From a request's first token to its end."),
    _histogram("request_prompt_tokens", "prompt_tokens", "Prompt tokens of a request."),
    _histogram("request_generation_tokens", "generation_tokens", "Tokens made for a request."),
    _histogram("iteration_tokens_total", "step_tokens", "Tokens computed in a step."),
    Metric("info", "cache_config", "How the KV pool is set up.", _cache_config),
)
