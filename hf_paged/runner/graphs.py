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
from hf_paged.guards.facts import tensors_inside
from hf_paged.guards.inner_tensors import watched
from hf_paged.kernels.build.compiling import compiled_together
from hf_paged.models import ModelExecutor
from hf_paged.models.aliases import aliases
from hf_paged.runner import device_times
from hf_paged.runner.attention_inputs import AttentionInputs
from hf_paged.runner.kv_cache import KVCache
from hf_paged.runner.padded_steps import GroupedTiles, PaddedSteps
from hf_paged.runner.request_state import RequestState
from hf_paged.sampling.token_log_probs import NO_LOG_PROBS
from hf_paged.sampling.token_mask import HostMasks
from hf_paged.scheduler import StepPlan

# Padded numbers: decode rows, or (tokens, rows) of prompts, or (decode rows, prompt tokens, prompt rows).
Size = int | tuple[int, int] | tuple[int, int, int]
_PLACE: tuple[Callable, ...] = torch.Tensor.data_ptr, attrgetter("shape"), torch.Tensor.stride  # `Look` compares dtypes


class Undrawn(NamedTuple):
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


class Place(NamedTuple):
    """Rows of a step, and the index of the first of them among the rows of a graph."""

    rows: slice
    first: int = 0

    @property
    def made(self) -> slice:
        """Return the slice of the graph's result."""
        return slice(self.first, self.first + self.rows.stop - self.rows.start)


class Part(NamedTuple):
    """A graph that computes rows of a step, with its inputs."""

    captured: Captured
    inputs: tuple[np.ndarray, ...]
    places: tuple[Place, ...]


