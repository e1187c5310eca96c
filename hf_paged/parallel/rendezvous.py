"""Rendezvous of ranks that run scripts of their own: no rank begins a collective before all have come.

Only torch's store is used here. A rank that waits in vain leaves with an error, and ranks that wait with it or come
later learn that; in a collective it would wait until the backend ends the process.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from hf_paged.errors import RankAloneError

# Seconds between two polls of a waiting rank, doubled each time. The store's own `wait` could not be interrupted, and a
# TCPStore logs a warning each time it times out.
_FIRST_NAP, _LONGEST_NAP = 50e-6, 50e-3
_ALL_CAME, _REFUSED = "all came", "refused: "


class Rendezvous:
    """Series of meetings of some ranks. A rank meets from one thread at a time.

    A meeting ends once, and the store decides how: all came, one left, or one refused. So no rank goes on alone. A rank
    that comes after another left goes to the next meeting; a rank that comes after another refused gets its error.

    Args:
        store: a `torch.distributed` store that all of the ranks reach.
        name: name of this series of meetings, the same on all ranks.
        rank: rank of this process.
        ranks: all ranks that meet.
        flags: flags that ranks may bring to a meeting.
    """

    def __init__(self, store: Any, name: str, rank: int, ranks: Sequence[int], flags: Sequence[str]) -> None:
        self._store = dist.PrefixStore(f"hf_paged/{name}", store)
        self._rank, self._ranks, self._flags = rank, list(ranks), tuple(flags)
        self._number = 0  # of the next meeting
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
        if len(self._ranks) == 1:
            return frozenset(brought)
        try:
            end = self._skip_left() or self._come_and_wait(brought, timeout, setting)
        except BaseException as error:  # waiting ranks learn that this rank does not come
            with suppress(Exception):
                self._end(f"rank {self._rank} was interrupted by {type(error).__name__}")
            raise
        finally:
            self._number += 1
        if end != _ALL_CAME:
            raise RankAloneError(
                f"rank {self._rank} would generate alone: {end.removeprefix(_REFUSED)}. The weights are sharded over "
                f"ranks {self._ranks}, which gather them together: call generate equally often on all of them, or "
                "enter hf_paged.gathered(model) on all of them and generate inside of it"
            )
        found = frozenset(flag for flag in self._flags if self._store.add(self._key(flag, self._number - 1), 0))
        self._forget()
        return found

    @property
    def num_meetings(self) -> int:
        """Number of meetings that ended for this rank, in whatever way."""
        return self._number

    def refuse(self, error: BaseException) -> None:
        """Send waiting and later ranks this rank's error, instead of meeting them. Does not wait."""
        if len(self._ranks) == 1:
            return
        text = str(error).rstrip(".")  # a sentence follows
        own = f"{_REFUSED}rank {self._rank} raised {type(error).__name__}: {text}"
        while self._skip_left() is None and self._end(own) != own:
            pass
        self._number += 1

    def _skip_left(self) -> str | None:
        """Go on to the first meeting that no rank left; returns how it ended if a rank refused it, else None."""
        while self._store.check([self._key("end")]):  # it ended without this rank
            end: str = self._store.get(self._key("end")).decode()
            if end.startswith(_REFUSED):
                return end
            self._number += 1
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
        for number in range(self._kept, self._number - 1):
            own = (f"rank {self._rank}",)
            for key in (*own, "end", "count", *self._flags) if self._rank == self._ranks[0] else own:
                self._store.delete_key(self._key(key, number))
        self._kept = self._number - 1

    def _key(self, name: str, number: int | None = None) -> str:
        return f"{self._number if number is None else number}/{name}"
