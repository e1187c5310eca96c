"""Device time of parts of a step, measured with CUDA events that are recorded only on request."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple

import torch

# Limit for a thread whose sections are never taken: its engine was made after the last request had ended.
_MOST_PIECES = 4096


class TimedSection(NamedTuple):
    """Device work between two events of one stream, with a ``name``."""

    name: str
    begin: torch.cuda.Event
    end: torch.cuda.Event


class _Pieces(threading.local):
    def __init__(self) -> None:
        self.known: deque[TimedSection] = deque(maxlen=_MOST_PIECES)


_pieces = _Pieces()
_askers: set[Any] = set()  # while it is empty, a step pays only this check


def ask(asker: Any) -> None:
    """Record pieces until `stop` is called with the same object."""
    _askers.add(asker)


def stop(asker: Any) -> None:
    """End the request of `ask`."""
    _askers.discard(asker)


def begin(device: torch.device) -> torch.cuda.Event | None:
    """Record the start of a piece on the current stream; returns None without a request and on a CPU."""
    if not _askers or device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def end(name: str, began: torch.cuda.Event | None) -> None:
    """Record the end of a piece that `begin` started; has no effect if `began` is None."""
    if began is not None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        _pieces.known.append(TimedSection(name, began, event))


def take() -> tuple[TimedSection, ...]:
    """Return the pieces that this thread launched since the last call, in order."""
    taken = tuple(_pieces.known)
    _pieces.known.clear()
    return taken
