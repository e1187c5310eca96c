"""Ranks that run scripts of their own: their rendezvous, and the gathering of whole tensors from their parts.

No rank begins a collective before all have come; for that only torch's store is used. A rank that waits in vain leaves
with an error, and ranks that wait with it or come later learn that; in a collective it would wait until the backend
ends the process. Tensors are gathered several in a collective, through buffers of bounded size.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hf_paged.errors import RankAloneError

# Seconds between two polls of a waiting rank, doubled each time. The store's own `wait` could not be interrupted, and a
# TCPStore logs a warning each time it times out.
_FIRST_NAP, _LONGEST_NAP = 50e-6, 50e-3
_ALL_CAME, _REFUSED = "all came", "refused: "
# Bytes that a rank receives in a collective. A larger tensor has a collective of its own.
BUCKET_BYTES = 256 << 20
# The collective's name since torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Rendezvous:
    """Series of meetings of some ranks. A rank meets from one thread at a time.

    A meeting ends once, and the store decides how: all came, one left, or one refused. So no rank goes on alone. A rank
    that comes after another left goes to the next meeting; a rank that comes after another refused gets its error.

    Args:
        store: a `torch.distributed` store that all of the ranks reach.
        name: name of this series of meetings, the same on all ranks.
        rank: rank of this process.
        ranks: all ranks that meet, at least two.
        flags: flags that ranks may bring to a meeting.
    """

    def __init__(self, store: Any, name: str, rank: int, ranks: Sequence[int], flags: Sequence[str]) -> None:
        self._store = dist.PrefixStore(f"hf_paged/{name}", store)
        self._rank, self._ranks, self._flags = rank, list(ranks), tuple(flags)
        self.num_meetings = 0  # that ended for this rank, in whatever way; the number of the next one
        self._kept = 0  # the first meeting whose keys are still in the store

    def meet(self, brought: Collection[str], timeout: float, setting: str) -> frozenset[str]:
        """Wait for all ranks.

        Args:
            brought: flags of this rank.
            timeout: seconds.
            setting: name of the timeout for the error.

        Returns:
            The flags that at least one rank brought.

        Raises:
            RankAloneError: not all came in time, or another rank gave up or refused.
        """
        try:
            end = self._skip_left() or self._come_and_wait(brought, timeout, setting)
        except BaseException as error:  # waiting ranks learn that this rank does not come
            with suppress(Exception):
                self._end(f"rank {self._rank} was interrupted by {type(error).__name__}")
            raise
        finally:
            self.num_meetings += 1
        if end != _ALL_CAME:
            raise RankAloneError(
                f"rank {self._rank} would generate alone: {end.removeprefix(_REFUSED)}. The weights are sharded over "
                f"ranks {self._ranks}, which gather them together: call generate equally often on all of them, or "
                "enter hf_paged.gathered(model) on all of them and generate inside of it"
            )
        found = frozenset(flag for flag in self._flags if self._store.add(self._key(flag, self.num_meetings - 1), 0))
        self._forget()
        return found

    def refuse(self, error: BaseException) -> None:
        """Send waiting and later ranks this rank's error, instead of meeting them. Does not wait."""
        text = str(error).rstrip(".")  # a sentence follows
        own = f"{_REFUSED}rank {self._rank} raised {type(error).__name__}: {text}"
        while self._skip_left() is None and self._end(own) != own:
            pass
        self.num_meetings += 1

    def _skip_left(self) -> str | None:
        """Go on to the first meeting that no rank left; returns how it ended if a rank refused it, else None."""
        while self._store.check([self._key("end")]):  # it ended without this rank
            end: str = self._store.get(self._key("end")).decode()
            if end.startswith(_REFUSED):
                return end
            self.num_meetings += 1
        return None

    def _come_and_wait(self, brought: Collection[str], timeout: float, setting: str) -> str:
        """Come, wait, and return how the meeting ended."""
        deadline, nap = time.monotonic() + timeout, _FIRST_NAP
        for flag in brought:
            self._store.add(self._key(flag), 1)
        self._store.set(self._key(f"rank {self._rank}"), "came")
        if self._store.add(self._key("count"), 1) == len(self._ranks):
            return self._end(_ALL_CAME)
        while not self._store.check([self._key("end")]):
            if (left := deadline - time.monotonic()) <= 0:
                return self._end(f"{self._missing()} did not come within {timeout:g} seconds ({setting}), which "
                                 f"rank {self._rank} waited")
            time.sleep(min(nap, left))
            nap = min(2 * nap, _LONGEST_NAP)
        end: bytes = self._store.get(self._key("end"))
        return end.decode()

    def _end(self, how: str) -> str:
        """End the meeting with `how`, if it has not ended; returns how it ended."""
        end: bytes = self._store.compare_set(self._key("end"), "", how)
        return end.decode()

    def _missing(self) -> str:
        names = [f"rank {rank}" for rank in self._ranks]
        return ", ".join(name for name in names if not self._store.check([self._key(name)]))

    def _forget(self) -> None:
        """Delete this rank's keys of meetings before the last, to which all came: no rank reads these keys any more."""
        for number in range(self._kept, self.num_meetings - 1):
            own = (f"rank {self._rank}",)
            for key in (*own, "end", "count", *self._flags) if self._rank == self._ranks[0] else own:
                self._store.delete_key(self._key(key, number))
        self._kept = self.num_meetings - 1

    def _key(self, name: str, number: int | None = None) -> str:
        return f"{self.num_meetings if number is None else number}/{name}"


class GatherShard(NamedTuple):
    """This rank's part of a tensor.

    Attributes:
        local: the rank's c rows along `dim`; fewer if `dim` is 0 and the rows do not suffice.
        whole: the gathered tensor, in the dtype that it is read in, and on the device of the collective.
        dim: dimension of the cut; rank r has rows r * c to (r + 1) * c.
        group: the process group of the ranks that share the tensor; None if every rank has the whole tensor.
    """

    local: torch.Tensor
    whole: torch.Tensor
    dim: int
    group: Any

    @property
    def padded_shape(self) -> list[int]:
        """Shape of a full part, of c rows along `dim`."""
        shape = list(self.whole.shape)
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
        self._copied = [part for part in parts if part.group is None]
        self._buckets = _buckets([part for part in parts if part.group is not None], bucket_bytes)
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
                place.narrow(part.dim, 0, part.local.shape[part.dim]).copy_(part.local)
            places.append(offset)
            offset += part.padded_size
        _all_gather(got, sent, group=group)  # bytes, which every backend carries
        by_rank = got.view(dtype).view(world, -1)
        for part, start in zip(bucket, places, strict=True):
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
