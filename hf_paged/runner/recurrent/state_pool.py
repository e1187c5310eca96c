"""Memory of recurrent states, a slot for each running sequence, and the config under which such models run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from weakref import WeakSet

import torch

from hf_paged.config import PagedConfig
from hf_paged.kernels.recurrent.mamba2 import MAX_GROUPS
from hf_paged.kernels.recurrent.packed_convolution import PackedRows
from hf_paged.models import KVSpec
from hf_paged.models.base import StateKey, StateShape
from hf_paged.models.recurrent.view import StateView
from hf_paged.runner.recurrent.saved_states import SavedStates

_WORD = torch.int64  # what memory of slots is copied in
STATES_SHARE = 0.375  # of a memory budget, beside pages and snapshots


class StatePool:
    """The states of all slots of the scheduler: each tensor [num_slots + 1, *shape], in the dtype in which stock keeps
    it. Those of a slot lie side by side: one copy moves them all. The last line belongs to padding rows of CUDA graphs.

    A sequence has the state slot of its number in the scheduler's table, from its admission to its end or preemption. A
    slot's content counts from the sequence's first step on: what an earlier sequence left is never read.

    Attributes:
        version: number of moves of the memory.
    """

    def __init__(self, spec: KVSpec, num_slots: int) -> None:
        self.spec, self.num_slots, self.version = spec, num_slots, 0
        self._use(self._lines_of(num_slots))
        self._arrivals = torch.zeros(num_slots + 1, MAX_GROUPS, dtype=torch.int32, device=spec.device)
        self._saved: WeakSet[SavedStates] = WeakSet()

    def view(self, slots: torch.Tensor, *, is_new: bool, lengths: torch.Tensor | None = None) -> StateView:
        """Return the states of the rows in these slots [R] for one forward; arguments as for `StateView`."""
        return StateView(self._tensors, slots, is_new=is_new, lengths=lengths, arrivals=self._arrivals)

    def packed_view(self, rows: PackedRows) -> StateView:
        """Return the states of packed prompts for one forward, whose layers kernels compute."""
        return StateView(self._tensors, rows.slots, is_new=False, arrivals=self._arrivals, packed=rows)

    def grow(self, num_slots: int) -> None:
        """Raise the number of slots; never lowers it.

        Raises:
            torch.OutOfMemoryError: If too little memory is free; the slots keep their states.
        """
        if num_slots > self.num_slots:
            grown = self._lines_of(num_slots)
            grown[: self.num_slots] = self._lines[: self.num_slots]
            self.version += 1  # before anything moves, since an interrupt may come in between
            self._use(grown)
            self._arrivals = self._arrivals.new_zeros(num_slots + 1, MAX_GROUPS)
            self.num_slots = num_slots

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy the states in slots ``sources`` [R] to ``targets`` [R], all at once."""
        self._lines[targets] = self._lines[sources]

    def copy_of(self, slot: int) -> torch.Tensor:
        """Return what `put` takes."""
        return self._lines[slot].clone()

    def put(self, slot: int, states: torch.Tensor) -> None:
        self._lines[slot] = states

    def keep(self, content: SavedStates) -> SavedStates:
        """Count a snapshot's content in `nbytes` as long as anything refers to it; returns it."""
        self._saved.add(content)
        return content

    @property
    def nbytes(self) -> int:
        return (self.num_slots + 1) * self.spec.state_bytes + sum(content.nbytes for content in self._saved)

    def close(self) -> None:
        self._use(self._lines.new_empty(0, self._lines.shape[1]))
        self.num_slots = -1

    def _lines_of(self, num_slots: int) -> torch.Tensor:
        """Return memory of slots, and zeros for padding rows: [num_slots + 1, words]."""
        lines = torch.empty(num_slots + 1, self.spec.state_bytes // _WORD.itemsize, dtype=_WORD,
                            device=self.spec.device)
        lines[num_slots:].zero_()
        return lines

    def _use(self, lines: torch.Tensor) -> None:
        tensors = by_key(lines, self.spec.states)
        self._lines, self._tensors = lines, tensors  # between which no interrupt comes


def by_key(lines: torch.Tensor, states: Iterable[StateShape]) -> dict[StateKey, torch.Tensor]:
    """Return the states [N, *shape] that lie side by side in lines [N, words]."""
    found, first = dict[StateKey, torch.Tensor](), 0
    for state in states:
        end = first + state.nbytes // _WORD.itemsize
        values = lines[:, first:end].view(state.dtype)[:, : math.prod(state.shape)]
        found[state.key], first = values.unflatten(1, state.shape), end
    return found


def config_for_states(config: PagedConfig, spec: KVSpec, budget: int) -> PagedConfig:
    """Return a config for a model with states: without guesses, whose states nothing takes back, and with as many
    sequences at once as have states in their share of `budget` bytes."""
    most = min(config.max_num_seqs, most_sequences(spec, budget))
    return replace(config, group_prefixes=False, speculation=False, max_num_seqs=most)


def most_sequences(spec: KVSpec, budget: int) -> int:
    """Return how many sequences have states in their share of `budget` bytes."""
    return max(1, int(budget * STATES_SHARE) // max(spec.state_bytes, 1))
