"""Rows of one call that step together: who holds which slots and blocks while somebody else picks the tokens.

They live beside the scheduler's own sequences, in slots and blocks of their own; the scheduler plans nothing meanwhile.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from hf_paged.scheduler.block_pool import KVBlock
from hf_paged.scheduler.plan import BlockUpdates, PrefillRows, StepPlan
from hf_paged.scheduler.scheduler import NO_UPDATES, Scheduler
from hf_paged.scheduler.sequence import Sequence


class OutOfBlocksError(RuntimeError):
    """The pool could not grow as far as its budget said that it could."""


class RowMoves(NamedTuple):
    """What the device has to follow: new row i is what row ``parents[i]`` was; blocks ``sources`` go to ``targets``."""

    parents: np.ndarray
    sources: list[int]
    targets: list[int]


def too_many_rows(scheduler: Scheduler, prompts: list[list[int]], max_new_tokens: int, max_blocks: int) -> str | None:
    """Why these rows cannot run all at once beside what runs now, or None. `max_blocks`: the pool at its largest."""
    if len(prompts) > scheduler.num_free_slots:
        return f"{len(prompts)} rows are to step together, and {scheduler.num_free_slots} of max_num_seqs are free"
    size = scheduler.config.block_size
    # Equal rows share the full blocks of their prompt; the last token's keys and values are never needed.
    wanted = sum(len(prompt) // size for prompt in set(map(tuple, prompts)))
    wanted += sum(-(-(len(prompt) + max_new_tokens - 1) // size) - len(prompt) // size for prompt in prompts)
    free = max_blocks - scheduler.num_blocks + scheduler.num_free_blocks
    if wanted > free:
        return f"rows that step together may need {wanted} blocks, and the KV pool has {free} for them"
    return None


class LockstepRows:
    """R rows, each with a slot, a block table and a number of tokens whose KV is computed.

    Equal prompts are one row until `fork`.

    Args:
        scheduler: Whose slots and blocks these rows take; it must not schedule while they are here.
        prompts: Token ids, at least one a row.
        max_tokens: Tokens (prompt and output) that a row may reach.
        cache_key: As in `Sequence`.

    Attributes:
        slots: int32 [R].
        lengths: int32 [rows now], leading tokens of each row whose KV is computed, or will be by the plan handed out.
    """

    def __init__(self, scheduler: Scheduler, prompts: list[list[int]], max_tokens: int, cache_key: bytes) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._size = scheduler.config.block_size
        self._max_tokens = max_tokens
        distinct: dict[tuple[int, ...], int] = {}
        self._prompt_of = [distinct.setdefault(tuple(prompt), len(distinct)) for prompt in prompts]
        self.sequences = [
            Sequence(f"lockstep-{i}", list(prompt), max_new_tokens=1, cache_key=cache_key)
            for i, prompt in enumerate(distinct)
        ]
        self.lengths = np.zeros(len(distinct), np.int32)
        self.slots = np.empty(0, np.int32)
        self.slots = np.array(scheduler.take_slots(len(prompts)), np.int32)

    def __len__(self) -> int:
        return len(self.sequences)

    def prompt_plans(self) -> Iterator[StepPlan]:
        """Plans that compute the prompts, in chunks; each has to run before the next is asked for.

        Rows whose last token a plan computes are those with ``samples``; over all plans every row once, in order.
        """
        plan = PrefillRows(self._scheduler.config.max_num_batched_tokens)
        for row, seq in enumerate(self.sequences):
            hits, num_hit = self._manager.get_computed_blocks(seq)
            self._allocate(seq, seq.num_prompt_tokens, hits)
            self._manager.count_hit(seq, num_hit)
            seq.slot, seq.block_hashes = int(self.slots[row]), []
            plan.admitted.append(seq)
            tokens = np.array(seq.prompt_token_ids, np.int32)
            start = num_hit
            while start < len(tokens):
                if not plan.room:
                    yield _plan_of(plan)
                    plan = PrefillRows(self._scheduler.config.max_num_batched_tokens)
                end = min(len(tokens), start + plan.room)
                plan.add(seq, start, end, max(start, seq.num_published * self._size), end == len(tokens))
                # At once, so that the next prompt hits what this plan computes.
                plan.published += self._manager.publish(seq, tokens, end)
                self.lengths[row] = start = end
        yield _plan_of(plan)

    def fork(self) -> RowMoves | None:
        """Once the prompts are computed: a row for every prompt again. None where all of them differ."""
        if len(self) == len(self.slots):
            return None
        return self.reorder(self._prompt_of)

    def decode_plan(self, num_new: int = 1) -> StepPlan:
        """Compute `num_new` more tokens of every row, which are known only to the device.

        Raises:
            OutOfBlocksError: as its name says; the rows hold what they held.
            ValueError: a row would exceed the length that these rows were made for.
        """
        start = self.lengths
        if int(start.max()) + num_new > self._max_tokens:
            raise ValueError(f"{int(start.max()) + num_new} tokens in a row that was made for {self._max_tokens}")
        slots: list[int] = []
        columns: list[int] = []
        ids: list[int] = []
        for row in np.flatnonzero(self._capacity() < start + num_new).tolist():
            seq = self.sequences[row]
            first = len(seq.block_table)
            new = self._allocate(seq, int(start[row]) + num_new)
            slots += [seq.slot] * len(new)
            columns += range(first, first + len(new))
            ids += new
        updates = BlockUpdates(*(np.array(x, np.int32) for x in (slots, columns, ids))) if ids else NO_UPDATES
        self.lengths = start + np.int32(num_new)
        count = len(self)
        return StepPlan(
            sequences=self.sequences, slots=self.slots, num_new_tokens=np.full(count, num_new, np.int32), start=start,
            write_from=start, samples=np.ones(count, bool), num_decode_rows=count if num_new == 1 else 0, admitted=[],
            block_updates=updates, tenancy=np.zeros(count, np.int64), published=[],
        )

    def reorder(self, parents: list[int]) -> RowMoves:
        """Row i becomes what row ``parents[i]`` was; there may be more rows than before, up to the number of slots.

        Full blocks are shared. The last block, which is not full and will be written, stays with the parent's first
        child; every other child gets a copy of its own.
        """
        pool = self._manager.block_pool
        for row in set(range(len(self))) - set(parents):
            self._manager.free(self.sequences[row])
        full = self.lengths // self._size
        used: set[int] = set()
        children, sources, targets = [], [], []
        for parent in parents:
            child = self.sequences[parent]
            if parent in used:
                table, keep = child.block_table, int(full[parent])
                own = self._take(len(table) - keep)
                pool.touch(pool.blocks[i] for i in table[:keep])
                sources += table[keep:]
                targets += own
                child = copy.copy(child)
                child.block_table = table[:keep] + own
            used.add(parent)
            children.append(child)
        for row, child in enumerate(children):
            child.slot = int(self.slots[row])
        self.sequences, self.lengths = children, self.lengths[parents]
        return RowMoves(np.array(parents, np.int64), sources, targets)

    def crop(self, num_tokens: int) -> None:
        """Forget the last `num_tokens` tokens of every row; they must not reach into what is published."""
        self.lengths = self.lengths - np.int32(num_tokens)
        blocks = self._manager.block_pool.blocks
        for seq, length in zip(self.sequences, self.lengths.tolist(), strict=True):
            keep = self._manager.num_blocks_for(length)
            assert length >= seq.num_published * self._size
            self._manager.block_pool.free([blocks[i] for i in reversed(seq.block_table[keep:])])
            del seq.block_table[keep:]

    def publish(self, tokens: np.ndarray) -> None:
        """Put every full block into the prefix cache. tokens: int32 [rows, at least the longest row]."""
        blocks = self._manager.block_pool.blocks
        for row, seq in enumerate(self.sequences):
            full = int(self.lengths[row]) // self._size
            while seq.num_published < full and (block := blocks[seq.block_table[seq.num_published]]).digest is not None:
                # A row before this one shares the block and has published it.
                seq.num_published += 1
                seq.prefix_id, seq.prefix_digest = block.prefix_id, block.digest
            self._manager.publish(seq, tokens[row], full * self._size)

    def free(self) -> None:
        """Give back every block and slot."""
        for seq in self.sequences:
            self._manager.free(seq)
        self._scheduler.give_slots(self.slots.tolist())
        self.sequences = []

    def _capacity(self) -> np.ndarray:
        return np.array([len(seq.block_table) for seq in self.sequences]) * self._size

    def _allocate(self, seq: Sequence, num_tokens: int, hits: list[KVBlock] | None = None) -> list[int]:
        while (new := self._manager.allocate_slots(seq, num_tokens, hits or [])) is None:
            self._grow(self._manager.shortage(seq, num_tokens, hits or []))
        return new

    def _take(self, count: int) -> list[int]:
        pool = self._manager.block_pool
        while pool.num_free < count:
            self._grow(count - pool.num_free)
        return [block.block_id for block in pool.allocate(count)]

    def _grow(self, missing: int) -> None:
        if not self._scheduler.ask_for_blocks(missing):
            raise OutOfBlocksError(f"{missing} blocks are missing, and the KV pool cannot grow")


def _plan_of(prompts: PrefillRows) -> StepPlan:
    columns = prompts.columns()
    return StepPlan(
        **columns._asdict(), sequences=prompts.sequences, num_decode_rows=0, admitted=prompts.admitted,
        block_updates=NO_UPDATES, tenancy=np.zeros(len(columns.slots), np.int64), published=prompts.published,
    )
