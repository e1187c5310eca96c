"""Sequences without a slot, best (priority, arrival) first."""

from __future__ import annotations

import heapq

from hf_paged.scheduler.sequence import Sequence, Status


class WaitingQueue:
    """A heap; an aborted sequence stays in it, marked finished, until it comes to the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.rank, seq))
        self._len += 1

    def sequences(self) -> list[Sequence]:
        """All of them, in no order."""
        return [seq for _, seq in self._heap if seq.status is not Status.FINISHED]

    def peek(self) -> Sequence | None:
        """The next to be admitted, or None."""
        while self._heap and self._heap[0][1].status is Status.FINISHED:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Take out what `peek` shows. Raises IndexError when empty."""
        seq = self.peek()
        if seq is None:
            raise IndexError("nobody waits")
        heapq.heappop(self._heap)
        self._len -= 1
        return seq

    def count_out(self) -> None:
        """One member was marked finished where it stands."""
        self._len -= 1
