"""Steps as CUDA graphs: the choice of the graphs of a step, their capture, and when they are dropped.

There is a graph of decode rows per padded number of rows, and a graph of prompts per padded number of tokens and class
of rows. A step with both replays one of each, so that decoding never waits for the launches of a prompt, or one common
graph if the prompts are long enough. A step is captured once it has run as often as `StepShape.num_first_runs` says:
the same padded step, without a graph. All graphs lie in one memory pool.
Steps with log-probabilities, with a row that names an adapter, or with shared prefixes have graphs of their own. A step
of decode rows that waits for token masks has two graphs: up to the logits, and from the logits on. `padded_steps.py`
has what graphs compute and the arrays that they read.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged.device.cuda import capture_lock, captures, upload
from hf_paged.guards.model_watch import place_columns
from hf_paged.kernels.build import kernel_log
from hf_paged.kernels.build.compiling import compiled_together
from hf_paged.models import ModelExecutor
from hf_paged.models.merged import keep_alive
from hf_paged.runner import device_times
from hf_paged.runner.attention_inputs import AttentionInputs
from hf_paged.runner.dry_runs import dry_runs
from hf_paged.runner.kv_cache import KVCache
from hf_paged.runner.padded_steps import PaddedSteps
from hf_paged.runner.request_state import RequestState
from hf_paged.runner.step_shape import Kind, StepShape
from hf_paged.sampling.log_probs import FILTERS, NO_LOG_PROBS
from hf_paged.sampling.token_mask import HostMasks
from hf_paged.scheduler import StepPlan


class Moves(NamedTuple):
    """Numbers that change where what graphs read has moved, by the name of what moved."""

    slots: int
    token_history: int
    stop_tokens: int
    axis_offsets: int
    edit_lists: int
    kv_pool: int
    kv_pool_size: int  # 0 if no kernel is made for it
    states: int  # 0 if the model has none


class ModelPlaces(NamedTuple):
    """What a graph holds of the model: places of its weights and of adapters, and which adapters are active."""

    weights: Any
    adapters: Any
    active_adapters: Any


class UndrawnLogits(NamedTuple):
    """A step of decode rows that ran up to the logits; `StepGraphs.draw` samples it, before any other replay.

    ``rows`` [2, size] int64 (slots, positions) and ``logits`` [size, V] (a rank's columns) are outputs of ``graph``,
    None: of a run without one; the first ``num_rows`` are rows of the step. ``memory``: the moves and the number of
    dropped graphs at that time.
    """

    graph: torch.cuda.CUDAGraph | None
    rows: torch.Tensor
    logits: torch.Tensor
    num_rows: int
    memory: tuple


class Captured(NamedTuple):
    """A graph, the device tensors of its inputs, and its result: `Drawn`, or logits [rows, V].

    ``name`` has its kind and its number of rows or tokens. ``kept``: tensors that it reads and that have no other
    reference. ``pool``: of its memory.
    """

    name: str
    graph: torch.cuda.CUDAGraph
    inputs: tuple[torch.Tensor, ...]
    result: Any
    kept: tuple[torch.Tensor, ...] = ()
    pool: Any = None


class GraphRows(NamedTuple):
    """Rows of a step, and the index of the first of them among the rows of a graph."""

    rows: slice
    first: int = 0

    @property
    def made(self) -> slice:
        """Return the slice of the graph's result."""
        return slice(self.first, self.first + self.rows.stop - self.rows.start)


class Padded(NamedTuple):
    """Step as a graph takes it: its shape, and the arrays that the graph reads.

    ``known``: The graph, if one was found for these inputs, which omit the attention plan of other graphs.
    """

    shape: StepShape
    inputs: tuple[np.ndarray, ...]
    known: Captured | None = None


class GraphCall(NamedTuple):
    """Rows of a step that are computed by a graph, or until there is one by what runs the same padded step."""

    found: Captured | partial
    padded: Padded
    places: tuple[GraphRows, ...]


class StepGraphs:
    """Captures and replays steps. A graph is valid until a tensor that it reads moves (see `check`).

    Attributes:
        steps: The padded steps that graphs may hold.
        num_captured: Number of graphs captured.
        uses: Numbers of uses of shapes.
        dropped_by: Numbers of graphs dropped, by the name of what moved or went.
    """

    def __init__(self, executor: ModelExecutor, kv_cache: KVCache, state: RequestState, attention: AttentionInputs,
                 max_num_batched_tokens: int) -> None:
        self._executor, self._cache, self._state, self._attention = executor, kv_cache, state, attention
        self._device = kv_cache.spec.device
        self.steps = PaddedSteps(executor, kv_cache, state, attention, max_num_batched_tokens)
        self._captured: dict[StepShape, Captured | None] = {}
        self._runs: Counter[StepShape] = Counter()  # without a graph
        self._loaded: set[StepShape] = set()  # shapes that would launch now what they launched in their last run
        self._structure: tuple[int, ...] = ()  # of the model that ran then, and the thread
        self._graphs: list[torch.cuda.CUDAGraph] = []  # also those whose capture an error ended
        self._pool: Any = None  # dies with its last graph
        self._stream: torch.cuda.Stream | None = None
        self._mask_stream: torch.cuda.Stream | None = None
        self._mask_words: torch.Tensor | None = None  # [rows, W] int32, read by graphs
        self._model_places: ModelPlaces | None = None
        self._nothing = torch.empty(0, dtype=torch.float32, device=self._device)
        self._held: list[torch.Tensor] = []  # keeps what graphs read allocated when a parameter gets new memory
        self._moves: Moves | None = None
        self._ready: tuple[StepPlan, Captured] | None = None  # the inputs of this step's graph are on the device
        self._sent_lines: tuple[torch.cuda.CUDAGraph, np.ndarray] | None = None  # mask lines last sent, and their graph
        self._foreseen: tuple[StepPlan, Captured] | None = None  # like `_ready`, for `undrawn`
        self.num_captured = 0
        self.uses: Counter[StepShape] = Counter()
        self.dropped_by: Counter[str] = Counter()
        executor.group.holds(self)

    def check(self) -> None:
        """Drop the graphs if the model's tensors moved or its active adapters changed since the last call."""
        places = self._places_now()
        if places != self._model_places:
            self.drop(_first_difference(self._model_places, places))
        self._model_places = places
        tensors = self._executor.tensors()
        self._held = keep_alive([*tensors.weights, *tensors.buffers, *self._executor.own_tensors()], self._held)

    def is_current(self) -> bool:
        """Return whether no tensor of a module moved and no other adapter became active since the last `check`."""
        return self._model_places == self._places_now()

    def _places_now(self) -> ModelPlaces:
        executor = self._executor
        own = place_columns(executor.own_tensors())
        return ModelPlaces(executor.watch.places(executor.model), own, executor.state_key())

    def drop_references(self) -> None:
        """Keep the graphs but not the memory that they read, until `check` finds all tensors in their places."""
        self._held = []

    @property
    def num_dropped(self) -> int:
        """Return the number of graphs dropped."""
        return self.dropped_by.total()

    def drop(self, reason: str) -> None:
        """Destroy all graphs, also graphs that a traceback still references; does not wait for a running graph."""
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        self._forget(list(self._captured), reason)
        self._pool = None

    def _drop_editing(self, reason: str) -> None:
        """Destroy the graphs that edit logits."""
        editing = [shape for shape in self._captured if shape.stages - {FILTERS}]
        graphs = [captured.graph for shape in editing if (captured := self._captured[shape]) is not None]
        for graph in graphs:
            graph.reset()
        self._graphs = [graph for graph in self._graphs if not any(graph is gone for gone in graphs)]
        self._forget(editing, reason)
        # A pool without a graph takes no capture. `_graphs` has others, of failed captures and of earlier pools.
        if not any(captured is not None and captured.pool == self._pool for captured in self._captured.values()):
            self._pool = None

    def _forget(self, shapes: Collection[StepShape], reason: str) -> None:
        for shape in shapes:
            if self._captured.pop(shape) is not None:
                self.dropped_by[reason] += 1
        self._loaded.clear()  # what moved may need other kernels
        for shape in [shape for shape in self._runs if shape.after is not None]:
            del self._runs[shape]  # which keeps a graph
        self._ready = self._sent_lines = self._foreseen = None

    def launch(self, plan: StepPlan, result: torch.Tensor, logprobs: Mapping[str, torch.Tensor] = NO_LOG_PROBS,
               num_logits: int = 0) -> torch.Tensor | None:
        """Run a padded step and start the copy of its sampled tokens to `result` [R]; returns None if none fits.

        `logprobs`, as in `RequestState.sample`, receive log-probabilities. Returns the logits of the first
        `num_logits` rows, which are decode rows: [num_logits, V].
        """
        parts, logits = self._parts(plan, tuple(logprobs), with_logits=num_logits > 0), self._nothing
        if parts is None:
            return None
        for found, padded, places in parts:
            # Copied before the next replay: an earlier captured graph may reuse the memory of these tokens.
            drawn = self._compute(found, padded)
            if drawn is None:
                return None
            for place in places:
                result[place.rows].copy_(drawn.tokens[place.made], non_blocking=True)
                for kind, values in drawn.logprobs.items():
                    logprobs[kind][place.rows].copy_(values[place.made], non_blocking=True)
            if drawn.logits is not None:
                logits = drawn.logits[:num_logits].clone()
        return logits

    def row_logits(self, plan: StepPlan) -> torch.Tensor | None:
        """Run a padded step up to each row's last logits, [R, V] or a rank's columns; returns None if none fits."""
        parts = self._parts(plan, draws=False)
        if parts is None:
            return None
        made: list[torch.Tensor] = []
        for found, padded, (place,) in parts:
            computed = self._compute(found, padded)
            if computed is None:
                return None
            made.append(computed[place.made].clone())  # the next replay overwrites the result
        return made[0] if len(made) == 1 else torch.cat(made)

    def undrawn(self, plan: StepPlan) -> UndrawnLogits | None:
        """Run a padded step of decode rows, all of which sample, up to the logits; returns None if none fits."""
        self._drop_if_moved()
        decodes = plan.num_decode_rows
        if decodes < len(plan.slots) or decodes > self.steps.sizes_of(plan)[-1]:
            return None
        found: Captured | partial | None
        if self._foreseen is not None and self.is_foreseen(plan):
            _, found = self._foreseen
            computed = self._replay(found)
        else:
            padded = self._decode_rows(plan, "undrawn")
            found = self._get(padded)
            computed = self._compute(found, padded)
        if computed is None:
            return None
        (logits, rows), graph = computed, found.graph if isinstance(found, Captured) else None
        return UndrawnLogits(graph, rows, logits, decodes, (self._moves_now(), self.num_dropped))

    def prefetch_inputs(self, plan: StepPlan) -> None:
        """Send the inputs of `undrawn` for this plan, the next step, after a forward whose tokens are not sampled yet.

        Has no effect if the step has no graph yet.
        """
        is_decode = len(plan.slots) == plan.num_decode_rows <= self.steps.decode_sizes[-1]
        if is_decode and self._moves_now() == self._moves:
            padded = self._decode_rows(plan, "undrawn")
            captured = self._present(padded)
            if captured is not None:
                self._send(captured, padded.inputs)
                self._foreseen = plan, captured

    def is_foreseen(self, plan: StepPlan) -> bool:
        """Return whether the device has the inputs of `undrawn` for this plan."""
        return self._foreseen is not None and self._foreseen[0] is plan

    def draw(self, step: UndrawnLogits, masks: HostMasks | None, stages: frozenset[str], result: torch.Tensor,
             logprobs: Mapping[str, torch.Tensor]) -> bool:
        """Sample the tokens of a step of `undrawn`, under masks of its rows; returns False if no graph can.

        Each graph up to the logits has its own graph for this, which reads the logits where the first one leaves them.
        Logits of a run without a graph lie elsewhere each time.
        """
        if step.memory != (self._moves_now(), self.num_dropped):
            return False  # the state has grown since, or the graph was dropped
        lines, words = np.full(len(step.logits), -1, np.int32), self._room_for_masks()
        if masks is not None:
            self._send_words(masks.words, words[: len(masks.words)])
            lines[: step.num_rows] = masks.lines
        shape = StepShape("masked", rows=len(lines), stages=stages, scored=tuple(logprobs), after=step.graph)
        padded = Padded(shape, (lines,))
        found = self._get(padded, step.logits, step.rows, words)
        if isinstance(found, Captured):
            self._send_lines(found, lines)
            drawn = self._replay(found)
        else:
            drawn = self._compute(found, padded)
        if drawn is None:
            return False
        result.copy_(drawn.tokens[: step.num_rows], non_blocking=True)
        for kind, values in drawn.logprobs.items():
            logprobs[kind].copy_(values[: step.num_rows], non_blocking=True)
        return True

    def _send_lines(self, captured: Captured, lines: np.ndarray) -> None:
        """Copy the lines of rows' masks to the input of a graph, if they are not there yet."""
        known = self._sent_lines
        if known is None or known[0] is not captured.graph or not np.array_equal(known[1], lines):
            self._sent_lines = None  # an interrupt may come between the two
            self._send(captured, (lines,))
            self._sent_lines = captured.graph, lines

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
        """Return what computes a step's decode rows and its prompts, or both together; None if no padded step fits.

        The calls sample tokens and make the log-probabilities named in `scored`, or end at the logits.
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
            if (found := self._get(padded)) is not None:
                places = GraphRows(slice(0, decodes)), GraphRows(slice(decodes, len(slots)), size)
                return [GraphCall(found, padded, places)]
        parts: list[GraphCall] = []
        if decodes:
            padded = (self._decode_rows(plan, "decode", scored, with_logits) if draws
                      else self._decode_rows(plan, "logits"))
            if (found := self._get(padded)) is None:
                return None
            parts.append(GraphCall(found, padded, (GraphRows(slice(0, decodes)),)))
        if prompts is not None:
            shape = prompts.shape._replace(**self._of_slots(slots[decodes:], draws))
            shape = shape._replace(kind="prompts", scored=scored) if draws else shape
            padded = prompts._replace(shape=shape)
            if (found := self._get(padded)) is None:
                return None
            parts.append(GraphCall(found, padded, (GraphRows(slice(decodes, len(slots))),)))
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
        """Run a padded step of decode rows up to the logits [R, V]; returns None if none fits."""
        self._drop_if_moved()
        decodes = plan.num_decode_rows
        if not decodes or decodes < len(plan.slots) or decodes > self.steps.decode_sizes[-1]:
            return None
        if self._ready is not None and self.is_ready(plan):
            return self._replay(self._ready[1])[:decodes].clone()
        padded = self._decode_rows(plan, "logits")
        computed = self._compute(self._get(padded), padded)
        return None if computed is None else computed[:decodes].clone()

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

    def capture_ahead(self, shapes: Iterable[StepShape]) -> None:
        """Capture steps of these shapes on padding alone, which writes nothing, as far as padding has them.

        For an engine that is prepared and idle. Steps of decode rows come first, the largest before others, which fit
        in its memory; where memory is short, the rest is left to requests. Steps that edit logits, or whose rows name
        adapters, are left out: what they read has no place yet.
        """
        self._drop_if_moved()
        for shape in sorted(shapes, key=lambda shape: (shape.tokens > 0, -shape.rows - shape.tokens)):
            has_place = shape.stages <= {FILTERS} and not shape.named
            if not has_place or self._key(shape) in self._captured or (arrays := self.steps.padding_of(shape)) is None:
                continue
            self._run(partial(self.steps.run, shape), Padded(shape, arrays), captures=True)
            if self._captured.get(key := self._key(shape)) is None:  # the run may have changed the key
                self._captured.pop(key, None)
                return

    def decode_shapes(self, most_rows: int, stages: frozenset[str] = frozenset()) -> list[StepShape]:
        """Return the shapes that sample up to so many decode rows; ``stages`` as in `RequestState.stages`."""
        sizes = self.steps.decode_sizes
        return [StepShape("decode", rows=size, stages=stages,
                          one_launch=self._executor.may_use_one_launch(size, np.zeros(size, np.int64)))
                for size in map(int, sizes[: np.searchsorted(sizes, most_rows) + 1])]

    def _moves_now(self) -> Moves:
        size = self._cache.num_blocks if self._attention.backend.knows_pool_size else 0
        moves, states = self._state.moves, self._cache.states
        return Moves(moves["slots"], moves["token history"], moves["stop tokens"], self._state.axis_offsets.moves,
                     self._state.edits.generation, self._cache.version, size, 0 if states is None else states.version)

    def _drop_if_moved(self) -> None:
        """Drop the graphs that read what has moved since the last call: of lists of edits, only those that edit."""
        before, now = self._moves, self._moves_now()
        if before == now:
            return
        reason = _first_difference(before, now)
        if before is not None and before._replace(edit_lists=now.edit_lists) == now:
            self._drop_editing(reason)
        else:
            self.drop(reason)
        if self.steps.num_slots != self._state.num_slots:
            self._mask_words = None
            self.steps.use_slots()
        self._moves = now  # last, so that an interrupted call is repeated

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

    def _get(self, padded: Padded, *kept: torch.Tensor) -> Captured | partial | None:
        """Return the graph of a step, captured with its inputs if it ran often enough, else what runs it; None if it
        cannot be captured.

        The step reads the tensors `kept` on the device, which stay where they are, and then its inputs.
        """
        shape = padded.shape
        if shape.after is None:
            self.uses[shape] += 1
        if padded.known is not None:  # another engine may meanwhile find that the kernel for all layers fails
            return padded.known
        key, run = self._key(shape), partial(self.steps.run, shape, *kept)
        if key not in self._captured:
            if not self._may_be_recorded(key):
                return run
            self._captured[key] = self._capture(run, padded.inputs, shape.name)
        return self._captured[key]

    def _may_be_recorded(self, key: StepShape) -> bool:
        """Return whether a step ran often enough, and needs no run before its capture.

        In a run modules that were exchanged are looked up, the table for one launch is made, and a thread gets its
        handle of cuBLAS, which no graph can do. Ranks, which have to act alike, run in one thread each.
        """
        structure: tuple[int, ...] = (self._executor.watch.step_structure(self._executor.model),)
        if not self._executor.group.is_parallel:
            structure += (threading.get_ident(),)
        if structure != self._structure:
            self._loaded.clear()
            self._structure = structure
        return self._runs[key] >= key.num_first_runs and key in self._loaded and not key.one_launch

    def _compute(self, found: Captured | partial | None, padded: Padded) -> Any:
        """Return the result of a step by what `_get` found for it; None without that, and if memory is short."""
        if isinstance(found, Captured):
            self._send(found, padded.inputs)
            return self._replay(found)
        return None if found is None else self._run(found, padded)

    def _run(self, run: partial, padded: Padded, *, captures: bool = False) -> Any:
        """Return the result of a step that runs without a graph; None if memory is short.

        The step is captured behind the run with `captures`, or if it ran often enough before.
        """
        self._ready, shape = None, padded.shape
        inputs = tuple(upload(array, self._device) for array in padded.inputs)
        num_rows = len(np.setdiff1d(padded.inputs[0][0], self._state.padding_slot))
        began = device_times.begin(self._device)
        try:
            with self._aside():
                # On this stream: after a first run on another one, replays of small models were 2 % slower.
                result = self._run_compiled(partial(run, *inputs), shape, num_rows)
        except torch.OutOfMemoryError:
            if self._executor.group.is_parallel:  # the other ranks would wait in collectives for ever
                raise
            self._captured.setdefault(self._key(shape), None)
            if not self._executor.may_repeat:
                raise
            return None
        device_times.end(shape.name, began)
        for tensor in _tensors_in(result):
            if tensor.is_cuda:  # memory of the own stream
                tensor.record_stream(torch.cuda.current_stream(self._device))
        key = self._key(shape)  # the kernel for all layers may have come, or gone, in the run
        self._runs[key] += 1
        self._loaded.add(key)
        if key not in self._captured and (captures or self._runs[key] > key.num_first_runs):
            self._captured[key] = self._capture(run, padded.inputs, shape.name)
        return result

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
        """Record a step that has run, which compiled and loaded its kernels, and do not run it.

        Returns None if the device lacks memory (a graph keeps its memory, other steps share theirs), or if the model
        does what a graph cannot hold.
        """
        inputs = tuple(upload(array, self._device) for array in arrays)
        try:
            with self._aside(), capture_lock(self._device), kernel_log.capturing():
                return self._record(run, inputs, name)
        except torch.OutOfMemoryError:
            if self._executor.group.is_parallel:
                raise
            return None

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Enqueue a block on the engine's own stream, between what the caller's stream has to do before and after."""
        stream, current = self._own_stream(), torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            current.wait_stream(stream)  # also after an error: enqueued work writes blocks and history

    def _run_compiled(self, run: Callable[[], object], shape: StepShape, num_rows: int) -> Any:
        """Call `run()` with its kernels compiled in parallel, then compile what decoding its rows will need."""
        may_repeat = self._executor.may_repeat  # ranks may miss different kernels
        if not may_repeat and self._key(shape) in self._loaded:
            return run()
        return compiled_together(run, dry_runs(self.steps, num_rows), may_break_off=may_repeat)

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
            if isinstance(error, RuntimeError) and not parallel:  # the runs before passed, so only capturing fails
                return None
            raise
        graph.capture_end()
        self.num_captured += 1
        return Captured(name, graph, inputs, result, tuple(self._executor.captured_tensors()), self._pool)


def _first_difference(before: Any, now: Any) -> str:
    """Return the name, in words, of the first field of a NamedTuple that has changed; "" if there was none before."""
    names = now._fields if before is not None else ()
    return next((name.replace("_", " ") for i, name in enumerate(names) if before[i] != now[i]), "")


def _tensors_in(made: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a step's result."""
    if isinstance(made, torch.Tensor):
        yield made
    elif made is not None:
        for part in made.values() if isinstance(made, Mapping) else made:
            yield from _tensors_in(part)
