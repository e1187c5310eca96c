"""Launches of steps of models with a recurrent state: prompts one by one or packed, and a forward of all rows of one
token."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_paged.device.cuda import upload
from hf_paged.runner.model_runner import Computed, ModelRunner
from hf_paged.runner.recurrent import saved_states
from hf_paged.runner.recurrent.prompt_order import Prompt, next_prompts
from hf_paged.runner.recurrent.state_pool import StatePool
from hf_paged.sampling.slot_row import SlotRow
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.snapshots import StateMoves


class RecurrentRunner(ModelRunner):
    """A `ModelRunner` whose pool has states beside pages. No step may run twice.

    A prompt is computed up to each place where its states are saved, in one forward with others where the executor
    packs prompts. Its last token, if states precede it, joins the decode rows behind the prompts. Prompts run eagerly,
    and decode rows as graphs.
    """

    def __init__(self, *args: Any, max_num_seqs: int, num_snapshots: int = 0, **options: Any) -> None:
        super().__init__(*args, max_num_seqs=max_num_seqs, **options)
        self.cache.states = StatePool(self.spec, max_num_seqs)
        self.num_snapshots, self.whole_prompts = num_snapshots, self.executor.whole_prompts

    def grow_slots(self, num_slots: int) -> int:
        with suppress(torch.OutOfMemoryError):
            self.cache.states.grow(num_slots)
            super().grow_slots(num_slots)
        return self.state.num_slots

    def _update_state(self, plan: StepPlan, admitted: list[SlotRow]) -> None:
        super()._update_state(plan, admitted)
        if plan.states is not None:
            saved_states.save_all(self.cache, plan.states.ended)

    def _by_graphs(self, plan: StepPlan, first: int, result: torch.Tensor,
                   logprobs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        count, rows = plan.num_decode_rows, list(range(len(plan.slots)))
        if not 0 < count < len(rows):
            return super()._by_graphs(plan, first, result, logprobs)
        start, end = plan.start, plan.start + plan.num_new_tokens
        decode = part_of(plan, rows[:count], start[:count], end[:count], num_decode_rows=count)
        of_decode, of_prompts = ({kind: values[part] for kind, values in logprobs.items()}
                                 for part in (slice(count), slice(count, None)))
        if (logits := super()._by_graphs(decode, first, result[:count], of_decode)) is not None:
            # Behind the decode rows, whose keys and values prompts may read.
            prompts = part_of(plan, rows[count:], start[count:], end[count:], num_decode_rows=0)
            run = partial(self._eagerly, prompts, 0, result[count:], of_prompts, every_token=False)
            self._compiled(run, prompts) if self._compiles else run()
        return logits

    def _hidden_states(self, plan: StepPlan, *, every_token: bool) -> Computed:
        moves = plan.states or StateMoves([], {}, {})
        hidden: list[list[torch.Tensor]] = [[] for _ in plan.slots]
        decodes, packed = plan.num_decode_rows, self.executor.packs_prompts
        waiting = [Prompt(plan, row, moves, self.block_size) for row in range(decodes, len(plan.slots))]
        singles = list(range(decodes))
        late = {block for row in singles for block in Prompt(plan, row, moves, self.block_size).writes(plan.start[row])}

        def run(rows: list[int], start: np.ndarray, end: np.ndarray, *, are_singles: bool = False) -> None:
            part = part_of(plan, rows, start, end, num_decode_rows=len(rows) if are_singles else 0)
            computed = super(RecurrentRunner, self)._hidden_states(part, every_token=True).hidden
            for row, tokens in zip(rows, computed.split((end - start).tolist()), strict=True):
                hidden[row].append(tokens)

        def run_singles() -> None:
            if singles:
                ends = plan.start[singles] + plan.num_new_tokens[singles]
                run(singles, ends - 1, ends, are_singles=True)
                singles.clear()
                late.clear()

        while waiting:
            found = next_prompts(waiting, late, packed=packed)
            if not found:
                run_singles()  # what others wait for
                continue
            for prompt in found:
                if prompt.load is not None:
                    saved_states.load(self.cache, prompt.load)
                    prompt.load = None
            last = [prompt for prompt in found if prompt.is_last_token]
            if pieces := [prompt for prompt in found if not prompt.is_last_token]:
                start, end = np.array([(prompt.start, prompt.piece_end) for prompt in pieces]).T
                run([prompt.row for prompt in pieces], start, end)
            for prompt in pieces:
                prompt.start = prompt.piece_end
                if prompt.saves:
                    saved_states.save(self.cache, prompt.saves.popleft())
            for prompt in last:
                singles.append(prompt.row)
                late.update(prompt.writes(prompt.start))
                prompt.start = prompt.end
            waiting = [prompt for prompt in waiting if prompt.start < prompt.end]
        run_singles()
        query_start = np.concatenate([[0], np.cumsum(plan.num_new_tokens)]).astype(np.int32)
        adapters = None
        if self.state.adapters.any_named(plan.slots):
            slots = np.repeat(plan.slots, plan.num_new_tokens).astype(np.int64)
            adapters = self.state.adapters.of(upload(slots, self.device))
        return Computed(torch.cat([tokens for row in hidden for tokens in row]), query_start, adapters)


def part_of(plan: StepPlan, rows: list[int], start: np.ndarray, end: np.ndarray, *, num_decode_rows: int) -> StepPlan:
    """Return a plan that computes the tokens of some rows from `start` to `end`, both [len(rows)]."""
    columns = {name: getattr(plan, name)[rows] for name in ("slots", "write_from", "samples", "tenancy")}
    return replace(plan, **columns, sequences=[plan.sequences[row] for row in rows], start=start.astype(np.int32),
                   num_new_tokens=(end - start).astype(np.int32), num_decode_rows=num_decode_rows, groups=None,
                   prompt_groups=None)
