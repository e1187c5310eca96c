"""Notices changed weights, so that keys and values computed with the old ones are never served.

Fused optimizers and writes through `.data` leave no trace in `_version`: only a checksum of all bytes is proof. The
counters and pointers are a shortcut to "surely changed".
"""

from __future__ import annotations

import itertools

import torch

from hf_paged.integration.models import ModelAdapter
from hf_paged.kernels.weights_checksum import weights_checksum


class WeightsGuard:
    """Checksums over all parameters and buffers of one model."""

    def __init__(self, adapter: ModelAdapter) -> None:
        self._adapter = adapter
        self._signature: tuple | None = None

    def surely_changed(self) -> bool:
        """True if storage or version counters moved since the last call of this method (False says nothing)."""
        signature = tuple((t.data_ptr(), t._version) for t in self._tensors())
        changed = self._signature is not None and signature != self._signature
        self._signature = signature
        return changed

    def checksum(self) -> torch.Tensor:
        """int64 [1] on the model's device, enqueued without waiting for it."""
        return weights_checksum(self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        model = self._adapter.model
        return [t.detach() for t in itertools.chain(model.parameters(), model.buffers())]
