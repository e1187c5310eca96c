"""Requests that end at a stop string, or at the time limit (``max_time``) of their call."""

from __future__ import annotations

import time
from collections.abc import Hashable

import numpy as np

from hf_paged.engine.features import CommittedStep, StepFeature
from hf_paged.engine.session import Request


class StopRules(StepFeature):
    """Requests that a `StopRule` may end."""

    def __init__(self) -> None:
        super().__init__()
        self._reasons: dict[int, str] = {}  # finish reasons by row, for the step that is being committed

    def uses(self, request: Request) -> bool:
        return request.stop is not None

    def start_over(self, request: Request, made: list[int]) -> bool:
        assert request.stop is not None
        return request.stop.resume(made)

    def ends(self, step: CommittedStep, sampled: np.ndarray) -> list[int]:
        self._reasons = {}
        waiting: dict[str, list[int]] = {}  # rows of each request that were not checked yet
        for row in np.flatnonzero(sampled).tolist():
            if (request := self.of_row(step.plan, row)) is not None:
                waiting.setdefault(request.request_id, []).append(row)
        while waiting:  # one token of each request a round: no guess counts behind a token that ends the request
            groups: dict[Hashable, list[tuple[Request, int]]] = {}
            for key, rows in waiting.items():
                request = self.requests[key]
                pushed = self.attempt(request, self._push, request, step.token_list[rows[0]])
                if pushed is not None:
                    groups.setdefault(pushed, []).append((request, rows[0]))
            for group in groups.values():
                self._look(group)
            waiting = {key: rows[1:] for key, rows in waiting.items() if len(rows) > 1
                       and rows[0] not in self._reasons and self._is_well(key)}
        return list(self._reasons)

    def _is_well(self, key: str) -> bool:
        """Return whether the request of this id is unfinished and has not failed."""
        return key in self.requests and self.requests[key].error is None

    def _push(self, request: Request, token: int) -> tuple[Hashable]:
        """Push a token to the request's rule; returns the key of rules that one `which_stop` call can check."""
        assert request.stop is not None
        return (request.stop.push(token),)

    def _look(self, group: list[tuple[Request, int]]) -> None:
        """Check the rules of requests with one key together, and note which of the requests end."""
        rules = [request.stop for request, _ in group]
        try:
            stops = rules[0].which_stop(rules)  # type: ignore[union-attr]
        except Exception as error:
            if len(group) == 1:
                self.attempt(group[0][0], _raise, error)
            for one in group if len(group) > 1 else ():
                self._look([one])
            return
        for (request, row), stop in zip(group, stops, strict=True):
            self.attempt(request, self._note, request, row, stop)

    def _note(self, request: Request, row: int, stops: bool) -> None:
        """Note the finish reason if the request ends with the token of this row."""
        assert request.stop is not None
        if stops:
            self._reasons[row] = "stop"
        elif request.stop.is_late(time.time()):
            self._reasons[row] = "length"

    def take(self, request: Request, step: CommittedStep, row: int) -> str | None:
        return self._reasons.get(row)


def _raise(error: Exception) -> None:
    raise error
