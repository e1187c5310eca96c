"""Steps as CUDA graphs: which graphs a step replays, their capture, and when they are dropped.

A graph of decode rows per padded number of rows, a graph of prompts per padded number of tokens and class of rows; a
step that holds both replays one of each, so that decoding never waits for the launches of a prompt, or one for both
where the prompts are long enough. Captured lazily, all in one memory pool.
Steps that bring log-probabilities, steps in which a row names an adapter, and steps whose rows, or whose prompts, share
prefixes have graphs of their own. A step of decode rows that waits for masks of tokens is two graphs: up to the logits,
and from there on. What graphs compute, and the arrays that they read, are in `padded_steps.py`.
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
from hf_paged.runner.padded_steps import PaddedSteps
from hf_paged.runner.request_state import RequestState
from hf_paged.runner.step_shape import Kind, StepShape
from hf_paged.sampling.token_log_probs import NO_LOG_PROBS
from hf_paged.sampling.token_mask import HostMasks
from hf_paged.scheduler import StepPlan

_PLACE: tuple[Callable, ...] = torch.Tensor.data_ptr, attrgetter("shape"), torch.Tensor.stride  # `Look` compares dtypes


class Undrawn(NamedTuple):
    """A step of decode rows that was replayed up to the logits; `StepGraphs.draw` goes on, before any other replay.

    ``rows`` [2, size] int64 (slots, positions) and ``logits`` [size, V] (a rank's columns) are what this ``graph``
    made; the first ``num_rows`` are rows of the step. ``memory``: where graphs read then, and how many had been
    dropped.
    """

    graph: torch.cuda.CUDAGraph
    rows: torch.Tensor
    logits: torch.Tensor
    num_rows: int
    memory: tuple


class Captured(NamedTuple):
    """A graph, the device tensors that it reads its step from, and what it makes: `Drawn`, or logits [rows, V].

    ``name`` says of what it is, and for how many rows or tokens. ``kept``: what else it reads that nobody else keeps.
    """

    name: str
    graph: torch.cuda.CUDAGraph
    inputs: tuple[torch.Tensor, ...]
    result: Any
    kept: tuple[torch.Tensor, ...] = ()


class Place(NamedTuple):
    """Rows of a step, and the first of them among the rows that a graph computes."""

    rows: slice
    first: int = 0

    @property
    def made(self) -> slice:
        """Of what the graph makes."""
        return slice(self.first, self.first + self.rows.stop - self.rows.start)


class Part(NamedTuple):
    """A graph that computes rows of a step, and what it is to read."""

    captured: Captured
    inputs: tuple[np.ndarray, ...]
    places: tuple[Place, ...]


class Padded(NamedTuple):
    """A step as a graph takes it: its shape, and what it reads.

    ``known``: the graph, where one was looked up for these inputs, which are not all that others of its size read.
    """

    shape: StepShape
    inputs: tuple[np.ndarray, ...]
    known: Captured | None = None


class StepGraphs:
    """Captures and replays steps. A graph is valid while nothing it points to has moved (see `check`).

    Attributes:
        steps: what graphs may hold.
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
        self._mask_words: torch.Tensor | None = None  # [rows, W] int32, which graphs read
        self._model_signature: tuple | None = None
        self._nothing = torch.empty(0, dtype=torch.float32, device=self._device)
        self._held: list[torch.Tensor] = []  # what the graphs read stays allocated, whoever re-points a parameter
        self._memory_signature: tuple | None = None
        self._ready: tuple[StepPlan, Captured] | None = None  # the device has what this step reads
        self._sent_lines: tuple[torch.cuda.CUDAGraph, np.ndarray] | None = None  # the last that went to such a graph
        self._foreseen: tuple[StepPlan, Captured] | None = None  # the device has what this step will read
        self.num_captured = 0
        self.num_dropped = 0
        executor.group.holds(self)

    def check(self) -> None:
        """Drop the graphs if the model's tensors moved or other adapters are active than when they were captured."""
        tensors = self._tensors()
        signature = self._signature(tensors)
        if signature != self._model_signature:
            self.drop()
        self._model_signature = signature
        self._held = aliases(tensors, self._held)

    def is_current(self) -> bool:
        """False once a tensor of a module lies elsewhere, or another adapter is active, than at the last `check`."""
        return self._model_signature == self._signature(self._tensors())

    def _signature(self, tensors: list[torch.Tensor]) -> tuple:
        # Column by column: rows of a few hundred tensors take longer to make.
        return *(list(map(of, tensors)) for of in _PLACE), self._executor.state_key()

    def _tensors(self) -> list[torch.Tensor]:
        parameters, buffers = tensors_inside(self._executor.model)
        return watched([*parameters, *buffers, *self._executor.plain_tensors(), *self._executor.own_tensors()])

    def let_go(self) -> None:
        """Keep the graphs, but none of the memory that they read, until `check` finds it all where it was."""
        self._held = []

    def drop(self) -> None:
        """Destroy all graphs, also those that a traceback still refers to; does not wait for one that runs."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self.num_dropped += sum(captured is not None for captured in self._captured.values())
        self._captured.clear()
        self._pool = self._ready = self._sent_lines = self._foreseen = None

    def launch(self, plan: StepPlan, result: torch.Tensor, logprobs: Mapping[str, torch.Tensor] = NO_LOG_PROBS,
               num_logits: int = 0) -> torch.Tensor | None:
        """Replay a step and start the copy of its sampled tokens to `result` [R]; None where no graph holds it.

        `logprobs`, as of `RequestState.sample`, receive log-probabilities. Returns the logits of the first
        `num_logits` rows, which are decode rows: [num_logits, V].
        """
        parts, logits = self._parts(plan, tuple(logprobs), with_logits=num_logits > 0), self._nothing
        if parts is None:
            return None
        for captured, inputs, places in parts:
            # Fetched before the next replay: a graph that was captured earlier may use the memory of these tokens.
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
        """Replay a step up to the logits after each row's last token, [R, V] or a rank's columns; None: no graph."""
        parts = self._parts(plan, draws=False)
        if parts is None:
            return None
        made: list[torch.Tensor] = []
        for captured, inputs, (place,) in parts:
            self._send(captured, inputs)
            made.append(self._replay(captured)[place.made].clone())  # the next replay overwrites it
        return made[0] if len(made) == 1 else torch.cat(made)

    def undrawn(self, plan: StepPlan) -> Undrawn | None:
        """Replay a step of decode rows, all of which sample, up to the logits; None: no graph for it."""
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
        return Undrawn(captured.graph, rows, logits, decodes, memory)

    def foresee(self, plan: StepPlan) -> None:
        """Send what `undrawn` of this plan, the next step, will read: behind a forward whose tokens are not drawn yet.

        Nothing where the step has no graph so far.
        """
        is_decode = len(plan.slots) == plan.num_decode_rows <= self.steps.decode_sizes[-1]
        if is_decode and self._memory() == self._memory_signature:
            padded = self._decode_rows(plan, "undrawn")
            captured = self._present(padded)
            if captured is not None:
                self._send(captured, padded.inputs)
                self._foreseen = plan, captured

    def is_foreseen(self, plan: StepPlan) -> bool:
        """Has the device what `undrawn` of this plan reads?"""
        return self._foreseen is not None and self._foreseen[0] is plan

    def draw(self, step: Undrawn, masks: HostMasks | None, stages: frozenset[str], result: torch.Tensor,
             logprobs: Mapping[str, torch.Tensor]) -> bool:
        """Draw the tokens of a step of `undrawn`, as `launch` does, under masks of its rows; False: no graph does it.

        There is a graph of this for each graph up to the logits, since it reads them where that leaves them.
        """
        if step.memory != (self._memory(), self.num_dropped):
            return False  # the state has grown since, or the graph is gone
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
        """Bring masks [M, W] to where graphs read them, beside the forward that runs.

        Nothing reads there now: the host knows the tokens that were drawn under the masks before.
        """
        if self._mask_stream is None:
            room.copy_(words)
            return
        with torch.cuda.stream(self._mask_stream):
            room.copy_(words, non_blocking=True)
        torch.cuda.current_stream(self._device).wait_stream(self._mask_stream)

    def _room_for_masks(self) -> torch.Tensor:
        """Where graphs read masks, of all rows: ``words`` of `TokenMasks`."""
        if self._mask_words is None:
            shape = self.steps.num_slots, -(-self._executor.num_logits // 32)
            self._mask_words = torch.empty(shape, dtype=torch.int32, device=self._device)
            if self._device.type == "cuda":
                self._mask_stream = torch.cuda.Stream(self._device)
                self._mask_stream.wait_stream(torch.cuda.current_stream(self._device))  # who had this memory before
        return self._mask_words

    def _parts(self, plan: StepPlan, scored: tuple[str, ...] = (), *, with_logits: bool = False,
               draws: bool = True) -> list[Part] | None:
        """The graphs of a step's decode rows and of its prompts, or one of both; None where none holds it.

        Graphs draw tokens and bring the log-probabilities that are named in `scored`, or leave the logits as they are.
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
                places = Place(slice(0, decodes)), Place(slice(decodes, len(slots)), size)
                return [Part(captured, padded.inputs, places)]
        parts: list[Part] = []
        if decodes:
            padded = (self._decode_rows(plan, "decode", scored, with_logits) if draws
                      else self._decode_rows(plan, "logits"))
            if (captured := self._get(padded)) is None:
                return None
            parts.append(Part(captured, padded.inputs, (Place(slice(0, decodes)),)))
        if prompts is not None:
            shape = prompts.shape._replace(**self._of_slots(slots[decodes:], draws))
            shape = shape._replace(kind="prompts", scored=scored) if draws else shape
            if (captured := self._get(Padded(shape, prompts.inputs))) is None:
                return None
            parts.append(Part(captured, prompts.inputs, (Place(slice(decodes, len(slots))),)))
        return parts

    def _prompts(self, plan: StepPlan, size: int) -> Padded:
        """The prompts of a step in so many padded tokens, up to the logits; not yet what their slots need."""
        inputs, tiles = self.steps.prompt_inputs(plan, size)
        long = self._attention.is_long((plan.start + plan.num_new_tokens)[plan.num_decode_rows :])
        queued = tiles is None and self._attention.wants_queue(plan)
        return Padded(StepShape("prompt_logits", tokens=size, prompts=len(inputs[1][0]) - 1, long=long, queued=queued,
                                tiles=tiles), inputs)

    def _of_slots(self, slots: np.ndarray, draws: bool = True) -> dict[str, Any]:
        """The fields of a `StepShape` that the requests in these slots decide."""
        stages = self._state.stages(slots) if draws else frozenset()
        return {"stages": stages, "named": self._state.adapters.any_named(slots)}

    def logits(self, plan: StepPlan) -> torch.Tensor | None:
        """Replay a step of decode rows up to the logits [R, V]; None: no graph for it."""
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
        """Send what `logits` of this plan will read, behind the step that runs; nothing where it has no graph yet."""
        self._drop_if_moved()
        padded = self._decode_rows(plan, "logits")
        captured = self._present(padded)
        if captured is not None:
            self._send(captured, padded.inputs)
            self._ready = plan, captured

    def is_ready(self, plan: StepPlan) -> bool:
        """Has the device what `logits` of this plan reads, and did no other step run since?"""
        return self._ready is not None and self._ready[0] is plan

    def _memory(self) -> tuple:
        """Other where what graphs read lies elsewhere."""
        size = self._cache.num_blocks if self._attention.backend.knows_pool_size else 0
        return self._state.version, self._state.edits.generation, self._cache.version, size

    def _drop_if_moved(self) -> None:
        signature = self._memory()
        if signature != self._memory_signature:
            self.drop()
            if self.steps.num_slots != self._state.num_slots:
                self._mask_words = None
                self.steps.use_slots()
            self._memory_signature = signature  # last: after an interrupt all of it comes again

    def _decode_rows(self, plan: StepPlan, kind: Kind, scored: tuple[str, ...] = (),
                     with_logits: bool = False) -> Padded:
        """The decode rows of a step, for a graph of this kind."""
        size, slots = self.steps.decode_size(plan), plan.slots[: plan.num_decode_rows]
        # Guesses are rows of one sequence, of which a later one reads what an earlier one writes.
        one_launch = plan.drafts is None and self._executor.may_run_at_once(size, plan.start[: len(slots)])
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
        """The shape, with whether one launch does compute all layers: another graph once its kernel is there."""
        return shape._replace(one_launch=shape.one_launch and self._executor.runs_at_once(shape.rows))

    def _get(self, padded: Padded, *kept: torch.Tensor) -> Captured | None:
        """The graph of a step, captured on its inputs where it is new; None where it cannot be had.

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
        """The first of what it reads, or all."""
        self._ready = None
        for tensor, array in zip(captured.inputs[: len(inputs)], inputs, strict=True):
            tensor.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)

    def _replay(self, captured: Captured) -> Any:
        began = device_times.begin(self._device)
        captured.graph.replay()
        device_times.end(captured.name, began)
        return captured.result

    def _capture(self, run: partial, arrays: tuple[np.ndarray, ...], name: str) -> Captured | None:
        """Run on this step's inputs once, which compiles what is missing and is repeated by the replay; record it.

        None where the device has no memory for it (a graph keeps memory for itself, the eager step shares what there
        is), or the model does what no graph can hold.
        """
        inputs = tuple(upload(array, self._device) for array in arrays)
        stream, current = self._own_stream(), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                # Here: after a first run on another stream the replays of nano were 2 % slower.
                num_rows = len(np.setdiff1d(arrays[0][0], self._state.padding_slot))
                self._run_compiled(partial(run, *inputs), num_rows)
                with capture_lock(self._device):
                    return self._record(run, inputs, name)
        except torch.OutOfMemoryError:
            if self._executor.group.is_parallel:  # the other ranks would wait in collectives that never come
                raise
            return None
        finally:
            current.wait_stream(stream)  # also after an error: what was enqueued there writes blocks and history

    def _run_compiled(self, run: Callable[[], object], num_rows: int) -> None:
        """`run()`, its kernels compiled side by side, and behind them those that decoding its rows will need."""
        if self._executor.group.is_parallel:  # ranks may miss other kernels, and would wait for each other
            run()
        else:
            compiled_together(run, self.steps.coming(num_rows))

    def _own_stream(self) -> torch.cuda.Stream:
        """The one this engine captures on, or takes over from an engine that is gone.

        Graphs hold the cuBLAS workspace of their stream (32 MiB on Hopper, kept by torch for good), and products that
        share one while they run beside each other spoil each other: no two engines use one stream.
        """
        if self._stream is None:
            free, _ = captures(self._device)
            try:
                stream = free.pop()
            except IndexError:
                stream = torch.cuda.Stream(self._device)
            else:
                with capture_lock(self._device):  # a capture in another thread would end with an error
                    torch.cuda.synchronize(self._device)  # the other's last replay may still run
            self._stream = stream
            weakref.finalize(self, free.append, self._stream)
        return self._stream

    def _record(self, run: partial, inputs: tuple[torch.Tensor, ...], name: str) -> Captured | None:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        self._executor.captured_tensors()  # of a capture that an error ended
        # Not torch.cuda.graph(): it collects garbage and empties the cache at every capture.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            result = run(*inputs)
        except BaseException as error:
            with suppress(RuntimeError):  # the first error is the one to see
                graph.capture_end()
            graph.reset()  # now, where it goes on without: `_graphs` keeps the object until the next drop
            # A pool that a broken capture recorded to takes no other: later graphs get a new one.
            self._pool = None
            parallel = self._executor.group.is_parallel  # ranks have to do the same
            if isinstance(error, RuntimeError) and not parallel:  # the first run passed: only a graph does not hold it
                return None
            raise
        graph.capture_end()
        self.num_captured += 1
        return Captured(name, graph, inputs, result, tuple(self._executor.captured_tensors()))
