"""Rows of a step that follow grammars: their matchers go on by new tokens, and say what may follow them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from hf_paged.engine.log_probs import Attempt
from hf_paged.engine.mask_maker import MaskMaker
from hf_paged.engine.matchers import Matcher
from hf_paged.engine.session import Request
from hf_paged.sampling.token_mask import HostMasks
from hf_paged.scheduler import StepPlan

RequestOf = Callable[[StepPlan, int], Request | None]


def any_follows(plan: StepPlan, requests: Mapping[str, Request]) -> bool:
    """Does a row that samples follow a grammar?"""
    rows = (requests.get(plan.sequences[row].request_id) for row in np.flatnonzero(plan.samples).tolist())
    return any(request is not None and request.grammar is not None for request in rows)


def go_ahead(plan: StepPlan, tokens: np.ndarray, request_of: RequestOf) -> None:
    """Let matchers go on by the tokens [R] of a step before its commit, which takes all tokens of open requests.

    `Request.match` says then what it led to: until the commit, nothing of a request changes.
    """
    taken = tokens.tolist()
    for row in np.flatnonzero(plan.samples & (tokens >= 0)).tolist():
        request = request_of(plan, row)
        if request is not None and request.matcher is not None:
            try:
                request.went_on = request.matcher.accept(taken[row])
            except Exception as error:
                request.went_on = error


class PendingMasks:
    """What may follow in each row of a step that samples, in the making. Nobody may use the matchers meanwhile.

    Args:
        plan: of the step, all tokens before which the matchers know.
        beside: in a thread, while the caller goes on.
    """

    def __init__(self, plan: StepPlan, maker: MaskMaker, request_of: RequestOf, attempt: Attempt, *,
                 beside: bool) -> None:
        self._plan, self._maker, self._request_of, self._attempt = plan, maker, request_of, attempt
        self._rows = np.flatnonzero(plan.samples).tolist()
        self._matchers: list[Matcher | None] = [None] * len(self._rows)
        for index, row in enumerate(self._rows):
            request = request_of(plan, row)
            if request is not None and request.grammar is not None:
                try:
                    self._matchers[index] = request.open_matcher
                except Exception as error:
                    attempt(request, _raise, error)
        self._end: Callable[[], HostMasks | None] = lambda: None
        if any(self._matchers):
            try:
                self._end = maker.begin(self._matchers) if beside else partial(maker.make, self._matchers)
            except Exception:  # of a single matcher
                self._end = self._make_without_failing

    def take(self) -> HostMasks | None:
        """Wait for them. A request whose own matcher raises ends with that. None: no row has a mask."""
        try:
            return self._end()
        except Exception:
            return self._make_without_failing()

    def _make_without_failing(self) -> HostMasks | None:
        for index, row in enumerate(self._rows):
            if self._matchers[index] is not None:
                request = self._request_of(self._plan, row)
                if request is None:
                    self._matchers[index] = None  # it has ended meanwhile
                else:
                    self._attempt(request, self._try_alone, index)
        return self._maker.make(self._matchers) if any(self._matchers) else None

    def _try_alone(self, index: int) -> None:
        matcher, self._matchers[index] = self._matchers[index], None
        self._maker.make([matcher])
        self._matchers[index] = matcher


def _raise(error: Exception) -> None:
    raise error
