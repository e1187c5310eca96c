"""Memory for tensors that lie side by side on a GPU, each in a block of torch's caching allocator.

Each storage is an ordinary one, which can be resized and freed alone. Only the addresses are chosen, by allocating in a
pool without other allocations. The pool is released as soon as all tensors are placed, since no other code could reuse
memory that is freed in it; its memory then belongs to the allocator like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from hf_paged.device.cuda import bytes_at, empty_cache

_UNIT = 512  # bytes: the allocator rounds every size up to a multiple
_SMALL = 1 << 20  # bytes: blocks up to this size come from segments of their own
_TRIES = 8
_MOST_CACHED = 1 << 30  # bytes placed before the cache is emptied, which bounds what the allocator keeps of old copies


def adjacent_memory(device: torch.device) -> AdjacentMemory | None:
    """Return an `AdjacentMemory` of this device; None if tensors cannot be placed, as on a CPU."""
    is_native = device.type == "cuda" and torch.cuda.get_allocator_backend() == "native"
    return AdjacentMemory(device) if is_native else None


class AdjacentMemory:
    """An allocator of adjacent tensors on one CUDA device. Sizes that could not be placed are not tried again."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: _Pool | None = None
        self._refused: set[tuple[int, ...]] = set()
        self._ballast: list[torch.Tensor] = []  # keeps holes occupied in which tensors were placed wrongly
        self._num_bytes = 0  # bytes placed since the cache was emptied

    def place(self, like: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return new adjacent tensors of these shapes and dtypes, in order; None if they cannot be placed."""
        sizes = tuple(tensor.numel() * tensor.element_size() for tensor in like)
        if not _is_placeable(sizes) or sizes in self._refused:
            return None
        if self._num_bytes > _MOST_CACHED:
            self._empty_cache()
        for _ in range(_TRIES):
            start, pieces = self._in_order(like, sizes)
            if not pieces:  # out of memory: torch frees no cached memory by itself while a pool is in use
                self._ballast.clear()
                self._empty_cache()
                continue
            if are_adjacent(pieces):
                self._num_bytes += sum(sizes)
                return pieces
            self._ballast += [piece for piece in pieces if not start <= piece.data_ptr() < start + sum(sizes)]
            del pieces  # free the tensors in the right place, or the next try would find no room there
        self._refused.add(sizes)
        return None

    def read_together(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return adjacent contiguous tensors [n_i, k] of one dtype as one [sum n_i, k], which owns no memory."""
        nbytes = sum(piece.numel() * piece.element_size() for piece in pieces)
        memory = bytes_at(pieces[0].data_ptr(), nbytes, pieces[0].device)
        return memory.view(pieces[0].dtype).view(-1, pieces[0].shape[1])

    def finish(self) -> None:
        """Release the pool after the last `place`, and the cached memory of the tensors that were replaced."""
        if self._pool is not None:
            self._ballast.clear()
            self._pool.release()
            self._pool = None
            self._empty_cache()

    def _in_order(self, like: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[int, list[torch.Tensor]]:
        """Allocate the tensors in order, large ones after freeing a block (at the returned address) that holds all.

        Returns no tensors if the device is out of memory.
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
    """A `torch.cuda.MemPool` without its destructor, which aborts the process if memory cannot be freed."""

    def __init__(self, device: torch.device) -> None:
        with torch.cuda.device(device):
            self._place = torch.cuda.current_device(), torch.cuda.graph_pool_handle()
        self._begin()
        self._end()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let this thread's allocations in the block come from the pool."""
        self._begin()
        try:
            yield
        finally:
            self._end()
            self.release()

    def release(self) -> None:
        """Undo one use (torch counts each begin); after the last one the memory belongs to the allocator."""
        torch._C._cuda_releasePool(*self._place)

    def _begin(self) -> None:
        torch._C._cuda_beginAllocateCurrentThreadToPool(*self._place)

    def _end(self) -> None:
        torch._C._cuda_endAllocateToPool(*self._place)


def are_adjacent(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether each of these contiguous tensors begins where the one before ends."""
    ends = [tensor.data_ptr() + tensor.numel() * tensor.element_size() for tensor in tensors]
    return ends[:-1] == [tensor.data_ptr() for tensor in tensors[1:]]


def _is_placeable(sizes: Sequence[int]) -> bool:
    """Return whether all sizes are whole blocks, and all small or all large: these never share a segment."""
    if not sizes or any(size == 0 or size % _UNIT for size in sizes):
        return False
    return max(sizes) <= _SMALL or min(sizes) > _SMALL
