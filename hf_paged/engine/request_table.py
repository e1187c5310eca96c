"""The table of an engine's unfinished requests, from which a request is removed as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hf_paged.engine.features.feature_set import FeatureSet
from hf_paged.engine.session import Request


class RequestTable:
    """The unfinished requests, the arrivals (which no step has received yet), and the features of each request.

    Only `remove` and `clear` take requests out. `remove` takes a request out of every part of the table and out of its
    session, so that no part can refer to a request that has ended.

    Args:
        features: the features, with which requests are registered.

    Attributes:
        by_id: all unfinished requests by id, read-only.
    """

    def __init__(self, features: FeatureSet) -> None:
        self._features = features
        self._by_id: dict[str, Request] = {}
        self.by_id: Mapping[str, Request] = MappingProxyType(self._by_id)
        self._arrivals: dict[str, Request] = {}

    def __contains__(self, request: Request) -> bool:
        return self._by_id.get(request.sequence.request_id) is request

    def add(self, request: Request, *, arrives: bool) -> None:
        """Add a request.

        Args:
            request: a request whose id is not in use.
            arrives: the request is an arrival, which the next step receives.
        """
        # The session comes second: after an interrupt in between, a request that no session has open is dropped.
        self._by_id[request.request_id] = request.session.open[request.request_id] = request
        if arrives:
            self._arrivals[request.request_id] = request
        self._features.add(request)

    def remove(self, request: Request) -> None:
        """Remove a request from its session and from the table, if the table has it."""
        if request.is_open:
            del request.session.open[request.request_id]  # first, for the same reason as in `add`
        if request in self:
            self._arrivals.pop(request.request_id, None)
            del self._by_id[request.request_id]
            self._features.remove(request)  # last: an exception of a feature must not end the request a second time

    def clear(self) -> None:
        """Remove all requests from the table, but not from their sessions."""
        self._arrivals.clear()
        self._by_id.clear()
        self._features.keep(())

    def take_arrivals(self) -> list[Request]:
        """Return the requests that were added since the last call."""
        arrivals, self._arrivals = self._arrivals, {}
        return list(arrivals.values())

    def arrive_again(self) -> None:
        """Make all requests arrivals, after an interrupt at an unknown point."""
        self._arrivals = dict(self._by_id)
