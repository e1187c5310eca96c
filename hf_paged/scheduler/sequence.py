"""One request in the scheduler: token ids, limits, blocks and status."""

from __future__ import annotations

import enum
from collections.abc import Sequence as Seq
from typing import Protocol

import numpy as np

from hf_paged.scheduler.block_pool import ROOT_DIGEST, ROOT_PREFIX_ID


class Status(enum.IntEnum):
    """Status of a sequence; a preempted sequence is WAITING again."""

    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class RunningColumns(Protocol):
    """Columns of the `RunningTable` that a sequence reads, by slot."""

    scheduled: np.ndarray
    known: np.ndarray
    tokens: np.ndarray

    def read_tokens(self, slot: int, first: int) -> list[int]: ...


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

    Raises:
        ValueError: If the prompt is empty or ``max_new_tokens < 0``.
    """

    __slots__ = (
        "_num_computed",
        "_output",
        "_prompt",
        "_table",
        "adapter",
        "arrival",
        "block_hashes",
        "block_table",
        "cache_key",
        "cache_salt",
        "eos_token_ids",
        "finish_reason",
        "is_mixed",
        "keeps_computed",
        "max_new_tokens",
        "num_cached_tokens",
        "num_in_flight",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published",
        "prefix_digest",
        "prefix_id",
        "priority",
        "read_cache",
        "request_id",
        "slot",
        "status",
        "was_admitted",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        *,
        max_new_tokens: int,
        eos_token_ids: tuple[int, ...] = (),
        priority: int = 0,
        cache_key: bytes = b"",
        cache_salt: bytes = b"",
        read_cache: bool = True,
        adapter: str | None = None,
        keeps_computed: bool = False,
        output_token_ids: Seq[int] = (),
    ) -> None:
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

        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.slot = -1
        self.block_table: list[int] = []
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
        self._table: RunningColumns | None = None

    def use_model_key(self, model_key: bytes) -> None:
        """Key the sequence's blocks in the prefix cache by this state of the model and its own salt from now on."""
        key = model_key + self.cache_salt
        if key != self.cache_key:
            self.cache_key, self.block_hashes = key, []

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: the lowest is admitted first, the highest is preempted first."""
        return (self.priority, self.arrival)

    @property
    def num_tokens(self) -> int:
        """Return the number of prompt and committed output tokens."""
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
        if self._table is not None:
            return self._table.read_tokens(self.slot, self.num_prompt_tokens)
        return list(self._output)

    def output_from(self, first: int) -> list[int]:
        """Return `output_token_ids[first:]`."""
        if self._table is not None:
            return self._table.read_tokens(self.slot, self.num_prompt_tokens + first)
        return self._output[first:]

    @property
    def token_ids(self) -> list[int]:
        """Return prompt and committed output as a new list."""
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

    def attach(self, table: RunningColumns, slot: int) -> None:
        """Keep output and lengths in the running table from now on."""
        self.slot = slot
        self._table = table

    def detach(self, num_computed: int) -> None:
        """Copy the output back from the running table; the slot is released separately."""
        if self._table is not None:
            self._output = self.output_token_ids
            self._table = None
        self._num_computed = num_computed

    def __repr__(self) -> str:
        return f"Sequence({self.request_id!r}, {self.status.name}, slot={self.slot}, num_tokens={self.num_tokens})"
