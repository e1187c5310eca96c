"""Decides every step: who computes how many tokens in which blocks, and what becomes of the sampled tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hf_paged.scheduler.block_pool import KVBlock
from hf_paged.scheduler.plan import BlockUpdates, CommitResult, SchedulerConfig, StepPlan
from hf_paged.scheduler.request_book import RequestBook
from hf_paged.scheduler.sequence import Sequence, Status

_NONE = np.empty(0, np.int32)
NO_UPDATES = BlockUpdates(_NONE, _NONE, _NONE)


@dataclass(slots=True)
class _Prefills:
    """The prefill part of a plan in the making."""

    budget: int  # tokens the step may still take
    sequences: list[Sequence] = field(default_factory=list)
    columns: list[tuple[int, int, int, int, bool]] = field(default_factory=list)  # see `_make_plan`
    admitted: list[Sequence] = field(default_factory=list)
    published: list[KVBlock] = field(default_factory=list)


class Scheduler(RequestBook):
    """Continuous batching over a paged KV cache.

    `schedule` may run one step ahead of `commit`: the input token of a decode row then still is on its way. Plans are
    committed in the order they were made.

    Args:
        config: Sizes.
        on_shortage: Called with the number of missing blocks before anyone is preempted or refused for want of them;
            returns how many blocks there are now, in total.
    """

    def __init__(self, config: SchedulerConfig, on_shortage: Callable[[int], int] | None = None) -> None:
        super().__init__(config)
        self._on_shortage = on_shortage
        # Columns of a plan that only decodes: shared by all such plans, so nobody may write to them.
        self._ones = np.ones(config.max_num_seqs, np.int32)
        self._trues = np.ones(config.max_num_seqs, bool)
        self._ones.flags.writeable = self._trues.flags.writeable = False

    def schedule(self) -> StepPlan | None:
        """Plan a step, or None if there is nothing to compute before a commit (or at all).

        Every sequence past its prefill gets a decode row. Only one that needs a block while none is free sits out a
        step, to see whether its token in flight is its last, before it preempts anyone.

        Raises:
            RuntimeError: Two plans wait for their commit.
        """
        if len(self._in_flight) > 1:
            raise RuntimeError("two plans wait for their commit; a third would outrun the known tokens")
        table = self._table
        slots = np.flatnonzero(table.decoding)
        start = table.scheduled[slots]
        short = False
        updates = NO_UPDATES
        needy = slots[table.capacity[slots] <= start]
        if needy.size:
            updates, short = self._extend_tables(needy)
            if short:  # some were preempted, others must wait for their block
                slots = np.flatnonzero(table.decoding & (table.capacity > table.scheduled))
                start = table.scheduled[slots]
        table.scheduled[slots] = start + 1
        table.decoding[slots] = start + 2 < table.limit[slots]

        prefills = _Prefills(self.config.max_num_batched_tokens - len(slots))
        if self._partial is not None and prefills.budget:
            self._add_chunk(self._partial, prefills)
        if not short:
            self._admit(prefills)
        if not len(slots) and not prefills.sequences:
            return None
        plan = self._make_plan(slots, start, updates, prefills)
        table.in_flight[plan.slots] += 1
        self._in_flight.append(plan)
        return plan

    def _make_plan(self, slots: np.ndarray, start: np.ndarray, updates: BlockUpdates, prefills: _Prefills) -> StepPlan:
        n = len(slots)
        sequences: list[Sequence] = [self._table.sequences[slot] for slot in slots.tolist()]
        slots = slots.astype(np.int32)
        num_new, write_from, samples = self._ones[:n], start, self._trues[:n]
        if prefills.columns:
            more_slots, more_new, more_start, more_write_from, more_samples = zip(*prefills.columns, strict=True)
            sequences += prefills.sequences
            slots = np.concatenate([slots, np.array(more_slots, np.int32)])
            num_new = np.concatenate([num_new, np.array(more_new, np.int32)])
            write_from = np.concatenate([start, np.array(more_write_from, np.int32)])
            start = np.concatenate([start, np.array(more_start, np.int32)])
            samples = np.concatenate([samples, np.array(more_samples, bool)])
        tenancy = self._table.tenancy[slots]
        return StepPlan(
            sequences, slots, num_new, start, write_from, samples, n,
            prefills.admitted, updates, tenancy, prefills.published,
        )  # fmt: skip

    def _add_chunk(self, seq: Sequence, prefills: _Prefills) -> None:
        """Schedule as much of a prefill as the budget allows."""
        table, slot = self._table, seq.slot
        start, target = int(table.scheduled[slot]), int(table.target[slot])
        count = min(target - start, prefills.budget)
        end = start + count
        write_from = max(start, seq.num_published * self.config.block_size)
        table.scheduled[slot] = end
        prefills.published += self.kv_cache_manager.publish(seq, table.tokens[slot], end)
        done = end == target
        table.decoding[slot] = done and end + 1 < int(table.limit[slot])
        self._partial = None if done else seq
        prefills.sequences.append(seq)
        prefills.columns.append((slot, count, start, write_from, done))
        prefills.budget -= count

    def _admit(self, prefills: _Prefills) -> None:
        """Give slots and blocks to waiting sequences, first come first served, while everything lasts."""
        manager, table = self.kv_cache_manager, self._table
        while prefills.budget and table.num_free_slots:
            seq = self._waiting.peek()
            if seq is None or seq.num_in_flight:
                return
            num_tokens = seq.num_tokens
            hits, num_hit = manager.get_computed_blocks(seq)
            if manager.allocate_slots(seq, num_tokens, hits) is None:
                if self.ask_for_blocks(manager.shortage(seq, num_tokens, hits)):
                    continue
                if manager.num_blocks_for(num_tokens) < self.num_blocks:
                    return  # it fits once others are gone; nobody overtakes it
                self._fail(seq)
                continue
            self._waiting.pop()
            seq.block_hashes = []
            if not seq.was_admitted:
                seq.was_admitted = True
                manager.count_hit(seq, num_hit)
            capacity = len(seq.block_table) * self.config.block_size
            limit = min(self.config.max_model_len, seq.num_prompt_tokens + seq.max_new_tokens)
            table.settle(seq, num_hit, capacity, limit)
            prefills.admitted.append(seq)
            self._add_chunk(seq, prefills)

    def _extend_tables(self, needy: np.ndarray) -> tuple[BlockUpdates, bool]:
        """One more block for each of these slots. The flag tells that there were too few, and not all got one."""
        pool = self.kv_cache_manager.block_pool
        missing = len(needy) - pool.num_free
        short = missing > 0
        if short and self.ask_for_blocks(missing):
            short = len(needy) > pool.num_free
        if short:
            return self._ration(needy), True
        return self._hand_out(needy.tolist()), False

    def _hand_out(self, slots: list[int]) -> BlockUpdates:
        table = self._table
        columns, ids = [], []
        for slot, block in zip(slots, self.kv_cache_manager.block_pool.allocate(len(slots)), strict=True):
            block_table = table.sequences[slot].block_table  # type: ignore[union-attr]
            columns.append(len(block_table))
            ids.append(block.block_id)
            block_table.append(block.block_id)
        index = np.array(slots, np.int32)
        table.capacity[index] += self.config.block_size
        return BlockUpdates(index, np.array(columns, np.int32), np.array(ids, np.int32))

    def _ration(self, needy: np.ndarray) -> BlockUpdates:
        """Give the free blocks to the oldest, and preempt the newest for those that can't go on."""
        table, pool = self._table, self.kv_cache_manager.block_pool
        updates = []
        for slot in sorted(needy.tolist(), key=lambda slot: table.sequences[slot].rank):  # type: ignore[union-attr]
            seq = table.sequences[slot]
            while not pool.num_free and seq is not None and seq.slot == slot:
                # Its token in flight may be its last: it waits for that commit rather than preempt for nothing.
                if table.in_flight[slot] or not self._make_room_for(seq):
                    break
            if pool.num_free and table.decoding[slot]:
                updates.append(self._hand_out([slot]))
        if not updates:
            return NO_UPDATES
        return BlockUpdates(*(np.concatenate(column) for column in zip(*updates, strict=True)))

    def _make_room_for(self, seq: Sequence) -> bool:
        """Preempt the newest sequence, maybe this one, or fail this one if it is alone. False: nothing to take."""
        others = [other for other in self._table.tenants() if other is not seq]
        if not others:
            self._fail(seq)
            return True
        # Who has reached its end gives its blocks back by itself at the next commit.
        victims = [other for other in others if self._table.decoding[other.slot] or other is self._partial]
        if not victims:
            return False
        self._preempt(max([seq, *victims], key=lambda victim: victim.rank))
        return True

    def ask_for_blocks(self, missing: int) -> bool:
        """Ask the owner of the pool for more; True if it grew."""
        before = self.num_blocks
        if self._on_shortage is not None:
            self.grow(self._on_shortage(missing))
        return self.num_blocks > before

    def commit(self, plan: StepPlan, tokens: np.ndarray) -> CommitResult:
        """Take in the tokens sampled by the oldest uncommitted plan.

        Args:
            plan: That plan.
            tokens: int64 [R]; read where ``plan.samples``. A negative one says that the row's logits were invalid:
                its sequence ends alone with ``"error"``.

        Raises:
            ValueError: Another plan is due.
        """
        if not self._in_flight or self._in_flight[0] is not plan:
            raise ValueError("plans are committed once each, in the order they were scheduled")
        self._in_flight.popleft()
        table = self._table
        slots = plan.slots
        present = table.tenancy[slots] == plan.tenancy
        finished: list[Sequence] = []
        late: list[int] = []
        if present.all():
            table.in_flight[slots] -= 1
        else:
            late = self._commit_absent(plan, np.flatnonzero(~present), tokens, finished)
            table.in_flight[slots[present]] -= 1

        rows = np.flatnonzero(plan.samples & present & ~table.draining[slots])
        slots, taken = slots[rows], tokens[rows]
        bad = taken < 0
        if bad.any():
            for slot in slots[bad].tolist():
                self._finish_bad(slot, finished)
            rows, slots, taken = rows[~bad], slots[~bad], taken[~bad]

        if rows.size:
            position = table.known[slots]
            table.ensure_columns(int(position.max()) + 1)
            table.tokens[slots, position] = taken
            table.known[slots] = position + 1
            if self.config.enable_prefix_caching:
                self._publish_decoded(plan, rows, slots)
            is_eos = (table.eos[slots] == taken[:, None]).any(axis=1)
            ended = is_eos | (position + 1 >= table.limit[slots])
            for i in np.flatnonzero(ended).tolist():
                seq = table.sequences[slots[i]]
                assert seq is not None
                self._finish(seq, "eos" if is_eos[i] else "length")
                finished.append(seq)
        if table.draining.any():
            for slot in np.flatnonzero(table.draining & (table.in_flight == 0)).tolist():
                self._release(slot)
        if late:
            rows = np.sort(np.concatenate([rows, np.array(late, rows.dtype)]))
        return CommitResult(rows, finished)

    def _publish_decoded(self, plan: StepPlan, rows: np.ndarray, slots: np.ndarray) -> None:
        """Publish the blocks that decode rows of this plan filled: all their tokens are known by now."""
        table = self._table
        end = plan.start[rows] + plan.num_new_tokens[rows]
        for i in np.flatnonzero(end & (self.config.block_size - 1) == 0).tolist():
            seq = table.sequences[slots[i]]
            assert seq is not None
            self.kv_cache_manager.publish(seq, table.tokens[slots[i]], int(end[i]))

    def _commit_absent(
        self, plan: StepPlan, rows: np.ndarray, tokens: np.ndarray, finished: list[Sequence]
    ) -> list[int]:
        """Rows whose sequence was preempted after the plan was made; returns those whose token was appended."""
        appended = []
        for row in rows.tolist():
            seq, token = plan.sequences[row], int(tokens[row])
            seq.num_in_flight -= 1
            if seq.status is not Status.WAITING or not plan.samples[row]:
                continue
            reason: str | None = "error"
            if token >= 0:
                seq.append(token)
                appended.append(row)
                reason = seq.reached_end(self.config.max_model_len)
            if reason is not None:
                self._finish(seq, reason)
                finished.append(seq)
        return appended

    def _finish_bad(self, slot: int, finished: list[Sequence]) -> None:
        seq = self._table.sequences[slot]
        assert seq is not None
        self.kv_cache_manager.unpublish(seq)  # KV that gave invalid logits is not worth a hit
        self._finish(seq, "error")
        finished.append(seq)
