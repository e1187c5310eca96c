"""Launches of steps of models with a recurrent state: prompts one by one or packed, and a forward of all rows of one
token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    and rows of one token as graphs.
    """

    def __init__(self, *args: Any, max_num_seqs: int, num_snapshots: int = 0, **options: Any) -> None:
        super().__init__(*args, max_num_seqs=max_num_seqs, **options)
        self.cache.states = StatePool(self.spec, max_num_seqs)
        self.num_snapshots, self.whole_prompts = num_snapshots, self.executor.whole_prompts
        self.least_chunk = self.executor.least_chunk

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
        """Run a step with its rows of one token, those that end prompts among them, as one graph, behind the prompts.

        Where prompts read what such rows write, decode rows alone are one, before the prompts.
        """
        count, rows = plan.num_decode_rows, list(range(len(plan.slots)))
        if count == len(rows) or self._fed.feeds(plan):
            return super()._by_graphs(plan, first, result, logprobs)
        start, end = plan.start, plan.start + plan.num_new_tokens
        if num_singles := self._num_singles(plan):
            run: partial[Any] = partial(self._prompts_alone, plan)
            self._compiled(run, plan) if self._compiles else run()
            rows = rows[:num_singles]
            singles = part_of(plan, rows, end[rows] - 1, end[rows], num_decode_rows=num_singles)
            result[num_singles:] = -1
            own = {kind: values[:num_singles] for kind, values in logprobs.items()}
            logits = super()._by_graphs(singles, first, result[:num_singles], own)
            if logits is None:
                _, logits = self._eagerly(singles, first, result[:num_singles], own, every_token=False)
            return result.new_empty(0) if logits is None else logits
        if not count:
            return None
        decode = part_of(plan, rows[:count], start[:count], end[:count], num_decode_rows=count)
        of_decode, of_prompts = ({kind: values[part] for kind, values in logprobs.items()}
                                 for part in (slice(count), slice(count, None)))
        if (logits := super()._by_graphs(decode, first, result[:count], of_decode)) is not None:
            # Behind the decode rows, whose keys and values prompts may read.
            prompts = part_of(plan, rows[count:], start[count:], end[count:], num_decode_rows=0)
            run = partial(self._eagerly, prompts, 0, result[count:], of_prompts, every_token=False)
            self._compiled(run, prompts) if self._compiles else run()
        return logits

    def _num_singles(self, plan: StepPlan) -> int:
        """Return how many rows sample behind one token that follows a state, the first ones; 0 if others sample, too,
        or if prompts read what such rows of others write."""
        prompts = self._prompts(plan)
        ends = [True] * plan.num_decode_rows + [prompt.ends_with_a_token for prompt in prompts]
        count = sum(ends)
        if not all(ends[:count]) or ends != plan.samples.tolist():
            return 0
        # A prompt that goes on within a block reads what it has in it, before its own last token.
        own = {prompt.row: set(prompt.writes(prompt.end - 1)) for prompt in prompts if prompt.ends_with_a_token}
        late = self._late(plan, range(plan.num_decode_rows)).union(*own.values())
        are_read = any(late.intersection(prompt.reads()) - own.get(prompt.row, set()) for prompt in prompts)
        return 0 if are_read else count

    def _prompts(self, plan: StepPlan) -> list[Prompt]:
        moves = plan.states or StateMoves([], {}, {})
        return [Prompt(plan, row, moves, self.block_size) for row in range(plan.num_decode_rows, len(plan.slots))]

    def _late(self, plan: StepPlan, rows: Iterable[int]) -> set[int]:
        """Return the blocks that rows of one token write."""
        moves = StateMoves([], {}, {})
        return {block for row in rows for block in Prompt(plan, row, moves, self.block_size).writes(plan.start[row])}

    def _prompts_alone(self, plan: StepPlan) -> None:
        """Compute prompts up to the last tokens of `_num_singles`."""
        for pieces in self._in_order(self._prompts(plan), set(), []):
            self._forward(plan, pieces)

    def _forward(self, plan: StepPlan, pieces: list[Prompt]) -> list[torch.Tensor]:
        """Compute the next pieces of prompts; returns their hidden states."""
        start, end = np.array([(prompt.start, prompt.piece_end) for prompt in pieces]).T
        return self._hidden_of(part_of(plan, [prompt.row for prompt in pieces], start, end, num_decode_rows=0))

    def _hidden_of(self, part: StepPlan) -> list[torch.Tensor]:
        return list(super()._hidden_states(part, every_token=True).hidden.split(part.num_new_tokens.tolist()))

    def _in_order(self, waiting: list[Prompt], late: set[int], singles: list[int]) -> Iterator[list[Prompt]]:
        """Yield the prompts whose next pieces the next forward computes, and none where `singles` have to come first.

        ``late``: blocks that wait for these, to which rows whose last token is left are added.
        """
        while waiting:
            found = next_prompts(waiting, late, packed=self.executor.packs_prompts)
            if not found:
                yield []  # what others wait for
                continue
            for prompt in found:
                if prompt.load is not None:
                    saved_states.load(self.cache, prompt.load)
                    prompt.load = None
            last = [prompt for prompt in found if prompt.is_last_token]
            if pieces := [prompt for prompt in found if not prompt.is_last_token]:
                yield pieces
            for prompt in pieces:
                prompt.start = prompt.piece_end
                if prompt.saves:
                    saved_states.save(self.cache, prompt.saves.popleft())
            for prompt in last:
                singles.append(prompt.row)
                late.update(prompt.writes(prompt.start))
                prompt.start = prompt.end
            waiting = [prompt for prompt in waiting if prompt.start < prompt.end]

    def _hidden_states(self, plan: StepPlan, *, every_token: bool) -> Computed:
        hidden: list[list[torch.Tensor]] = [[] for _ in plan.slots]
        singles = list(range(plan.num_decode_rows))
        late = self._late(plan, singles)

        def run_singles() -> None:
            if singles:
                ends = plan.start[singles] + plan.num_new_tokens[singles]
                part = part_of(plan, singles, ends - 1, ends, num_decode_rows=len(singles))
                for row, tokens in zip(singles, self._hidden_of(part), strict=True):
                    hidden[row].append(tokens)
                singles.clear()
                late.clear()

        for pieces in self._in_order(self._prompts(plan), late, singles):
            if not pieces:
                run_singles()
                continue
            for prompt, tokens in zip(pieces, self._forward(plan, pieces), strict=True):
                hidden[prompt.row].append(tokens)
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
