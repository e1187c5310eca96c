"""Which LoRA adapter each running sequence goes through: names on the host, entries of the executor on the device."""

from __future__ import annotations

import numpy as np
import torch

from hf_paged.device.upload import upload
from hf_paged.models.tuners import BASE


class AdapterSlots:
    """Per slot an index into the executor's entries (see `StepContext.adapters`), [S + 1] int32 on the device.

    While no sequence names an adapter, nothing is kept and nothing is sent.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._device = device
        self._index = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self._is_named = np.zeros(num_slots + 1, dtype=bool)
        self._names: dict[int, str] = {}  # by slot; also of sequences that have ended
        self._entries: dict[str, int] = {BASE: -1}

    def grow(self, num_slots: int) -> None:
        """Raise the number of slots to this; graphs have to be captured anew."""
        more = num_slots + 1 - len(self._index)
        index, is_named = torch.nn.functional.pad(self._index, (0, more)), np.pad(self._is_named, (0, more))
        self._index, self._is_named = index, is_named

    def use_entries(self, names: tuple[str, ...]) -> None:
        """The executor's entries are these now: slots follow, by their names."""
        entries = {BASE: -1} | {name: entry for entry, name in enumerate(names, 1)}
        if entries != self._entries:
            self._entries = entries
            # A name that is gone is none of a row that will run.
            self._names = {slot: name for slot, name in self._names.items() if name in entries}
            self._send(list(self._names))

    def admit(self, slots: list[int], names: list[str | None]) -> None:
        """Sequences got these slots; None: they go through the model's active adapters."""
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
        """Does one of these sequences name an adapter?"""
        return bool(self._names) and bool(self._is_named[slots].any())

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """``slots`` [T] int64 on the device -> the entry of each, [T] int32."""
        return self._index[slots]

    def _send(self, slots: list[int]) -> None:
        if slots:
            entries = [self._entries[self._names[slot]] if slot in self._names else 0 for slot in slots]
            index, values = upload(np.array([slots, entries], dtype=np.int64), self._device)
            self._index[index] = values.to(torch.int32)
