"""What attention has to know of a step, in one place for eager steps and for captured ones."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from hf_paged.attention.backend import AttentionBackend
from hf_paged.attention.choose_groups import GroupChoice
from hf_paged.attention.plan_decode import GroupedPlan, emptied, plan_groups
from hf_paged.attention.plan_prompts import PromptPlan, Prompts, padded
from hf_paged.device.cuda import upload
from hf_paged.kernels.attention.prefill import FULL_TILE, SHORT_SEQUENCE
from hf_paged.kernels.attention.types import DecodeWork, GroupedWork, PagedMetadata, PromptWork, TileQueue
from hf_paged.kernels.step_inputs import StepInputs
from hf_paged.models import KVSpec
from hf_paged.models.base import LastTokens, Parts
from hf_paged.runner.request_state import RequestState
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.prefix_tree import PrefixGroups

_FEW_TOKENS = 16  # so few new tokens of each row make it worth while to read a prefix once for all


class AttentionInputs:
    """Makes `PagedMetadata` for the steps of one runner, and plans how rows are split and which prefixes are read once.

    Attributes:
        saved_positions, saved_prompt_positions: positions that grouping saved the last planned decode rows and prompts
            from reading, in one layer without a window.
    """

    def __init__(self, backend: AttentionBackend, spec: KVSpec, state: RequestState, max_model_len: int) -> None:
        self.backend, self.spec = backend, spec.attention(state.block_size)
        self._state, self._max_model_len = state, max_model_len
        self.saved_positions = self.saved_prompt_positions = 0
        self.use_windows(())
        # The choice of the last step with groups; groups are the same object as long as they have not changed.
        self._chosen: tuple[PrefixGroups, int, GroupChoice | None] | None = None

    def parts(self, plan: StepPlan, query_start: np.ndarray, slot_mapping: torch.Tensor, *,
              ends: bool) -> tuple[Parts, LastTokens | None]:
        """An eager step: decode rows and prefill rows are parts of their own, each with its own attention kernel.

        ``ends``: the last tokens of rows may be all that is read; they are where some row has more, and no tile reads
        for several rows what these share.
        """
        rows, decodes, device = len(plan.slots), plan.num_decode_rows, self.spec.device
        seq_lens = plan.start + plan.num_new_tokens
        counts = np.arange(rows + 1)
        packed = np.concatenate([plan.slots, seq_lens, query_start, counts], dtype=np.int32)
        slots, lens, starts, singles = upload(packed, device).split((rows, rows, rows + 1, rows + 1))
        ends = ends and int(query_start[-1]) > rows
        parts: Parts = []
        last_parts: Parts = []
        for a, b in ((0, decodes), (decodes, rows)):
            if a == b:
                continue
            first, last = int(query_start[a]), int(query_start[b])
            from_zero = starts[a : b + 1] - first if first else starts[: b + 1]
            longest = int(plan.num_new_tokens[a:b].max()), int(seq_lens[a:b].max())
            work: DecodeWork | GroupedWork | PromptWork | TileQueue | None
            if a < decodes:
                work = self._work(seq_lens[a:b], plan.slots[a:b], plan.groups)
            else:
                work = self._prompt_work(plan, seq_lens[a:b], *longest)
            ends = ends and not isinstance(work, PromptWork)
            meta = self._metadata(from_zero, lens[a:b], slots[a:b], slot_mapping[first:last], *longest, work)
            meta = self.backend.read_once(meta, self.spec)
            parts.append((first, last, meta))
            if ends and longest[0] > 1:
                alone = self._row_by_row(self.plain_plan(seq_lens[a:b], plan.slots[a:b]), b - a)
                meta = self.last_tokens(singles[: b - a + 1], lens[a:b], slots[a:b], alone, longest[1])
                meta = self.backend.read_once(meta, self.spec)
            last_parts.append((a, b, meta))
        if not ends:
            return parts, None
        return parts, LastTokens(upload(query_start[1:].astype(np.int64) - 1, device), last_parts)

    def decode_rows(self, starts: torch.Tensor, inputs: StepInputs, work: DecodeWork | GroupedWork) -> PagedMetadata:
        """A captured step of R rows of one new token each; any length may come. `starts` counts them, [R + 1] int32."""
        assert inputs.seq_lens is not None and inputs.slots is not None, "decode rows write all"
        return self._metadata(starts, inputs.seq_lens, inputs.slots, inputs.slot_mapping, 1, self._max_model_len, work)

    def prompts(self, query_start: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor,
                slot_mapping: torch.Tensor, *, long: bool,
                work: PromptWork | TileQueue | None = None) -> PagedMetadata:
        """A captured step of prompts, all int32; `long` as `is_long` says."""
        bounds = self.captured_bounds(len(slot_mapping), long)
        return self._metadata(query_start, seq_lens, slots, slot_mapping, *bounds, work)

    def last_tokens(self, starts: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor, work: DecodeWork | None,
                    max_seq_len: int | None = None) -> PagedMetadata:
        """The last tokens of a step's prompts, each a row by itself. ``starts`` counts them, all int32.

        ``max_seq_len`` as in `PagedMetadata`, None: of a captured step, in which any length may come.
        """
        longest = self._max_model_len if max_seq_len is None else max_seq_len
        return self._metadata(starts, seq_lens, slots, slots[:0].long(), 1, longest, work)

    def _work(self, seq_lens: np.ndarray, slots: np.ndarray,
              groups: PrefixGroups | None) -> DecodeWork | GroupedWork | None:
        device, work = self.spec.device, self.split_plan(seq_lens, slots, groups)
        if isinstance(work, GroupedPlan):
            return GroupedWork(upload(work.items, device), upload(work.rows, device), work.num_parts, work.config)
        return self._row_by_row(work, len(slots))

    def _row_by_row(self, items: np.ndarray | None, num_rows: int) -> DecodeWork | None:
        """Of an eager step; None where the backend runs without a plan."""
        return None if items is None else DecodeWork(upload(items, self.spec.device), self.arrivals(num_rows))

    def _prompt_work(self, plan: StepPlan, seq_lens: np.ndarray, max_query_len: int,
                     max_seq_len: int) -> DecodeWork | GroupedWork | PromptWork | TileQueue | None:
        if max_query_len == 1 and plan.prompt_groups is not None:  # all in the cache: the kernels of decode rows
            saved = self.saved_positions
            work = self._work(seq_lens, plan.slots[plan.num_decode_rows :], plan.prompt_groups)
            self.saved_positions, self.saved_prompt_positions = saved, self.saved_positions
            return work
        made = self.prompt_plan(plan, max_query_len, max_seq_len)
        if made is None:
            return self.tile_queue() if self.wants_queue(plan) else None
        items, rows, own_begin = (upload(array, self.spec.device) for array in made[:3])
        return PromptWork(GroupedWork(items, rows, made.num_parts, made.kernel.config), own_begin)

    def _metadata(self, query_start: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor,
                  slot_mapping: torch.Tensor, max_query_len: int, max_seq_len: int,
                  work: DecodeWork | GroupedWork | PromptWork | TileQueue | None = None) -> PagedMetadata:
        return PagedMetadata(
            query_start=query_start, seq_lens=seq_lens, block_table=self._state.block_table, slots=slots,
            slot_mapping=slot_mapping, max_query_len=max_query_len, max_seq_len=max_seq_len, work=work,
        )

    def arrivals(self, num_rows: int) -> torch.Tensor:
        """Return the counters of `DecodeWork` for ``num_rows`` rows."""
        return torch.zeros(num_rows * self.spec.num_kv_heads, dtype=torch.int32, device=self.spec.device)

    def tile_queue(self) -> TileQueue:
        return TileQueue(torch.zeros(2, dtype=torch.int32, device=self.spec.device))

    def wants_queue(self, plan: StepPlan) -> bool:
        """Return whether programs take the tiles of the step's prompts from a queue, if no prefix is shared."""
        # Not with windows: the cost of tiles differs from layer to layer, and one decision holds for all layers.
        if not self.backend.has_queue or self._has_windows:
            return False
        rows = slice(plan.num_decode_rows, None)
        num_new = plan.num_new_tokens[rows]
        return self.backend.wants_queue(num_new, plan.start[rows] + num_new, self.spec)

    def split_plan(self, seq_lens: np.ndarray, slots: np.ndarray,
                   groups: PrefixGroups | None = None) -> np.ndarray | GroupedPlan | None:
        """Return the plan of rows of one new token, which may read shared prefixes of groups once for several rows.

        The plan's sizes depend on the number of rows alone. Returns None if the backend runs without a plan.
        """
        self.saved_positions = 0
        if groups is not None and (choice := self._choice(groups, len(slots))) is not None:
            plan = plan_groups(seq_lens, slots, choice, self._share_of_layers(seq_lens))
            if plan is not None:
                self.saved_positions = choice.saved_positions
                return plan
        return self.plain_plan(seq_lens, slots)

    def plain_plan(self, seq_lens: np.ndarray, slots: np.ndarray) -> np.ndarray | None:
        """Return the plan of rows without shared prefixes; does not change `saved_positions`."""
        return self.backend.plan(seq_lens, slots, self.spec)

    def prompt_plan(self, plan: StepPlan, max_query_len: int, max_seq_len: int) -> PromptPlan | None:
        """Return the plan by which prompts' shared prefixes are read for tiles of several rows; None for row by row.

        The lengths are the bounds of `PagedMetadata`.
        """
        self.saved_prompt_positions = 0
        if plan.prompt_groups is None:
            return None
        rows = slice(plan.num_decode_rows, None)
        prompts = Prompts(plan.start[rows], plan.num_new_tokens[rows], plan.slots[rows], max_query_len, max_seq_len)
        share_of_layers = self._share_of_layers(prompts.start + prompts.num_new)
        found = self.backend.plan_prompts(plan.prompt_groups, prompts, self.spec, share_of_layers)
        if found is not None:
            self.saved_prompt_positions = found.saved_positions
        return found

    def captured_prompt_plan(self, plan: StepPlan, num_tokens: int) -> PromptPlan | None:
        """Return the `prompt_plan` of a graph for ``num_tokens`` tokens."""
        if plan.prompt_groups is None:
            self.saved_prompt_positions = 0
            return None
        long = self.is_long((plan.start + plan.num_new_tokens)[plan.num_decode_rows :])
        return self.prompt_plan(plan, *self.captured_bounds(num_tokens, long))

    def plan_of_a_group(self, slots: np.ndarray) -> GroupedPlan | None:
        """Return the plan of rows that share as much as they can, but for its work: these rows are padding.

        None if the backend reads row by row. Does not change `saved_positions`.
        """
        groups, shared = self._one_group(len(slots))
        choice = self.backend.choose_groups(groups, len(slots), self.spec)
        plan = None if choice is None else plan_groups(np.full(len(slots), shared + 1), slots, choice)
        return None if plan is None else emptied(plan, slots)

    def plan_of_prompts_in_a_group(self, slots: np.ndarray, num_tokens: int) -> PromptPlan | None:
        """Return a plan of prompts as `plan_of_a_group` does of rows, in the sizes of a graph of `num_tokens`.

        Padding of no length is no work of its items.
        """
        count = min(len(slots), num_tokens)
        groups, shared = self._one_group(count)
        prompts = Prompts(np.full(count, shared), np.full(count, min(num_tokens // count, _FEW_TOKENS)), slots[:count],
                          *self.captured_bounds(num_tokens, long=True))
        found = self.backend.plan_prompts(groups, prompts, self.spec, 1.0)
        if found is None:
            return None
        nothing = found._replace(items=found.items[:0], rows=found.rows[:0], own_begin=found.own_begin[:0])
        return padded(nothing, num_tokens, len(slots))

    def _one_group(self, num_rows: int) -> tuple[PrefixGroups, int]:
        """Return a group of all rows, and the positions that they share."""
        shared = max(self._max_model_len // self.spec.block_size, 1) * self.spec.block_size
        members, zero = np.arange(num_rows, dtype=np.int32), np.zeros(1, dtype=np.int32)
        return PrefixGroups(members, zero, zero + num_rows, zero, zero + shared), shared

    def use_windows(self, windows: tuple[int | None, ...]) -> None:
        """Set the windows of the layers; None for a layer that sees all positions."""
        self._windows = Counter(windows)
        self._has_windows = any(window is not None for window in windows)

    def _share_of_layers(self, seq_lens: np.ndarray) -> float:
        """Return the fraction of layers that see all positions of these rows; windows of others exclude prefixes."""
        if not self._has_windows:
            return 1.0
        longest = int(seq_lens.max())
        seeing = sum(count for window, count in self._windows.items() if window is None or longest <= window)
        return seeing / self._windows.total()

    def _choice(self, groups: PrefixGroups, num_rows: int) -> GroupChoice | None:
        chosen = self._chosen
        if chosen is None or chosen[0] is not groups or chosen[1] != num_rows:
            chosen = self._chosen = groups, num_rows, self.backend.choose_groups(groups, num_rows, self.spec)
        return chosen[2]

    def captured_bounds(self, num_tokens: int, long: bool) -> tuple[int, int]:
        """Return the most new tokens and the most tokens of a row in a graph's steps."""
        # Tiles for full rows: a row of a replay may have any number of the graph's tokens.
        return max(FULL_TILE, num_tokens), self._max_model_len if long else SHORT_SEQUENCE

    @staticmethod
    def is_long(seq_lens: np.ndarray) -> bool:
        """Return whether these prompts need a graph with the tiles of long sequences."""
        return int(seq_lens.max()) > SHORT_SEQUENCE
