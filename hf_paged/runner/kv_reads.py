"""How much of the KV cache the rows of all steps read, and how much they would have without groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from hf_paged.models import KVSpec


class KVReads:
    """Bytes of K and V over all layers of this rank, counted step by step; they go on where a new pool is made.

    Attributes:
        num_bytes: What attention read for rows of one new token, and for prompts as if each read what it sees once:
            every position of a row in every layer, and of a layer with a sliding window the positions inside of it.
        num_saved_bytes: What it read for another row of the same group, and not again; layers with a window count
            nothing.
    """

    def __init__(self) -> None:
        self.num_bytes = self.num_saved_bytes = 0
        self._position_bytes = 0  # in one layer
        self._num_layers: list[tuple[int | None, int]] = []  # by window
        self._num_full_layers = 0

    def use(self, spec: KVSpec, windows: Iterable[int | None]) -> None:
        """From now on steps are of a model of this shape, whose layers have these windows (None: all positions)."""
        self._position_bytes = 2 * spec.num_kv_heads * spec.head_dim * spec.cache_dtype.itemsize
        by_window = Counter(windows)
        self._num_layers, self._num_full_layers = list(by_window.items()), by_window[None]

    def count(self, start: np.ndarray, num_new: np.ndarray, saved_positions: int) -> None:
        """Rows of a step were launched.

        Args:
            start: int32 [R], positions of their first new tokens.
            num_new: int32 [R], new tokens.
            saved_positions: What groups of these rows did not read again, in positions of one layer without a window.
        """
        num_positions, num_tokens = 0, int(np.add.reduce(num_new, dtype=np.int64))
        for window, num_layers in self._num_layers:
            seen = start if window is None else np.minimum(start, window - 1)
            num_positions += num_layers * (int(np.add.reduce(seen, dtype=np.int64)) + num_tokens)
        num_saved = saved_positions * self._num_full_layers
        self.num_bytes += (num_positions - num_saved) * self._position_bytes
        self.num_saved_bytes += num_saved * self._position_bytes
