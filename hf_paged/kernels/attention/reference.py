"""Paged attention in torch: the reference that the kernels are compared with, and what a CPU runs.

`HostRows` works out on the host where a step's keys and values are: once a step, for all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from hf_paged.kernels.attention.types import AttentionOptions, PagedMetadata, positively_scaled

# From torch._C, so that a patched torch.nn.functional does not change the reference.
_ATTENTION = torch._C._nn.scaled_dot_product_attention
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
    """A row that is read alone: its new tokens are `first` to `last - 1`, and see positions by `mask` or causally."""

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


class Sight(NamedTuple):
    """Which positions up to its own a token sees: `AttentionOptions.window` and `AttentionOptions.chunk`."""

    window: int | None
    chunk: int | None

    def spans(self, lengths: np.ndarray) -> np.ndarray:
        """Return how many positions the last token of each sequence sees, from their lengths [n]."""
        if self.chunk is not None:
            return (lengths - 1) % self.chunk + 1
        return lengths if self.window is None else np.minimum(lengths, self.window)


class Reads(NamedTuple):
    """All rows of a step that see a position, with one window or chunk."""

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
        self._by_sight: dict[Sight, Reads] = {}

    def reads(self, window: int | None, chunk: int | None = None) -> Reads:
        """Return the reads of layers with this window or chunk."""
        sight = Sight(window, chunk)
        found = self._by_sight.get(sight)
        if found is None:
            found = self._by_sight[sight] = self._reads(sight)
        return found

    def _reads(self, sight: Sight) -> Reads:
        """Read rows of one new token in groups of similar length; rows of more tokens, or without a group, alone."""
        if len(self._lengths) == 1 and self._longest:
            return Reads([], [self._row(0, sight)])
        seen = self._lengths > 0
        ones = np.flatnonzero((self._counts == 1) & seen)
        spans = sight.spans(self._lengths[ones])
        order = np.argsort(spans, kind="stable")
        groups = [ones[order[cut]] for cut in _cuts(spans[order], self._width)]
        alone = [int(rows[0]) for rows in groups if len(rows) == 1] + np.flatnonzero((self._counts > 1) & seen).tolist()
        return Reads([self._group(rows, sight) for rows in groups if len(rows) > 1],
                     [self._row(row, sight) for row in alone])

    def _row(self, row: int, sight: Sight) -> SingleRow:
        first, new, length = int(self._starts[row]), int(self._counts[row]), int(self._lengths[row])
        lengths = np.arange(length - new + 1, length + 1)  # up to each new token
        first_seen = lengths - sight.spans(lengths)
        begin, causal = int(first_seen[0]), 1 < new == length and not first_seen.any()
        mask = None if new == 1 or causal else _causal_mask(lengths, first_seen, self._device)
        return SingleRow(first, first + new, self._pages(row, begin, length), mask, causal)

    def _pages(self, row: int, begin: int, end: int) -> Pages:
        size = self._block_size
        blocks = self._tables[row, begin // size : -(-end // size)]
        if (np.diff(blocks) == 1).all():
            return Pages(None, int(blocks[0]) * size + begin % size, end - begin)
        return Pages(torch.from_numpy(blocks.astype(np.int64)).to(self._device), begin % size, end - begin)

    def _group(self, rows: np.ndarray, sight: Sight) -> GroupedRows:
        """Rows of one new token, those that see least first."""
        spans = sight.spans(self._lengths[rows])
        width = int(spans[-1])
        begin = self._lengths[rows] - spans
        position = begin[:, None] + np.minimum(np.arange(width), spans[:, None] - 1)
        block = self._tables[rows[:, None], position // self._block_size].astype(np.int64)
        slots = (block * self._block_size + position % self._block_size).reshape(-1)
        mask = None
        if spans[0] != spans[-1]:
            mask = torch.from_numpy(np.arange(width) < spans[:, None]).to(self._device)[:, None, None]
        tokens = torch.from_numpy(self._starts[rows].astype(np.int64)).to(self._device)
        return GroupedRows(tokens, torch.from_numpy(slots).to(self._device), width, mask)


def host_rows_of(meta: PagedMetadata, block_size: int, width: int) -> HostRows:
    """Return `meta.host_rows` for caches of this block size and Hkv * D elements a position."""
    return HostRows(meta.query_start, meta.seq_lens, meta.block_table, meta.slots, block_size, width)


def _cuts(spans: np.ndarray, width: int) -> list[slice]:
    """Cut rows sorted by span into runs whose padded size stays under the limit (a longer row is a run alone)."""
    cuts, begin = [], 0
    for i, span in enumerate(spans.tolist()):
        if i > begin and (i + 1 - begin) * span * width > _GROUP_ELEMENTS:
            cuts.append(slice(begin, i))
            begin = i
    return [*cuts, slice(begin, len(spans))] if len(spans) else []


def _causal_mask(lengths: np.ndarray, first_seen: np.ndarray, device: torch.device) -> torch.Tensor:
    """``[n, L]`` bool: n tokens, behind ``lengths - 1`` others, against positions from the first one's first seen on.
    """
    ends, firsts = (torch.from_numpy(positions).to(device)[:, None] for positions in (lengths, first_seen))
    seen = torch.arange(int(first_seen[0]), int(lengths[-1]), device=device)
    return (seen < ends) & (seen >= firsts)


def paged_attention_reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata, options: AttentionOptions, *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Paged attention in torch: visible positions are read, then ``scaled_dot_product_attention``.

    Rows with one new token go together in groups of similar length, longer ones row by row. Reads the metadata on the
    host unless `HostRows` has, so on CUDA it waits for the device.
    """
    q, options = positively_scaled(q, options)
    rows = meta.host_rows
    if rows is None:
        rows = host_rows_of(meta, k_cache.shape[1], k_cache.shape[2] * k_cache.shape[3])
    grouped, single = rows.reads(options.window, options.chunk)
    if out is None and len(single) == 1 and single[0].last - single[0].first == len(q):
        return _of_row(q, k_cache, v_cache, single[0], options)
    out = q.new_zeros((*q.shape[:2], v_cache.shape[3])) if out is None else out.zero_()
    for group in grouped:
        out.index_copy_(0, group.tokens, _of_group(q, k_cache, v_cache, group, options))
    for row in single:
        out[row.first : row.last] = _of_row(q[row.first : row.last], k_cache, v_cache, row, options)
    return out


