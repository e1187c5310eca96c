"""Input and output types of a scheduler, and the rows of draft tokens (guesses at the next tokens) in a plan."""

from __future__ import annotations

from collections.abc import Container, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from hf_paged.scheduler.block_pool import KVBlock
from hf_paged.scheduler.prefix_tree import PrefixGroups, PrefixTree
from hf_paged.scheduler.sequence import Sequence
from hf_paged.scheduler.snapshots import StateMoves

# Tokens by slot that may follow the last known token of the slot's sequence.
Drafts = Mapping[int, Seq[int]]
NO_DRAFTS: Drafts = MappingProxyType({})
# Maximum of decode rows in a step with drafts, the rows of drafts included.
MOST_GUESSING_ROWS = 128


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes of a scheduler, most of them as `PagedConfig` checks them.

    Args:
        block_size: Tokens per cache block, a power of two.
        num_blocks: Blocks in the pool at the start, the null block included; at least 2.
        max_num_seqs: Maximum of running sequences, and the number of slots.
        max_num_batched_tokens: Tokens computed in one step, at least max_num_seqs so that no decode row waits.
        max_model_len: Maximum number of tokens of a sequence, prompt and output together.
        group_prefixes: If False, plans have neither `groups` nor `prompt_groups`.
        num_snapshots: Of recurrent states, without which no cached block is read; None for a model without states.
        whole_prompts: Prompts are not cut into chunks; one that exceeds a step's budget is the only one in its step.
        least_chunk: Tokens that a chunk behind a prompt's first has at least: 1 or 2.

    Raises:
        ValueError: If max_model_len is below 2.
    """

    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    enable_prefix_caching: bool = True
    group_prefixes: bool = True
    num_snapshots: int | None = None
    whole_prompts: bool = False
    least_chunk: int = 1

    def __post_init__(self) -> None:
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len is {self.max_model_len}; at least 2 (a prompt token, an output token)")

    @property
    def most_chunk(self) -> int:
        """Tokens of a prompt that a step without decode rows has room for."""
        return max(self.max_num_batched_tokens, 2 * self.least_chunk - 1)


class BlockUpdates(NamedTuple):
    """New block-table entries of sequences that ran before this step: three int32 arrays of one length."""

    slots: np.ndarray
    columns: np.ndarray
    block_ids: np.ndarray


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StepPlan:
    """One step over R rows, decode rows first. Arrays are [R] int32 unless another shape or dtype is given.

    Attributes:
        sequences: The sequence of each row.
        slots: The slot of each row.
        num_new_tokens: Tokens to compute, 1 for a decode row.
        start: Position of the first new token.
        write_from: KV of positions below it is computed but not written: their block is cached and may be shared.
        samples: bool; the successor of the row's last token is sampled.
        num_decode_rows: Number of leading rows whose input token the previous step sampled.
        admitted: Sequences that got their slot in this step; the runner has no state of them yet.
        block_updates: New block-table entries of the other rows.
        tenancy: int64; the slot's tenancy counter, which distinguishes its sequence from a later one.
        published: Blocks put into the prefix cache before this step has computed them.
        prefix_tree: Tree of all rows that hold blocks, in any plan; None for prompts in lockstep.
        groups: Decode rows that begin with the same blocks; None if no two do. The same object as in the previous plan
            if unchanged.
        prompt_groups: Likewise for the other rows, numbered from the first of them; a group ends before the new tokens
            of all its rows.
        drafts: int32; the guessed token at `start` of a decode row, or -1 if the token is known. A row with a guess
            follows the row of the same sequence at the position before, and counts if that row samples the guess.
            None if all tokens are known.
        states: Copies of recurrent states; None if there are none.
    """

    sequences: list[Sequence]
    slots: np.ndarray
    num_new_tokens: np.ndarray
    start: np.ndarray
    write_from: np.ndarray
    samples: np.ndarray
    num_decode_rows: int
    admitted: list[Sequence]
    block_updates: BlockUpdates
    tenancy: np.ndarray
    published: list[KVBlock]
    prefix_tree: PrefixTree | None = None
    groups: PrefixGroups | None = None
    prompt_groups: PrefixGroups | None = None
    drafts: np.ndarray | None = None
    states: StateMoves | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.num_new_tokens.sum())

    def behind(self, rows: Seq[StepPlan]) -> StepPlan:
        """Return this step with the decode rows of other plans in front; those rows sample nothing."""
        if not rows:
            return self
        plans = [*rows, self]
        updates = zip(*(plan.block_updates for plan in plans), strict=True)
        columns: dict[str, Any] = {name: np.concatenate([getattr(plan, name) for plan in plans])
                                   for name in (*RowColumns._fields, "tenancy")}
        slots, num_decode_rows = columns["slots"], sum(plan.num_decode_rows for plan in plans)
        tree, drafts = rows[0].prefix_tree, self.drafts
        if drafts is not None:
            drafts = np.concatenate([np.full(len(slots) - len(drafts), -1, np.int32), drafts])
        return replace(
            self, **columns, sequences=[seq for plan in plans for seq in plan.sequences],
            num_decode_rows=num_decode_rows, block_updates=BlockUpdates(*map(np.concatenate, updates)),
            prefix_tree=tree, groups=None if tree is None else tree.groups(slots[:num_decode_rows]), drafts=drafts,
        )

    def token_columns(self, first_row: int = 0) -> np.ndarray:
        """Return slot, position and write_from of every token, in row order from `first_row` on; int64 [3, T]."""
        if self.num_decode_rows == len(self.slots):  # one token per row
            return np.array((self.slots, self.start, self.write_from), np.int64)[:, first_row:]
        num_new = self.num_new_tokens[first_row:]
        row = np.repeat(np.arange(first_row, first_row + len(num_new)), num_new)
        place = np.arange(len(row)) - np.repeat(np.cumsum(num_new) - num_new, num_new)
        return np.stack([self.slots[row], self.start[row] + place, self.write_from[row]]).astype(np.int64)


class RowColumns(NamedTuple):
    """Columns of a `StepPlan` for some of its rows."""

    slots: np.ndarray
    num_new_tokens: np.ndarray
    start: np.ndarray
    write_from: np.ndarray
    samples: np.ndarray


@dataclass(slots=True)
class PrefillRows:
    """Prefill rows of a plan under construction; a prompt may be cut anywhere but less than `least_chunk` tokens from
    its ends."""

    room: int  # tokens left in the step's budget; too few to cut a prompt count as none
    least_chunk: int = 1
    sequences: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    published: list[KVBlock] = field(default_factory=list)
    _rows: list[tuple[int, int, int, int, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._use_room(self.room)

    def _use_room(self, room: int) -> None:
        self.room = 0 if room < 2 * self.least_chunk - 1 else room

    def chunk_end(self, seq: Sequence, start: int, end: int) -> int:
        """Return where the chunk of a sequence's next tokens `start` to `end` - 1 ends in this plan."""
        found = seq.chunk_end(start, min(end, start + self.room))
        return seq.chunk_end(start, end - self.least_chunk) if 0 < end - found < self.least_chunk else found

    def add(self, seq: Sequence, start: int, end: int, write_from: int, samples: bool) -> None:
        """Add one row: positions `start` to `end - 1` of a sequence."""
        self._use_room(self.room - (end - start))
        self.sequences.append(seq)
        self._rows.append((seq.slot, end - start, start, write_from, samples))

    def columns(self) -> RowColumns:
        """Return the columns of the rows added so far; requires at least one row."""
        *numbers, samples = zip(*self._rows, strict=True)
        slots, num_new, start, write_from = (np.array(column, np.int32) for column in numbers)
        return RowColumns(slots, num_new, start, write_from, np.array(samples, bool))


