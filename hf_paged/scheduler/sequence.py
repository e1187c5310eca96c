"""Sequences of a scheduler (token ids, limits, blocks, status), the queue of waiting and the table of running ones."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from hf_paged.scheduler.block_pool import ROOT_DIGEST, ROOT_PREFIX_ID

FIRST_COLUMNS = 256


class Status(enum.IntEnum):
    """Status of a sequence; a preempted sequence is WAITING again."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class FedContent(Protocol):
    """What a model is fed of a prompt besides its token ids."""

    def block_key(self, first: int, end: int) -> bytes:
        """Return what keys and values of tokens `first` to `end` - 1 depend on besides their ids and the tokens in
        front; b"" if on nothing."""

    def chunk_end(self, first: int, end: int) -> int:
        """Return the last place up to `end` where a chunk from `first` on may end, else the first one behind it."""


class Sequence:
    """A prompt and the tokens generated after it.

    Args:
        request_id: Unique among the unfinished requests of a scheduler.
        prompt_token_ids: At least one token id, each below 2**31. The list is not copied and must not change.
        output_token_ids: Tokens generated before.
        max_new_tokens: Maximum of generated tokens, `output_token_ids` included; the sequence then ends with
            ``"length"``. With 0 it ends when its prompt is computed.
        eos_token_ids: Tokens that end the sequence with ``"eos"`` (the token itself is kept).
        priority: Lower goes first; ties go by arrival.
        cache_key: Extra bytes (the model's state, then the salt) under which the prefix cache keeps its blocks.
        cache_salt: Bytes that sequences must have in common to share blocks; see `use_model_key`.
        read_cache: False computes every prompt token (prompt logprobs need them) yet still fills the cache.
        adapter: Name of the adapter to compute with, a part of the model's state; None for no adapter.
        keeps_computed: Computed KV is kept when the model changes, see `Scheduler.preempt_all`.
        fed: What the model is fed of the prompt besides its ids; None: nothing.

    Raises:
        ValueError: If the prompt is empty or ``max_new_tokens < 0``.
    """

    def __init__(self, request_id: str, prompt_token_ids: list[int], *, max_new_tokens: int,
                 eos_token_ids: tuple[int, ...] = (), priority: int = 0, cache_key: bytes = b"",
                 cache_salt: bytes = b"", read_cache: bool = True, adapter: str | None = None,
                 keeps_computed: bool = False, output_token_ids: Seq[int] = (),
                 fed: FedContent | None = None) -> None:
        if not prompt_token_ids:
            raise ValueError(f"request {request_id!r}: prompt_token_ids is empty; at least one token is needed")
        if max_new_tokens < 0:
            raise ValueError(f"request {request_id!r}: max_new_tokens is {max_new_tokens}; at least 0 is needed")
        self.request_id = request_id
        self.priority = priority
        self.arrival = -1
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_new_tokens = max_new_tokens
        self.eos_token_ids = tuple(eos_token_ids)
        self.cache_key = cache_key
        self.cache_salt = cache_salt
        self.read_cache = read_cache
        self.adapter = adapter
        self.keeps_computed = keeps_computed
        self.fed = fed

        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.slot = -1
        self.block_table: list[int] = []
        self.last_blocks: list[int] = []  # the table when it finished running
        self.num_cached_tokens = 0
        self.num_preemptions = 0

        # Fields below belong to the scheduler.
        self.was_admitted = False
        self.is_mixed = False  # several states of the model computed its KV: other sequences must not hit its blocks
        self.num_in_flight = 0  # uncommitted plans that still contain this sequence after it was preempted
        self.num_published = 0  # leading blocks of the table that are in the prefix cache
        self.prefix_id = ROOT_PREFIX_ID  # of the last published block
        self.prefix_digest = ROOT_DIGEST
        self.block_hashes: list[tuple[bytes, bytes]] = []  # (content, digest) of leading full blocks, while waiting
        self._prompt = prompt_token_ids
        self._output = list(output_token_ids)
        self._num_computed = 0
        self._table: RunningTable | None = None

    def use_model_key(self, model_key: bytes) -> None:
        """Key the sequence's blocks in the prefix cache by this state of the model and its own salt from now on."""
        key = model_key + self.cache_salt
        if key != self.cache_key:
            self.cache_key, self.block_hashes = key, []

    def block_key(self, first: int, end: int) -> bytes:
        """Return what a block of tokens `first` to `end` - 1 depends on besides the ids of the sequence."""
        key = b"" if self.fed is None else self.fed.block_key(first, end)
        return key if first else key + self.cache_key

    def chunk_end(self, first: int, end: int) -> int:
        """Return where a chunk of tokens from `first` on ends that is to end at `end`: earlier or, if tokens that see
        each other would not fit, later."""
        return end if self.fed is None else self.fed.chunk_end(first, end)

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: the lowest is admitted first, the highest is preempted first."""
        return (self.priority, self.arrival)

    @property
    def num_tokens(self) -> int:
        if self._table is not None:
            return int(self._table.known[self.slot])
        return self.num_prompt_tokens + len(self._output)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Return the number of leading tokens whose KV is in the cache or in a scheduled step."""
        if self._table is not None:
            return int(self._table.scheduled[self.slot])
        return self._num_computed

    @property
    def prompt_token_ids(self) -> list[int]:
        return list(self._prompt)

    @property
    def output_token_ids(self) -> list[int]:
        """Return the committed output as a new list."""
        return self.output_from(0)

    def output_from(self, first: int) -> list[int]:
        if self._table is not None:
            return self._table.read_tokens(self.slot, self.num_prompt_tokens + first)
        return self._output[first:]

    @property
    def token_ids(self) -> list[int]:
        return self._prompt + self.output_token_ids

    def known_ids(self) -> np.ndarray:
        """Return `token_ids` as int32; may be a view that later steps change."""
        if self._table is not None:
            return self._table.tokens[self.slot, : self._table.known[self.slot]]
        return np.array(self.token_ids, np.int32)

    def ids_between(self, first: int, last: int) -> list[int]:
        """Return `token_ids[first:last]`, without copying the whole prompt if the range lies in it."""
        return self._prompt[first:last] if last <= self.num_prompt_tokens else self.token_ids[first:last]

    def append(self, token: int) -> None:
        """Add an output token while the sequence is not in the running table."""
        assert self._table is None
        self._output.append(token)

    def reached_end(self, max_model_len: int) -> str | None:
        """Return the finish reason if the committed output is complete, else None."""
        output = self.output_token_ids
        if output and output[-1] in self.eos_token_ids:
            return "eos"
        if len(output) >= self.max_new_tokens or self.num_prompt_tokens + len(output) >= max_model_len:
            return "length"
        return None

    def end(self, reason: str) -> None:
        """Finish a sequence that was never added to a scheduler."""
        assert self.status is Status.WAITING and self.arrival < 0
        self.status, self.finish_reason = Status.FINISHED, reason

    def detach(self, num_computed: int) -> None:
        """Copy the output back from the running table; the slot is released separately."""
        if self._table is not None:
            self._output = self.output_token_ids
            self._table = None
        self._num_computed = num_computed

    def __repr__(self) -> str:
        return f"Sequence({self.request_id!r}, {self.status.name}, slot={self.slot}, num_tokens={self.num_tokens})"


