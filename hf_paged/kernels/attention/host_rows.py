"""Where the torch backend finds a step's keys and values: worked out on the host once a step, for all layers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

# Rows are gathered in groups whose padded K stays inside the CPU's cache; one gather of all rows measured 2.8x slower.
_GROUP_ELEMENTS = 1 << 20


class Pages(NamedTuple):
    """Positions of one row: `length` slots that follow each other, of the cache or of `blocks` gathered from it."""

    blocks: torch.Tensor | None
    first: int
    length: int

    def read(self, cache: torch.Tensor) -> torch.Tensor:
        """[Hkv, 1, length, D], a view where nothing is gathered."""
        held = cache if self.blocks is None else cache.index_select(0, self.blocks)
        heads, dim = cache.shape[2:]
        offset = held.storage_offset() + self.first * heads * dim
        return held.as_strided((heads, 1, self.length, dim), (dim, dim, heads * dim, 1), offset)


class SingleRow(NamedTuple):
    """A row by itself: its new tokens are `first` to `last`, and tell apart what they see by `mask` or causally."""

    first: int
    last: int
    pages: Pages
    mask: torch.Tensor | None
    causal: bool


class GroupedRows(NamedTuple):
    """Rows of one new token, at `tokens` [n], padded to `width` positions each."""

    tokens: torch.Tensor
    slots: torch.Tensor  # [n * width]; padding repeats a row's last position: finite where the row is
    width: int
    mask: torch.Tensor | None  # [n, 1, 1, width]

    def read(self, cache: torch.Tensor) -> torch.Tensor:
        """[n, Hkv, width, D]."""
        heads, dim = cache.shape[2:]
        gathered = cache.view(-1, heads * dim).index_select(0, self.slots)
        return gathered.view(len(self.tokens), self.width, heads, dim).transpose(1, 2)


class Reads(NamedTuple):
    """All rows of a step that see anything, with one window."""

    grouped: list[GroupedRows]
    single: list[SingleRow]


class HostRows:
    """The rows of a step. Reads the metadata on the host, so on CUDA it waits for the device.

    Args:
        query_start, seq_lens, block_table, slots: as in `PagedMetadata`.
        block_size: of the caches.
        width: elements of a position in a cache, Hkv * D.
    """

    def __init__(self, query_start: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor,
                 slots: torch.Tensor, block_size: int, width: int) -> None:
        self._device, self._block_size, self._width = slots.device, block_size, width
        self._starts = query_start.cpu().numpy()
        self._lengths = seq_lens.cpu().numpy().astype(np.int64)
        self._counts = np.diff(self._starts)
        self._longest = int(self._lengths.max(initial=0))
        used = -(-self._longest // block_size)
        self._tables = block_table[:, :used].index_select(0, slots).cpu().numpy()
        self._by_window: dict[int | None, Reads] = {}

    def reads(self, window: int | None) -> Reads:
        """What layers with this window read."""
        found = self._by_window.get(window)
        if found is None:
            found = self._by_window[window] = self._reads(self._longest if window is None else window)
        return found

    def _reads(self, window: int) -> Reads:
        """Read rows of one new token in groups of similar length; rows of more tokens, or without a group, alone."""
        if len(self._lengths) == 1 and self._longest:
            return Reads([], [self._row(0, window)])
        seen = self._lengths > 0
        ones = np.flatnonzero((self._counts == 1) & seen)
        spans = np.minimum(self._lengths[ones], window)
        order = np.argsort(spans, kind="stable")
        groups = [ones[order[cut]] for cut in _cuts(spans[order], self._width)]
        alone = [int(rows[0]) for rows in groups if len(rows) == 1] + np.flatnonzero((self._counts > 1) & seen).tolist()
        return Reads([self._group(rows, window) for rows in groups if len(rows) > 1],
                     [self._row(row, window) for row in alone])

    def _row(self, row: int, window: int) -> SingleRow:
        first, new, length = int(self._starts[row]), int(self._counts[row]), int(self._lengths[row])
        begin = max(0, length - new - window + 1)
        causal = 1 < new == length <= window
        mask = None if new == 1 or causal else _causal_mask(new, length, begin, window, self._device)
        return SingleRow(first, first + new, self._pages(row, begin, length), mask, causal)

    def _pages(self, row: int, begin: int, end: int) -> Pages:
        size = self._block_size
        blocks = self._tables[row, begin // size : -(-end // size)]
        if (np.diff(blocks) == 1).all():
            return Pages(None, int(blocks[0]) * size + begin % size, end - begin)
        return Pages(torch.from_numpy(blocks.astype(np.int64)).to(self._device), begin % size, end - begin)

    def _group(self, rows: np.ndarray, window: int) -> GroupedRows:
        """Rows of one new token, shortest first."""
        spans, width = np.minimum(self._lengths[rows], window), int(min(self._lengths[rows[-1]], window))
        begin = self._lengths[rows] - spans
        position = begin[:, None] + np.minimum(np.arange(width), spans[:, None] - 1)
        block = self._tables[rows[:, None], position // self._block_size].astype(np.int64)
        slots = (block * self._block_size + position % self._block_size).reshape(-1)
        mask = None
        if spans[0] != spans[-1]:
            mask = torch.from_numpy(np.arange(width) < spans[:, None]).to(self._device)[:, None, None]
        tokens = torch.from_numpy(self._starts[rows].astype(np.int64)).to(self._device)
        return GroupedRows(tokens, torch.from_numpy(slots).to(self._device), width, mask)


def _cuts(spans: np.ndarray, width: int) -> list[slice]:
    """Cut rows sorted by span into runs whose padded size stays under the limit (a longer row is a run alone)."""
    cuts, begin = [], 0
    for i, span in enumerate(spans.tolist()):
        if i > begin and (i + 1 - begin) * span * width > _GROUP_ELEMENTS:
            cuts.append(slice(begin, i))
            begin = i
    return [*cuts, slice(begin, len(spans))] if len(spans) else []


def _causal_mask(new: int, length: int, begin: int, window: int, device: torch.device) -> torch.Tensor:
    """``[new, length - begin]`` bool: the last of ``length`` positions against positions from ``begin`` on."""
    query = torch.arange(length - new, length, device=device)[:, None]
    seen = torch.arange(begin, length, device=device)
    return (seen <= query) & (seen > query - window)
