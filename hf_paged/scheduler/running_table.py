"""Running sequences as arrays indexed by slot, so that a decode step over all of them is a few numpy calls."""

from __future__ import annotations

import numpy as np

from hf_paged.scheduler.sequence import Sequence, Status

FIRST_COLUMNS = 256


class RunningTable:
    """State of the sequences that hold a slot.

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
        seq.attach(self, slot)
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
        """Return the known tokens of a slot from position `first` on."""
        tokens: list[int] = self.tokens[slot, first : self.known[slot]].tolist()
        return tokens

    def _resize_tokens(self, num_slots: int, num_columns: int) -> None:
        """Resize `tokens`; copies known tokens only, since untouched pages of zeros take no memory."""
        old, self.tokens = self.tokens, np.zeros((num_slots, num_columns), np.int32)
        for slot in range(len(old)):
            if self.sequences[slot] is not None:
                self.tokens[slot, : self.known[slot]] = old[slot, : self.known[slot]]
