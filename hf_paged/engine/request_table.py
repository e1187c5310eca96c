"""The unfinished requests of an engine core in one table, out of which a request goes as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hf_paged.engine.features.feature_set import FeatureSet
from hf_paged.engine.session import Request


class RequestTable:
    """The unfinished requests, those among them that no step has received yet, and the features that they use.

    `remove` is the only way out, and takes a request out of everything here and out of its session: no part of the
    table can name a request that has ended.

    Args:
        features: get to know the requests.

    Attributes:
        by_id: all of them by their ids, to be read only.
    """

    def __init__(self, features: FeatureSet) -> None:
        self._features = features
        self._by_id: dict[str, Request] = {}
        self.by_id: Mapping[str, Request] = MappingProxyType(self._by_id)
        self._arrivals: dict[str, Request] = {}

    def __contains__(self, request: Request) -> bool:
        return self._by_id.get(request.sequence.request_id) is request

    def add(self, request: Request, *, arrives: bool) -> None:
        """Take a request in.

        Args:
            request: One whose id is not in use.
            arrives: It is an arrival, which the next step receives.
        """
        # The session comes second: after an interrupt in between, a request that no session has open is dropped.
        self._by_id[request.request_id] = request.session.open[request.request_id] = request
        if arrives:
            self._arrivals[request.request_id] = request
        self._features.add(request)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is; one that is not in the table leaves the table as it is."""
        if request.is_open:
            del request.session.open[request.request_id]  # first, for the same reason as in `add`
        if request in self:
            self._arrivals.pop(request.request_id, None)
            del self._by_id[request.request_id]
            self._features.remove(request)  # last: what a feature raises then ends no request

    def clear(self) -> None:
        """Remove all requests; their sessions keep them."""
        self._arrivals.clear()
        self._by_id.clear()
        self._features.keep(())

    def take_arrivals(self) -> list[Request]:
        """The requests that came since the last call."""
        arrivals, self._arrivals = self._arrivals, {}
        return list(arrivals.values())

    def arrive_again(self) -> None:
        """Make all requests arrivals, after an interrupt at an unknown point."""
        self._arrivals = dict(self._by_id)
