"""The unfinished requests of an engine core in one table, out of which a request goes as a whole."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from types import MappingProxyType

from hf_paged.engine.session import Request


class RequestTable:
    """The unfinished requests, those among them that no step has received yet, and the time limits of some.

    `remove` is the only way out, and takes a request out of everything here and out of its session: no part of the
    table can name a request that has ended.

    Attributes:
        by_id: all of them by their ids, to be read only.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Request] = {}
        self.by_id: Mapping[str, Request] = MappingProxyType(self._by_id)
        self._arrivals: dict[str, Request] = {}
        self._deadlines: dict[str, float] = {}  # by `time.monotonic`
        self._next_deadline = math.inf  # not later than the first of them

    def __contains__(self, request: Request) -> bool:
        return self._by_id.get(request.request_id) is request

    def add(self, request: Request, *, arrives: bool, is_timed: bool) -> None:
        """Take a request in.

        Args:
            request: One whose id is not in use.
            arrives: It is an arrival, which the next step receives.
            is_timed: Its time limit counts here, if it has one.
        """
        # The session comes second: after an interrupt in between, a request that no session has open is dropped.
        self._by_id[request.request_id] = request.session.open[request.request_id] = request
        if arrives:
            self._arrivals[request.request_id] = request
        if is_timed:
            self._watch_time(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is; one that is not in the table leaves the table as it is."""
        if request.is_open:
            del request.session.open[request.request_id]  # first, for the same reason as in `add`
        if request in self:
            self._arrivals.pop(request.request_id, None)
            self._deadlines.pop(request.request_id, None)
            del self._by_id[request.request_id]

    def clear(self) -> None:
        """Remove all requests; their sessions keep them."""
        for part in (self._arrivals, self._deadlines, self._by_id):
            part.clear()

    def take_arrivals(self) -> list[Request]:
        """The requests that came since the last call."""
        arrivals, self._arrivals = self._arrivals, {}
        return list(arrivals.values())

    def arrive_again(self) -> None:
        """Make all requests arrivals, after an interrupt at an unknown point."""
        self._arrivals = dict(self._by_id)
        self._deadlines, self._next_deadline = {}, math.inf
        for request in self._by_id.values():
            self._watch_time(request)

    def late(self) -> list[Request]:
        """The requests whose time is over."""
        if not self._deadlines or (now := time.monotonic()) < self._next_deadline:
            return []
        late = [key for key, deadline in self._deadlines.items() if deadline <= now]
        self._next_deadline = min((time for key, time in self._deadlines.items() if key not in late), default=math.inf)
        return [self._by_id[key] for key in late]

    def _watch_time(self, request: Request) -> None:
        if request.deadline is not None:
            self._deadlines[request.request_id] = request.deadline
            self._next_deadline = min(self._next_deadline, request.deadline)
