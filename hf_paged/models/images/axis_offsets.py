"""By how much RoPE's positions behind a prompt with images differ from cache positions, per slot on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hf_paged.device.cuda import upload
from hf_paged.models.base import FedTokens
from hf_paged.models.images.fed_prompt import FedPrompt


class AxisOffsets:
    """Offsets [A, S + 1] of the positions on A axes, of slots; without memory until a prompt differs.

    From then on all decode steps compute positions on each axis, those of text from offsets of 0. ``moves`` counts how
    often that, or the tensor, changed: graphs read it.
    """

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._num_slots, self._device, self.moves = num_slots, device, 0
        self._table: torch.Tensor | None = None

    def grow(self, num_slots: int) -> None:
        """Raise the number of slots; graphs must be captured again."""
        if self._table is not None:
            self._table = torch.nn.functional.pad(self._table, (0, num_slots - self._num_slots))
        self._num_slots = num_slots

    def admit(self, slots: list[int], fed: Sequence[object]) -> None:
        """Write the offsets of sequences that got a slot; ``fed``: `Sequence.fed` of each, or nothing for all."""
        found = {slot: prompt.offsets for slot, prompt in zip(slots, fed, strict=False)
                 if isinstance(prompt, FedPrompt) and prompt.offsets is not None}
        if self._table is None:
            if not found:
                return
            axes = len(next(iter(found.values())))
            self.moves += 1
            self._table = torch.zeros(axes, self._num_slots + 1, dtype=torch.int64, device=self._device)
        none = np.zeros(len(self._table), np.int64)
        columns = np.stack([found.get(slot, none) for slot in slots], axis=1).astype(np.int64)
        self._table[:, upload(np.array(slots, np.int64), self._device)] = upload(columns, self._device)

    def fed(self, slots: torch.Tensor, positions: torch.Tensor) -> FedTokens | None:
        """Return what decode rows at ``positions`` [T] of ``slots`` [T] feed; None if no prompt ever differed."""
        return None if self._table is None else FedTokens({}, positions + self._table[:, slots])
