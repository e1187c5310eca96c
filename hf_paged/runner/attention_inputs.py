"""What attention has to know of a step, in one place for eager steps and for captured ones."""

from __future__ import annotations

import numpy as np
import torch

from hf_paged.attention.backend import AttentionBackend
from hf_paged.attention.plan_groups import GroupedPlan
from hf_paged.attention.planner import AttentionPlanner
from hf_paged.device.upload import upload
from hf_paged.kernels.attention.types import DecodeWork, GroupedWork, PagedMetadata, PromptWork, TileQueue
from hf_paged.kernels.step_inputs import StepInputs
from hf_paged.models import KVSpec
from hf_paged.runner.request_state import RequestState
from hf_paged.runner.step_context import LastTokens, Parts
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.prefix_groups import PrefixGroups


class AttentionInputs(AttentionPlanner):
    """Makes `PagedMetadata` for the steps of one runner."""

    def __init__(self, backend: AttentionBackend, spec: KVSpec, state: RequestState, max_model_len: int) -> None:
        super().__init__(backend, spec.attention(state.block_size), max_model_len)
        self._state = state

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
            meta = self._read_once(self._metadata(from_zero, lens[a:b], slots[a:b], slot_mapping[first:last], *longest,
                                                  work))
            parts.append((first, last, meta))
            if ends and longest[0] > 1:
                alone = self._row_by_row(self.plain_plan(seq_lens[a:b], plan.slots[a:b]), b - a)
                meta = self._read_once(self.last_tokens(singles[: b - a + 1], lens[a:b], slots[a:b], alone, longest[1]))
            last_parts.append((a, b, meta))
        if not ends:
            return parts, None
        return parts, LastTokens(upload(query_start[1:].astype(np.int64) - 1, device), last_parts)

    def _read_once(self, meta: PagedMetadata) -> PagedMetadata:
        return self.backend.read_once(meta, self.spec)

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
