"""Rows of a step that follow grammars: their matchers go on by new tokens, and say what may follow them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from hf_paged.engine.grammars import MaskMaker, Matcher
from hf_paged.engine.log_probs import Attempt
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
    for row in np.flatnonzero(plan.samples & (tokens >= 0)).tolist():
        request = request_of(plan, row)
        if request is not None and request.matcher is not None:
            try:
                request.went_on = request.matcher.accept(int(tokens[row]))
            except Exception as error:
                request.went_on = error


def masks_of(plan: StepPlan, maker: MaskMaker, request_of: RequestOf, attempt: Attempt) -> HostMasks | None:
    """What may follow in each row of a plan that samples; a request whose own matcher raises ends with that."""
    requests = [request_of(plan, row) for row in np.flatnonzero(plan.samples).tolist()]
    matchers: list[Matcher | None] = [None] * len(requests)

    def ask(request: Request, row: int) -> None:
        matchers[row] = request.open_matcher

    def try_alone(row: int) -> None:
        matcher, matchers[row] = matchers[row], None
        maker.make([matcher])
        matchers[row] = matcher

    for row, request in enumerate(requests):
        if request is not None and request.grammar is not None:
            attempt(request, ask, request, row)
    try:
        return maker.make(matchers) if any(matchers) else None
    except Exception:  # of a single matcher
        for row, request in enumerate(requests):
            if request is not None and matchers[row] is not None:
                attempt(request, try_alone, row)
        return maker.make(matchers)
