"""Rows of one call that join the engine's steps while stock's decoding loop picks the tokens in the caller's thread."""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import torch

from hf_paged.device.cuda import upload
from hf_paged.options.request_spec import RequestSpec
from hf_paged.runner.recurrent import saved_states
from hf_paged.sampling.slot_row import SlotRow
from hf_paged.scheduler import Sequence, StepPlan
from hf_paged.scheduler.lockstep_rows import LockstepRows, OutOfBlocksError, RowMoves

# Seconds after the last answer from which rows that wait for no logits may lose their blocks to other rows: the caller
# may itself wait for those rows, which would be a deadlock.
_IDLE = 0.02


class BlockShortage(enum.Enum):
    """The result of freeing blocks of other batches: some are free now, they are held and may come later, or none."""

    FREE = enum.auto()
    WAIT = enum.auto()
    NONE = enum.auto()


def arrivals_of(specs: list[RequestSpec]) -> list[Sequence]:
    """Return a sequence for the prompt of each row."""
    return [Sequence(f"lockstep-{i}", spec.prompt, max_new_tokens=1, cache_salt=spec.cache_salt,
                     adapter=spec.adapter_name, fed=spec.fed) for i, spec in enumerate(specs)]


class LockstepBatch:
    """Paged forwards over rows that all advance by the same number of tokens a step.

    The caller requests logits and waits; the next steps of the engine, in any thread, compute them beside the rows of
    all other callers. Between two such queries the rows keep their slots and blocks, but may lose them (`lose`): the
    batch keeps their tokens, which the next query computes again.

    Args:
        core: the engine's loop (`EngineCore`, which imports this module).
        held: holds the engine's lock, between two steps.
        drive: steps the engine until `is_waiting` is False.
        call: a weak reference to an object that lives as long as the call.
        specs: the R rows, as in `Engine.lockstep`.
    """

    _numbers = itertools.count()

    def __init__(self, core: Any, held: Callable[[], AbstractContextManager],
                 drive: Callable[[LockstepBatch], None], call: Callable[[], object | None],
                 specs: list[RequestSpec]) -> None:
        self.rows: LockstepRows | None = None
        self.thread = threading.get_ident()
        self.arrival = next(self._numbers)
        self._core, self._held, self._drive, self._call = core, held, drive, call
        self._specs = specs
        self._most_new = specs[0].max_new_tokens  # of each row
        self._max_tokens = max(map(len, self._prompts)) + self._most_new
        self.has_checked_adapters = False  # for the model as it is now
        self._tokens: torch.Tensor | None = None  # [R, most new tokens] int32 on the device: tokens after the prompts
        self._count = 0  # columns of `_tokens` that are known
        self._asked: torch.Tensor | None = None  # [R, n] int64: the query's tokens, n = 0 for the prompts' own logits
        self._answer: torch.Tensor | Exception | None = None
        self._answered_at = time.monotonic()
        self.is_short = False  # the open query waits for blocks
        self._stream: torch.cuda.Stream | None = None  # the caller's
        self._chunks: Iterator[None] | None = None  # each `next` computes another part of the known tokens
        self._logits: list[torch.Tensor] = []  # after the prompts computed so far
        self._places: torch.Tensor | None = None  # [2, R] int64 on the device: slots, and positions of the next tokens
        self._ahead: StepPlan | None = None  # a plan, made ahead, for the next token of every row
        self._is_reordered = False
        self._version: int | None = None  # weights version at the first token; None if the model changed since then

    @property
    def adapters(self) -> list[str | None]:
        """`RequestSpec.adapter_name` of each row."""
        return [spec.adapter_name for spec in self._specs]

    @property
    def _prompts(self) -> list[list[int]]:
        return [spec.prompt for spec in self._specs]

    # -- the caller's side ------------------------------------------------------------------------------------------

    def prompts(self) -> torch.Tensor:
        """Compute the prompts; returns logits [R, V] after the last token of each, in the model's dtype."""
        none = torch.empty(len(self._prompts), 0, dtype=torch.int64, device=self._core.device)
        return self._ask(none)[:, 0]

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Compute ``tokens`` [R, n] of every row; returns logits [R, n, V].

        Raises:
            torch.OutOfMemoryError: the device lacks the memory for the blocks.
            ValueError: more tokens than these rows were made for.
        """
        if self._count + tokens.shape[1] > self._most_new:
            length = self._max_tokens - self._most_new + self._count + tokens.shape[1]
            raise ValueError(f"{length} tokens in a row that was made for {self._max_tokens}")
        return self._ask(tokens)

    def reorder(self, parents: list[int]) -> None:
        """Let row i continue the tokens of row ``parents[i]``."""
        if parents == list(range(len(parents))):
            return
        with self._held():
            with self._core.changing():
                self._take_back()
            rows, self._places, self._is_reordered = self.rows, None, True
            self._specs = [self._specs[parent] for parent in parents]
            if self._tokens is not None:
                with self._core.changing():
                    self._tokens = self._tokens[upload(np.array(parents, np.int64), self._core.device)]
            if rows is not None:
                with self._core.changing():
                    while self.rows is not None:
                        self._save_ended()
                        try:
                            self._follow(rows, rows.reorder(parents))
                            break
                        except OutOfBlocksError:
                            if self._core.joining.free_blocks_for(self) is not BlockShortage.FREE:
                                self.give_back()

    def crop(self, num_tokens: int) -> None:
        """Forget the last tokens of every row; raises ValueError if they are of a prompt with images."""
        if num_tokens > self._count and any(spec.fed is not None for spec in self._specs):
            raise ValueError(f"num_tokens={num_tokens}: expected at most {self._count}, the tokens behind a prompt "
                             "with images")
        with self._held():
            if self.rows is not None:
                with self._core.changing():
                    self._take_back()
                    if not self.rows.have_states and self.rows.may_crop(num_tokens):
                        self.rollback_tokens(self.rows, num_tokens)
                    else:  # the caller's next tokens would go into blocks that others read, or behind later states
                        self.give_back()
            self._count -= num_tokens
            if self._count < 0:
                self._specs = [spec.but(prompt=spec.prompt[: self._count]) for spec in self._specs]
                self._count = 0
            self._core.totals["generated"] -= num_tokens * len(self._prompts)

    def keys_and_values(self, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return copies of each layer's K and V [R, num_kv_heads, length, head_dim]; zeros before a row's tokens."""
        while True:
            with self._held():
                if self.rows is not None and self._chunks is None:
                    with self._core.changing():
                        self._take_back()
                    return self._gather(self.rows, length)
            self._ask(torch.empty(len(self._prompts), 0, dtype=torch.int64, device=self._core.device))

    def close(self) -> None:
        """Publish the computed blocks in the prefix cache, and free slots and blocks; needs the engine's lock."""
        core, rows = self._core, self.rows
        if rows is None:
            return
        with core.changing():
            core.trust_cache()
            self._take_back()
            complete = self._chunks is None and len(rows) == len(rows.slots)
            if complete and self._version == core.weights_version and not core.weights_moved():
                history = self._prompts
                if self._tokens is not None:
                    new = self._tokens[:, : self._count].tolist()
                    history = [prompt + row for prompt, row in zip(history, new, strict=True)]
                longest = max(map(len, history))
                rows.publish(np.array([row + [0] * (longest - len(row)) for row in history], np.int32))
            self.give_back()

    def _ask(self, tokens: torch.Tensor) -> torch.Tensor:
        device = self._core.device
        if device.type == "cuda":
            self._stream = torch.cuda.current_stream(device)
        self._asked = tokens
        try:
            self._drive(self)
        except BaseException:
            with self._held():  # so that no step is computing the answer
                self._asked = self._answer = None
            raise
        answer, self._asked, self._answer = self._answer, None, None
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        if self._stream is not None:  # another thread may have launched the step, on another stream
            self._core.runner.follow_stream()
            answer.record_stream(self._stream)
        return answer

    # -- inside a step, the engine's lock held ----------------------------------------------------------------------

    def rollback_tokens(self, rows: LockstepRows, num_tokens: int) -> None:
        """Mark the last tokens of these rows as not computed."""
        self._take_back()
        self._places = None
        rows.crop(num_tokens)

    @property
    def is_orphan(self) -> bool:
        """Whether the call of these rows has ended."""
        return self._call() is None

    @property
    def is_waiting(self) -> bool:
        """Whether the caller waits for logits."""
        return self._asked is not None and self._answer is None

    @property
    def is_computing(self) -> bool:
        """Whether known tokens are still being computed, a chunk a step."""
        return self._chunks is not None

    def may_lose(self, other: LockstepBatch | None) -> bool:
        """Return whether `other` (None for the scheduler's own sequences) may take the blocks of this batch."""
        if self.rows is None or other is self:
            return False
        is_idle = not self.is_waiting and time.monotonic() - self._answered_at > _IDLE
        return is_idle or (other is not None and self.arrival > other.arrival)

    def give_back(self) -> None:
        """Free slots and blocks; the caller's next query computes the rows again."""
        if self.rows is not None:
            self.rows.free()
        self.lose()

    def lose(self) -> None:
        """Forget slots and blocks, which are freed or whose scheduler was dropped."""
        self.rows, self._chunks, self._logits, self._places, self._ahead = None, None, [], None, None

    def invalidate_prefix(self) -> None:
        """Exclude these rows from the prefix cache: they mix keys and values of before and after a model change."""
        self._version, self.has_checked_adapters = None, False
        for sequence in self.rows.sequences if self.rows is not None else ():
            sequence.is_mixed = True

    def fail(self, error: Exception) -> None:
        """Answer the open query with an exception, which is raised to the caller."""
        self._answered_at, self._answer = time.monotonic(), error

    def prepare(self) -> StepPlan | None:
        """Work on the open query: run at most one forward of this batch, or return decode rows to join the next step.

        Raises:
            OutOfBlocksError: blocks are short, and the scheduler has no sequence left to preempt.
        """
        assert self._asked is not None
        self._save_ended()
        try:
            if self.rows is None:
                self._begin()
            if self._chunks is not None and next(self._chunks, self) is not self:
                return None
        except OutOfBlocksError:
            self.give_back()
            raise
        assert self.rows is not None
        runner, num_new = self._core.runner, self._asked.shape[1]
        runner.follow_stream()
        if self._stream is not None and self._stream != (current := torch.cuda.current_stream(runner.device)):
            current.wait_stream(self._stream)  # the caller's stream may still compute the tokens
        if num_new == 0:
            logits, self._logits = torch.cat(self._logits), []  # of the last known token of every row
            self.answer(logits)
            return None
        if num_new > 1:
            self._core.model_changed()
            self._take_back()
        self._logits = []
        plan, self._ahead = self._ahead, None
        if plan is None:
            plan = self.rows.decode_plan(num_new)
        self._set_tokens(plan, self._asked.to(runner.device))
        if num_new == 1:
            return plan
        self.answer(runner.logits(plan, [], of_every_token=True))
        return None

    def plan_ahead(self) -> None:
        """Plan the next token of every row ahead, while no other rows or requests compete for blocks."""
        if self.rows is None or self._is_reordered or self._count >= self._most_new:
            return
        with suppress(OutOfBlocksError):  # raised again by the query for the next token, if one comes
            self._ahead = self.rows.decode_plan()
            self._core.runner.make_ready(self._ahead)

    def _take_back(self) -> None:
        """Drop the plan that was made ahead, with the blocks of its tokens."""
        if self._ahead is not None and self.rows is not None:
            self._ahead = None
            self.rows.crop(1)

    def answer(self, logits: torch.Tensor) -> None:
        """Answer the open query with ``logits`` [R * n, V] of the rows' n new tokens (n = 0: of the last known one)."""
        assert self._asked is not None
        count, num_new = self._asked.shape
        if num_new:
            if self._tokens is None:
                self._tokens = torch.zeros(count, self._most_new, dtype=torch.int32, device=self._core.device)
            self._tokens[:, self._count : self._count + num_new] = self._asked
        logits = logits.view(count, max(1, num_new), -1)
        self._core.totals["generated"] += count * max(1, num_new)
        self.is_short, self._answered_at = False, time.monotonic()
        # In one statement, without a call: an interrupt in between would have the same tokens computed twice.
        self._count, self._answer = self._count + num_new, logits

    def _save_ended(self) -> None:
        """Save the states of sequences that ended, before rows take their slots and blocks."""
        core = self._core
        if core.scheduler is None or (snapshots := core.scheduler.snapshots) is None:
            return
        ended = snapshots.take_ended()
        try:
            saved_states.save_all(core.runner.cache, ended)
        except BaseException:
            snapshots.drop([move.snapshot for move in ended])
            raise

    def _begin(self) -> None:
        """Get slots for the rows, and begin to compute all tokens known so far."""
        core = self._core
        arrivals = arrivals_of(self._specs)
        core.receive(arrivals)
        self.rows = LockstepRows(core.scheduler_or_build(), arrivals, self._max_tokens)
        self._chunks, self._logits = self._compute(self.rows), []

    def _compute(self, rows: LockstepRows) -> Iterator[None]:
        """Compute the known tokens, a part a step; equal prompts once, and then each row has a slot of its own."""
        core, max_length = self._core, self._max_tokens
        plans = rows.prompt_plans()
        while not rows.has_planned_prompts:
            plan = next(plans)
            settings = [SlotRow.of(max_length=max_length, adapter=seq.adapter) for seq in plan.admitted]
            self._logits.append(core.runner.logits(plan, settings))
            core.totals["steps"] += 1
            core.totals["prefill"] += plan.num_tokens
            if rows.has_planned_prompts:
                next(plans, None)  # finish the generator, so that the blocks of its last plan stay published
            else:
                yield
        core.trust_cache()
        if self._count == 0:
            self._version = core.weights_version
        if (moves := rows.fork()) is not None:
            self._follow(rows, moves)
            # The slots may hold the state of earlier requests.
            core.runner.admit(rows.sequences, [SlotRow.of(max_length=max_length, adapter=adapter)
                                               for adapter in self.adapters])
            self._logits = [torch.cat(self._logits)[upload(moves.parents, core.device)]]
        # Tokens after the prompts, of rows that lost their blocks: behind the fork, so that equal prompts share blocks.
        first, most = 0, max(1, rows.max_step_tokens // len(rows))
        while first < self._count:
            yield
            assert self._tokens is not None
            columns = self._tokens[:, first : min(first + most, self._count)]
            first += columns.shape[1]
            plan = rows.decode_plan(columns.shape[1])
            self._set_tokens(plan, columns)
            core.runner.logits(plan, [])
            core.totals["steps"] += 1
            core.totals["prefill"] += plan.num_tokens
        self._chunks = None

    def _set_tokens(self, plan: StepPlan, tokens: torch.Tensor) -> None:
        """Write the tokens of a plan, which is to compute them, to the device."""
        if self._places is None:
            slots_and_starts = np.stack([plan.slots, plan.start]).astype(np.int64)
            self._places = upload(slots_and_starts, self._core.device)
        slots, starts = self._places
        self._core.runner.state.set_tokens(slots, starts, tokens)
        starts += tokens.shape[1]

    def _gather(self, rows: LockstepRows, length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        runner = self._core.runner
        size, positions = runner.block_size, np.full((len(rows), length), -1, np.int64)
        for line, seq, count in zip(positions, rows.sequences, rows.lengths.tolist(), strict=True):
            slots = np.array(seq.block_table)[:, None] * size + np.arange(size)
            line[length - count :] = slots.ravel()[:count]
        index = upload(positions, runner.device)
        empty = (index < 0)[:, :, None, None]

        def gather(pages: torch.Tensor) -> torch.Tensor:
            return pages.flatten(0, 1)[index.clamp(min=0)].masked_fill(empty, 0).transpose(1, 2).contiguous()

        return [(gather(keys), gather(values)) for keys, values in runner.cache.layers]

    def _follow(self, rows: LockstepRows, moves: RowMoves) -> None:
        """Copy blocks and write block tables on the device after rows moved."""
        runner = self._core.runner
        runner.follow_stream()
        if moves.sources:
            sources, targets = upload(np.array([moves.sources, moves.targets], np.int64), runner.device)
            runner.cache.copy_blocks(sources, targets)
        if rows.have_states:
            slots = upload(rows.slots[: len(rows)].astype(np.int64), runner.device)
            runner.cache.states.move(slots[upload(moves.parents, runner.device)], slots)
        runner.follow_rows(rows.sequences)
