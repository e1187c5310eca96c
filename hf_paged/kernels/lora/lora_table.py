"""The table of addresses by which kernels read the LoRA adapters of some linear layers in place, without copies.

The linear layers read the same input. A row of it belongs to an *entry*, a set of adapters that are added up;
each *part* of an entry has at most one adapter for each of the layers, the *members*.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.device.cuda import upload
from hf_paged.kernels._triton import next_power_of_2

MOST_MEMBERS = 3
_SMALLEST_RANK = 16  # of a product on tensor cores
_LARGEST_TILE = 64  # rank columns that a program takes at once
_FIELDS = 5  # int64 values of an adapter in the table
# Tables begin at multiples of so many adapters, 16 bytes of scales, so that kernels are compiled once for all layers.
_ALIGNED = 4


class Adapter(NamedTuple):
    """LoRA of one layer: ``a`` [r, K], ``b`` [n, r] and ``bias`` [n] of b's product, of one dtype and contiguous."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    scaling: float

    def key(self) -> tuple:
        """Where it lies, and what else its product depends on besides the values there."""
        bias = None if self.bias is None else self.bias.data_ptr()
        return self.a.data_ptr(), self.b.data_ptr(), bias, self.a.shape, self.a.dtype, self.scaling


Part = tuple[Adapter | None, ...]  # by member
Entry = tuple[Part, ...]


class LoraTable(NamedTuple):
    """The adapters of J members in E entries of at most P parts.

    ``places`` [E, P, J, 5] int64: addresses of a, b and bias (0: none), rank (0: no adapter), bytes of b. ``scales``
    [E, P, J] float32. Both were written by a copy, on which kernels rely (see `_lora_tile`). ``columns``: first column
    and number of columns of each member in the members' product. ``compute_dtype``: in which PEFT would multiply.
    ``rank``: the largest rank, padded to a power of two; ``rank_divisor`` divides all ranks. ``aligned``: each address
    and each row of a begins at a multiple of 16 bytes. ``rounds_delta``: see `Members`.
    """

    entries: tuple[Entry, ...]
    places: torch.Tensor
    scales: torch.Tensor
    columns: tuple[tuple[int, int], ...]
    compute_dtype: torch.dtype
    rank: int
    rank_divisor: int
    aligned: bool
    has_bias: bool
    rounds_delta: bool = False

    @property
    def num_parts(self) -> int:
        return self.places.shape[1]

    @property
    def num_members(self) -> int:
        return self.places.shape[2]

    @property
    def num_slots(self) -> int:
        """Adapters that an entry can have."""
        return self.num_parts * self.num_members

    @property
    def rank_tile(self) -> int:
        """Rank columns that a program takes at once."""
        return min(self.rank, _LARGEST_TILE)

    @property
    def dtype(self) -> torch.dtype:
        """Of the adapters as they lie in memory."""
        return next(adapter.a.dtype for adapter in _adapters(self.entries))

    def adapters(self) -> list[Adapter]:
        """All of them, entry by entry."""
        return _adapters(self.entries)


class Members(NamedTuple):
    """What a table is made of: adapters by entry, part and member, and the members' columns in their product.

    ``rounds_delta``: round what an entry adds to the product's dtype before it is added.
    """

    entries: tuple[Entry, ...]
    columns: tuple[tuple[int, int], ...]
    compute_dtype: torch.dtype
    rounds_delta: bool = False


def make_tables(groups: Sequence[Members], device: torch.device) -> list[LoraTable]:
    """A table for each group of layers, all sent to the device in one copy each of places and scales.

    Raises:
        ValueError: a group without adapters, or of too many members.
    """
    fields = [_numbers(group) for group in groups]
    if not fields:
        return []
    starts = [0, *accumulate(-(-scale.size // _ALIGNED) * _ALIGNED for _, scale in fields)]
    places, scales = np.zeros((starts[-1], _FIELDS), np.int64), np.zeros(starts[-1], np.float32)
    parts = [slice(start, start + scale.size) for start, (_, scale) in zip(starts, fields, strict=False)]
    for part, (place, scale) in zip(parts, fields, strict=True):
        places[part], scales[part] = place.reshape(-1, _FIELDS), scale.reshape(-1)
    sent, sent_scales = upload(places, device), upload(scales, device)
    return [_table(group, sent[part].view(place.shape), sent_scales[part].view(scale.shape))
            for group, part, (place, scale) in zip(groups, parts, fields, strict=True)]


def _table(group: Members, places: torch.Tensor, scales: torch.Tensor) -> LoraTable:
    adapters = _adapters(group.entries)
    ranks = [len(adapter.a) for adapter in adapters]
    addresses = [t.data_ptr() for adapter in adapters for t in (adapter.a, adapter.b)]
    row_bytes = [adapter.a.shape[1] * adapter.a.element_size() for adapter in adapters]
    return LoraTable(
        group.entries, places, scales, group.columns, group.compute_dtype,
        max(_SMALLEST_RANK, next_power_of_2(max(ranks))), int(np.gcd.reduce([*ranks, _SMALLEST_RANK])),
        not any(number % 16 for number in addresses + row_bytes),
        any(adapter.bias is not None for adapter in adapters), group.rounds_delta,
    )


def _numbers(group: Members) -> tuple[np.ndarray, np.ndarray]:
    """``places`` and ``scales`` of a table, on the host."""
    if len(group.columns) > MOST_MEMBERS or not _adapters(group.entries):
        raise ValueError(f"columns={group.columns}: expected 1 to {MOST_MEMBERS} members, one of them with an adapter")
    shape = len(group.entries), max(1, *map(len, group.entries)), len(group.columns)
    places, scales = np.zeros((*shape, _FIELDS), np.int64), np.zeros(shape, np.float32)
    for e, entry in enumerate(group.entries):
        for p, part in enumerate(entry):
            for j, adapter in enumerate(part):
                if adapter is None:
                    continue
                bias = 0 if adapter.bias is None else adapter.bias.data_ptr()
                places[e, p, j] = adapter.a.data_ptr(), adapter.b.data_ptr(), bias, len(adapter.a), adapter.b.nbytes
                scales[e, p, j] = adapter.scaling
    return places, scales


def _adapters(entries: Sequence[Entry]) -> list[Adapter]:
    return [adapter for entry in entries for part in entry for adapter in part if adapter is not None]
