"""How long pieces of a step take on the device: CUDA events around them, recorded only while somebody asks."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple

import torch

# Of a thread whose pieces nobody takes: an engine that came when the asking had ended.
_MOST_PIECES = 4096


class Piece(NamedTuple):
    """Device work between two events of one stream; ``name`` says what it was."""

    name: str
    begin: torch.cuda.Event
    end: torch.cuda.Event


class _Pieces(threading.local):
    def __init__(self) -> None:
        self.known: deque[Piece] = deque(maxlen=_MOST_PIECES)


_pieces = _Pieces()
_askers: set[Any] = set()  # a look at it is all that a step pays while nobody asks


def ask(asker: Any) -> None:
    """Have pieces recorded until `stop` of the same object."""
    _askers.add(asker)


def stop(asker: Any) -> None:
    """It asks no more."""
    _askers.discard(asker)


def begin(device: torch.device) -> torch.cuda.Event | None:
    """Record the begin of a piece on the current stream; None where nobody asks, and on a CPU."""
    if not _askers or device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def end(name: str, began: torch.cuda.Event | None) -> None:
    """Record its end; nothing where it has no begin."""
    if began is not None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        _pieces.known.append(Piece(name, began, event))


def take() -> tuple[Piece, ...]:
    """What this thread launched since the last time, in order."""
    taken = tuple(_pieces.known)
    _pieces.known.clear()
    return taken
