"""Steps in the form that graphs hold: decode rows, prompts, or both together, padded to one of few sizes.

This module makes their input arrays on the host, and has their computation from token ids to tokens or logits.
Padding rows have length 0 and a slot of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged.attention.plan_decode import GroupedPlan
from hf_paged.attention.plan_prompts import padded
from hf_paged.device.cuda import upload
from hf_paged.kernels.attention.decode import padded_rows
from hf_paged.kernels.attention.prefill import FULL_TILE
from hf_paged.kernels.attention.types import (
    DecodeWork,
    GroupedWork,
    PagedMetadata,
    PromptWork,
)
from hf_paged.kernels.step_inputs import StepInputs
from hf_paged.models import ModelExecutor
from hf_paged.models.base import LastTokens, Parts, StepContext
from hf_paged.runner.attention_inputs import AttentionInputs
from hf_paged.runner.kv_cache import KVCache
from hf_paged.runner.request_state import RequestState
from hf_paged.runner.step_shape import GroupedTiles, StepShape
from hf_paged.sampling.log_probs import LOGPROBS, TOPS, shape_of
from hf_paged.sampling.token_mask import TokenMasks
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.plan import MOST_GUESSING_ROWS

# With more operations prompts keep a GPU busy longer than their launches keep the host: a graph gains nothing, and one
# forward of decode rows and prompts reads the weights once.
_PROMPT_FLOPS = 17e12
# Padding with more operations costs more than the launches that a graph saves.
_WASTED_FLOPS = 5e12
_MOST_PROMPT_ROWS = 256
# Up to this number there is a separate padded size: the head over the maximum of rows takes 1 % of a step.
_FEW_PROMPT_ROWS = 32
# From here on decode rows and prompts share a graph, since decode rows add little to so many tokens. Shorter prompts
# have too many sizes for a graph per number of decode rows.
_MIXED_TOKENS = 1024
# Padded rows of steps with drafts, whose number varies from step to step: few sizes, since each is captured once.
GUESSING_SIZES = np.array(sorted([48, 96, *(1 << i for i in range(8))]))
assert GUESSING_SIZES[-1] == MOST_GUESSING_ROWS


class Drawn(NamedTuple):
    """Sampled ``tokens`` [rows] int64 and log-probabilities (see `RequestState.sample`), if the graph computes them.

    ``logits`` [rows, V], if the graph returns them.
    """

    tokens: torch.Tensor
    logprobs: Mapping[str, torch.Tensor]
    logits: torch.Tensor | None = None


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes of `padded_rows`, and the largest: few, since each is a graph that some first run captures."""
    sizes, size = [], 1
    while size < max_num_seqs:
        sizes.append(size)
        size = padded_rows(size + 1)
    return [*sizes, max_num_seqs]


def mixed_sizes(most_rows: int) -> list[int]:
    """Return padded numbers of decode rows in steps with prompts: few, since each has a graph per number of prompt
    tokens, and padding costs little beside prompts."""
    sizes = {8, 16, *(size << i for size in (2, 3) for i in range(4, 16))}
    return [size for size in sorted(sizes) if size < most_rows] + [most_rows]


def prompt_sizes(num_parameters: int, max_num_batched_tokens: int) -> list[int]:
    """Return padded numbers of prompt tokens, from 16 up to where the GPU takes longer than the host."""
    most = min(max_num_batched_tokens, max(128, int(_PROMPT_FLOPS / (2 * num_parameters))))
    sizes = [*(1 << i for i in range(4, 10)), *range(768, 2048, 256), *range(2048, most + 1, 1024)]
    return [size for size in sizes if size <= most]


