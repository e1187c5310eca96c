"""Steps as CUDA graphs: the choice of the graphs of a step, their capture, and when they are dropped.

There is a graph of decode rows per padded number of rows, and a graph of prompts per padded number of tokens and class
of rows. A step with both replays one of each, so that decoding never waits for the launches of a prompt, or one common
graph if the prompts are long enough. Graphs are captured lazily, in one memory pool.
Steps with log-probabilities, with a row that names an adapter, or with shared prefixes have graphs of their own. A step
of decode rows that waits for token masks has two graphs: up to the logits, and from the logits on. `padded_steps.py`
has what graphs compute and the arrays that they read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged.device.captures import capture_lock, captures
from hf_paged.device.upload import upload
from hf_paged.guards.inner_tensors import watched
from hf_paged.guards.snapshot import tensors_inside
from hf_paged.kernels.build.compiling import compiled_together
from hf_paged.models import ModelExecutor
from hf_paged.models.keep_alive import keep_alive
from hf_paged.runner import device_times
from hf_paged.runner.attention_inputs import AttentionInputs
from hf_paged.runner.kv_cache import KVCache
from hf_paged.runner.padded_steps import PaddedSteps
from hf_paged.runner.request_state import RequestState
from hf_paged.runner.step_shape import Kind, StepShape
from hf_paged.sampling.token_log_probs import NO_LOG_PROBS
from hf_paged.sampling.token_mask import HostMasks
from hf_paged.scheduler import StepPlan

_PLACE: tuple[Callable, ...] = torch.Tensor.data_ptr, attrgetter("shape"), torch.Tensor.stride  # `Look` compares dtypes


class ReplayedLogits(NamedTuple):
    """A step of decode rows replayed up to the logits; `StepGraphs.draw` samples it, before any other replay.

    ``rows`` [2, size] int64 (slots, positions) and ``logits`` [size, V] (a rank's columns) are outputs of ``graph``;
    the first ``num_rows`` are rows of the step. ``memory``: the memory signature and the number of dropped graphs at
    the replay.
    """

    graph: torch.cuda.CUDAGraph
    rows: torch.Tensor
    logits: torch.Tensor
    num_rows: int
    memory: tuple


class Captured(NamedTuple):
    """A graph, the device tensors of its inputs, and its result: `Drawn`, or logits [rows, V].

    ``name`` has its kind and its number of rows or tokens. ``kept``: tensors that it reads and that have no other
    reference.
    """

    name: str
    graph: torch.cuda.CUDAGraph
    inputs: tuple[torch.Tensor, ...]
    result: Any
    kept: tuple[torch.Tensor, ...] = ()


class GraphRows(NamedTuple):
    """Rows of a step, and the index of the first of them among the rows of a graph."""

    rows: slice
    first: int = 0

    @property
    def made(self) -> slice:
        """Return the slice of the graph's result."""
        return slice(self.first, self.first + self.rows.stop - self.rows.start)


class GraphCall(NamedTuple):
    """A graph that computes rows of a step, with its inputs."""

    captured: Captured
    inputs: tuple[np.ndarray, ...]
    places: tuple[GraphRows, ...]


class Padded(NamedTuple):
    """Step as a graph takes it: its shape, and the arrays that the graph reads.

    ``known``: The graph, if one was found for these inputs, which omit the attention plan of other graphs.
    """

    shape: StepShape
    inputs: tuple[np.ndarray, ...]
    known: Captured | None = None


class StepGraphs:
    """Captures and replays steps. A graph is valid until a tensor that it reads moves (see `check`).

    Attributes:
        steps: The padded steps that graphs may hold.
    """

    def __init__(self, executor: ModelExecutor, kv_cache: KVCache, state: RequestState, attention: AttentionInputs,
                 max_num_batched_tokens: int) -> None:
        self._executor, self._cache, self._state, self._attention = executor, kv_cache, state, attention
        self._device = kv_cache.spec.device
        self.steps = PaddedSteps(executor, kv_cache, state, attention, max_num_batched_tokens)
        self._captured: dict[StepShape, Captured | None] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []  # also those whose capture an error ended
        self._pool: Any = None  # dies with its last graph
        self._stream: torch.cuda.Stream | None = None
        self._mask_stream: torch.cuda.Stream | None = None
        self._mask_words: torch.Tensor | None = None  # [rows, W] int32, read by graphs
        self._model_signature: tuple | None = None
        self._nothing = torch.empty(0, dtype=torch.float32, device=self._device)
        self._held: list[torch.Tensor] = []  # keeps what graphs read allocated when a parameter gets new memory
        self._memory_signature: tuple | None = None
        self._ready: tuple[StepPlan, Captured] | None = None  # the inputs of this step's graph are on the device
        self._sent_lines: tuple[torch.cuda.CUDAGraph, np.ndarray] | None = None  # mask lines last sent, and their graph
        self._foreseen: tuple[StepPlan, Captured] | None = None  # like `_ready`, for `undrawn`
        self.num_captured = 0
        self.num_dropped = 0
        executor.group.holds(self)

    def check(self) -> None:
        """Drop the graphs if the model's tensors moved or its active adapters changed since the last call."""
        tensors = self._tensors()
        signature = self._signature(tensors)
        if signature != self._model_signature:
            self.drop()
        self._model_signature = signature
        self._held = keep_alive(tensors, self._held)

    def is_current(self) -> bool:
        """Return whether no tensor of a module moved and no other adapter became active since the last `check`."""
        return self._model_signature == self._signature(self._tensors())

    def _signature(self, tensors: list[torch.Tensor]) -> tuple:
        # Column by column: tuples of a few hundred tensors would take longer.
        return *(list(map(of, tensors)) for of in _PLACE), self._executor.state_key()

    def _tensors(self) -> list[torch.Tensor]:
        parameters, buffers = tensors_inside(self._executor.model)
        return watched([*parameters, *buffers, *self._executor.plain_tensors(), *self._executor.own_tensors()])

    def drop_references(self) -> None:
        """Keep the graphs but not the memory that they read, until `check` finds all tensors in their places."""
        self._held = []

    def drop(self) -> None:
        """Destroy all graphs, also graphs that a traceback still references; does not wait for a running graph."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self.num_dropped += sum(captured is not None for captured in self._captured.values())
        self._captured.clear()
        self._pool = self._ready = self._sent_lines = self._foreseen = None

    def launch(self, plan: StepPlan, result: torch.Tensor, logprobs: Mapping[str, torch.Tensor] = NO_LOG_PROBS,
               num_logits: int = 0) -> torch.Tensor | None:
        """Replay a step and start the copy of its sampled tokens to `result` [R]; returns None if no graph fits.

        `logprobs`, as in `RequestState.sample`, receive log-probabilities. Returns the logits of the first
        `num_logits` rows, which are decode rows: [num_logits, V].
        """
        parts, logits = self._parts(plan, tuple(logprobs), with_logits=num_logits > 0), self._nothing
        if parts is None:
            return None
        for captured, inputs, places in parts:
            # Copied before the next replay: an earlier captured graph may reuse the memory of these tokens.
            self._send(captured, inputs)
            drawn = self._replay(captured)
            for place in places:
                result[place.rows].copy_(drawn.tokens[place.made], non_blocking=True)
                for kind, values in drawn.logprobs.items():
                    logprobs[kind][place.rows].copy_(values[place.made], non_blocking=True)
            if drawn.logits is not None:
                logits = drawn.logits[:num_logits].clone()
        return logits

    def row_logits(self, plan: StepPlan) -> torch.Tensor | None:
        """Replay a step up to each row's last logits, [R, V] or a rank's columns; returns None if no graph fits."""
        parts = self._parts(plan, draws=False)
        if parts is None:
            return None
        made: list[torch.Tensor] = []
        for captured, inputs, (place,) in parts:
            self._send(captured, inputs)
            made.append(self._replay(captured)[place.made].clone())  # the next replay overwrites the result
        return made[0] if len(made) == 1 else torch.cat(made)

    def undrawn(self, plan: StepPlan) -> ReplayedLogits | None:
        """Replay a step of decode rows, all of which sample, up to the logits; returns None if no graph fits."""
        self._drop_if_moved()
        decodes = plan.num_decode_rows
        if decodes < len(plan.slots) or decodes > self.steps.sizes_of(plan)[-1]:
            return None
        captured: Captured | None
        if self._foreseen is not None and self.is_foreseen(plan):
            _, captured = self._foreseen
        else:
            padded = self._decode_rows(plan, "undrawn")
            captured = self._get(padded)
            if captured is None:
                return None
            self._send(captured, padded.inputs)
        memory = self._memory(), self.num_dropped
        logits, rows = self._replay(captured)
        return ReplayedLogits(captured.graph, rows, logits, decodes, memory)

    def prefetch_inputs(self, plan: StepPlan) -> None:
        """Send the inputs of `undrawn` for this plan, the next step, after a forward whose tokens are not sampled yet.

        Has no effect if the step has no graph yet.
        """
        is_decode = len(plan.slots) == plan.num_decode_rows <= self.steps.decode_sizes[-1]
        if is_decode and self._memory() == self._memory_signature:
            padded = self._decode_rows(plan, "undrawn")
            captured = self._present(padded)
            if captured is not None:
                self._send(captured, padded.inputs)
                self._foreseen = plan, captured

    def is_foreseen(self, plan: StepPlan) -> bool:
        """Return whether the device has the inputs of `undrawn` for this plan."""
        return self._foreseen is not None and self._foreseen[0] is plan

    def draw(self, step: ReplayedLogits, masks: HostMasks | None, stages: frozenset[str], result: torch.Tensor,
             logprobs: Mapping[str, torch.Tensor]) -> bool:
        """Sample the tokens of a step of `undrawn`, under masks of its rows; returns False if no graph can.

        Each graph up to the logits has its own graph for this, which reads the logits where the first one leaves them.
        """
        if step.memory != (self._memory(), self.num_dropped):
            return False  # the state has grown since, or the graph was dropped
        lines, words = np.full(len(step.logits), -1, np.int32), self._room_for_masks()
        if masks is not None:
            self._send_words(masks.words, words[: len(masks.words)])
            lines[: step.num_rows] = masks.lines
        shape = StepShape("masked", rows=len(lines), stages=stages, scored=tuple(logprobs), after=step.graph)
        captured = self._get(Padded(shape, (lines,)), step.logits, step.rows, words)
        if captured is None:
            return False
        known = self._sent_lines
        if known is None or known[0] is not captured.graph or not np.array_equal(known[1], lines):
            self._sent_lines = None  # an interrupt may come between the two
            self._send(captured, (lines,))
            self._sent_lines = captured.graph, lines
        drawn = self._replay(captured)
        result.copy_(drawn.tokens[: step.num_rows], non_blocking=True)
        for kind, values in drawn.logprobs.items():
            logprobs[kind].copy_(values[: step.num_rows], non_blocking=True)
        return True

    def _send_words(self, words: torch.Tensor, room: torch.Tensor) -> None:
        """Copy masks [M, W] to the memory that graphs read, on a second stream beside the running forward.

        No kernel reads that memory now: the host has the tokens sampled under the masks before.
        """
        if self._mask_stream is None:
            room.copy_(words)
            return
        with torch.cuda.stream(self._mask_stream):
            room.copy_(words, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._mask_stream)

    def _room_for_masks(self) -> torch.Tensor:
        """Return the memory of all rows' masks that graphs read: ``words`` of `TokenMasks`."""
        if self._mask_words is None:
            shape = self.steps.num_slots, -(-self._executor.num_logits // 32)
            self._mask_words = torch.empty(shape, dtype=torch.int32, device=self._device)
            if self._device.type == "cuda":
                self._mask_stream = torch.cuda.Stream(self._device)
                self._mask_stream.wait_stream(torch.cuda.current_stream(self._device))  # earlier users of the memory
        return self._mask_words

    def _parts(self, plan: StepPlan, scored: tuple[str, ...] = (), *, with_logits: bool = False,
               draws: bool = True) -> list[GraphCall] | None:
        """Return the graphs of a step's decode rows and of its prompts, or a common one; None if no graph fits.

        The graphs sample tokens and make the log-probabilities named in `scored`, or end at the logits.
        """
        self._drop_if_moved()
        decodes, slots = plan.num_decode_rows, plan.slots
        num_new = plan.num_new_tokens[decodes:]
        prompt_size = self.steps.prompt_size(len(num_new), int(num_new.sum()))
        if prompt_size is None or (decodes and decodes > self.steps.sizes_of(plan)[-1]):
            return None
        prompts = self._prompts(plan, prompt_size) if prompt_size else None
        if draws and prompts is not None and (size := self.steps.mixed_size(decodes, prompt_size)):
            decode_inputs, decode_tiles = self.steps.decode_inputs(plan, size)
            shape = prompts.shape._replace(
                kind="mixed", rows=size, scored=scored, with_logits=with_logits, decode_tiles=decode_tiles,
                **self._of_slots(slots))
            padded = Padded(shape, (*decode_inputs, *prompts.inputs))
            if (captured := self._get(padded)) is not None:
                places = GraphRows(slice(0, decodes)), GraphRows(slice(decodes, len(slots)), size)
                return [GraphCall(captured, padded.inputs, places)]
        parts: list[GraphCall] = []
        if decodes:
            padded = (self._decode_rows(plan, "decode", scored, with_logits) if draws
                      else self._decode_rows(plan, "logits"))
            if (captured := self._get(padded)) is None:
                return None
            parts.append(GraphCall(captured, padded.inputs, (GraphRows(slice(0, decodes)),)))
        if prompts is not None:
            shape = prompts.shape._replace(**self._of_slots(slots[decodes:], draws))
            shape = shape._replace(kind="prompts", scored=scored) if draws else shape
            if (captured := self._get(Padded(shape, prompts.inputs))) is None:
                return None
            parts.append(GraphCall(captured, prompts.inputs, (GraphRows(slice(decodes, len(slots))),)))
        return parts

    def _prompts(self, plan: StepPlan, size: int) -> Padded:
        """Return the prompts of a step in `size` padded tokens, up to the logits; `_of_slots` completes the shape."""
        inputs, tiles = self.steps.prompt_inputs(plan, size)
        long = self._attention.is_long((plan.start + plan.num_new_tokens)[plan.num_decode_rows :])
        queued = tiles is None and self._attention.wants_queue(plan)
        return Padded(StepShape("prompt_logits", tokens=size, prompts=len(inputs[1][0]) - 1, long=long, queued=queued,
                                tiles=tiles), inputs)

    def _of_slots(self, slots: np.ndarray, draws: bool = True) -> dict[str, Any]:
        """Return the fields of a `StepShape` that depend on the requests in these slots."""
        stages = self._state.stages(slots) if draws else frozenset()
        return {"stages": stages, "named": self._state.adapters.any_named(slots)}

    def logits(self, plan: StepPlan) -> torch.Tensor | None:
        """Replay a step of decode rows up to the logits [R, V]; returns None if no graph fits."""
        self._drop_if_moved()
        decodes = plan.num_decode_rows
        if not decodes or decodes < len(plan.slots) or decodes > self.steps.decode_sizes[-1]:
            return None
        if not self.is_ready(plan):
            padded = self._decode_rows(plan, "logits")
            captured = self._get(padded)
            if captured is None:
                return None
            self._send(captured, padded.inputs)
            self._ready = plan, captured
        assert self._ready is not None
        return self._replay(self._ready[1])[:decodes].clone()

    def make_ready(self, plan: StepPlan) -> None:
        """Send the inputs of `logits` for this plan during the running step; has no effect without a captured graph."""
        self._drop_if_moved()
        padded = self._decode_rows(plan, "logits")
        captured = self._present(padded)
        if captured is not None:
            self._send(captured, padded.inputs)
            self._ready = plan, captured

    def is_ready(self, plan: StepPlan) -> bool:
        """Return whether the device has the inputs of `logits` for this plan and no other step ran since."""
        return self._ready is not None and self._ready[0] is plan

    def _memory(self) -> tuple:
        """Return a signature that changes whenever memory that graphs read has moved."""
        size = self._cache.num_blocks if self._attention.backend.knows_pool_size else 0
        return self._state.version, self._state.edits.generation, self._cache.version, size

    def _drop_if_moved(self) -> None:
        signature = self._memory()
        if signature != self._memory_signature:
            self.drop()
            if self.steps.num_slots != self._state.num_slots:
                self._mask_words = None
                self.steps.use_slots()
            self._memory_signature = signature  # last, so that an interrupted call is repeated

    def _decode_rows(self, plan: StepPlan, kind: Kind, scored: tuple[str, ...] = (),
                     with_logits: bool = False) -> Padded:
        """Return the decode rows of a step for a graph of this kind."""
        size, slots = self.steps.decode_size(plan), plan.slots[: plan.num_decode_rows]
        # Guesses are rows of one sequence, of which a later one reads what an earlier one writes.
        one_launch = plan.drafts is None and self._executor.may_use_one_launch(size, plan.start[: len(slots)])
        shape = StepShape(kind, rows=size, scored=scored, with_logits=with_logits, one_launch=one_launch,
                          **self._of_slots(slots, kind == "decode"))
        if one_launch and plan.groups is None:
            captured = self._captured.get(self._key(shape))
            if captured is not None and captured.kept:  # it reads no plan of an attention kernel
                return Padded(shape, (self.steps.unplanned_rows(plan, size),), captured)
        inputs, tiles = self.steps.decode_inputs(plan, size)
        return Padded(shape._replace(tiles=tiles), inputs)

    def _present(self, padded: Padded) -> Captured | None:
        return padded.known or self._captured.get(self._key(padded.shape))

    def _key(self, shape: StepShape) -> StepShape:
        """Return the key of a graph, whose `one_launch` says whether one launch computes all layers."""
        return shape._replace(one_launch=shape.one_launch and self._executor.uses_one_launch(shape.rows))

    def _get(self, padded: Padded, *kept: torch.Tensor) -> Captured | None:
        """Return the graph of a step, captured with its inputs if new; None if it cannot be captured.

        The step reads the tensors `kept` on the device, which stay where they are, and then its inputs.
        """
        if padded.known is not None:  # another engine may meanwhile find that the kernel for all layers fails
            return padded.known
        shape = padded.shape
        key = self._key(shape)
        if key not in self._captured:
            captured = self._capture(partial(self.steps.run, shape, *kept), padded.inputs, shape.name)
            key = self._key(shape)  # the kernel for all layers may have come, or gone, in the run before
            self._captured.setdefault(key, captured)
        return self._captured[key]

    def _send(self, captured: Captured, inputs: tuple[np.ndarray, ...]) -> None:
        """Copy arrays to the first inputs of a graph."""
        self._ready = None
        for tensor, array in zip(captured.inputs[: len(inputs)], inputs, strict=True):
            tensor.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)

    def _replay(self, captured: Captured) -> Any:
        began = device_times.begin(self._device)
        captured.graph.replay()
        device_times.end(captured.name, began)
        return captured.result

    def _capture(self, run: partial, arrays: tuple[np.ndarray, ...], name: str) -> Captured | None:
        """Run once on this step's inputs, which compiles missing kernels and is repeated by the replay; then record.

        Returns None if the device lacks memory (a graph keeps its memory, eager steps share theirs), or if the model
        does what a graph cannot hold.
        """
        inputs = tuple(upload(array, self._device) for array in arrays)
        stream, current = self._own_stream(), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                # On this stream: after a first run on another one, replays of small models were 2 % slower.
                num_rows = len(np.setdiff1d(arrays[0][0], self._state.padding_slot))
                self._run_compiled(partial(run, *inputs), num_rows)
                with capture_lock(self._device):
                    return self._record(run, inputs, name)
        except torch.OutOfMemoryError:
            if self._executor.group.is_parallel:  # the other ranks would wait in collectives for ever
                raise
            return None
        finally:
            current.wait_stream(stream)  # also after an error: enqueued work writes blocks and history

    def _run_compiled(self, run: Callable[[], object], num_rows: int) -> None:
        """Call `run()` with its kernels compiled in parallel, then compile what decoding its rows will need."""
        if self._executor.group.is_parallel:  # ranks may miss different kernels and would wait for each other
            run()
        else:
            compiled_together(run, self.steps.coming(num_rows))

    def _own_stream(self) -> torch.cuda.Stream:
        """Return the stream on which this engine captures, new or from an engine that was deleted.

        Graphs hold the cuBLAS workspace of their stream (32 MiB on Hopper, never freed by torch), and products that
        share a workspace corrupt each other if they run at the same time: no two engines use one stream.
        """
        if self._stream is None:
            free, _ = captures(self._device)
            try:
                stream = free.pop()
            except IndexError:
                stream = torch.cuda.Stream(self._device)
            else:
                with capture_lock(self._device):  # synchronizing would break a capture in another thread
                    torch.cuda.synchronize(self._device)  # the former engine's last replay may still run
            self._stream = stream
            weakref.finalize(self, free.append, self._stream)
        return self._stream

    def _record(self, run: partial, inputs: tuple[torch.Tensor, ...], name: str) -> Captured | None:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        self._executor.captured_tensors()  # discards tensors of a failed capture
        # Not torch.cuda.graph(), which collects garbage and empties the cache at every capture.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            result = run(*inputs)
        except BaseException as error:
            with suppress(RuntimeError):  # the original error is the one to report
                graph.capture_end()
            graph.reset()  # now: `_graphs` keeps the object until the next drop
            # A pool of a failed capture accepts no other capture.
            self._pool = None
            parallel = self._executor.group.is_parallel  # all ranks have to act alike
            if isinstance(error, RuntimeError) and not parallel:  # the first run passed, so only capturing fails
                return None
            raise
        graph.capture_end()
        self.num_captured += 1
        return Captured(name, graph, inputs, result, tuple(self._executor.captured_tensors()))
