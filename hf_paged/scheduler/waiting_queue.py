"""Sequences without a slot, best (priority, arrival) first."""

from __future__ import annotations

import heapq

from hf_paged.scheduler.sequence import Sequence, Status


class WaitingQueue:
    """Priority heap of waiting sequences; a finished sequence is removed only when it reaches the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.rank, seq))
        self._len += 1

    def sequences(self) -> list[Sequence]:
        """Return all waiting sequences in arbitrary order."""
        return [seq for _, seq in self._heap if seq.status is not Status.FINISHED]

    def peek(self) -> Sequence | None:
        """Return the next sequence to admit, or None."""
        while self._heap and self._heap[0][1].status is Status.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Remove and return the sequence of `peek`; raises IndexError if there is none."""
        seq = self.peek()
        if seq is None:
            raise IndexError("nobody waits")
        heapq.heappop(self._heap)
        self._len -= 1
        return seq

    def count_out(self) -> None:
        """Decrease the length for a sequence that was finished while it waits."""
        self._len -= 1
