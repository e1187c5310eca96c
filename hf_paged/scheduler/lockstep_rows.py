"""Slots and blocks of the rows of one lockstep call, whose tokens stock's decoding loop picks.

The rows have slots and blocks beside the scheduler's own sequences and join the steps that the scheduler plans.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from hf_paged.scheduler.block_pool import KVBlock
from hf_paged.scheduler.plan import BlockUpdates, PrefillRows, StepPlan
from hf_paged.scheduler.scheduler import NO_UPDATES, Scheduler
from hf_paged.scheduler.sequence import Sequence


class OutOfBlocksError(RuntimeError):
    """Raised if blocks are missing, the pool cannot grow, and the scheduler has no sequence left to preempt."""


class RowMoves(NamedTuple):
    """Moves for the device: new row i continues row ``parents[i]``; blocks ``sources`` are copied to ``targets``."""

    parents: np.ndarray
    sources: list[int]
    targets: list[int]


def blocks_together(arrivals: list[Sequence], max_new_tokens: int, block_size: int) -> int:
    """Return the number of blocks that these rows may need while they step together."""
    # Equal rows share the full blocks of their prompt; the KV of the last token is never read.
    lengths = [seq.num_prompt_tokens for seq in arrivals]
    wanted = sum(len(prompt) // block_size for prompt, *_ in set(map(_kind, arrivals)))
    return wanted + sum(-(-(length + max_new_tokens - 1) // block_size) - length // block_size for length in lengths)


def _kind(seq: Sequence) -> tuple[tuple[int, ...], str | None, bytes]:
    """Return all that keys and values of a prompt depend on: its ids, its adapter, and what else they are keyed by."""
    return tuple(seq.prompt_token_ids), seq.adapter, seq.block_key(0, seq.num_prompt_tokens)


class LockstepRows:
    """R rows, each with a slot, a block table and a number of tokens whose KV is computed.

    Equal prompts under one adapter, which are fed the same, are one row until `fork`. After an OutOfBlocksError of
    `prompt_plans` only `free` may be called; any other method that raises this error may be called again.

    Args:
        scheduler: Owner of the slots and blocks.
        arrivals: Prompt of every row, with its adapter, its cache key and what it is fed; of equal ones the first is
            used up.
        max_tokens: Maximum number of tokens (prompt and output) of a row.

    Attributes:
        slots: int32 [R].
        lengths: int32 [current rows], leading tokens of each row whose KV is computed or is in the last plan.

    Raises:
        MemoryError: If there are too few slots and no memory for more.
    """

    def __init__(self, scheduler: Scheduler, arrivals: list[Sequence], max_tokens: int) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._tree = scheduler.prefix_tree
        self._size, self._whole_prompts = scheduler.config.block_size, scheduler.config.whole_prompts
        self.have_states = scheduler.config.num_snapshots is not None
        self._max_tokens = max_tokens
        numbers: dict[Any, int] = {}
        self._prompt_of = [numbers.setdefault(kind, len(numbers)) for kind in map(_kind, arrivals)]
        self.sequences = [arrivals[self._prompt_of.index(number)] for number in range(len(numbers))]
        self.lengths = np.zeros(len(numbers), np.int32)
        self._capacity: np.ndarray | None = None  # tokens that each row's blocks hold; None if not counted yet
        self._promised: list[KVBlock] = []  # blocks published by the last plan of `prompt_plans`
        self.slots = np.array(scheduler.take_slots(len(arrivals)), np.int32)

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def max_step_tokens(self) -> int:
        """How many tokens behind the prompts a step computes."""
        return 1 if self._whole_prompts else self._scheduler.config.max_num_batched_tokens

    def prompt_plans(self) -> Iterator[StepPlan]:
        """Yield plans that compute the prompts in chunks; each plan has to run before the next is requested.

        A row has ``samples`` in the plan that computes its last token; over all plans every row has it once, in order.

        Raises:
            OutOfBlocksError: If blocks are missing and cannot be freed.
        """
        config = self._scheduler.config
        plan = PrefillRows(config.most_chunk, config.least_chunk)
        for row, seq in enumerate(self.sequences):
            # Blocks alone do not say which states are behind them.
            hits, num_hit = ([], 0) if self.have_states else self._manager.get_computed_blocks(seq)
            self._allocate(seq, seq.num_prompt_tokens, hits)
            self._manager.count_hit(seq, num_hit)
            seq.slot, seq.block_hashes = int(self.slots[row]), []
            self._tree.add(seq.slot, seq.block_table)
            plan.admitted.append(seq)
            tokens = np.array(seq.prompt_token_ids, np.int32)
            start = num_hit
            while start < len(tokens):
                least = len(tokens) if self._whole_prompts else seq.chunk_end(start, start + 1)
                if plan.sequences and least - start > plan.room:
                    yield self._plan_of(plan)
                    self._promised = []
                    plan = PrefillRows(config.most_chunk, config.least_chunk)
                end = max(least, plan.chunk_end(seq, start, len(tokens)))
                plan.add(seq, start, end, max(start, seq.num_published * self._size), end == len(tokens))
                # Before the step, so that the next prompt hits what this plan computes.
                plan.published += self._manager.publish(seq, tokens, end)
                self._promised = plan.published
                self.lengths[row] = start = end
        yield self._plan_of(plan)
        self._promised = []

    @property
    def has_planned_prompts(self) -> bool:
        return all(seq.num_prompt_tokens <= length
                   for seq, length in zip(self.sequences, self.lengths.tolist(), strict=True))

    def _plan_of(self, prompts: PrefillRows) -> StepPlan:
        columns = prompts.columns()
        return StepPlan(
            **columns._asdict(), sequences=prompts.sequences, num_decode_rows=0, admitted=prompts.admitted,
            block_updates=NO_UPDATES, tenancy=np.zeros(len(columns.slots), np.int64), published=prompts.published,
            prompt_groups=self._tree.groups_ahead(columns.slots, columns.start),
        )

    def fork(self) -> RowMoves | None:
        """Give every prompt a row of its own again, after prefill; returns None if all prompts differ."""
        if len(self) == len(self.slots):
            return None
        return self.reorder(self._prompt_of)

    def decode_plan(self, num_new: int = 1) -> StepPlan:
        """Plan `num_new` more tokens of every row; only the device knows the tokens.

        Raises:
            OutOfBlocksError: If blocks are missing and cannot be freed.
            ValueError: If a row would exceed `max_tokens`.
        """
        start = self.lengths
        if int(start.max()) + num_new > self._max_tokens:
            raise ValueError(f"{int(start.max()) + num_new} tokens in a row that was made for {self._max_tokens}")
        updates = self._extend_tables(start + np.int32(num_new))
        self.lengths = start + np.int32(num_new)
        count = len(self)
        return StepPlan(
            sequences=self.sequences, slots=self.slots, num_new_tokens=np.full(count, num_new, np.int32), start=start,
            write_from=start, samples=np.zeros(count, bool), num_decode_rows=count if num_new == 1 else 0, admitted=[],
            block_updates=updates, tenancy=np.zeros(count, np.int64), published=[], prefix_tree=self._tree,
            groups=self._tree.groups(self.slots) if num_new == 1 else None,
            prompt_groups=self._tree.groups_ahead(self.slots, start) if num_new > 1 else None,
        )

    def _extend_tables(self, lengths: np.ndarray) -> BlockUpdates:
        """Allocate blocks for `lengths` tokens of the rows, or none with an OutOfBlocksError."""
        if self._capacity is None:
            self._capacity = np.array([len(seq.block_table) for seq in self.sequences], np.int32) * self._size
        needy = np.flatnonzero(self._capacity < lengths)
        if not needy.size:
            return NO_UPDATES
        missing = (lengths[needy] - self._capacity[needy] + np.int32(self._size - 1)) // self._size
        self._make_room(int(missing.sum()))
        self._capacity = None
        slots: list[int] = []
        columns: list[int] = []
        ids: list[int] = []
        for row in needy.tolist():
            seq = self.sequences[row]
            first = len(seq.block_table)
            new = self._allocate(seq, int(lengths[row]))
            slots += [seq.slot] * len(new)
            columns += range(first, first + len(new))
            ids += new
        self._tree.extended()
        return BlockUpdates(*(np.array(x, np.int32) for x in (slots, columns, ids)))

    def reorder(self, parents: list[int]) -> RowMoves:
        """Make row i continue row ``parents[i]``; the number of rows may grow up to the number of slots.

        Full blocks are shared. The last block, which is partly filled and will be written, stays with the parent's
        first child; every other child gets a copy.

        Raises:
            OutOfBlocksError: If blocks are missing and cannot be freed.
        """
        pool, self._capacity = self._manager.block_pool, None
        for row in set(range(len(self))) - set(parents):
            self._release(self.sequences[row])
        full = self.lengths // self._size
        self._make_room(sum((times - 1) * (len(self.sequences[parent].block_table) - int(full[parent]))
                            for parent, times in Counter(parents).items()))
        used: set[int] = set()
        children, sources, targets = [], [], []
        for parent in parents:
            child = self.sequences[parent]
            if parent in used:
                table, keep = child.block_table, int(full[parent])
                own = [block.block_id for block in pool.allocate(len(table) - keep)]
                pool.touch(pool.blocks[i] for i in table[:keep])
                sources += table[keep:]
                targets += own
                child = copy.copy(child)
                child.block_table = table[:keep] + own
            used.add(parent)
            children.append(child)
        moved = [row for row, child in enumerate(children) if row >= len(self) or child is not self.sequences[row]]
        for row in moved:
            self._tree.remove(int(self.slots[row]))
        for row in moved:
            children[row].slot = int(self.slots[row])
            self._tree.add(children[row].slot, children[row].block_table)
        self.sequences, self.lengths = children, self.lengths[parents]
        return RowMoves(np.array(parents, np.int64), sources, targets)

    def may_crop(self, num_tokens: int) -> bool:
        """Return whether every row, shortened by `num_tokens`, would next write into a private, unpublished block."""
        blocks = self._manager.block_pool.blocks
        return all(
            length >= seq.num_published * self._size
            and (length % self._size == 0 or blocks[seq.block_table[length // self._size]].ref_count == 1)
            for seq, length in zip(self.sequences, (self.lengths - num_tokens).tolist(), strict=True)
        )

    def crop(self, num_tokens: int) -> None:
        """Drop the last `num_tokens` tokens of every row; requires `may_crop`."""
        assert self.may_crop(num_tokens)
        self.lengths, self._capacity = self.lengths - np.int32(num_tokens), None
        blocks = self._manager.block_pool.blocks
        for seq, length in zip(self.sequences, self.lengths.tolist(), strict=True):
            keep = self._manager.num_blocks_for(length)
            if keep < len(seq.block_table):
                self._tree.remove(seq.slot)
                self._manager.block_pool.free([blocks[i] for i in reversed(seq.block_table[keep:])])
                del seq.block_table[keep:]
                self._tree.add(seq.slot, seq.block_table)

    def publish(self, tokens: np.ndarray) -> None:
        """Put every full block into the prefix cache. tokens: int32 [rows, at least the longest row]."""
        blocks = self._manager.block_pool.blocks
        for row, seq in enumerate(self.sequences):
            full = int(self.lengths[row]) // self._size
            while seq.num_published < full and (block := blocks[seq.block_table[seq.num_published]]).digest is not None:
                # An earlier row shares the block and has published it.
                seq.num_published += 1
                seq.prefix_id, seq.prefix_digest = block.prefix_id, block.digest
            self._manager.publish(seq, tokens[row], full * self._size)

    def free(self) -> None:
        """Release all blocks and slots; unpublishes blocks of the last prompt plan, which may not have run."""
        self._manager.block_pool.unpublish(self._promised)
        self._promised = []
        for seq in self.sequences:
            self._release(seq)
        self._scheduler.give_slots(self.slots.tolist())
        self.sequences = []

    def _allocate(self, seq: Sequence, num_tokens: int, hits: list[KVBlock] | None = None) -> list[int]:
        while (new := self._manager.allocate_slots(seq, num_tokens, hits or [])) is None:
            self._grow(self._manager.shortage(seq, num_tokens, hits or []))
        return new

    def _release(self, seq: Sequence) -> None:
        self._tree.remove(seq.slot)
        self._manager.free(seq)

    def _make_room(self, count: int) -> None:
        while (missing := count - self._manager.block_pool.num_free) > 0:
            self._grow(missing)

    def _grow(self, missing: int) -> None:
        if not self._scheduler.make_room(missing):
            raise OutOfBlocksError(f"{missing} blocks are missing, and the KV pool cannot grow")
