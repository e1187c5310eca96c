"""Numbers for the contents of fed rows: equal contents have one number, and rows of one number are held once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hf_paged.process_lock import ProcessLock

MOST_BYTES = 256 << 20  # of the rows that are held to compare others with


class _Content(NamedTuple):
    identity: int
    rows: Mapping[str, torch.Tensor]


class FedContents:
    """Contents of fed rows that were seen last. Thread-safe.

    Two contents are compared number by number; a sum only says with which of them. The content that was used the
    longest ago is forgotten beyond `most_bytes`: it gets a new number when it comes again, which costs a hit of the
    prefix cache. `num_bytes`: memory of the rows that are held.
    """

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes, self.num_bytes, self._last = most_bytes, 0, 0
        self._lock = ProcessLock()
        self._known: OrderedDict[tuple[Any, int], _Content] = OrderedDict()

    def clear(self) -> None:
        """Forget all contents; those that come again get new numbers."""
        with self._lock.rlock:
            self._known.clear()
            self.num_bytes = 0

    def find(self, rows: Mapping[str, torch.Tensor]) -> tuple[int, Mapping[str, torch.Tensor]]:
        """Return the number of rows by the name of the decoder's input, and the tensors that are held of them."""
        kind = tuple((name, part.dtype, tuple(part.shape), part.device, _sum(part)) for name, part in rows.items())
        with self._lock.rlock:
            for key in [key for key in self._known if key[0] == kind]:
                held = self._known[key]
                if all(torch.equal(held.rows[name], part) for name, part in rows.items()):
                    self._known.move_to_end(key)
                    return held.identity, held.rows
            self._last += 1
            made = _Content(self._last, {name: part.clone() for name, part in rows.items()})
            self._known[kind, made.identity] = made
            self.num_bytes += _bytes(made)
            while self.num_bytes > self._most_bytes and len(self._known) > 1:
                self.num_bytes -= _bytes(self._known.popitem(last=False)[1])
            return made.identity, made.rows


def _sum(part: torch.Tensor) -> float:
    return float(part.double().sum())


def _bytes(content: _Content) -> int:
    return sum(part.nbytes for part in content.rows.values())