class WaitingQueue:
    """Priority heap of waiting sequences; a finished sequence is removed only when it reaches the top.

    A held sequence leaves the heap when it reaches the top, so that later ones overtake it.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._len = 0
        self.held: dict[str, Sequence] = {}  # by request id
        self._aside: dict[str, Sequence] = {}  # those of them that have left the heap

    def __len__(self) -> int:
        return self._len

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.rank, seq))
        self._len += 1

    def sequences(self) -> list[Sequence]:
        """Return all waiting sequences in arbitrary order."""
        return [*self._aside.values(), *(seq for _, seq in self._heap if seq.status is not Status.FINISHED)]

    def peek(self) -> Sequence | None:
        while self._heap:
            first = self._heap[0][1]
            if first.status is not Status.FINISHED:
                if self.held.get(first.request_id) is not first:
                    return first
                self._aside[first.request_id] = first
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Remove and return the sequence of `peek`; raises IndexError if there is none."""
        seq = self.peek()
        if seq is None:
            raise IndexError("nobody waits")
        heapq.heappop(self._heap)
        self._len -= 1
        return seq

    def count_out(self, seq: Sequence) -> None:
        """Decrease the length for a sequence that was finished while it waits."""
        self.held.pop(seq.request_id, None)
        self._aside.pop(seq.request_id, None)
        self._len -= 1

    def hold(self, seq: Sequence) -> None:
        """Let others overtake a waiting sequence until `release`."""
        self.held[seq.request_id] = seq

    def release(self, seq: Sequence) -> None:
        """Put a held sequence back to its place in the order."""
        del self.held[seq.request_id]
        if self._aside.pop(seq.request_id, None) is not None:
            heapq.heappush(self._heap, (seq.rank, seq))