class Padded(NamedTuple):
    """Decode rows padded to a graph of `size` rows: the function and the inputs.

    ``known``: The graph, if one was found for these inputs, which omit the attention plan of other graphs.
    """

    size: int
    run: partial
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
        self._captured: dict[tuple, Captured | None] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []  # includes graphs whose capture failed
        self._pool: Any = None  # freed with its last graph
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
        self._held = aliases(tensors, self._held)

    def is_current(self) -> bool:
        """Return whether no tensor of a module moved and no other adapter became active since the last `check`."""
        return self._model_signature == self._signature(self._tensors())

    def _signature(self, tensors: list[torch.Tensor]) -> tuple:
        # Column by column: tuples of a few hundred tensors would take longer.
        return *(list(map(of, tensors)) for of in _PLACE), self._executor.state_key()

    def _tensors(self) -> list[torch.Tensor]:
        parameters, buffers = tensors_inside(self._executor.model)
        return watched([*parameters, *buffers, *self._executor.plain_tensors(), *self._executor.own_tensors()])

    def let_go(self) -> None:
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
        scored, logits, stages = tuple(logprobs), self._nothing, self._state.stages

        def decode(slots: np.ndarray, named: bool) -> partial:
            return partial(self.steps.decode, stages=stages(slots), scored=scored, named=named,
                           with_logits=num_logits > 0)

        def prompts(slots: np.ndarray, long: bool, named: bool) -> partial:
            return partial(self.steps.prompts, stages=stages(slots), long=long, scored=scored, named=named)

        def mixed(slots: np.ndarray, long: bool, named: bool) -> partial:
            return partial(self.steps.mixed, stages=stages(slots), long=long, scored=scored, named=named,
                           with_logits=num_logits > 0)

        parts = self._parts(plan, decode, prompts, mixed)
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
        def decode(_: np.ndarray, named: bool) -> partial:
            return partial(self.steps.logits, named=named)

        def prompts(_: np.ndarray, long: bool, named: bool) -> partial:
            return partial(self.steps.prompt_logits, long=long, named=named)

        parts = self._parts(plan, decode, prompts)
        if parts is None:
            return None
        made: list[torch.Tensor] = []
        for captured, inputs, (place,) in parts:
            self._send(captured, inputs)
            made.append(self._replay(captured)[place.made].clone())  # the next replay overwrites the result
        return made[0] if len(made) == 1 else torch.cat(made)

    def undrawn(self, plan: StepPlan) -> Undrawn | None:
        """Replay a step of decode rows, all of which sample, up to the logits; returns None if no graph fits."""
        self._drop_if_moved()
        decodes = plan.num_decode_rows
        if decodes < len(plan.slots) or decodes > self.steps.sizes_of(plan)[-1]:
            return None
        captured: Captured | None
        if self._foreseen is not None and self.is_foreseen(plan):
            _, captured = self._foreseen
        else:
            padded = self._undrawn_graph(plan)
            captured = self._get(*padded)
            if captured is None:
                return None
            self._send(captured, padded.inputs)
        memory = self._memory(), self.num_dropped
        logits, rows = self._replay(captured)
        return Undrawn(captured.graph, rows, logits, decodes, memory)

    def foresee(self, plan: StepPlan) -> None:
        """Send the inputs of `undrawn` for this plan, the next step, after a forward whose tokens are not sampled yet.

        Has no effect if the step has no graph yet.
        """
        is_decode = len(plan.slots) == plan.num_decode_rows <= self.steps.decode_sizes[-1]
        if is_decode and self._memory() == self._memory_signature:
            padded = self._undrawn_graph(plan)
            captured = self._present(padded)
            if captured is not None:
                self._send(captured, padded.inputs)
                self._foreseen = plan, captured

    def is_foreseen(self, plan: StepPlan) -> bool:
        """Return whether the device has the inputs of `undrawn` for this plan."""
        return self._foreseen is not None and self._foreseen[0] is plan

    def _undrawn_graph(self, plan: StepPlan) -> Padded:
        """Return this step's padded rows for `PaddedSteps.undrawn`."""
        named = self._state.adapters.any_named(plan.slots)
        return self._padded(partial(self.steps.undrawn, named=named), plan)

    def draw(self, step: Undrawn, masks: HostMasks | None, stages: frozenset[str], result: torch.Tensor,
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
        run = partial(self.steps.masked, step.logits, step.rows, words, of=step.graph, stages=stages,
                      scored=tuple(logprobs))
        captured = self._get(len(lines), run, (lines,))
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

    def _parts(self, plan: StepPlan, decode: Callable[..., partial], prompts: Callable[..., partial],
               mixed: Callable[..., partial] | None = None) -> list[Part] | None:
        """Return the graphs of a step's decode rows and of its prompts, or a common one; None if no graph fits.

        The captured function is ``decode(slots, named=...)`` and ``prompts(slots, long=..., named=...)``, or ``mixed``
        with the arguments of ``prompts``.
        """
        self._drop_if_moved()
        decodes, any_named = plan.num_decode_rows, self._state.adapters.any_named
        num_new = plan.num_new_tokens[decodes:]
        prompt_size = self.steps.prompt_size(len(num_new), int(num_new.sum()))
        if prompt_size is None or (decodes and decodes > self.steps.sizes_of(plan)[-1]):
            return None
        prompt_inputs, tiles = self.steps.prompt_inputs(plan, prompt_size) if prompt_size else ((), None)
        if mixed is not None and (size := self.steps.mixed_size(decodes, prompt_size)):
            part = self._mixed_part(plan, size, mixed, prompt_inputs, tiles)
            if part is not None:
                return [part]
        parts: list[Part] = []
        if decodes:
            slots = plan.slots[:decodes]
            captured, inputs = self._decode_graph(decode(slots, named=any_named(slots)), plan)
            if captured is None:
                return None
            parts.append(Part(captured, inputs, (Place(slice(0, decodes)),)))
        if prompt_size:
            run = self._of_prompts(prompts, plan, plan.slots[decodes:], tiles)
            captured = self._get((prompt_size, len(prompt_inputs[1][0]) - 1), run, prompt_inputs)
            if captured is None:
                return None
            parts.append(Part(captured, prompt_inputs, (Place(slice(decodes, len(plan.slots))),)))
        return parts

    def _mixed_part(self, plan: StepPlan, size: int, mixed: Callable[..., partial],
                    prompt_inputs: tuple[np.ndarray, ...], tiles: GroupedTiles | None) -> Part | None:
        """Return the common graph of a step's decode rows, padded to `size`, and its prompts."""
        decodes, (decode_inputs, decode_tiles) = plan.num_decode_rows, self.steps.decode_inputs(plan, size)
        run = partial(self._of_prompts(mixed, plan, plan.slots, tiles), decode_tiles=decode_tiles)
        inputs = *decode_inputs, *prompt_inputs
        captured = self._get((size, len(prompt_inputs[0][0]), len(prompt_inputs[1][0]) - 1), run, inputs)
        if captured is None:
            return None
        return Part(captured, inputs, (Place(slice(0, decodes)), Place(slice(decodes, len(plan.slots)), size)))

    def _of_prompts(self, make: Callable[..., partial], plan: StepPlan, slots: np.ndarray,
                    tiles: GroupedTiles | None) -> partial:
        """Return `make` of a step's prompts; `tiles` describes the attention over shared prefixes."""
        long = self._attention.is_long((plan.start + plan.num_new_tokens)[plan.num_decode_rows :])
        queued = tiles is None and self._attention.wants_queue(plan)
        return partial(make(slots, long=long, named=self._state.adapters.any_named(slots)), queued=queued, tiles=tiles)

    def logits(self, plan: StepPlan) -> torch.Tensor | None:
        """Replay a step of decode rows up to the logits [R, V]; returns None if no graph fits."""
        self._drop_if_moved()
        decodes = plan.num_decode_rows
        if not decodes or decodes < len(plan.slots) or decodes > self.steps.decode_sizes[-1]:
            return None
        if not self.is_ready(plan):
            named = self._state.adapters.any_named(plan.slots)
            captured, inputs = self._decode_graph(partial(self.steps.logits, named=named), plan)
            if captured is None:
                return None
            self._send(captured, inputs)
            self._ready = plan, captured
        assert self._ready is not None
        return self._replay(self._ready[1])[:decodes].clone()

    def make_ready(self, plan: StepPlan) -> None:
        """Send the inputs of `logits` for this plan during the running step; has no effect without a captured graph."""
        self._drop_if_moved()
        named = self._state.adapters.any_named(plan.slots)
        padded = self._padded(partial(self.steps.logits, named=named), plan)
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

    def _decode_graph(self, run: partial, plan: StepPlan) -> tuple[Captured | None, tuple[np.ndarray, ...]]:
        padded = self._padded(run, plan)
        return self._get(*padded), padded.inputs

    def _padded(self, run: partial, plan: StepPlan) -> Padded:
        size = self.steps.decode_size(plan)
        # Drafts are rows of one sequence: a later row reads KV that an earlier row writes.
        at_once = plan.drafts is None and self._executor.may_run_at_once(size, plan.start[: plan.num_decode_rows])
        if at_once and plan.groups is None:
            alone = partial(run, tiles=None, at_once=True)
            captured = self._captured.get(self._key(size, alone))
            if captured is not None and captured.kept:  # a kernel for all layers, which reads no attention plan
                return Padded(size, alone, (self.steps.unplanned_rows(plan, size),), captured)
        inputs, tiles = self.steps.decode_inputs(plan, size)
        return Padded(size, partial(run, tiles=tiles, at_once=at_once), inputs)

    def _present(self, padded: Padded) -> Captured | None:
        return padded.known or self._captured.get(self._key(padded.size, padded.run))

    def _key(self, size: Size, run: partial) -> tuple:
        """Return the key of a graph; its last item says whether one launch computes all layers."""
        at_once = isinstance(size, int) and run.keywords.get("at_once", False) and self._executor.runs_at_once(size)
        others = (value for name, value in run.keywords.items() if name != "at_once")
        return size, run.func.__name__, *others, at_once

    def _get(self, size: Size, run: partial, inputs: tuple[np.ndarray, ...],
             known: Captured | None = None) -> Captured | None:
        """Return the graph of `run`, captured with a step's inputs if new; None if it cannot be captured."""
        if known is not None:  # valid even if another engine has found meanwhile that the kernel for all layers fails
            return known
        key = self._key(size, run)
        if key not in self._captured:
            sizes = size if isinstance(size, tuple) else (size,)
            captured = self._capture(run, inputs, f"{run.func.__name__} {'x'.join(map(str, sizes))}")
            key = self._key(size, run)  # the first run may have enabled or disabled the kernel for all layers
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
