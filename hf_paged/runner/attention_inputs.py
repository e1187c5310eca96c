"""What attention has to know of a step, in one place for eager steps and for captured ones."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch

from hf_paged.device.upload import upload
from hf_paged.kernels.attention.backends import AttentionBackend
from hf_paged.kernels.attention.grouped_work import GroupChoice, GroupedPlan, plan_groups
from hf_paged.kernels.attention.metadata import DecodeWork, GroupedWork, PagedMetadata, PromptWork, TileQueue
from hf_paged.kernels.attention.prefill import FULL_TILE, SHORT_SEQUENCE
from hf_paged.kernels.attention.prompt_work import PromptPlan, Prompts
from hf_paged.kernels.step_inputs import StepInputs
from hf_paged.models import KVSpec
from hf_paged.runner.request_state import RequestState
from hf_paged.runner.step_context import Ends, Parts
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.prefix_groups import PrefixGroups


class AttentionInputs:
    """Makes `PagedMetadata` for the steps of one runner."""

    def __init__(self, backend: AttentionBackend, spec: KVSpec, state: RequestState, max_model_len: int) -> None:
        self.backend = backend
        self._spec, self._state, self._max_model_len = spec, state, max_model_len
        # That the rows planned last do not read again, in one layer without a window: those that decode, and others.
        self.saved_positions = self.saved_prompt_positions = 0
        self._windows: Counter[int | None] = Counter()
        # Of the last step with groups, which are the same objects as long as they hold the same.
        self._chosen: tuple[PrefixGroups, int, GroupChoice | None] | None = None

    def arrivals(self, num_rows: int) -> torch.Tensor:
        """The counters of `DecodeWork` for as many rows."""
        return torch.zeros(num_rows * self._spec.num_kv_heads, dtype=torch.int32, device=self._spec.device)

    def tile_queue(self) -> TileQueue:
        """A new queue."""
        return TileQueue(torch.zeros(2, dtype=torch.int32, device=self._spec.device))

    def may_queue(self) -> bool:
        """May there be prompts whose tiles are taken from a queue?"""
        # With windows, what tiles of one layer see says nothing of those of another.
        return self.backend.has_queue and not self._has_windows()

    def wants_queue(self, plan: StepPlan) -> bool:
        """Are programs to take the tiles of the step's prompts from a queue, where nothing is read for several?"""
        if not self.may_queue():
            return False
        spec, rows = self._spec, slice(plan.num_decode_rows, None)
        num_new = plan.num_new_tokens[rows]
        return self.backend.wants_queue(num_new, plan.start[rows] + num_new, spec.num_heads, spec.num_kv_heads,
                                        spec.head_dim, spec.cache_dtype, spec.device)

    def split_plan(self, seq_lens: np.ndarray, slots: np.ndarray,
                   groups: PrefixGroups | None = None) -> np.ndarray | GroupedPlan | None:
        """How rows of one new token are cut; what groups of them share may be read once for several.

        The plan's sizes depend on the number of rows alone. None: the backend runs without one.
        """
        self.saved_positions = 0
        if groups is not None and (choice := self._choice(groups, len(slots))) is not None:
            plan = plan_groups(seq_lens, slots, choice, self._share_of_layers(seq_lens))
            if plan is not None:
                self.saved_positions = choice.saved_positions
                return plan
        return self.plain_plan(seq_lens, slots)

    def plan_nothing(self) -> None:
        """In place of `split_plan`: each row reads all of its positions, whatever the kernel."""
        self.saved_positions = 0

    def plain_plan(self, seq_lens: np.ndarray, slots: np.ndarray) -> np.ndarray | None:
        """`split_plan` where nothing is shared, of rows that are no step's: nothing is noted of them."""
        spec = self._spec
        return self.backend.plan(seq_lens, slots, spec.num_kv_heads, spec.head_dim, spec.cache_dtype, spec.device)

    def prompt_plan(self, plan: StepPlan, max_query_len: int, max_seq_len: int) -> PromptPlan | None:
        """How what the prompts of a step share is cut, to be read for tiles of several rows; None: row by row.

        The numbers are those of `PagedMetadata`.
        """
        self.saved_prompt_positions = 0
        if plan.prompt_groups is None:
            return None
        spec, rows = self._spec, slice(plan.num_decode_rows, None)
        prompts = Prompts(plan.start[rows], plan.num_new_tokens[rows], plan.slots[rows], max_query_len, max_seq_len)
        found = self.backend.plan_prompts(plan.prompt_groups, prompts, spec.num_heads, spec.num_kv_heads, spec.head_dim,
                                          spec.cache_dtype, spec.device,
                                          self._share_of_layers(prompts.start + prompts.num_new))
        if found is not None:
            self.saved_prompt_positions = found.saved_positions
        return found

    def captured_prompt_plan(self, plan: StepPlan, num_tokens: int) -> PromptPlan | None:
        """`prompt_plan` of a graph for as many tokens."""
        if plan.prompt_groups is None:
            self.saved_prompt_positions = 0
            return None
        long = self.is_long((plan.start + plan.num_new_tokens)[plan.num_decode_rows :])
        return self.prompt_plan(plan, *self._captured_bounds(num_tokens, long))

    def use_windows(self, windows: tuple[int | None, ...]) -> None:
        """From now on layers have these windows, None: they see all positions."""
        self._windows = Counter(windows)

    def _has_windows(self) -> bool:
        return bool(self._windows.keys() - {None})

    def _share_of_layers(self, seq_lens: np.ndarray) -> float:
        """Of those layers that see every position of these rows: in others, prefixes are out of sight, or soon are."""
        if not self._has_windows():
            return 1.0
        longest = int(seq_lens.max())
        seeing = sum(count for window, count in self._windows.items() if window is None or longest <= window)
        return seeing / self._windows.total()

    def _choice(self, groups: PrefixGroups, num_rows: int) -> GroupChoice | None:
        chosen, spec = self._chosen, self._spec
        if chosen is None or chosen[0] is not groups or chosen[1] != num_rows:
            choice = self.backend.choose_groups(groups, num_rows, spec.num_heads, spec.num_kv_heads, spec.head_dim,
                                                spec.cache_dtype, spec.device)
            chosen = self._chosen = groups, num_rows, choice
        return chosen[2]

    def parts(self, plan: StepPlan, query_start: np.ndarray, slot_mapping: torch.Tensor, *,
              ends: bool) -> tuple[Parts, Ends | None]:
        """An eager step: decode rows and prefill rows are parts of their own, each with its own attention kernel.

        ``ends``: the last tokens of rows may be all that is read; they are where some row has more, and no tile reads
        for several rows what these share.
        """
        rows, decodes, device = len(plan.slots), plan.num_decode_rows, self._spec.device
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
            meta = self._read_once(self._metadata(from_zero, lens[a:b], slots[a:b], slot_mapping[first:last], *longest,
                                                  work))
            parts.append((first, last, meta))
            if ends and longest[0] > 1:
                alone = self._row_by_row(self.plain_plan(seq_lens[a:b], plan.slots[a:b]), b - a)
                meta = self._read_once(self.last_tokens(singles[: b - a + 1], lens[a:b], slots[a:b], alone, longest[1]))
            last_parts.append((a, b, meta))
        if not ends:
            return parts, None
        return parts, Ends(upload(query_start[1:].astype(np.int64) - 1, device), last_parts)

    def _read_once(self, meta: PagedMetadata) -> PagedMetadata:
        spec = self._spec
        return self.backend.read_once(meta, self._state.block_size, spec.num_kv_heads * spec.head_dim)

    def decode_rows(self, starts: torch.Tensor, inputs: StepInputs, work: DecodeWork | GroupedWork) -> PagedMetadata:
        """A captured step of R rows of one new token each; any length may come. `starts` counts them, [R + 1] int32."""
        assert inputs.seq_lens is not None and inputs.slots is not None, "decode rows write all"
        return self._metadata(starts, inputs.seq_lens, inputs.slots, inputs.slot_mapping, 1, self._max_model_len, work)

    def prompts(self, query_start: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor,
                slot_mapping: torch.Tensor, *, long: bool,
                work: PromptWork | TileQueue | None = None) -> PagedMetadata:
        """A captured step of prompts, all int32; `long` as `is_long` says."""
        bounds = self._captured_bounds(len(slot_mapping), long)
        return self._metadata(query_start, seq_lens, slots, slot_mapping, *bounds, work)

    def last_tokens(self, starts: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor, work: DecodeWork | None,
                    max_seq_len: int | None = None) -> PagedMetadata:
        """The last tokens of a step's prompts, each a row by itself. ``starts`` counts them, all int32.

        ``max_seq_len`` as in `PagedMetadata`, None: of a captured step, in which any length may come.
        """
        longest = self._max_model_len if max_seq_len is None else max_seq_len
        return self._metadata(starts, seq_lens, slots, slots[:0].long(), 1, longest, work)

    def _captured_bounds(self, num_tokens: int, long: bool) -> tuple[int, int]:
        """Most new tokens and most tokens of a row of a graph's steps."""
        # Replays bring rows of any length up to all tokens: the tiles are those of full ones.
        return max(FULL_TILE, num_tokens), self._max_model_len if long else SHORT_SEQUENCE

    @staticmethod
    def is_long(seq_lens: np.ndarray) -> bool:
        """Do these prompts need a graph with the tiles of long sequences?"""
        return int(seq_lens.max()) > SHORT_SEQUENCE

    def _work(self, seq_lens: np.ndarray, slots: np.ndarray,
              groups: PrefixGroups | None) -> DecodeWork | GroupedWork | None:
        device, work = self._spec.device, self.split_plan(seq_lens, slots, groups)
        if isinstance(work, GroupedPlan):
            return GroupedWork(upload(work.items, device), upload(work.rows, device), work.num_parts, work.config)
        return self._row_by_row(work, len(slots))

    def _row_by_row(self, items: np.ndarray | None, num_rows: int) -> DecodeWork | None:
        """Of an eager step; None where the backend runs without a plan."""
        return None if items is None else DecodeWork(upload(items, self._spec.device), self.arrivals(num_rows))

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
        items, rows, own_begin = (upload(array, self._spec.device) for array in made[:3])
        return PromptWork(GroupedWork(items, rows, made.num_parts, made.kernel.config), own_begin)

    def _metadata(self, query_start: torch.Tensor, seq_lens: torch.Tensor, slots: torch.Tensor,
                  slot_mapping: torch.Tensor, max_query_len: int, max_seq_len: int,
                  work: DecodeWork | GroupedWork | PromptWork | TileQueue | None = None) -> PagedMetadata:
        return PagedMetadata(
            query_start=query_start, seq_lens=seq_lens, block_table=self._state.block_table, slots=slots,
            slot_mapping=slot_mapping, max_query_len=max_query_len, max_seq_len=max_seq_len, work=work,
        )