class CommitResult(NamedTuple):
    """Result of a commit.

    Attributes:
        accepted: Rows, ascending, whose sampled token was appended to its sequence.
        finished: Sequences that this commit ended.
    """

    accepted: np.ndarray
    finished: list[Sequence]


def guessing_rows(slots: np.ndarray, start: np.ndarray, guesses: list[Seq[int]],
                  copies: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `slots`, `start` and `drafts` of a `StepPlan`, with a row for each draft after the row that it follows.

    Args:
        slots: [n] slots of the decode rows.
        start: [n] position of each row's known token.
        guesses: Drafts of each row.
        copies: [n] rows that replace each row: one, plus one per draft.
    """
    ends = np.cumsum(copies)
    positions = np.repeat(start - ends + copies, copies) + np.arange(ends[-1])
    drafts = [token for tokens in guesses for token in (-1, *tokens)]
    return np.repeat(slots, copies), positions.astype(np.int32), np.array(drafts, np.int32)


def confirmed(plan: StepPlan, tokens: np.ndarray, last: Container[int] = ()) -> np.ndarray:
    """Return which rows count, bool [R]: their input token is known or was sampled as guessed, before any end.

    Args:
        last: Rows whose token ends their sequence, besides rows that sampled an EOS token.
    """
    assert plan.drafts is not None
    found = plan.drafts < 0
    for row in np.flatnonzero(~found).tolist():
        before = int(tokens[row - 1])
        right = found[row - 1] and before == plan.drafts[row] and row - 1 not in last
        found[row] = right and before not in plan.sequences[row].eos_token_ids
    return found
