"""Launches of steps of models with a recurrent state: prompts one by one, and a forward of all rows of one token."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_paged.runner.model_runner import Computed, ModelRunner
from hf_paged.runner.recurrent import saved_states
from hf_paged.runner.recurrent.state_pool import StatePool
from hf_paged.sampling.slot_row import SlotRow
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.snapshots import StateMoves


class RecurrentRunner(ModelRunner):
    """A `ModelRunner` whose pool has states beside pages. No step may run twice.

    A prompt is computed up to each place where its states are saved. Its last token, if states precede it, joins the
    decode rows behind the prompts. Prompts run eagerly, and decode rows as graphs.
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
        singles = list(range(plan.num_decode_rows))

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

        for row in range(plan.num_decode_rows, len(plan.slots)):
            slot, start = int(plan.slots[row]), int(plan.start[row])
            end, saves = start + int(plan.num_new_tokens[row]), moves.saves.get(slot, [])
            if slot in moves.loads:
                saved_states.load(self.cache, moves.loads[slot])
            if (start or plan.write_from[row]) and (saves or end - start > 1):
                run_singles()  # this row may read keys and values of their tokens
            for move in saves:
                run([row], np.array([start]), np.array([move.snapshot.position]))
                saved_states.save(self.cache, move)
                start = move.snapshot.position
            if 0 < start == end - 1:
                singles.append(row)
            elif start < end:
                run([row], np.array([start]), np.array([end]))
        run_singles()
        query_start = np.concatenate([[0], np.cumsum(plan.num_new_tokens)]).astype(np.int32)
        return Computed(torch.cat([tokens for row in hidden for tokens in row]), query_start, None)  # no row's adapters


def part_of(plan: StepPlan, rows: list[int], start: np.ndarray, end: np.ndarray, *, num_decode_rows: int) -> StepPlan:
    """Return a plan that computes the tokens of some rows from `start` to `end`, both [len(rows)]."""
    columns = {name: getattr(plan, name)[rows] for name in ("slots", "write_from", "samples", "tenancy")}
    return replace(plan, **columns, sequences=[plan.sequences[row] for row in rows], start=start.astype(np.int32),
                   num_new_tokens=(end - start).astype(np.int32), num_decode_rows=num_decode_rows, groups=None,
                   prompt_groups=None)
