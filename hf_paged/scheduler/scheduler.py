"""Decides for every step which sequence computes how many tokens in which blocks, and commits sampled tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container
from collections.abc import Sequence as Seq

import numpy as np

from hf_paged.scheduler.kv_cache_manager import KVCacheManager
from hf_paged.scheduler.plan import (
    NO_DRAFTS,
    BlockUpdates,
    CommitResult,
    Drafts,
    PrefillRows,
    RowColumns,
    SchedulerConfig,
    StepPlan,
    confirmed,
    guessing_rows,
)
from hf_paged.scheduler.prefix_tree import PrefixTree
from hf_paged.scheduler.sequence import RunningTable, Sequence, Status, WaitingQueue
from hf_paged.scheduler.snapshots import SnapshotCache

WAITING_REASONS = ("slots", "blocks", "step", "preempted", "kernels")
_NONE = np.empty(0, np.int32)
NO_UPDATES = BlockUpdates(_NONE, _NONE, _NONE)


class Scheduler:
    """Continuous batching over a paged KV cache: waiting, running and finished sequences, and the plan of each step.

    After an asynchronous exception (Ctrl-C) in a call the state may be inconsistent; make a new scheduler then.

    `schedule` may run one step ahead of `commit`: the input token of a decode row is then not known on the host yet.
    Plans are committed in the order of their creation.

    Args:
        config: Sizes.
        on_shortage: Called with the number of missing blocks before a sequence is preempted or fails for lack of
            blocks; returns the new total number of blocks.
        on_few_slots: Called with the total number of slots needed, if lockstep rows hold some of them; returns the new
            total number of slots.
        on_stuck: Called if no sequence is left to preempt. Returns True if lockstep rows hold blocks, or have just
            released some, so that waiting may help.
    """

    def __init__(self, config: SchedulerConfig, on_shortage: Callable[[int], int] | None = None,
                 on_few_slots: Callable[[int], int] | None = None, on_stuck: Callable[[], bool] | None = None) -> None:
        self.config = config
        self.kv_cache_manager = KVCacheManager(config)
        self.prefix_tree = PrefixTree(config.block_size, config.group_prefixes)
        self.snapshots: SnapshotCache | None = None  # of recurrent states
        if config.num_snapshots is not None and config.enable_prefix_caching:
            self.snapshots = SnapshotCache(config.num_snapshots, self.kv_cache_manager.block_pool, config.block_size,
                                           whole_prompts=config.whole_prompts, least_chunk=config.least_chunk)
        self.num_preemptions = 0  # for lack of blocks
        self._table = RunningTable(config.max_num_seqs)
        self._waiting = WaitingQueue()
        self._requests: dict[str, Sequence] = {}  # unfinished sequences by request id
        self._num_scored = 0  # unfinished requests with max_new_tokens 0
        self._partial: Sequence | None = None  # in chunked prefill; at most one, since it takes the whole budget
        self._in_flight: deque[StepPlan] = deque()
        self._failed: list[Sequence] = []
        # The sequence last found short of blocks, its key, and the `BlockPool.num_gains` at which it may fit.
        self._short: tuple[Sequence, bytes, int] | None = None
        self._num_arrived = 0
        self._on_shortage, self._on_few_slots = on_shortage, on_few_slots
        self._on_stuck = on_stuck if on_stuck is not None else lambda: False
        # Columns of a plan without prefill, shared by all such plans and therefore read-only.
        self._ones = np.ones(config.max_num_batched_tokens, np.int32)
        self._trues = np.ones(config.max_num_batched_tokens, bool)
        self._ones.flags.writeable = self._trues.flags.writeable = False

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence. Raises ValueError if its id is taken or its prompt leaves no room for a token."""
        if seq.request_id in self._requests:
            raise ValueError(f"request_id {seq.request_id!r} belongs to an unfinished request")
        if seq.num_prompt_tokens >= self.config.max_model_len:
            raise ValueError(
                f"request {seq.request_id!r}: the prompt has {seq.num_prompt_tokens} tokens; max_model_len "
                f"({self.config.max_model_len}) must leave room for at least one more"
            )
        seq.arrival = self._num_arrived
        self._num_arrived += 1
        self._requests[seq.request_id] = seq
        self._num_scored += not seq.max_new_tokens
        self._waiting.push(seq)

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence now; has no effect on a sequence that is finished or belongs to another scheduler.

        Tokens in flight are dropped; blocks are freed once the plans that contain the sequence are committed.
        """
        if self._requests.get(seq.request_id) is seq:
            self._finish(seq, reason)

    def hold(self, seq: Sequence) -> None:
        """Keep a waiting sequence out of steps until `release`; has no effect on one that runs, ended or is held."""
        if self._waits(seq) and seq.request_id not in self._waiting.held:
            self._waiting.hold(seq)

    def release(self, seq: Sequence) -> None:
        """Let a held sequence run in its turn; has no effect on any other sequence."""
        if self._waiting.held.get(seq.request_id) is seq:
            self._waiting.release(seq)

    def _waits(self, seq: Sequence) -> bool:
        return self._requests.get(seq.request_id) is seq and seq.status is Status.WAITING

    def would_hit(self, seq: Sequence) -> bool:
        """Return whether a sequence that waits could go on behind tokens that were computed for others."""
        hits = self.kv_cache_manager.get_computed_blocks(seq)[0]
        return bool(hits) or (self.snapshots is not None and self.snapshots.find(seq, hits) is not None)

    def take_failed(self) -> list[Sequence]:
        """Return the sequences that `schedule` finished with ``"error"`` since the last call: the pool is too small."""
        failed, self._failed = self._failed, []
        return failed

    def preempt_all(self, *, but_keepers: bool = False) -> None:
        """Return every running sequence to waiting and drop the plans in flight, unpublishing their blocks.

        Args:
            but_keepers: The model changed between two steps, with no plan in flight: a sequence with `keeps_computed`
                continues with its computed blocks, and blocks that it fills from now on are never published.
        """
        assert not (but_keepers and self._in_flight)
        pool, table = self.kv_cache_manager.block_pool, self._table
        for plan in self._in_flight:
            pool.unpublish(plan.published)
            if self.snapshots is not None and plan.states is not None:
                self.snapshots.drop(plan.states.saved())
            for seq in plan.sequences:
                seq.num_in_flight = 0
        self._in_flight.clear()
        table.in_flight[:] = 0
        # Newest first, so that the oldest sequences' cached blocks are evicted last.
        for seq in sorted(table.tenants(), key=lambda seq: seq.rank, reverse=True):
            if seq.status is Status.FINISHED:
                self._release(seq.slot)
            elif but_keepers and seq.keeps_computed:
                seq.is_mixed = True
            else:
                self._send_back(seq)

    def rollback(self, plan: StepPlan) -> None:
        """Undo a plan whose launch raised: unpublish its blocks and return all running sequences to waiting.

        An older uncommitted plan is dropped too. Raises ValueError if this plan is not in flight.
        """
        if not any(plan is other for other in self._in_flight):
            raise ValueError("the plan is not in flight")
        self.preempt_all()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        return len(self._waiting.held)

    def waiting_by_reason(self) -> dict[str, int]:
        """Return the number of waiting sequences for each of `WAITING_REASONS`.

        "kernels": the sequence is held. "preempted": it ran and had to release its blocks. The others wait in order for
        one reason: "slots" (``max_num_seqs`` are running), "blocks" (too few are free for the first of them), else
        "step": the next step admits them.
        """
        counts = dict.fromkeys(WAITING_REASONS, 0)
        counts["kernels"] = self.num_held
        waiting = [seq for seq in self._waiting.sequences() if seq.request_id not in self._waiting.held]
        counts["preempted"] = sum(seq.was_admitted for seq in waiting)
        first = self._waiting.peek()
        if first is not None:
            reason = "step"
            if self._table.num_tenants >= self.config.max_num_seqs:
                reason = "slots"
            elif self.kv_cache_manager.num_blocks_for(first.num_tokens) > self.num_free_blocks:
                reason = "blocks"
            counts[reason] = len(waiting) - counts["preempted"]
        return counts

    @property
    def num_running(self) -> int:
        return len(self._requests) - len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        return self._table.num_free_slots

    def take_slots(self, count: int) -> list[int]:
        """Lend slots to rows that the scheduler does not own, until `give_slots`; may raise the number of slots.

        Raises:
            MemoryError: If too few slots are free and there is no memory for more.
        """
        if self._table.num_free_slots < count:
            self._ask_for_slots(count)
        if (free := self._table.num_free_slots) < count:
            raise MemoryError(f"{count} rows need a slot each, {free} are free, and there is no memory for more")
        return self._table.take(count)

    def give_slots(self, slots: list[int]) -> None:
        self._table.give(slots)

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks in the pool, the null block included."""
        return self.kv_cache_manager.block_pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self.kv_cache_manager.block_pool.num_free

    def grow(self, num_blocks: int) -> None:
        """Raise the total number of blocks; never lowers it."""
        self.kv_cache_manager.block_pool.grow(num_blocks)

    def reset_prefix_cache(self) -> bool:
        """Drop all cached prefixes; returns False, without effect, while a block is in use."""
        if not self.kv_cache_manager.block_pool.reset():
            return False
        if self.snapshots is not None:
            self.snapshots.clear()
        return True

    def start_over(self) -> bool:
        """Drop cached prefixes and counts; returns False, without effect, if a sequence, plan or lent slot is left."""
        table, manager = self._table, self.kv_cache_manager
        if self._requests or self._in_flight or self._failed or table.num_tenants or table.num_lent:
            return False
        if not self.reset_prefix_cache():
            return False
        self.num_preemptions = manager.prefix_cache_queries = manager.prefix_cache_hits = 0
        return True

    def schedule(self, drafts: Drafts = NO_DRAFTS) -> StepPlan | None:
        """Plan a step; returns None if there is nothing to compute (before the next commit).

        Every sequence after its prefill gets a decode row. Only if no block is free for it, it skips a step before it
        preempts another sequence, since its token in flight may be its last.

        Args:
            drafts: Draft tokens of sequences with no token in flight. Each draft gets a decode row, as far as the token
                budget and free blocks allow without preemption, and in at most half of the remaining budget if a prompt
                waits; such a sequence is not scheduled again before the commit.

        Raises:
            RuntimeError: If two plans wait for their commit.
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
            if short:  # some sequences were preempted, others wait for their block
                slots = np.flatnonzero(table.decoding & (table.capacity > table.scheduled))
                start = table.scheduled[slots]
        table.scheduled[slots] = start + 1
        table.decoding[slots] = start + 2 < table.limit[slots]
        guesses: list[Seq[int]] = []
        if drafts:
            guesses, extension = self._fitting(drafts, slots, start)
            updates = BlockUpdates(*map(np.concatenate, zip(updates, extension, strict=True)))

        room = self.config.max_num_batched_tokens - len(slots) - sum(map(len, guesses))
        prefills = PrefillRows(room if len(slots) else self.config.most_chunk, self.config.least_chunk)
        if self._partial is not None and prefills.room:
            self._add_chunk(self._partial, prefills)
        if not short:
            self._admit(prefills)
        if not len(slots) and not prefills.sequences:
            return None
        plan = self._make_plan(slots, start, updates, prefills, guesses)
        table.in_flight[plan.slots] += 1
        self._in_flight.append(plan)
        return plan

    def _fitting(self, drafts: Drafts, slots: np.ndarray, start: np.ndarray) -> tuple[list[Seq[int]], BlockUpdates]:
        """Return for each decode row the drafts that fit, or an empty list if no draft does, and their new blocks."""
        table, size = self._table, self.config.block_size
        room, num_free = self.config.max_num_batched_tokens - len(slots), self.num_free_blocks
        if self._partial is not None or self._waiting:
            room //= 2  # prompts go on beside guesses
        guesses: list[Seq[int]] = []
        needy: list[int] = []
        for slot, position in zip(slots.tolist(), start.tolist(), strict=True):
            tokens = drafts.get(slot, ())
            if tokens:
                if table.in_flight[slot]:
                    raise ValueError(f"drafts for slot {slot}, whose last token is in flight")
                held = int(table.capacity[slot])
                tokens = tokens[: max(0, min(room, int(table.limit[slot]) - position - 2))]
                if position + len(tokens) >= held:
                    if len(needy) < num_free:
                        needy.append(slot)
                        held += size
                    tokens = tokens[: held - position - 1]
            if tokens:
                room -= len(tokens)
                table.decoding[slot] = False
            guesses.append(tokens)
        return (guesses if any(guesses) else []), self._hand_out(needy) if needy else NO_UPDATES

    def _make_plan(self, slots: np.ndarray, start: np.ndarray, updates: BlockUpdates, prefills: PrefillRows,
                   guesses: list[Seq[int]]) -> StepPlan:
        sequences: list[Sequence] = [self._table.sequences[slot] for slot in slots.tolist()]
        slots, drafts, prompt_groups = slots.astype(np.int32), None, None
        if not guesses:
            groups = self.prefix_tree.groups(slots)
        else:
            copies = np.array([1 + len(tokens) for tokens in guesses])
            groups = self.prefix_tree.groups_of_copies(slots, copies, start)
            sequences = [seq for seq, count in zip(sequences, copies.tolist(), strict=True) for _ in range(count)]
            slots, start, drafts = guessing_rows(slots, start, guesses, copies)
        n = len(slots)
        rows = RowColumns(slots, self._ones[:n], start, start, self._trues[:n])
        if prefills.sequences:
            sequences += prefills.sequences
            columns = prefills.columns()
            prompt_groups = self.prefix_tree.groups_ahead(columns.slots, columns.start)
            rows = RowColumns(*map(np.concatenate, zip(rows, columns, strict=True)))
            if drafts is not None:
                drafts = np.concatenate([drafts, np.full(len(columns.slots), -1, np.int32)])
        return StepPlan(
            **rows._asdict(), sequences=sequences, num_decode_rows=n, admitted=prefills.admitted,
            block_updates=updates, tenancy=self._table.tenancy[rows.slots], published=prefills.published,
            prefix_tree=self.prefix_tree, groups=groups, prompt_groups=prompt_groups, drafts=drafts,
            states=None if self.snapshots is None else self.snapshots.take_moves(),
        )

    def _add_chunk(self, seq: Sequence, prefills: PrefillRows) -> None:
        table, slot = self._table, seq.slot
        start, target = int(table.scheduled[slot]), int(table.target[slot])
        end = target if self.config.whole_prompts else prefills.chunk_end(seq, start, target)
        write_from = max(start, seq.num_published * self.config.block_size)
        table.scheduled[slot] = end
        prefills.published += self.kv_cache_manager.publish(seq, table.tokens[slot], end)
        if self.snapshots is not None:
            self.snapshots.save_chunk(seq, table.tokens[slot], start, end)
        done = end == target
        table.decoding[slot] = done and end + 1 < int(table.limit[slot])
        self._partial = None if done else seq
        prefills.add(seq, start, end, write_from, done and seq.max_new_tokens > 0)
        if not done:
            prefills.room = 0

    def _has_slot(self) -> bool:
        """Return whether a slot is free for one more sequence; lent slots do not count against ``max_num_seqs``."""
        table = self._table
        if table.num_tenants >= self.config.max_num_seqs:
            return False
        if not table.num_free_slots:
            self._ask_for_slots(0)
        return table.num_free_slots > 0

    def _ask_for_slots(self, lent: int) -> None:
        """Request slots for ``max_num_seqs`` sequences, all lent slots and `lent` more."""
        if self._on_few_slots is not None:
            wanted = self.config.max_num_seqs + self._table.num_lent + lent
            if (found := self._on_few_slots(wanted)) > self._table.num_slots:
                self._table.grow(found)

    def _admit(self, prefills: PrefillRows) -> None:
        """Admit waiting sequences in order while the token budget, slots and blocks last."""
        manager, table = self.kv_cache_manager, self._table
        while prefills.room:
            seq = self._waiting.peek()
            if seq is None or seq.num_in_flight or not self._has_slot():
                return
            num_tokens = seq.num_tokens
            if table.num_tenants and (least := self._least_missing(seq)) > 0:
                if self.ask_for_blocks(least):
                    continue
                return
            hits, num_hit = manager.get_computed_blocks(seq)
            snapshot = None
            if self.snapshots is not None:
                snapshot = self.snapshots.find(seq, hits)
                num_hit = 0 if snapshot is None else snapshot.position
            if self.config.whole_prompts and prefills.sequences and num_tokens - num_hit > prefills.room:
                return
            if prefills.sequences and seq.chunk_end(num_hit, num_hit + 1) - num_hit > prefills.room:
                return
            if manager.allocate_slots(seq, num_tokens, hits) is None:
                missing = manager.shortage(seq, num_tokens, hits)
                if self.ask_for_blocks(missing):
                    continue
                if not table.num_tenants and self._on_stuck() and manager.shortage(seq, num_tokens, hits) <= 0:
                    continue
                if manager.num_blocks_for(num_tokens) < self.num_blocks:
                    self._short = seq, seq.cache_key, manager.block_pool.num_gains + missing
                    return  # it fits after others release blocks; later sequences do not overtake it
                self._fail(seq)
                continue
            self._waiting.pop()
            seq.block_hashes, self._short = [], None
            if not seq.was_admitted:
                seq.was_admitted = True
                manager.count_hit(seq, num_hit)
            capacity = len(seq.block_table) * self.config.block_size
            limit = min(self.config.max_model_len, seq.num_prompt_tokens + seq.max_new_tokens)
            self.prefix_tree.add(table.settle(seq, num_hit, capacity, limit), seq.block_table)
            if self.snapshots is not None:
                self.snapshots.admit(seq, hits, snapshot)
            prefills.admitted.append(seq)
            self._add_chunk(seq, prefills)

    def _least_missing(self, seq: Sequence) -> int:
        """Return a lower bound of the blocks that a waiting sequence lacks, without the slow prefix lookup."""
        if self._short is None or self._short[0] is not seq or self._short[1] != seq.cache_key:
            return 0
        return self._short[2] - self.kv_cache_manager.block_pool.num_gains

    def _extend_tables(self, needy: np.ndarray) -> tuple[BlockUpdates, bool]:
        """Allocate one block for each slot; the flag is True if too few were free and some slots got none."""
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
        self.prefix_tree.extended()
        index = np.array(slots, np.int32)
        table.capacity[index] += self.config.block_size
        return BlockUpdates(index, np.array(columns, np.int32), np.array(ids, np.int32))

    def _ration(self, needy: np.ndarray) -> BlockUpdates:
        """Give free blocks to the oldest sequences, and preempt the newest for sequences that cannot go on."""
        table, pool = self._table, self.kv_cache_manager.block_pool
        updates = []
        for slot in sorted(needy.tolist(), key=lambda slot: table.sequences[slot].rank):  # type: ignore[union-attr]
            seq = table.sequences[slot]
            while not pool.num_free and seq is not None and seq.slot == slot:
                # The token in flight may be the last: waiting for its commit avoids a needless preemption.
                if table.in_flight[slot] or not self._make_room_for(seq):
                    break
            if pool.num_free and table.decoding[slot]:
                updates.append(self._hand_out([slot]))
        if not updates:
            return NO_UPDATES
        return BlockUpdates(*(np.concatenate(column) for column in zip(*updates, strict=True)))

    def _make_room_for(self, seq: Sequence) -> bool:
        """Preempt the newest sequence, or fail `seq` if it is alone; returns False if neither is possible now."""
        others = [other for other in self._table.tenants() if other is not seq]
        if not others:
            if self._on_stuck():
                return self.num_free_blocks > 0
            self._fail(seq)
            return True
        # A sequence that has reached its end releases its blocks at the next commit anyway.
        victims = [other for other in others if self._table.decoding[other.slot] or other is self._partial]
        if not victims:
            return False
        self._preempt(max([seq, *victims], key=lambda victim: victim.rank))
        return True

    def make_room(self, missing: int) -> bool:
        """Grow the pool, else preempt, for rows that the scheduler does not own; returns False if neither works."""
        if self.ask_for_blocks(missing):
            return True
        victims = [seq for seq in self._table.tenants() if seq.status is not Status.FINISHED]
        if victims:
            self._preempt(max(victims, key=lambda victim: victim.rank))
        return bool(victims)

    def ask_for_blocks(self, missing: int) -> bool:
        before = self.num_blocks
        if self._on_shortage is not None:
            self.grow(self._on_shortage(missing))
        return self.num_blocks > before

    def commit(self, plan: StepPlan, tokens: np.ndarray, last: Container[int] = ()) -> CommitResult:
        """Append the tokens sampled by the oldest uncommitted plan.

        Args:
            plan: The oldest uncommitted plan.
            tokens: int64 [R]; read where ``plan.samples``. A negative token marks invalid logits: its sequence
                alone ends with ``"error"``.
            last: Rows after whose token drafts do not count, since the caller is going to end the sequence.

        Raises:
            ValueError: If an older plan is uncommitted.
        """
        if not self._in_flight or self._in_flight[0] is not plan:
            raise ValueError("plans are committed once each, in the order they were scheduled")
        self._in_flight.popleft()
        table = self._table
        slots, samples = plan.slots, plan.samples
        if plan.drafts is not None:
            samples = samples & confirmed(plan, tokens, last)
        present = table.tenancy[slots] == plan.tenancy
        finished: list[Sequence] = []
        late: list[int] = []
        if present.all():
            table.in_flight[slots] -= 1
        else:
            late = self._commit_absent(plan, np.flatnonzero(~present), samples, tokens, finished)
            table.in_flight[slots[present]] -= 1

        if self._num_scored:
            self._finish_scored(plan, present, finished)
        live = present & ~table.draining[slots]
        rows = np.flatnonzero(samples & live)
        slots, taken = slots[rows], tokens[rows]
        ended: list[tuple[int, str]] = []
        bad = taken < 0
        if bad.any():
            ended = [(slot, "error") for slot in slots[bad].tolist()]
            rows, slots, taken = rows[~bad], slots[~bad], taken[~bad]

        if rows.size:
            end = plan.start[rows] + plan.num_new_tokens[rows]  # all tokens up to here are computed
            table.tokens[slots, end] = taken
            table.known[slots] = end + 1  # if a slot has several rows, the last row wins
            if self.config.enable_prefix_caching:
                self._publish_decoded(slots, end)
            is_eos = (table.eos[slots] == taken[:, None]).any(axis=1)
            is_last = is_eos | (end + 1 >= table.limit[slots])
            ended += [(int(slots[i]), "eos" if is_eos[i] else "length") for i in np.flatnonzero(is_last).tolist()]
        if plan.drafts is not None:  # continue after the confirmed drafts
            slots = plan.slots[live & (plan.drafts >= 0)]
            table.scheduled[slots] = table.known[slots] - 1
            table.decoding[slots] = table.known[slots] < table.limit[slots]
        for slot, reason in ended:
            seq = table.sequences[slot]
            assert seq is not None
            if reason == "error":
                self.kv_cache_manager.unpublish(seq)  # later requests must not hit KV that led to invalid logits
                if self.snapshots is not None:
                    self.snapshots.clear()
            self._finish(seq, reason)
            finished.append(seq)
        if table.draining.any():
            for slot in np.flatnonzero(table.draining & (table.in_flight == 0)).tolist():
                self._retire(slot)
        if late:
            rows = np.sort(np.concatenate([rows, np.array(late, rows.dtype)]))
        return CommitResult(rows, finished)

    def _publish_decoded(self, slots: np.ndarray, end: np.ndarray) -> None:
        """Publish the block of each slot that is full with its `end` tokens; all of these tokens are known."""
        table = self._table
        for i in np.flatnonzero(end & (self.config.block_size - 1) == 0).tolist():
            seq = table.sequences[slots[i]]
            assert seq is not None
            self.kv_cache_manager.publish(seq, table.tokens[slots[i]], int(end[i]))

    def _commit_absent(self, plan: StepPlan, rows: np.ndarray, samples: np.ndarray, tokens: np.ndarray,
                       finished: list[Sequence]) -> list[int]:
        """Commit rows of sequences preempted since the plan was made; returns the rows with an appended token."""
        appended = []
        for row in rows.tolist():
            seq, token = plan.sequences[row], int(tokens[row])
            seq.num_in_flight -= plan.drafts is None or plan.drafts[row] < 0
            if seq.status is not Status.WAITING or not samples[row]:
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

    def _finish_scored(self, plan: StepPlan, present: np.ndarray, finished: list[Sequence]) -> None:
        """Finish sequences with max_new_tokens 0 whose prompt is computed."""
        for row in range(plan.num_decode_rows, len(plan.slots)):
            seq = plan.sequences[row]
            done = int(plan.start[row]) + int(plan.num_new_tokens[row]) == seq.num_prompt_tokens
            if present[row] and done and not seq.max_new_tokens and seq.status is Status.RUNNING:
                self._finish(seq, "length")
                finished.append(seq)

    def _finish(self, seq: Sequence, reason: str) -> None:
        if seq.status is Status.WAITING:
            self._waiting.count_out(seq)
        seq.finish_reason = reason
        seq.status = Status.FINISHED
        del self._requests[seq.request_id]
        self._num_scored -= not seq.max_new_tokens
        if seq is self._partial:
            self._partial = None
        slot = seq.slot
        if slot >= 0:
            seq.detach(seq.num_computed_tokens)
            seq.last_blocks = seq.block_table
            self._table.decoding[slot] = False
            self._table.draining[slot] = True
            if not self._table.in_flight[slot]:
                self._retire(slot)

    def _retire(self, slot: int) -> None:
        """Release a finished sequence whose steps have all been committed; a snapshot keeps its states."""
        seq, computed = self._table.sequences[slot], int(self._table.scheduled[slot])
        assert seq is not None
        # The step in flight at an abort computed a token that is not known here.
        is_known = seq.finish_reason != "error" and computed <= self._table.known[slot]
        if self.snapshots is not None and is_known and seq.max_new_tokens:
            self.snapshots.save_end(seq, self._table.tokens[slot], computed)
        self._release(slot)

    def _fail(self, seq: Sequence) -> None:
        self._finish(seq, "error")
        self._failed.append(seq)

    def _release(self, slot: int) -> None:
        """Release blocks and slot of a detached sequence."""
        seq = self._table.sequences[slot]
        assert seq is not None
        self.prefix_tree.remove(slot)
        self.kv_cache_manager.free(seq)
        self._table.vacate(slot)

    def _preempt(self, seq: Sequence) -> None:
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self._send_back(seq)

    def _send_back(self, seq: Sequence) -> None:
        """Move a running sequence back to waiting; keeps its output and drops its computed KV."""
        if seq is self._partial:
            self._partial = None
        seq.num_in_flight = int(self._table.in_flight[seq.slot])
        seq.detach(0)
        self._release(seq.slot)
        seq.status = Status.WAITING
        self._waiting.push(seq)
