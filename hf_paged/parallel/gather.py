"""Gathering of whole tensors from parts on ranks: several tensors in a collective, through buffers of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Bytes that a rank receives in a collective. A larger tensor has a collective of its own.
BUCKET_BYTES = 256 << 20
# The collective's name since torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class GatherShard(NamedTuple):
    """This rank's part of a tensor.

    Attributes:
        local: the rank's c rows along `dim`; fewer if `dim` is 0 and the rows do not suffice.
        whole: the gathered tensor, in the dtype that it is read in, and on the device of the collective.
        dim: dimension of the cut; rank r has rows r * c to (r + 1) * c. None: every rank has the whole tensor.
        group: the process group of the ranks that share the tensor; None if `dim` is None.
    """

    local: torch.Tensor
    whole: torch.Tensor
    dim: int | None
    group: Any

    @property
    def padded_shape(self) -> list[int]:
        """Shape of a full part, of c rows along `dim`."""
        shape = list(self.whole.shape)
        if self.dim is not None:
            shape[self.dim] = -(-shape[self.dim] // dist.get_world_size(self.group))
        return shape

    @property
    def padded_size(self) -> int:
        """Number of elements of a full part."""
        return int(torch.Size(self.padded_shape).numel())


class Gatherer:
    """Function that fills `GatherShard.whole` of all shards.

    It allocates when made, so that no rank fails between collectives.

    Args:
        parts: parts, in the same order on all ranks.
        bucket_bytes: bytes that a rank receives in a collective at most.
    """

    def __init__(self, parts: Iterable[GatherShard], bucket_bytes: int = BUCKET_BYTES) -> None:
        parts = list(parts)
        self._copied = [part for part in parts if part.dim is None]
        self._buckets = _buckets([part for part in parts if part.dim is not None], bucket_bytes)
        largest: dict[torch.device, tuple[int, int]] = {}
        for bucket in self._buckets:
            sent, got = largest.get(bucket[0].whole.device, (0, 0))
            size = _sent_bytes(bucket)
            largest[bucket[0].whole.device] = max(sent, size), max(got, size * dist.get_world_size(bucket[0].group))
        self._memory = {
            device: tuple(torch.empty(size, dtype=torch.uint8, device=device) for size in sizes)
            for device, sizes in largest.items()
        }

    @torch.no_grad()
    def __call__(self) -> None:
        """Run the collectives, in all of which every rank has to take part."""
        for part in self._copied:
            part.whole.copy_(part.local)
        for bucket in self._buckets:
            self._gather(bucket)

    def _gather(self, bucket: list[GatherShard]) -> None:
        group, dtype, device = bucket[0].group, bucket[0].whole.dtype, bucket[0].whole.device
        world, size = dist.get_world_size(group), _sent_bytes(bucket)
        sent, got = (memory[:n] for memory, n in zip(self._memory[device], (size, size * world), strict=True))
        offset, places = 0, list[int]()
        for part in bucket:
            place = sent.view(dtype)[offset : offset + part.padded_size].view(part.padded_shape)
            if part.local.numel():  # one copy that also casts; the rest is padding, which is never read
                assert part.dim is not None
                place.narrow(part.dim, 0, part.local.shape[part.dim]).copy_(part.local)
            places.append(offset)
            offset += part.padded_size
        _all_gather(got, sent, group=group)  # bytes, which every backend carries
        by_rank = got.view(dtype).view(world, -1)
        for part, start in zip(bucket, places, strict=True):
            assert part.dim is not None
            pieces = by_rank[:, start : start + part.padded_size].view(world, *part.padded_shape)
            total, full = part.whole.shape[part.dim], part.padded_shape[part.dim]
            for rank, piece in enumerate(pieces):
                first = min(rank * full, total)
                count = min(full, total - first)
                part.whole.narrow(part.dim, first, count).copy_(piece.narrow(part.dim, 0, count))


def _buckets(parts: Sequence[GatherShard], most: int) -> list[list[GatherShard]]:
    """Return buckets of neighbouring parts of one group, dtype and device, of at most `most` bytes."""
    buckets: list[list[GatherShard]] = []
    for part in parts:
        alike = buckets and _kind(buckets[-1][0]) == _kind(part)
        if not alike or _sent_bytes([*buckets[-1], part]) * dist.get_world_size(part.group) > most:
            buckets.append([])
        buckets[-1].append(part)
    return buckets


def _kind(part: GatherShard) -> tuple:
    return id(part.group), part.whole.dtype, part.whole.device


def _sent_bytes(bucket: Sequence[GatherShard]) -> int:
    return sum(part.padded_size for part in bucket) * bucket[0].whole.element_size()
