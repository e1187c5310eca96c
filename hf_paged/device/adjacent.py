"""Memory for tensors that lie side by side on a GPU, each in a block of torch's caching allocator.

Every storage is an ordinary one: it can be resized, and is freed by itself. Only the places are chosen, by allocating
in a pool where nobody else does. The pool goes as soon as all are placed, since what is freed in it would be lent to
nobody else; its memory then belongs to the allocator like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from hf_paged.device.cuda import bytes_at, empty_cache

_UNIT = 512  # bytes: the allocator rounds every size up to a multiple
_SMALL = 1 << 20  # bytes: up to here blocks come from segments of their own
_TRIES = 8
_MOST_CACHED = 1 << 30  # bytes that may have been freed elsewhere, and are kept by the allocator, meanwhile


def adjacent_memory(device: torch.device) -> AdjacentMemory | None:
    """Where tensors can be laid side by side on this device; None: nowhere, as on a CPU."""
    is_native = device.type == "cuda" and torch.cuda.get_allocator_backend() == "native"
    return AdjacentMemory(device) if is_native else None


class AdjacentMemory:
    """Places tensors on one CUDA device. Sizes that could not be placed once are not tried again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: _Pool | None = None
        self._refused: set[tuple[int, ...]] = set()
        self._ballast: list[torch.Tensor] = []  # fills the holes that pieces went to
        self._num_bytes = 0  # placed since the cache was emptied

    def place(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """New tensors of these shapes and dtypes, each beginning where the one before ends; None: it cannot be done."""
        sizes = tuple(tensor.numel() * tensor.element_size() for tensor in like)
        if not _is_placeable(sizes) or sizes in self._refused:
            return None
        if self._num_bytes > _MOST_CACHED:
            self._empty_cache()
        for _ in range(_TRIES):
            start, pieces = self._in_order(like, sizes)
            if not pieces:  # cached memory is not given back as long as a pool is in use
                self._ballast.clear()
                self._empty_cache()
                continue
            if are_adjacent(pieces):
                self._num_bytes += sum(sizes)
                return pieces
            self._ballast += [piece for piece in pieces if not start <= piece.data_ptr() < start + sum(sizes)]
            del pieces  # or the next would find no room among them
        self._refused.add(sizes)
        return None

    def read_together(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Adjacent contiguous tensors [n_i, k] of one dtype as one [sum n_i, k], which owns no memory."""
        nbytes = sum(piece.numel() * piece.element_size() for piece in pieces)
        memory = bytes_at(pieces[0].data_ptr(), nbytes, pieces[0].device)
        return memory.view(pieces[0].dtype).view(-1, pieces[0].shape[1])

    def finish(self) -> None:
        """All are placed for now: give up the pool, and what the tensors whose place they took have left behind."""
        if self._pool is not None:
            self._ballast.clear()
            self._pool.release()
            self._pool = None
            self._empty_cache()

    def _in_order(self, like: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[int, list[torch.Tensor]]:
        """Allocate one after the other, large ones with a free block (at the first value) that takes all of them.

        No tensors where the device is out of memory.
        """
        start = 0
        self._pool = self._pool or _Pool(self.device)
        with suppress(torch.OutOfMemoryError), self._pool.in_use():
            if sizes[0] > _SMALL:
                start = torch.empty(sum(sizes), dtype=torch.uint8, device=self.device).data_ptr()
            return start, [torch.empty(one.shape, dtype=one.dtype, device=self.device) for one in like]
        return start, []

    def _empty_cache(self) -> None:
        empty_cache()
        self._num_bytes = 0


class _Pool:
    """What `torch.cuda.MemPool` is, but for its destructor, which aborts the process where memory cannot be freed."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._place = torch.cuda.current_device(), torch.cuda.graph_pool_handle()
        self._begin()
        self._end()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """What this thread allocates in the block comes from here."""
        self._begin()
        try:
            yield
        finally:
            self._end()
            self.release()

    def release(self) -> None:
        """One use less: torch counts every beginning. After the last the memory is the allocator's like any other."""
        torch._C._cuda_releasePool(*self._place)

    def _begin(self) -> None:
        torch._C._cuda_beginAllocateCurrentThreadToPool(*self._place)

    def _end(self) -> None:
        torch._C._cuda_endAllocateToPool(*self._place)


def are_adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    """Does each of these contiguous tensors begin where the one before ends?"""
    ends = [tensor.data_ptr() + tensor.numel() * tensor.element_size() for tensor in tensors]
    return ends[:-1] == [tensor.data_ptr() for tensor in tensors[1:]]


def _is_placeable(sizes: Sequence[int]) -> bool:
    """Whole blocks, and all of them small or all of them large, which never lie in one segment."""
    if not sizes or any(size == 0 or size % _UNIT for size in sizes):
        return False
    return max(sizes) <= _SMALL or min(sizes) > _SMALL
