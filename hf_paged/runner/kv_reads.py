"""Count of KV bytes that attention reads over all steps, and of bytes that prefix groups save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from hf_paged.models import KVSpec


class KVReads:
    """Bytes of K and V over all layers of this rank, counted per step; the counts continue with a new pool.

    Attributes:
        num_bytes: Bytes that attention read. A row counts each position that it attends to once per layer, in a layer
            with a sliding window only positions inside the window; a prompt counts as if it read each position once.
        num_saved_bytes: Bytes that were read once for several rows of a group; layers with a window are not counted.
    """

    def __init__(self) -> None:
        self.num_bytes = self.num_saved_bytes = 0
        self._position_bytes = 0  # in one layer
        self._num_layers: list[tuple[int | None, int]] = []  # by window
        self._num_full_layers = 0

    def use(self, spec: KVSpec, windows: Iterable[int | None]) -> None:
        """Set the shape of the model and the sliding windows of its layers (None: all positions)."""
        self._position_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.cache_dtype.itemsize
        by_window = Counter(windows)
        self._num_layers, self._num_full_layers = list(by_window.items()), by_window[None]

    def count(self, start: np.ndarray, num_new: np.ndarray, saved_positions: int) -> None:
        """Add the rows of a launched step.

        Args:
            start: int32 [R], positions of their first new tokens.
            num_new: int32 [R], numbers of new tokens.
            saved_positions: Positions that groups saved, in one layer without a window.
        """
        num_positions, num_tokens = 0, int(np.add.reduce(num_new, dtype=np.int64))
        for window, num_layers in self._num_layers:
            seen = start if window is None else np.minimum(start, window - 1)
            num_positions += num_layers * (int(np.add.reduce(seen, dtype=np.int64)) + num_tokens)
        num_saved = saved_positions * self._num_full_layers
        self.num_bytes += (num_positions - num_saved) * self._position_bytes
        self.num_saved_bytes += num_saved * self._position_bytes
