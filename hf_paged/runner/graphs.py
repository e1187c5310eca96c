"""Steps as CUDA graphs: token ids, layers, final norm, head, sampling, state advance.

A graph of decode rows per padded number of rows, a graph of prompts per padded number of tokens; a step that holds both
replays one of each, so that decoding never waits for the launches of a prompt. Captured lazily, all in one memory pool.
Padding rows have length 0 and a slot of their own. Steps that bring log-probabilities, steps in which a row names an
adapter, and steps whose rows, or whose prompts, share prefixes have graphs of their own. A step of decode rows that
waits for masks of tokens is two graphs: up to the logits, and from there on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged.kernels.attention.grouped_work import GroupedPlan
from hf_paged.kernels.attention.metadata import DecodeWork, GroupedConfig, GroupedWork, PagedMetadata, PromptWork
from hf_paged.kernels.attention.prompt_work import padded
from hf_paged.kernels.compiling import compiled_together
from hf_paged.kernels.upload import upload
from hf_paged.models import ModelExecutor
from hf_paged.models.captures import capture_lock, captures
from hf_paged.models.guards.inner_tensors import watched
from hf_paged.runner import device_times
from hf_paged.runner.attention_inputs import AttentionInputs
from hf_paged.runner.kv_cache import KVCache
from hf_paged.runner.request_state import RequestState
from hf_paged.runner.step_context import PagedStep
from hf_paged.sampling.token_log_probs import NO_LOG_PROBS
from hf_paged.sampling.token_mask import HostMasks, TokenMasks
from hf_paged.sampling.top_log_probs import shape_of
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.plan import MOST_GUESSING_ROWS

# Prompts of more operations keep a GPU longer than their launches keep the host: nothing to gain from a graph, and one
# forward of decode rows and prompts reads the weights once.
_PROMPT_FLOPS = 17e12
# Padding that costs more than this is not worth the launches that it saves.
_WASTED_FLOPS = 5e12
_MOST_PROMPT_ROWS = 256
# Padded rows of steps with guesses, whose number changes from step to step: few sizes, since each is captured once.
_GUESSING_SIZES = np.array(sorted([48, 96, *(1 << i for i in range(8))]))
assert _GUESSING_SIZES[-1] == MOST_GUESSING_ROWS


class Drawn(NamedTuple):
    """Sampled ``tokens`` [rows] int64 and, of a graph that makes them, log-probabilities (see `RequestState.sample`).

    ``logits`` [rows, V] of a graph whose first rows are asked for them.
    """

    tokens: torch.Tensor
    logprobs: Mapping[str, torch.Tensor]
    logits: torch.Tensor | None = None


class Undrawn(NamedTuple):
    """A step of decode rows that was replayed up to the logits; `StepGraphs.draw` goes on, before any other replay.

    ``rows`` [2, size] int64 (slots, positions) and ``logits`` [size, V] (a rank's columns) are what the graph of this
    ``key`` made; the first ``num_rows`` are rows of the step. ``memory``: where graphs read then, and how many had been
    dropped.
    """

    key: tuple
    rows: torch.Tensor
    logits: torch.Tensor
    num_rows: int
    memory: tuple


class GroupedTiles(NamedTuple):
    """What a graph of a step whose rows share prefixes holds of its plans, see `GroupedWork`."""

    num_parts: int
    config: GroupedConfig


class Captured(NamedTuple):
    """A graph, the device tensors that it reads its step from, and what it makes: `Drawn`, or logits [rows, V].

    ``name`` says of what it is, and for how many rows or tokens.
    """

    name: str
    graph: torch.cuda.CUDAGraph
    inputs: tuple[torch.Tensor, ...]
    result: Any


class Part(NamedTuple):
    """`rows` of a step, the graph that computes them, and what it is to read."""

    rows: slice
    captured: Captured
    inputs: tuple[np.ndarray, ...]


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Padded batch sizes: 1, 2, 4, 8, then steps of an eighth of the size, so that padding stays under 13 %."""
    sizes, size = [1, 2, 4], 8
    while size < max_num_seqs:
        sizes.append(size)
        size += max(8, size // 8 // 8 * 8)
    return [s for s in sizes if s < max_num_seqs] + [max_num_seqs]


def prompt_sizes(num_parameters: int, max_num_batched_tokens: int) -> list[int]:
    """Padded numbers of prompt tokens, from 16 up to where the GPU takes longer than the host."""
    most = min(max_num_batched_tokens, max(128, int(_PROMPT_FLOPS / (2 * num_parameters))))
    sizes = [*(1 << i for i in range(4, 10)), *range(768, 2048, 256), *range(2048, most + 1, 1024)]
    return [size for size in sizes if size <= most]


class StepGraphs:
    """Captures and replays steps. A graph is valid while nothing it points to has moved (see `check`)."""

    def __init__(self, executor: ModelExecutor, kv_cache: KVCache, state: RequestState, attention: AttentionInputs,
                 max_num_batched_tokens: int) -> None:
        self._executor, self._cache, self._state, self._attention = executor, kv_cache, state, attention
        self._device = kv_cache.spec.device
        self._num_parameters = sum(p.numel() for p in executor.model.parameters())
        self._prompt_sizes = np.array(prompt_sizes(self._num_parameters, max_num_batched_tokens) or [0])
        self._use_slots()
        self._captured: dict[tuple, Captured | None] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []  # also those whose capture an error ended
        self._pool: Any = None  # dies with its last graph
        self._stream: torch.cuda.Stream | None = None
        self._mask_stream: torch.cuda.Stream | None = None
        self._model_signature: tuple | None = None
        self._nothing = torch.empty(0, dtype=torch.float32, device=self._device)
        self._held: list[torch.Tensor] = []  # what the graphs read stays allocated, whoever re-points a parameter
        self._memory_signature: tuple | None = None
        self._ready: tuple[StepPlan, Captured] | None = None  # the device has what this step reads
        self._sent_lines: tuple[torch.cuda.CUDAGraph, np.ndarray] | None = None  # the last that went to such a graph
        self._foreseen: tuple[StepPlan, tuple, Captured] | None = None  # the device has what this step will read
        self.num_captured = 0
        self.num_dropped = 0
        executor.group.holds(self)

    def _use_slots(self) -> None:
        """As many rows as there are slots may come, and with guesses more."""
        self._num_slots = self._state.num_slots
        self._decode_sizes = np.array(decode_sizes(self._num_slots))
        # Shared by all graphs: one runs at a time, and leaves zeros.
        self._arrivals = self._attention.arrivals(max(self._num_slots, MOST_GUESSING_ROWS))
        self._mask_words: torch.Tensor | None = None  # [rows, W] int32, which graphs read

    def check(self) -> None:
        """Drop the graphs if the model's tensors moved or other adapters are active than when they were captured."""
        signature = self._signature()
        if signature != self._model_signature:
            self.drop()
        self._model_signature = signature
        self._held = [tensor.detach() for tensor in self._tensors()]

    def is_current(self) -> bool:
        """False once a tensor of a module lies elsewhere, or another adapter is active, than at the last `check`."""
        return self._model_signature == self._signature()

    def _signature(self) -> tuple:
        return tuple((tensor.data_ptr(), tensor.stride()) for tensor in self._tensors()), self._executor.state_key()

    def _tensors(self) -> list[torch.Tensor]:
        model = self._executor.model
        own = self._executor.own_tensors()
        return watched([*model.parameters(), *model.buffers(), *self._executor.plain_tensors(), *own])

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
        scored, logits, stages = tuple(logprobs), self._nothing, self._state.stages

        def decode(slots: np.ndarray, named: bool) -> partial:
            return partial(self._decode, stages=stages(slots), scored=scored, named=named, with_logits=num_logits > 0)

        def prompts(slots: np.ndarray, long: bool, named: bool) -> partial:
            return partial(self._prompts, stages=stages(slots), long=long, scored=scored, named=named)

        parts = self._parts(plan, decode, prompts)
        if parts is None:
            return None
        for rows, captured, inputs in parts:
            # Fetched before the next replay: a graph that was captured earlier may use the memory of these tokens.
            self._send(captured, inputs)
            drawn = self._replay(captured)
            result[rows].copy_(drawn.tokens[: rows.stop - rows.start], non_blocking=True)
            for kind, values in drawn.logprobs.items():
                logprobs[kind][rows].copy_(values[: rows.stop - rows.start], non_blocking=True)
            if drawn.logits is not None:
                logits = drawn.logits[:num_logits].clone()
        return logits

    def row_logits(self, plan: StepPlan) -> torch.Tensor | None:
        """Replay a step up to the logits after each row's last token, [R, V] or a rank's columns; None: no graph."""
        def decode(_: np.ndarray, named: bool) -> partial:
            return partial(self._logits, named=named)

        def prompts(_: np.ndarray, long: bool, named: bool) -> partial:
            return partial(self._prompt_logits, long=long, named=named)

        parts = self._parts(plan, decode, prompts)
        if parts is None:
            return None
        made: list[torch.Tensor] = []
        for rows, captured, inputs in parts:
            self._send(captured, inputs)
            made.append(self._replay(captured)[: rows.stop - rows.start].clone())  # the next replay overwrites it
        return made[0] if len(made) == 1 else torch.cat(made)

    def undrawn(self, plan: StepPlan) -> Undrawn | None:
        """Replay a step of decode rows, all of which sample, up to the logits; None: no graph for it."""
        self._drop_if_moved()
        decodes = plan.num_decode_rows
        if decodes < len(plan.slots) or decodes > self._sizes_of(plan)[-1]:
            return None
        captured: Captured | None
        if self._foreseen is not None and self.is_foreseen(plan):
            _, key, captured = self._foreseen
        else:
            run, inputs, key = self._undrawn_graph(plan)
            captured = self._get(key[0], run, inputs)
            if captured is None:
                return None
            self._send(captured, inputs)
        memory = self._memory(), self.num_dropped
        logits, rows = self._replay(captured)
        return Undrawn(key, rows, logits, decodes, memory)

    def foresee(self, plan: StepPlan) -> None:
        """Send what `undrawn` of this plan, the next step, will read: behind a forward whose tokens are not drawn yet.

        Nothing where the step has no graph so far.
        """
        is_decode = len(plan.slots) == plan.num_decode_rows <= self._decode_sizes[-1]
        if is_decode and self._memory() == self._memory_signature:
            _, inputs, key = self._undrawn_graph(plan)
            captured = self._captured.get((key[0], self._undrawn.__name__, *key[1:]))
            if captured is not None:
                self._send(captured, inputs)
                self._foreseen = plan, key, captured

    def is_foreseen(self, plan: StepPlan) -> bool:
        """Has the device what `undrawn` of this plan reads?"""
        return self._foreseen is not None and self._foreseen[0] is plan

    def _undrawn_graph(self, plan: StepPlan) -> tuple[partial, tuple[np.ndarray, ...], tuple]:
        """What a graph of this step up to the logits runs and reads, and its key."""
        size, named = self._decode_size(plan), self._state.adapters.any_named(plan.slots)
        inputs, tiles = self._decode_inputs(plan, size)
        return partial(self._undrawn, named=named, tiles=tiles), inputs, (size, named, tiles)

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
        run = partial(self._masked, step.logits, step.rows, words, of=step.key, stages=stages, scored=tuple(logprobs))
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
            shape = self._num_slots, -(-self._executor.num_logits // 32)
            self._mask_words = torch.empty(shape, dtype=torch.int32, device=self._device)
            if self._device.type == "cuda":
                self._mask_stream = torch.cuda.Stream(self._device)
                self._mask_stream.wait_stream(torch.cuda.current_stream(self._device))  # who had this memory before
        return self._mask_words

    def _parts(self, plan: StepPlan, decode: Callable[..., partial],
               prompts: Callable[..., partial]) -> list[Part] | None:
        """The graphs of a step's decode rows and of its prompts; None where none holds it.

        What is captured is ``decode(slots, named=...)`` and ``prompts(slots, long=..., named=...)``.
        """
        self._drop_if_moved()
        decodes, any_named = plan.num_decode_rows, self._state.adapters.any_named
        num_new = plan.num_new_tokens[decodes:]
        prompt_size = self._prompt_size(len(num_new), int(num_new.sum()))
        if prompt_size is None or (decodes and decodes > self._sizes_of(plan)[-1]):
            return None
        parts: list[Part] = []
        inputs: tuple[np.ndarray, ...]
        if decodes:
            slots = plan.slots[:decodes]
            captured, inputs = self._decode_graph(decode(slots, named=any_named(slots)), plan)
            if captured is None:
                return None
            parts.append(Part(slice(0, decodes), captured, inputs))
        if prompt_size:
            slots, (inputs, tiles) = plan.slots[decodes:], self._prompt_inputs(plan, prompt_size)
            long = self._attention.is_long((plan.start + plan.num_new_tokens)[decodes:])
            run = partial(prompts(slots, long=long, named=any_named(slots)), tiles=tiles)
            captured = self._get(prompt_size, run, inputs)
            if captured is None:
                return None
            parts.append(Part(slice(decodes, len(plan.slots)), captured, inputs))
        return parts

    def logits(self, plan: StepPlan) -> torch.Tensor | None:
        """Replay a step of decode rows up to the logits [R, V]; None: no graph for it."""
        self._drop_if_moved()
        decodes = plan.num_decode_rows
        if not decodes or decodes < len(plan.slots) or decodes > self._decode_sizes[-1]:
            return None
        if not self.is_ready(plan):
            named = self._state.adapters.any_named(plan.slots)
            captured, inputs = self._decode_graph(partial(self._logits, named=named), plan)
            if captured is None:
                return None
            self._send(captured, inputs)
            self._ready = plan, captured
        assert self._ready is not None
        return self._replay(self._ready[1])[:decodes].clone()

    def make_ready(self, plan: StepPlan) -> None:
        """Send what `logits` of this plan will read, behind the step that runs; nothing where it has no graph yet."""
        self._drop_if_moved()
        size = self._decode_size(plan)
        inputs, tiles = self._decode_inputs(plan, size)
        captured = self._captured.get((size, self._logits.__name__, self._state.adapters.any_named(plan.slots), tiles))
        if captured is not None:
            self._send(captured, inputs)
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
            self._memory_signature = signature
            if self._num_slots != self._state.num_slots:
                self._use_slots()

    def _decode_graph(self, run: partial, plan: StepPlan) -> tuple[Captured | None, tuple[np.ndarray, ...]]:
        size = self._decode_size(plan)
        inputs, tiles = self._decode_inputs(plan, size)
        return self._get(size, partial(run, tiles=tiles), inputs), inputs

    def _decode_size(self, plan: StepPlan) -> int:
        sizes = self._sizes_of(plan)
        return int(sizes[np.searchsorted(sizes, plan.num_decode_rows)])

    def _sizes_of(self, plan: StepPlan) -> np.ndarray:
        return self._decode_sizes if plan.drafts is None else _GUESSING_SIZES

    def _prompt_size(self, num_rows: int, num_tokens: int) -> int | None:
        """Padded number of tokens of these prompts; 0: there are none, None: no graph is worth it."""
        if not num_tokens:
            return 0
        if num_tokens > self._prompt_sizes[-1]:
            return None
        # As many rows as tokens, at most.
        size = int(self._prompt_sizes[np.searchsorted(self._prompt_sizes, num_tokens)])
        wasted = 2.0 * self._num_parameters * (size - num_tokens)
        return None if num_rows > self._prompt_rows(size) or wasted > _WASTED_FLOPS else size

    def _prompt_rows(self, size: int) -> int:
        return min(size, self._state.num_slots, _MOST_PROMPT_ROWS)

    def _get(self, size: int, run: partial, inputs: tuple[np.ndarray, ...]) -> Captured | None:
        """The graph of `run`, captured on a step's inputs where it is new; None where it cannot be had."""
        key = (size, run.func.__name__, *run.keywords.values())
        if key not in self._captured:
            self._captured[key] = self._capture(run, inputs, f"{run.func.__name__[1:]} {size}")
        return self._captured[key]

    def _send(self, captured: Captured, inputs: tuple[np.ndarray, ...]) -> None:
        self._ready = None
        for tensor, array in zip(captured.inputs, inputs, strict=True):
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
            compiled_together(run, self.coming(num_rows))

    def coming(self, most_rows: int, most_tokens: int = 0) -> Iterator[Callable[[], object]]:
        """What graphs of up to so many decode rows and prompt tokens run, the smallest first, over padding alone."""
        for num_rows, num_tokens in zip_longest(self._decode_sizes, self._prompt_sizes, fillvalue=0):
            if 0 < num_rows <= most_rows:
                yield partial(self._run_padding_rows, num_rows)
            if 0 < num_tokens <= most_tokens:
                yield partial(self._run_padding_tokens, num_tokens)

    def _run_padding_rows(self, size: int) -> None:
        rows = np.empty((2, size), dtype=np.int64)
        rows[0], rows[1] = self._state.padding_slot, -1
        work = self._attention.plain_plan(rows[1] + 1, rows[0])
        assert work is not None, "a backend that runs in graphs plans"
        inputs = [upload(array, self._device) for array in (rows, work)]
        self._decode(*inputs, stages=frozenset(), scored=(), named=False, with_logits=False, tiles=None)

    def _run_padding_tokens(self, size: int) -> None:
        tokens, rows = np.empty((3, size), dtype=np.int64), np.zeros((6, self._prompt_rows(size) + 1), dtype=np.int64)
        tokens[0], tokens[1], tokens[2] = self._state.padding_slot, -1, 0
        rows[1] = rows[4] = self._state.padding_slot
        inputs = [upload(array, self._device) for array in (tokens, rows)]
        self._prompts(*inputs, stages=frozenset(), long=False, scored=(), named=False, tiles=None)

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
        return Captured(name, graph, inputs, result)

    def _decode_inputs(self, plan: StepPlan, size: int) -> tuple[tuple[np.ndarray, ...], GroupedTiles | None]:
        """rows [2, size] int64 (slots, positions), and the attention's plan, which is for these tiles."""
        count = plan.num_decode_rows
        rows = np.empty((2, size), dtype=np.int64)
        rows[0], rows[1] = self._state.padding_slot, -1
        rows[0, :count], rows[1, :count] = plan.slots[:count], plan.start[:count]
        work = self._attention.split_plan(rows[1] + 1, rows[0], plan.groups)
        assert work is not None, "a backend that runs in graphs plans"
        if isinstance(work, GroupedPlan):
            return (rows, work.items, work.rows), GroupedTiles(work.num_parts, work.config)
        return (rows, work), None

    def _decode(self, rows: torch.Tensor, items: torch.Tensor, parts: torch.Tensor | None = None, *,
                stages: frozenset[str], scored: tuple[str, ...], named: bool, with_logits: bool,
                tiles: GroupedTiles | None) -> Drawn:
        hidden = self._decode_hidden(rows, items, parts, named, tiles)
        logits, (slots, positions) = self._executor.shard_logits(*hidden), rows
        # The sampled token's place is the length of what it follows.
        drawn = self._draw(logits, slots, positions + 1, stages, scored)
        return drawn._replace(logits=logits) if with_logits else drawn  # a graph that keeps them keeps their memory

    def _logits(self, rows: torch.Tensor, items: torch.Tensor, parts: torch.Tensor | None = None, *, named: bool,
                tiles: GroupedTiles | None) -> torch.Tensor:
        return self._executor.shard_logits(*self._decode_hidden(rows, items, parts, named, tiles))

    def _undrawn(self, rows: torch.Tensor, items: torch.Tensor, parts: torch.Tensor | None = None, *, named: bool,
                 tiles: GroupedTiles | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits, and the rows: the next step's may come before tokens are drawn from the logits."""
        return self._logits(rows, items, parts, named=named, tiles=tiles), rows.clone()

    def _masked(self, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor, lines: torch.Tensor, *,
                of: tuple, stages: frozenset[str], scored: tuple[str, ...]) -> Drawn:
        """Tokens of rows [2, size] from logits, which another graph (``of``) leaves, and masks."""
        slots, positions = rows
        return self._draw(logits, slots, 1 + positions, stages, scored, TokenMasks(words, lines))

    def _decode_hidden(self, rows: torch.Tensor, items: torch.Tensor, parts: torch.Tensor | None, named: bool,
                       tiles: GroupedTiles | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states, and the rows' adapters where some row names one."""
        state, (slots, positions) = self._state, rows
        input_ids, at, slot_mapping = state.inputs(slots, positions)
        work: DecodeWork | GroupedWork = DecodeWork(items, self._arrivals)
        if parts is not None and tiles is not None:
            work = GroupedWork(items, parts, *tiles)
        meta = self._attention.decode_rows(slots, positions, slot_mapping, work)
        adapters = state.adapters.of(slots) if named else None
        return self._executor.hidden_states(input_ids, self._step(at, meta, adapters)), adapters

    def _prompt_inputs(self, plan: StepPlan, size: int) -> tuple[tuple[np.ndarray, ...], GroupedTiles | None]:
        """tokens [3, size] int64 (slots, positions, write_from), rows [6, rows + 1] int64 (see `_prompts`), and where
        prompts share prefixes the arrays of the attention's plan, which is for these tiles."""
        rows = slice(plan.num_decode_rows, None)
        slots, start, num_new = plan.slots[rows], plan.start[rows], plan.num_new_tokens[rows]
        count, padding = len(slots), self._state.padding_slot
        ends = np.cumsum(num_new)
        tokens = np.empty((3, size), dtype=np.int64)
        tokens[0], tokens[1], tokens[2] = padding, -1, 0
        real = plan.token_columns(plan.num_decode_rows)
        tokens[:, : real.shape[1]] = real

        by_row = np.zeros((6, self._prompt_rows(size) + 1), dtype=np.int64)
        starts, row_slots, seq_lens, last, sampled_slots, sampled_positions = by_row
        starts[1 : count + 1], starts[count + 1 :] = ends, ends[-1]
        row_slots[:] = sampled_slots[:] = padding
        row_slots[:count], seq_lens[:count], last[:count] = slots, start + num_new, ends - 1
        samples = np.flatnonzero(plan.samples[rows])
        sampled_slots[samples], sampled_positions[samples] = slots[samples], (start + num_new)[samples]
        shared = self._attention.captured_prompt_plan(plan, size)
        if shared is None:
            return (tokens, by_row), None
        shared = padded(shared, size, self._prompt_rows(size))
        tiles = GroupedTiles(shared.num_parts, shared.kernel.config)
        return (tokens, by_row, shared.items, shared.rows, shared.own_begin), tiles

    def _prompts(self, tokens: torch.Tensor, rows: torch.Tensor, *work: torch.Tensor, stages: frozenset[str],
                 long: bool, scored: tuple[str, ...], named: bool, tiles: GroupedTiles | None) -> Drawn:
        logits = self._prompt_logits(tokens, rows, *work, long=long, named=named, tiles=tiles)
        sampled_slots, sampled_positions = rows[4:, :-1]
        return self._draw(logits, sampled_slots, sampled_positions, stages, scored)

    def _prompt_logits(self, tokens: torch.Tensor, rows: torch.Tensor, *work: torch.Tensor, long: bool, named: bool,
                       tiles: GroupedTiles | None) -> torch.Tensor:
        state, (slots, positions, write_from) = self._state, tokens
        input_ids, at, slot_mapping = state.inputs(slots, positions, write_from)
        small, shared = rows[:3].to(torch.int32), None
        if tiles is not None:
            items, parts, own_begin = work
            shared = PromptWork(GroupedWork(items, parts, *tiles), own_begin)
        meta = self._attention.prompts(small[0], small[2, :-1], small[1, :-1], slot_mapping, long=long, work=shared)
        adapters = state.adapters.of(slots) if named else None
        hidden = self._executor.hidden_states(input_ids, self._step(at, meta, adapters))
        last = rows[3, :-1]
        return self._executor.shard_logits(hidden[last], None if adapters is None else adapters[last])

    def _draw(self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, stages: frozenset[str],
              scored: tuple[str, ...], masks: TokenMasks | None = None) -> Drawn:
        logprobs = {name: torch.empty(shape_of(name, len(slots)), dtype=torch.float32, device=self._device)
                    for name in scored}
        return Drawn(self._state.sample(logits, slots, positions, stages, logprobs, masks), logprobs)

    def _step(self, positions: torch.Tensor, meta: PagedMetadata, adapters: torch.Tensor | None) -> PagedStep:
        parts = [(0, len(positions), meta)]
        return PagedStep(positions, meta.slot_mapping, self._cache, parts, self._attention.backend, adapters)
