"""Runs step plans on the device and returns tokens later. `launch` never waits for the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from hf_paged.attention.registry import resolve_backend
from hf_paged.device.cuda import capture_lock, upload
from hf_paged.kernels.build.compiling import compiled_ahead, compiled_together
from hf_paged.models import KVSpec, ModelExecutor
from hf_paged.models.base import StepContext
from hf_paged.models.images.fed_rows import FedRows
from hf_paged.runner import device_times
from hf_paged.runner.attention_inputs import AttentionInputs
from hf_paged.runner.dry_runs import dry_runs, rows_with
from hf_paged.runner.graphs import StepGraphs, UndrawnLogits
from hf_paged.runner.kv_cache import KVCache, KVReads
from hf_paged.runner.prompt_scores import NOTHING, PromptSpan, Wanted, prompt_log_probs
from hf_paged.runner.request_state import RequestState
from hf_paged.runner.sharded_sampling import ShardedSampling
from hf_paged.runner.step_shape import StepShape
from hf_paged.sampling.log_probs import shape_of
from hf_paged.sampling.slot_row import SlotRow
from hf_paged.sampling.token_mask import HostMasks, TokenMasks
from hf_paged.scheduler import Sequence, StepPlan

Result = TypeVar("Result")


class PendingSample(NamedTuple):
    """Rows of a launched step whose tokens `ModelRunner.sample` will sample, once their masks are known.

    ``logits`` [n, V] (a rank's columns) of the rows ``rows`` of R; ``slots`` and ``positions`` [n] int64 on the host;
    ``stages`` of logits editing. ``result`` [R] and ``logprobs`` {kind: [R]} on the host include the lockstep rows in
    front. ``undrawn``: the same step, if a graph may sample the tokens.
    """

    logits: torch.Tensor
    rows: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    stages: frozenset[str]
    result: torch.Tensor
    logprobs: Mapping[str, torch.Tensor]
    undrawn: UndrawnLogits | None = None


class StepHandle(NamedTuple):
    """A launched step. ``tokens`` [R] int64 on the host, valid once ``done`` (None on a CPU) has passed.

    If requested also, in float32: ``logprobs``, as in `RequestState.sample`, undefined for rows that do not sample, and
    ``prompt_logprobs`` of the tokens of ``spans``, one span after the other, with a `Top` each in ``prompt_tops``.

    ``heard`` [1] int64, of a sharded model: nonzero if rank 0 has a command to send (`hf_paged.engine.ranks.commands`).

    ``logits`` [N, V], on the device, of the lockstep rows that joined the step.

    ``unsampled``: rows whose tokens `ModelRunner.sample` still has to sample; it returns a handle without them.
    """

    tokens: torch.Tensor
    done: torch.cuda.Event | None
    logprobs: Mapping[str, torch.Tensor] = MappingProxyType({})
    prompt_logprobs: torch.Tensor | None = None
    spans: tuple[PromptSpan, ...] = ()
    heard: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    unsampled: PendingSample | None = None
    prompt_tops: torch.Tensor | None = None

    def wait(self) -> np.ndarray:
        """Return sampled tokens [R] int64; -1 for invalid logits, undefined for rows that do not sample."""
        if self.done is not None:
            self.done.synchronize()
        return self.tokens.numpy()


class Computed(NamedTuple):
    """A step before its logits: ``hidden`` [T, hidden_size], the first token of each row and the end [R + 1], and
    `StepContext.adapters`; of all tokens, or of the last token of each row only."""

    hidden: torch.Tensor
    query_start: np.ndarray
    adapters: torch.Tensor | None

    def at(self, tokens: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return hidden states and adapters of some tokens."""
        return self.hidden[tokens], None if self.adapters is None else self.adapters[tokens]


class ModelRunner:
    """Owner of what is on the device: the KV pool, the state of the running requests, the captured steps."""

    num_snapshots: int | None = None  # these three are fields of `SchedulerConfig`
    whole_prompts = False
    least_chunk = 1

    def __init__(self, executor: ModelExecutor, spec: KVSpec, *, block_size: int, num_blocks: int, max_num_seqs: int,
                 max_model_len: int, max_num_batched_tokens: int, attention_backend: str,
                 use_graphs: bool = False, max_blocks: int | None = None, reads: KVReads | None = None) -> None:
        self.executor = executor
        self.spec = spec
        self.device = spec.device
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.cache = KVCache(spec, block_size, num_blocks, max_blocks)
        self.sharded = None
        if executor.group.is_parallel:
            self.sharded = ShardedSampling(executor, spec.device)
        self.state = RequestState(max_num_seqs, max_model_len, block_size, spec.device, self.sharded)
        backend = resolve_backend(attention_backend, spec.device)
        self.reads = KVReads() if reads is None else reads
        self.attention = AttentionInputs(backend, spec, self.state, max_model_len)
        self.look_at_windows()
        self._fed = FedRows(block_size)
        self._stream: torch.cuda.Stream | None = None  # stream of the last step
        self._compiles = spec.device.type == "cuda"  # kernels of a step in parallel
        self._known_kinds: set[tuple[Any, ...]] = set()  # of steps that may not repeat, whose kernels are compiled
        self.graphs = None
        if use_graphs and spec.device.type == "cuda" and not backend.waits:
            self.graphs = StepGraphs(executor, self.cache, self.state, self.attention, max_num_batched_tokens)

    def look_at_windows(self) -> None:
        """Apply the sliding windows of the layers after they may have changed."""
        windows = self.executor.windows()
        self.reads.use(self.spec, windows)
        self.attention.use_windows(windows)

    def prepare(self) -> None:
        """Renew what the executor caches and drop outdated graphs, when an idle engine gets requests."""
        self.state.adapters.use_entries(self.executor.name_rows())
        if self.graphs is not None and self.executor.has_unmerged:
            self.graphs.drop_references()  # the aliases that graphs hold would keep weights from being merged
        with capture_lock(self.device):
            self.executor.prepare(self.max_model_len)
        if self.graphs is not None:
            self.graphs.check()

    def release(self) -> None:
        """Release the pool's memory and references to other memory; keeps graphs and the request state.

        Raises:
            DriverError: If the driver did not release all of it.
        """
        if self.graphs is not None:
            self.graphs.drop_references()
        self.executor.drop_references()
        self.cache.release()

    def is_current(self) -> bool:
        """Return whether `prepare` would not change what a step computes."""
        return self.executor.is_current() and (self.graphs is None or self.graphs.is_current())

    def routes_of(self, blocks: list[int], num_tokens: int) -> torch.Tensor:
        """Return `KVCache.routes_of`, behind the last step."""
        self.follow_stream()
        return self.cache.routes_of(blocks, num_tokens)

    def grow_slots(self, num_slots: int) -> int:
        """Raise the number of slots if memory allows; returns the resulting number."""
        if num_slots > self.state.num_slots:
            with suppress(torch.OutOfMemoryError):
                self.state.grow(num_slots)
        return self.state.num_slots

    def launch(self, plan: StepPlan, admitted: list[SlotRow], wanted: Wanted = NOTHING,
               joining: Seq[StepPlan] = ()) -> StepHandle:
        """Enqueue one step. Steps that score prompts run eagerly.

        Args:
            plan: The scheduler's plan.
            admitted: Rows of `plan.admitted`, in order.
            wanted: Log-probabilities to compute.
            joining: Plans of lockstep decode rows, which end at the logits.
        """
        first = sum(len(rows.slots) for rows in joining)
        plan = plan.behind(joining) if first else plan
        self._begin(plan, admitted)
        result, logprobs = self._room_on_host(len(plan.slots), wanted)
        own = {kind: values[first:] for kind, values in logprobs.items()}
        if self.graphs is not None and not wanted.prompt:
            logits = self._by_graphs(plan, first, result, logprobs)
            if logits is not None:
                self._count_reads(plan)
                return self._handle(result[first:], own, logits=logits)
        began = device_times.begin(self.device)
        run = partial(self._eagerly, plan, first, result, logprobs, every_token=bool(wanted.prompt))
        computed, logits = self._compiled(run, plan) if self._compiles else run()
        self._count_reads(plan)
        device_times.end("eager", began)
        if not wanted.prompt:
            return self._handle(result[first:], own, logits=logits)
        spans = [span._replace(row=first + span.row) for span in wanted.prompt]
        began = device_times.begin(self.device)
        scored, tops = self._score_prompts(plan, computed, spans, wanted.prompt_top)
        device_times.end("prompt log-probabilities", began)
        return self._handle(result[first:], own, scored, wanted.prompt, logits, tops)

    def _by_graphs(self, plan: StepPlan, first: int, result: torch.Tensor,
                   logprobs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Run a step as `StepGraphs.launch` does, with the logits of its first rows; returns None if none fits."""
        assert self.graphs is not None
        return None if self._fed.feeds(plan) else self.graphs.launch(plan, result, logprobs, num_logits=first)

    def _eagerly(self, plan: StepPlan, first: int, result: torch.Tensor, logprobs: Mapping[str, torch.Tensor], *,
                 every_token: bool) -> tuple[Computed, torch.Tensor | None]:
        """Run a step without graphs, with the logits of its first rows, if any; repeating it gives the same result."""
        computed = self._hidden_states(plan, every_token=every_token)
        logits = self.executor.logits(*computed.at(slice(0, first))) if first else None
        self._sample(plan, computed, result, logprobs)
        return computed, logits

    def _compiled(self, run: partial[Result], plan: StepPlan) -> Result:
        """Call `run()` with its kernels compiled in parallel, then compile the kernels of decoding its rows."""
        later = () if self.graphs is None else dry_runs(self.graphs.steps, len(plan.slots))
        if self.executor.may_repeat:
            return compiled_together(run, later)
        # Such a step is not broken off at a missing kernel: a dry run looks for all before, once a kind.
        if (kind := self._kind(run, plan)) in self._known_kinds:
            return run()
        result = compiled_together(run, later, may_break_off=False)
        self._known_kinds.add(kind)
        return result

    def _kind(self, run: partial[Result], plan: StepPlan) -> tuple[Any, ...]:
        """Return what decides on the kernels of an eager step, its sizes by powers of two."""
        num_new, decodes = plan.num_new_tokens, plan.num_decode_rows
        sizes = decodes, len(num_new) - decodes, int(num_new.sum()) - decodes, int(num_new.max())
        features = self.state.stages(plan.slots[plan.samples]), self.state.adapters.any_named(plan.slots)
        groups = plan.groups is not None, plan.prompt_groups is not None
        return run.func.__name__, *(size.bit_length() for size in sizes), *features, *groups

    def launch_unsampled(self, plan: StepPlan, admitted: list[SlotRow], wanted: Wanted = NOTHING,
                         joining: Seq[StepPlan] = ()) -> StepHandle:
        """Launch a step, some rows of which sample, up to the logits; `sample` completes it."""
        first = sum(len(rows.slots) for rows in joining)
        plan = plan.behind(joining) if first else plan
        if self.graphs is None or not self.graphs.is_foreseen(plan):
            self._begin(plan, admitted)
        result, logprobs = self._room_on_host(len(plan.slots), wanted)
        rows = np.flatnonzero(plan.samples)
        slots, positions = plan.slots[rows], plan.start[rows] + plan.num_new_tokens[rows]
        stages = self.state.stages(slots)
        graphs = None if wanted.prompt or self._fed.feeds(plan) else self.graphs
        if graphs is not None and not first and (undrawn := graphs.undrawn(plan)) is not None:
            self._count_reads(plan)
            logits = undrawn.logits[: undrawn.num_rows]
            unsampled = PendingSample(logits, rows, slots, positions, stages, result, logprobs, undrawn)
            return StepHandle(result, None, logprobs, unsampled=unsampled)
        every = None if graphs is None else graphs.row_logits(plan)
        scored, tops, spans = None, None, [span._replace(row=first + span.row) for span in wanted.prompt]
        if every is not None:
            self._count_reads(plan)
        else:
            began = device_times.begin(self.device)
            run = partial(self._hidden_states, plan, every_token=bool(spans))
            computed = self._compiled(run, plan) if self._compiles else run()
            self._count_reads(plan)
            last = upload(computed.query_start[1:].astype(np.int64) - 1, self.device)
            every = self.executor.shard_logits(*computed.at(last))
            if spans:
                scored, tops = self._score_prompts(plan, computed, spans, wanted.prompt_top)
            device_times.end("eager up to the logits", began)
        logits = every if len(rows) == len(every) else every[upload(rows, self.device)]
        unsampled = PendingSample(logits, rows, slots, positions, stages, result, logprobs)
        own = {kind: values[first:] for kind, values in logprobs.items()}
        return StepHandle(result[first:], None, own, scored, wanted.prompt, None, every[:first] if first else None,
                          unsampled, tops)

    def prefetch_inputs(self, plan: StepPlan) -> None:
        """Send the inputs of this plan, the next to launch, while the current step waits for token masks.

        Only for a step without new rows: a new row's slot may be in use until the current tokens are sampled.
        """
        if self.graphs is not None and not plan.admitted and plan.drafts is None:
            self._update_state(plan, [])
            self.graphs.prefetch_inputs(plan)

    def sample(self, handle: StepHandle, masks: HostMasks | None) -> StepHandle:
        """Enqueue the sampling of a step of `launch_unsampled`, before any other step.

        Args:
            masks: Masks of the rows of the plan that sample, in order; None if no row has one.
        """
        assert handle.unsampled is not None
        self.follow_stream()
        logits, rows, slots, positions, stages, result, logprobs, undrawn = handle.unsampled
        graphs = self.graphs
        if undrawn is None or graphs is None or not graphs.draw(undrawn, masks, stages, result, logprobs):
            began = device_times.begin(self.device)
            on_device = None if masks is None else masks.to(self.device)
            at = list(upload(np.array((slots, positions), np.int64), self.device))
            self._draw(logits, rows, at, stages, result, logprobs, on_device)
            device_times.end("sampling under masks", began)
        return self._handle(handle.tokens, handle.logprobs, handle.prompt_logprobs, handle.spans, handle.logits,
                            handle.prompt_tops)

    def logits(self, plan: StepPlan, admitted: list[SlotRow], *, of_every_token: bool = False) -> torch.Tensor:
        """Enqueue one step up to the logits [N, V]: of the rows that sample, or of all tokens, in order."""
        if self.graphs is not None and self.graphs.is_ready(plan):
            self.follow_stream()
        else:
            self._update_state(plan, admitted)
        if self.graphs is not None and (logits := self.graphs.logits(plan)) is not None:
            self._count_reads(plan)
            return logits
        began = device_times.begin(self.device)
        run = partial(self._hidden_states, plan, every_token=of_every_token)
        computed = self._compiled(run, plan) if self._compiles else run()
        self._count_reads(plan)
        if of_every_token:
            logits = self.executor.logits(computed.hidden, computed.adapters)
        else:
            last = upload(computed.query_start[1:][plan.samples].astype(np.int64) - 1, self.device)
            logits = self.executor.logits(*computed.at(last))
        device_times.end("eager logits", began)
        return logits

    def _begin(self, plan: StepPlan, admitted: list[SlotRow]) -> None:
        """Update the requests' state for a step that samples."""
        self._update_state(plan, admitted)
        if plan.drafts is not None:
            guessed = np.flatnonzero(plan.drafts >= 0)
            columns = np.array((plan.slots[guessed], plan.start[guessed], plan.drafts[guessed]), np.int64)
            slots, places, tokens = upload(columns, self.device)
            self.state.set_tokens(slots, places, tokens[:, None])

    def _room_on_host(self, rows: int, wanted: Wanted) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Allocate host tensors for a step's tokens and log-probabilities."""
        logprobs = {name: self._on_host(shape_of(name, rows), torch.float32) for name in wanted.sampled}
        return self._on_host(rows, torch.int64), logprobs

    def make_ready(self, plan: StepPlan) -> None:
        """Send the inputs of `logits` for a decode plan, except the tokens, while the device runs another step."""
        if self.graphs is not None:
            self._update_state(plan, [])
            self.graphs.make_ready(plan)

    def capture_ahead(self, most_rows: int, others: Iterable[StepShape] = ()) -> None:
        """Capture the steps of up to so many decode rows, and others, after `prepare` and before the first comes."""
        if self.graphs is not None:
            self.follow_stream()
            self.graphs.capture_ahead([*self.graphs.decode_shapes(most_rows), *others])

    def missing_kernels(self, stages: frozenset[str], scored: tuple[str, ...], *, masked: bool,
                        named: bool) -> list[Future[object]]:
        """Begin to compile, in other processes, the kernels that rows with these options (`rows_with`) miss.

        Returns a future for each of them, which is done when it is there.
        """
        if self.graphs is None:
            return []
        self.follow_stream()
        return compiled_ahead(partial(rows_with, self.graphs.steps, stages, scored, masked=masked, named=named))

    def _update_state(self, plan: StepPlan, admitted: list[SlotRow]) -> None:
        self.follow_stream()
        if plan.admitted:
            self.admit(plan.admitted, admitted)
        self.state.update_blocks(*plan.block_updates)

    def admit(self, sequences: Seq[Sequence], settings: list[SlotRow]) -> None:
        """Write the known tokens, block tables and settings of sequences that got a slot, and what they are fed."""
        self._fed.admit(sequences)
        self.state.admit([s.slot for s in sequences], [s.known_ids() for s in sequences],
                         [s.block_table for s in sequences], settings, [s.fed for s in sequences])

    def follow_rows(self, sequences: Seq[Sequence]) -> None:
        """Write the block tables of rows that continue others, and how far their positions are from those of text."""
        slots = [s.slot for s in sequences]
        self._fed.admit(sequences)
        self.state.axis_offsets.admit(slots, [s.fed for s in sequences])
        self.state.set_tables(slots, [s.block_table for s in sequences])

    def follow_stream(self) -> None:
        """Order this step after the last one, which another thread may have launched on another stream."""
        if self.device.type != "cuda":
            return
        current = torch.cuda.current_stream(self.device)
        if self._stream is not None and self._stream != current:
            current.wait_stream(self._stream)
        self._stream = current

    def _hidden_states(self, plan: StepPlan, *, every_token: bool) -> Computed:
        """Compute hidden states of every token, or of the last token of each row."""
        num_new = plan.num_new_tokens
        query_start = np.zeros(len(num_new) + 1, dtype=np.int32)
        np.cumsum(num_new, out=query_start[1:])
        token_slots, token_positions, write_from = upload(plan.token_columns(), self.device)
        input_ids, token_positions, slot_mapping, *_ = self.state.inputs(token_slots, token_positions, write_from)

        parts, ends = self.attention.parts(plan, query_start, slot_mapping, ends=not every_token)
        adapters = self.state.adapters.of(token_slots) if self.state.adapters.any_named(plan.slots) else None
        # With drafts, and with prompts that share a prefix, a later row reads KV that an earlier row writes.
        decodes_alone = plan.num_decode_rows == len(plan.slots) and plan.drafts is None
        one_launch = decodes_alone and self.executor.may_use_one_launch(len(num_new), plan.start)
        step = StepContext(token_positions, slot_mapping, self.cache, parts, self.attention.backend, adapters,
                           one_launch, ends, self._fed.of(plan, self.device))
        hidden = self.executor.hidden_states(input_ids, step)
        if ends is None:
            return Computed(hidden, query_start, adapters)
        of_rows = None if adapters is None else adapters[ends.tokens]
        return Computed(hidden, np.arange(len(query_start), dtype=np.int32), of_rows)

    def _count_reads(self, plan: StepPlan) -> None:
        """Count the KV reads of an enqueued step."""
        start, num_new, decodes = plan.start, plan.num_new_tokens, plan.num_decode_rows
        if decodes:
            self.reads.count(start[:decodes], num_new[:decodes], self.attention.saved_positions)
        if decodes < len(start):
            self.reads.count(start[decodes:], num_new[decodes:], self.attention.saved_prompt_positions)

    def _sample(self, plan: StepPlan, computed: Computed, result: torch.Tensor,
                logprobs: Mapping[str, torch.Tensor]) -> None:
        rows = np.flatnonzero(plan.samples)
        if not len(rows):
            result.fill_(-1)
            if self.sharded is not None:
                self.sharded.listen()
            return
        ends = computed.query_start[rows + 1] - 1, plan.slots[rows], plan.start[rows] + plan.num_new_tokens[rows]
        last, *at = upload(np.array(ends, np.int64), self.device)
        every = len(rows) == len(computed.hidden)
        hidden, adapters = (computed.hidden, computed.adapters) if every else computed.at(last)
        self._draw(self.executor.shard_logits(hidden, adapters), rows, at, self.state.stages(plan.slots[rows]), result,
                   logprobs)

    def _draw(self, logits: torch.Tensor, rows: np.ndarray, at: Seq[torch.Tensor], stages: frozenset[str],
              result: torch.Tensor, logprobs: Mapping[str, torch.Tensor], masks: TokenMasks | None = None) -> None:
        """Sample ``rows`` from their logits, and start the copy of tokens and log-probabilities to the host.

        ``at``: Slots and positions of the tokens, on the device.
        """
        known = {name: torch.empty(shape_of(name, len(rows)), dtype=torch.float32, device=self.device)
                 for name in logprobs}
        slots, positions = at
        tokens = self.state.sample(logits, slots, positions, stages, known, masks)
        self._fetch(tokens, rows, result)
        for kind, values in known.items():
            self._fetch(values, rows, logprobs[kind])

    def _score_prompts(self, plan: StepPlan, computed: Computed, spans: list[PromptSpan],
                       top: str | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute log-probabilities of the spans' tokens and the likeliest tokens, and start their copy to the host."""
        starts = computed.query_start
        columns = [
            (np.arange(starts[row], starts[row] + count), np.full(count, plan.slots[row]),
             np.arange(first, first + count))
            for row, first, count in spans
        ]
        packed = np.stack([np.concatenate(parts) for parts in zip(*columns, strict=True)])
        at, slots, positions = upload(packed.astype(np.int64), self.device)
        ids = self.state.tokens[slots, positions].long()
        tops = None
        if top is not None:
            tops = torch.empty(shape_of(top, len(ids)), dtype=torch.float32, device=self.device)
        known = prompt_log_probs(self.executor, computed.hidden, at, ids, computed.adapters, tops)
        if tops is not None:
            tops = self._on_host(tuple(tops.shape), torch.float32).copy_(tops, non_blocking=True)
        return self._on_host(len(known), torch.float32).copy_(known, non_blocking=True), tops

    def _fetch(self, values: torch.Tensor, rows: np.ndarray, result: torch.Tensor) -> None:
        """Start the copy of ``values`` [len(rows), ...] to ``rows`` of ``result`` [R, ...] on the host, with -1 in
        other rows."""
        if len(rows) < len(result):
            every = torch.full(result.shape, -1, dtype=values.dtype, device=self.device)
            values = every.index_copy_(0, upload(rows, self.device), values)
        result.copy_(values, non_blocking=True)

    def _on_host(self, size: int | tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="cpu", pin_memory=self.device.type == "cuda")

    def _handle(self, result: torch.Tensor, logprobs: Mapping[str, torch.Tensor], scored: torch.Tensor | None = None,
                spans: tuple[PromptSpan, ...] = (), logits: torch.Tensor | None = None,
                tops: torch.Tensor | None = None) -> StepHandle:
        """Make a handle of results whose copies to the host are under way."""
        heard = None
        if self.sharded is not None:
            heard = self._on_host(1, torch.int64).copy_(self.sharded.heard, non_blocking=True)
        done = None
        if self.device.type == "cuda":
            done = torch.cuda.Event()
            done.record()
        return StepHandle(result, done, logprobs, scored, spans, heard, logits, None, tops)