def attend_row(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, row: SingleRow,
               options: AttentionOptions) -> torch.Tensor:
    """Attend by q ``[n, Hq, D]`` of one row to the positions that its mask says -> ``[n, Hq, Dv]``, contiguous."""
    q, options = positively_scaled(q, options)
    return _of_row(q, k_cache, v_cache, row, options)


def _of_row(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, row: SingleRow,
            options: AttentionOptions) -> torch.Tensor:
    """q ``[n, Hq, D]`` of one row -> ``[n, Hq, Dv]``, contiguous."""
    k, v, sinks = row.pages.read(k_cache), row.pages.read(v_cache), options.sinks
    if len(q) == 1 and row.mask is None:
        # The query heads of one KV head become its query positions: no copy of K and V per head, larger products.
        grouped = q.reshape(len(k), 1, -1, q.shape[2])
        sinks = None if sinks is None else sinks.view(len(k), 1, -1, 1)
        return _attend(grouped, k, v, None, False, options, sinks).reshape(1, q.shape[1], -1)
    sinks = None if sinks is None else sinks.view(-1, 1, 1)
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    attended = _attend(q.transpose(0, 1)[None], k, v, row.mask, row.causal, options, sinks)
    return attended[0].transpose(0, 1).contiguous()


def _of_group(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, group: GroupedRows,
              options: AttentionOptions) -> torch.Tensor:
    """q ``[T, Hq, D]`` of the whole step -> ``[n, Hq, Dv]`` of the group's tokens."""
    k, v = group.read(k_cache), group.read(v_cache)
    grouped = q.index_select(0, group.tokens).reshape(len(k), k.shape[1], -1, q.shape[2])
    sinks = None if options.sinks is None else options.sinks.view(k.shape[1], -1, 1)
    return _attend(grouped, k, v, group.mask, False, options, sinks).reshape(len(k), q.shape[1], -1)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool,
    options: AttentionOptions, sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``[n, H, M, D]`` queries over ``[n, Hkv, L, D]`` keys and ``[n, Hkv, L, Dv]`` values; H is a multiple of Hkv,
    sinks fit their scores but for the last dim, which is 1."""
    scale, softcap = options.scale, options.softcap
    if softcap is None and sinks is None:
        return _ATTENTION(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, -1, dtype=torch.promote_types(q.dtype, torch.float32))
    return torch.matmul(weights[..., : k.shape[-2]].to(v.dtype), v)
