"""LoRA adapter of each running sequence: its name on the host, and its index for the executor on the device."""

from __future__ import annotations

import numpy as np
import torch

from hf_paged.device.upload import upload
from hf_paged.models.tuners import BASE


class AdapterSlots:
    """Index into the executor's adapters per slot (see `StepContext.adapters`), [S + 1] int32 on the device.

    0 stands for the model's active adapters, -1 for the base model. While no sequence names an adapter, no slot is
    stored and nothing is sent to the device.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._index = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self._is_named = np.zeros(num_slots + 1, dtype=bool)
        self._names: dict[int, str] = {}  # by slot; includes ended sequences
        self._entries: dict[str, int] = {BASE: -1}

    def grow(self, num_slots: int) -> None:
        """Raise the number of slots; graphs must be captured again."""
        more = num_slots + 1 - len(self._index)
        index, is_named = torch.nn.functional.pad(self._index, (0, more)), np.pad(self._is_named, (0, more))
        self._index, self._is_named = index, is_named

    def use_entries(self, names: tuple[str, ...]) -> None:
        """Use a new order of the executor's adapters and update the indices of all slots by name."""
        entries = {BASE: -1} | {name: entry for entry, name in enumerate(names, 1)}
        if entries != self._entries:
            self._entries = entries
            # A slot whose adapter was deleted belongs to an ended sequence.
            self._names = {slot: name for slot, name in self._names.items() if name in entries}
            self._send(list(self._names))

    def admit(self, slots: list[int], names: list[str | None]) -> None:
        """Set the adapters of sequences that got these slots; None stands for the model's active adapters."""
        if not self._names and not any(names):
            return
        for slot, name in zip(slots, names, strict=True):
            self._is_named[slot] = name is not None
            if name is None:
                self._names.pop(slot, None)
            else:
                self._names[slot] = name
        self._send(slots)

    def any_named(self, slots: np.ndarray) -> bool:
        """Return whether one of these sequences names an adapter."""
        return bool(self._names) and bool(self._is_named[slots].any())

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the adapter index of each slot: ``slots`` [T] int64 on the device -> [T] int32."""
        return self._index[slots]

    def _send(self, slots: list[int]) -> None:
        if slots:
            entries = [self._entries[self._names[slot]] if slot in self._names else 0 for slot in slots]
            index, values = upload(np.array([slots, entries], dtype=np.int64), self._device)
            self._index[index] = values.to(torch.int32)