class RunningTable:
    """State of the sequences that hold a slot, as arrays: a decode step over all of them is a few numpy calls.

    Attributes, all indexed by slot:
        sequences: The sequence in the slot, or None.
        scheduled: Tokens whose KV is computed or will be by a scheduled step; also the next position to compute.
        known: Prompt and committed output tokens.
        target: Tokens known at admission; the sequence is in prefill while `scheduled` is below.
        capacity: Tokens that its blocks hold.
        limit: Number of tokens at which the sequence ends in any case.
        decoding: Joins the next decode: prefill done, tokens in flight do not reach the end, not finished.
        draining: Finished, but in an uncommitted plan.
        in_flight: Number of uncommitted plans with the sequence.
        tenancy: Counter that rises whenever a sequence enters or leaves the slot.
        eos: [slots, k] EOS ids of the sequence, padded with -1.
        tokens: [slots, columns] its known tokens; there are as many columns as the longest limit needs.
    """

    def __init__(self, num_slots: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.scheduled = np.zeros(num_slots, np.int32)
        self.known = np.zeros(num_slots, np.int32)
        self.target = np.zeros(num_slots, np.int32)
        self.capacity = np.zeros(num_slots, np.int32)
        self.limit = np.zeros(num_slots, np.int32)
        self.decoding = np.zeros(num_slots, bool)
        self.draining = np.zeros(num_slots, bool)
        self.in_flight = np.zeros(num_slots, np.int32)
        self.tenancy = np.zeros(num_slots, np.int64)
        self.eos = np.full((num_slots, 1), -1, np.int32)
        self.tokens = np.zeros((num_slots, FIRST_COLUMNS), np.int32)
        self.num_lent = 0  # slots of rows that the scheduler does not own (lockstep)
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_slots(self) -> int:
        return len(self.sequences)

    @property
    def num_tenants(self) -> int:
        return self.num_slots - len(self._free) - self.num_lent

    def grow(self, num_slots: int) -> None:
        """Raise the number of slots; the new slots are taken last."""
        old, more = self.num_slots, num_slots - self.num_slots
        self.sequences += [None] * more
        for name in ("scheduled", "known", "target", "capacity", "limit", "decoding", "draining", "in_flight",
                     "tenancy"):
            setattr(self, name, np.pad(getattr(self, name), (0, more)))
        self.eos = np.pad(self.eos, ((0, more), (0, 0)), constant_values=-1)
        self._resize_tokens(num_slots, self.tokens.shape[1])
        self._free = [*range(num_slots - 1, old - 1, -1), *self._free]

    @property
    def num_free_slots(self) -> int:
        return len(self._free)

    def tenants(self) -> list[Sequence]:
        """Return the sequences that hold a slot, finished ones that drain included."""
        return [seq for seq in self.sequences if seq is not None]

    def settle(self, seq: Sequence, scheduled: int, capacity: int, limit: int) -> int:
        """Give a sequence a slot and return it; `scheduled` of the sequence's tokens need no computing."""
        token_ids = seq.token_ids
        slot = self._free.pop()
        # Columns for the sequence's limit, so that no later step has to resize the table.
        if (columns := self.tokens.shape[1]) < max(limit, len(token_ids)):
            self._resize_tokens(self.num_slots, max(2 * columns, limit, len(token_ids)))
        self.tokens[slot, : len(token_ids)] = token_ids
        self.scheduled[slot] = scheduled
        self.known[slot] = self.target[slot] = len(token_ids)
        self.capacity[slot] = capacity
        self.limit[slot] = limit
        extra = len(seq.eos_token_ids) - self.eos.shape[1]
        if extra > 0:
            self.eos = np.pad(self.eos, ((0, 0), (0, extra)), constant_values=-1)
        self.eos[slot] = -1
        self.eos[slot, : len(seq.eos_token_ids)] = seq.eos_token_ids
        self.tenancy[slot] += 1
        self.sequences[slot] = seq
        seq.slot, seq._table = slot, self
        seq.status = Status.RUNNING
        return slot

    def vacate(self, slot: int) -> None:
        """Free the slot; requires that `Sequence.detach` was called before."""
        seq = self.sequences[slot]
        assert seq is not None
        seq.slot = -1
        self.sequences[slot] = None
        self.decoding[slot] = self.draining[slot] = False
        self.in_flight[slot] = 0
        self.tenancy[slot] += 1
        self._free.append(slot)

    def take(self, count: int) -> list[int]:
        """Lend free slots, without a sequence, until `give`."""
        taken = self._free[len(self._free) - count :]
        assert len(taken) == count
        self.num_lent += count
        del self._free[len(self._free) - count :]
        return taken

    def give(self, slots: list[int]) -> None:
        self.num_lent -= len(slots)
        self._free += reversed(slots)

    def read_tokens(self, slot: int, first: int) -> list[int]:
        tokens: list[int] = self.tokens[slot, first : self.known[slot]].tolist()
        return tokens

    def _resize_tokens(self, num_slots: int, num_columns: int) -> None:
        """Resize `tokens`; copies known tokens only, since untouched pages of zeros take no memory."""
        old, self.tokens = self.tokens, np.zeros((num_slots, num_columns), np.int32)
        for slot in range(len(old)):
            if self.sequences[slot] is not None:
                self.tokens[slot, : self.known[slot]] = old[slot, : self.known[slot]]