class PaddedSteps:
    """Padded steps of one runner that graphs may hold.

    Attributes:
        state, attention: As given.
        num_slots: Slots of the state, at the last `use_slots`.
        decode_sizes: Padded numbers of decode rows, ascending.
        prompt_sizes: Padded numbers of prompt tokens, ascending.
        prompt_lengths: Lengths of prompts of models with states, which no graph holds, ascending.
    """

    def __init__(self, executor: ModelExecutor, kv_cache: KVCache, state: RequestState, attention: AttentionInputs,
                 max_num_batched_tokens: int) -> None:
        self._executor, self._cache, self.state, self.attention = executor, kv_cache, state, attention
        self._device = kv_cache.spec.device
        self._num_parameters = sum(p.numel() for p in executor.model.parameters())
        # Prompts of models with states run without graphs.
        sizes = [] if executor.has_states else prompt_sizes(self._num_parameters, max_num_batched_tokens)
        self.prompt_sizes = np.array(sizes or [0])
        # Between two of these lengths there are no other kernels, nor beyond: those of experts depend on all tokens.
        has_experts = executor.has_states and executor.why_not_experts(self._device) is None and any(
            "experts" in module._modules for module in executor.model.modules())
        most = max(FULL_TILE, max_num_batched_tokens if has_experts else 0)
        self.prompt_lengths = [1 << i for i in range(most.bit_length())] if executor.has_states else []
        self.use_slots()

    def use_slots(self) -> None:
        """Set the padded sizes for the state's number of slots."""
        num_slots = self.state.num_slots
        self.decode_sizes = np.array(decode_sizes(num_slots))
        # Shared by all graphs: only one runs at a time, and it resets them to zeros.
        most_rows = max(num_slots, MOST_GUESSING_ROWS)
        self._arrivals = self.attention.arrivals(most_rows)
        self._queue = self.attention.tile_queue()
        self._mixed_sizes = np.array(mixed_sizes(most_rows))
        self._starts = torch.arange(most_rows + 1, dtype=torch.int32, device=self._device)
        self.num_slots = num_slots  # last, so that an interrupted call is repeated

    def decode_size(self, plan: StepPlan) -> int:
        """Return the padded number of decode rows of a step, which may have at most `sizes_of(plan)[-1]`."""
        sizes = self.sizes_of(plan)
        return int(sizes[np.searchsorted(sizes, plan.num_decode_rows)])

    def sizes_of(self, plan: StepPlan) -> np.ndarray:
        """Return the padded numbers of decode rows for such a step, ascending."""
        return self.decode_sizes if plan.drafts is None else GUESSING_SIZES

    def prompt_size(self, num_rows: int, num_tokens: int) -> int | None:
        """Return the padded number of tokens of these prompts; 0 without prompts, None if no graph is worth it."""
        if not num_tokens:
            return 0
        if num_tokens > self.prompt_sizes[-1]:
            return None
        # Prompts have at most as many rows as tokens.
        size = int(self.prompt_sizes[np.searchsorted(self.prompt_sizes, num_tokens)])
        wasted = 2.0 * self._num_parameters * (size - num_tokens)
        return None if num_rows > self._most_prompt_rows(size) or wasted > _WASTED_FLOPS else size

    def _most_prompt_rows(self, size: int) -> int:
        return min(size, self.state.num_slots, _MOST_PROMPT_ROWS)

    def _prompt_rows(self, num_rows: int, size: int) -> int:
        """Return the padded number of prompts in a graph of `size` tokens."""
        most = self._most_prompt_rows(size)
        return min(most, _FEW_PROMPT_ROWS) if num_rows <= _FEW_PROMPT_ROWS else most

    def mixed_size(self, num_decode_rows: int, prompt_size: int) -> int:
        """Return the padded number of decode rows to compute in one graph with `prompt_size` tokens; 0 if separate."""
        if not num_decode_rows or prompt_size < _MIXED_TOKENS:
            return 0
        return int(self._mixed_sizes[np.searchsorted(self._mixed_sizes, num_decode_rows)])

    def run_padding_rows(self, size: int, *, shared: bool = False, named: bool = False,
                         stages: frozenset[str] = frozenset(), scored: tuple[str, ...] = ()) -> None:
        """Sample decode rows that are all padding; ``shared``: they read a prefix together."""
        arrays, tiles = self._padding_inputs(size, shared=shared)
        if shared and tiles is None:
            return
        shape = StepShape("decode", rows=size, named=named, tiles=tiles, stages=stages, scored=scored)
        self.run(shape, *self._sent(arrays))

    def run_masked_padding(self, size: int, stages: frozenset[str] = frozenset(), scored: tuple[str, ...] = ()) -> None:
        """Sample decode rows that are all padding in two parts, as steps do whose token masks come late."""
        shape = StepShape("masked", rows=size, stages=stages, scored=scored)
        undrawn = self.undrawn(StepShape("undrawn", rows=size), *self._sent(self._padding_inputs(size)[0]))
        words = torch.zeros(size, -(-self._executor.num_logits // 32), dtype=torch.int32, device=self._device)
        lines = torch.full((size,), -1, dtype=torch.int32, device=self._device)
        self.masked(shape, *undrawn, words, lines)

    def run_padding_tokens(self, size: int, *, long: bool = False, shared: bool = False, named: bool = False) -> None:
        """Sample prompts whose tokens are all padding; ``shared``: they read a prefix together."""
        prompts = self._prompt_rows(1, size)
        arrays, tiles = self._padding_prompts(size, prompts, shared=shared)
        if shared and tiles is None:
            return
        shape = StepShape("prompts", tokens=size, prompts=prompts, named=named, long=long, tiles=tiles)
        self.run(shape, *self._sent(arrays))

    def run_padding_prompt(self, size: int, *, long: bool = False) -> None:
        """Compute a prompt that is all padding as `RecurrentRunner` computes one, or packed ones, without a graph.

        ``size``: its length; ``long``: it goes on behind as many tokens as a sequence has, or has as many.
        """
        tokens, rows = self._sent(self._padding_tokens(size, 1))
        inputs = self.state.inputs(*tokens)
        starts, slots, seq_lens = rows[:3].to(torch.int32)
        meta = self.attention.prompts(starts, seq_lens[:-1], slots[:-1], inputs.slot_mapping, long=long)
        most = meta.max_seq_len if long else size
        new = most if self._executor.whole_prompts else size
        parts = [(0, size, meta._replace(max_query_len=new, max_seq_len=most))]
        self._executor.hidden_states(inputs.ids, self._step(inputs.positions, inputs.slot_mapping, parts, None))

    def padding_of(self, shape: StepShape) -> tuple[np.ndarray, ...] | None:
        """Return the arrays of a step of this shape that has no real row; None if it reads the logits of another step,
        or if no step of this engine has the shape."""
        if not self._has(shape):
            return None
        of_rows, of_prompts = (shape.decode_tiles, shape.tiles) if shape.tokens else (shape.tiles, None)
        arrays: tuple[np.ndarray, ...] = ()
        if shape.rows:
            arrays, tiles = self._padding_inputs(shape.rows, shared=of_rows is not None)
            if tiles != of_rows:
                return None
        if shape.tokens:
            prompts, tiles = self._padding_prompts(shape.tokens, shape.prompts, shared=of_prompts is not None)
            if tiles != of_prompts:
                return None
            arrays += prompts
        return arrays

    def _has(self, shape: StepShape) -> bool:
        """Return whether steps have this kind, these sizes and these log-probabilities; not for ``masked`` steps."""
        has_prompts = shape.tokens in self.prompt_sizes and shape.prompts in {
            self._prompt_rows(count, shape.tokens) for count in (1, _FEW_PROMPT_ROWS + 1)}
        match shape.kind:
            case "decode" | "logits" | "undrawn":
                has_rows = shape.rows in self.decode_sizes or shape.rows in GUESSING_SIZES
                has_sizes = has_rows and shape.tokens == shape.prompts == 0
            case "prompts" | "prompt_logits":
                has_sizes = has_prompts and shape.rows == 0
            case "mixed":
                has_sizes = has_prompts and shape.tokens >= _MIXED_TOKENS and shape.rows in self._mixed_sizes
            case _:
                has_sizes = False
        return has_sizes and {*shape.scored} <= {*LOGPROBS, *TOPS}

    def _padding_inputs(self, size: int, *, shared: bool = False) -> tuple[tuple[np.ndarray, ...], GroupedTiles | None]:
        """Return `decode_inputs` without a real row; ``shared``: of rows that read a prefix together, if any can."""
        rows = self._padding_rows(size)
        if shared and (work := self.attention.plan_of_a_group(rows[0])) is not None:
            return (rows, work.items, work.rows), GroupedTiles(work.num_parts, work.config)
        plain = self.attention.plain_plan(rows[1] + 1, rows[0])
        assert plain is not None, "a backend that runs in graphs plans"
        return (rows, plain), None

    def _padding_prompts(self, size: int, prompts: int, *,
                         shared: bool = False) -> tuple[tuple[np.ndarray, ...], GroupedTiles | None]:
        """Return `prompt_inputs` without a real prompt; ``shared`` as in `_padding_inputs`."""
        tokens, rows = self._padding_tokens(size, prompts)
        if shared and (work := self.attention.plan_of_prompts_in_a_group(rows[1, :-1], size)) is not None:
            assert work.own_begin is not None
            return ((tokens, rows, work.items, work.rows, work.own_begin),
                    GroupedTiles(work.num_parts, work.kernel.config))
        plain = self.attention.plain_plan(rows[2, :-1], rows[1, :-1])
        assert plain is not None, "a backend that runs in graphs plans"
        return (tokens, rows, plain), None

    def _padding_tokens(self, size: int, prompts: int) -> tuple[np.ndarray, np.ndarray]:
        tokens, rows = np.empty((3, size), dtype=np.int64), np.zeros((6, prompts + 1), dtype=np.int64)
        tokens[0], tokens[1], tokens[2] = self.state.padding_slot, -1, 0
        rows[1] = rows[4] = self.state.padding_slot
        return tokens, rows

    def _padding_rows(self, size: int) -> np.ndarray:
        rows = np.empty((2, size), dtype=np.int64)
        rows[0], rows[1] = self.state.padding_slot, -1
        return rows

    def _sent(self, arrays: tuple[np.ndarray, ...]) -> list[torch.Tensor]:
        return [upload(array, self._device) for array in arrays]

    def decode_inputs(self, plan: StepPlan, size: int) -> tuple[tuple[np.ndarray, ...], GroupedTiles | None]:
        """Return rows [2, size] int64 (slots, positions) and the arrays of the attention plan, with the plan's
        constants."""
        rows = self._decode_rows(plan, size)
        work = self.attention.split_plan(rows[1] + 1, rows[0], plan.groups)
        assert work is not None, "a backend that runs in graphs plans"
        if isinstance(work, GroupedPlan):
            return (rows, work.items, work.rows), GroupedTiles(work.num_parts, work.config)
        return (rows, work), None

    def unplanned_rows(self, plan: StepPlan, size: int) -> np.ndarray:
        """Return the rows of `decode_inputs` for a step without an attention kernel."""
        self.attention.saved_positions = 0
        return self._decode_rows(plan, size)

    def _decode_rows(self, plan: StepPlan, size: int) -> np.ndarray:
        count = plan.num_decode_rows
        rows = self._padding_rows(size)
        rows[0, :count], rows[1, :count] = plan.slots[:count], plan.start[:count]
        return rows

    def run(self, shape: StepShape, *arrays: torch.Tensor) -> Any:
        """Compute a step of this shape from its arrays on the device: `Drawn`, or logits."""
        return getattr(self, shape.kind)(shape, *arrays)

    def decode(self, shape: StepShape, rows: torch.Tensor, items: torch.Tensor,
               parts: torch.Tensor | None = None) -> Drawn:
        """Sample tokens of decode rows, from the arrays of `decode_inputs`."""
        logits, (slots, positions) = self.logits(shape, rows, items, parts), rows
        # The sampled token's place is the length of what it follows.
        return self._draw(shape, logits, slots, positions + 1)

    def logits(self, shape: StepShape, rows: torch.Tensor, items: torch.Tensor,
               parts: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [size, V] of decode rows, or a rank's columns."""
        inputs, meta = self._of_decode_rows(rows, items, parts, shape.tiles)
        adapters = self.state.adapters.of(rows[0]) if shape.named else None
        step = self._step(inputs.positions, meta.slot_mapping, [(0, len(inputs.ids), meta)], adapters, shape.one_launch)
        step = step._replace(fed=self.state.axis_offsets.fed(rows[0], inputs.positions))
        return self._executor.shard_logits(self._executor.hidden_states(inputs.ids, step), adapters)

    def undrawn(self, shape: StepShape, rows: torch.Tensor, items: torch.Tensor,
                parts: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits and a copy of the rows: the next step's rows may come before these logits are sampled."""
        return self.logits(shape, rows, items, parts), rows.clone()

    def masked(self, shape: StepShape, logits: torch.Tensor, rows: torch.Tensor, words: torch.Tensor,
               lines: torch.Tensor) -> Drawn:
        """Sample tokens of rows [2, size] from the logits of another graph, under masks."""
        slots, positions = rows
        return self._draw(shape, logits, slots, 1 + positions, TokenMasks(words, lines))

    def _of_decode_rows(self, rows: torch.Tensor, items: torch.Tensor, parts: torch.Tensor | None,
                        tiles: GroupedTiles | None) -> tuple[StepInputs, PagedMetadata]:
        slots, positions = rows
        inputs = self.state.inputs(slots, positions)
        work: DecodeWork | GroupedWork = DecodeWork(items, self._arrivals)
        if parts is not None and tiles is not None:
            work = GroupedWork(items, parts, *tiles)
        return inputs, self.attention.decode_rows(self._starts[: len(slots) + 1], inputs, work)

    def prompt_inputs(self, plan: StepPlan, size: int) -> tuple[tuple[np.ndarray, ...], GroupedTiles | None]:
        """Return tokens [3, size] int64 (slots, positions, write_from), rows [6, rows + 1] int64, and the attention
        plan of the rows' last tokens, or if prompts share prefixes the arrays and constants of the plan of all tokens.

        A column of `rows` has the index of the row's first token, its slot, its length, the index of its last token,
        and slot and position of its sampled token.
        """
        rows = slice(plan.num_decode_rows, None)
        slots, start, num_new = plan.slots[rows], plan.start[rows], plan.num_new_tokens[rows]
        count, padding = len(slots), self.state.padding_slot
        ends = np.cumsum(num_new)
        tokens = np.empty((3, size), dtype=np.int64)
        tokens[0], tokens[1], tokens[2] = padding, -1, 0
        real = plan.token_columns(plan.num_decode_rows)
        tokens[:, : real.shape[1]] = real

        by_row = np.zeros((6, self._prompt_rows(count, size) + 1), dtype=np.int64)
        starts, row_slots, seq_lens, last, sampled_slots, sampled_positions = by_row
        starts[1 : count + 1], starts[count + 1 :] = ends, ends[-1]
        row_slots[:] = sampled_slots[:] = padding
        row_slots[:count], seq_lens[:count], last[:count] = slots, start + num_new, ends - 1
        samples = np.flatnonzero(plan.samples[rows])
        sampled_slots[samples], sampled_positions[samples] = slots[samples], (start + num_new)[samples]
        shared = self.attention.captured_prompt_plan(plan, size)
        if shared is None:
            alone = self.attention.plain_plan(seq_lens[:-1], row_slots[:-1])
            assert alone is not None, "a backend that runs in graphs plans"
            return (tokens, by_row, alone), None
        shared = padded(shared, size, by_row.shape[1] - 1)
        tiles = GroupedTiles(shared.num_parts, shared.kernel.config)
        return (tokens, by_row, shared.items, shared.rows, shared.own_begin), tiles

    def prompts(self, shape: StepShape, tokens: torch.Tensor, rows: torch.Tensor, *work: torch.Tensor) -> Drawn:
        """Tokens of prompts, from what `prompt_inputs` makes."""
        sampled_slots, sampled_positions = rows[4:, :-1]
        return self._draw(shape, self.prompt_logits(shape, tokens, rows, *work), sampled_slots, sampled_positions)

    def prompt_logits(self, shape: StepShape, tokens: torch.Tensor, rows: torch.Tensor,
                      *work: torch.Tensor) -> torch.Tensor:
        """Logits [rows, V] of the last tokens of prompts, or a rank's columns."""
        inputs, meta, ends = self._of_prompts(shape, tokens, rows, work)
        slots, last = tokens[0], rows[3, :-1]
        return self._logits_of(inputs, [meta], last, None if ends is None else [ends], slots if shape.named else None)

    def mixed(self, shape: StepShape, rows: torch.Tensor, items: torch.Tensor, *arrays: torch.Tensor) -> Drawn:
        """Tokens of decode rows and of prompts behind them, which go through the layers together.

        The arrays are those of `decode_inputs`, and then those of `prompt_inputs`.
        """
        parts, (tokens, prompts, *work) = (None, arrays) if shape.decode_tiles is None else (arrays[0], arrays[1:])
        decoded, decode_meta = self._of_decode_rows(rows, items, parts, shape.decode_tiles)
        computed, prompt_meta, ends = self._of_prompts(shape, tokens, prompts, tuple(work))
        inputs = StepInputs(*(torch.cat(both) for both in zip(decoded[:3], computed[:3], strict=True)))
        count = len(decoded.ids)
        last = torch.cat([torch.arange(count, device=self._device), count + prompts[3, :-1]])
        logits = self._logits_of(inputs, [decode_meta, prompt_meta], last,
                                 None if ends is None else [decode_meta, ends],
                                 torch.cat([rows[0], tokens[0]]) if shape.named else None)
        slots, places = torch.cat([rows[0], prompts[4, :-1]]), torch.cat([1 + rows[1], prompts[5, :-1]])
        return self._draw(shape, logits, slots, places)

    def _of_prompts(self, shape: StepShape, tokens: torch.Tensor, rows: torch.Tensor,
                    work: tuple[torch.Tensor, ...]) -> tuple[StepInputs, PagedMetadata, PagedMetadata | None]:
        """What the layers read of prompts, and of their last tokens alone, where no tile reads for several rows."""
        slots, positions, write_from = tokens
        inputs = self.state.inputs(slots, positions, write_from)
        starts, row_slots, seq_lens = rows[:3].to(torch.int32)
        of_rows = seq_lens[:-1], row_slots[:-1]
        prompts = partial(self.attention.prompts, starts, *of_rows, inputs.slot_mapping, long=shape.long)
        if shape.tiles is not None:
            items, parts, own_begin = work
            return inputs, prompts(work=PromptWork(GroupedWork(items, parts, *shape.tiles), own_begin)), None
        (alone,), meta = work, prompts(work=self._queue if shape.queued else None)
        ends = self.attention.last_tokens(self._starts[: len(starts)], *of_rows, DecodeWork(alone, self._arrivals))
        return inputs, meta, ends

    def _logits_of(self, inputs: StepInputs, parts: list[PagedMetadata], last: torch.Tensor,
                   ends: list[PagedMetadata] | None, named_slots: torch.Tensor | None) -> torch.Tensor:
        """Return logits of all rows' ``last`` tokens, whose layout is ``ends``; ``named_slots``: slots of all tokens if
        a row names an adapter."""
        adapters = None if named_slots is None else self.state.adapters.of(named_slots)
        read = None if ends is None else LastTokens(last, _cuts(ends, [len(meta.slots) for meta in ends]))
        cuts = _cuts(parts, [len(meta.slot_mapping) for meta in parts])
        hidden = self._executor.hidden_states(
            inputs.ids, self._step(inputs.positions, inputs.slot_mapping, cuts, adapters, ends=read))
        if read is None:
            hidden = hidden[last]
        return self._executor.shard_logits(hidden, None if adapters is None else adapters[last])

    def _draw(self, shape: StepShape, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor,
              masks: TokenMasks | None = None) -> Drawn:
        logprobs = {name: torch.empty(shape_of(name, len(slots)), dtype=torch.float32, device=self._device)
                    for name in shape.scored}
        tokens = self.state.sample(logits, slots, positions, shape.stages, logprobs, masks)
        # A graph that keeps its logits keeps their memory.
        return Drawn(tokens, logprobs, logits if shape.with_logits else None)

    def _step(self, positions: torch.Tensor, slot_mapping: torch.Tensor, parts: Parts, adapters: torch.Tensor | None,
              one_launch: bool = False, ends: LastTokens | None = None) -> StepContext:
        return StepContext(positions, slot_mapping, self._cache, parts, self.attention.backend, adapters, one_launch,
                           ends)


def _cuts(layouts: list[PagedMetadata], counts: list[int]) -> Parts:
    """Return `StepContext.parts` of consecutive ranges with these numbers of tokens."""
    ends = np.cumsum(counts).tolist()
    return [(end - count, end, meta) for meta, count, end in zip(layouts, counts, ends, strict=True)]
