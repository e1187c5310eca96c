"""All features of one engine: which of them running requests use, and the one place where their hooks are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hf_paged.engine.features import HOOKS, CommittedStep, StepFeature
from hf_paged.engine.session import Request
from hf_paged.runner.prompt_scores import NOTHING, Wanted
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.drafts import NO_DRAFTS, Drafts, confirmed


class FeatureSet:
    """The features of one engine, in the order in which their hooks are called; `start_over` goes the other way.

    Args:
        features: all of them.
        fail: ends a request with what was raised in its own part of a step.
        end: ends a request for a reason.

    Attributes:
        active: the features that unfinished requests use.
        having: by name of a hook, the active features that define it; "tokens": those that follow new tokens.
    """

    def __init__(self, features: Iterable[StepFeature], fail: Callable[[Request, Exception], None],
                 end: Callable[[Request, str], None]) -> None:
        self._all = tuple(features)
        self._fail, self._end = fail, end
        self.active: tuple[StepFeature, ...] = ()
        self.having = _by_hook(())
        self._tables: dict[tuple[StepFeature, ...], dict[str, tuple[StepFeature, ...]]] = {}  # by what is active
        for feature in self._all:
            feature.attempt = self.attempt

    def __getitem__(self, kind: type) -> Any:
        """The feature of a class."""
        return next(feature for feature in self._all if isinstance(feature, kind))

    def attempt(self, request: Request, action: Callable[..., Any], *args: Any) -> Any:
        """Do what belongs to one request: where it raises, that request ends with the error, and no other."""
        try:
            return action(*args)
        except Exception as error:
            self._fail(request, error)

    # -- requests come and go ---------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Set up a new request in its caller's thread, who gets what is raised."""
        request.features = tuple([feature for feature in self._all if feature.uses(request)])
        for feature in request.features:
            feature.admit(request)

    def add(self, request: Request) -> None:
        """The request is in the table of unfinished ones."""
        for feature in request.features:
            feature.requests[request.sequence.request_id] = request
        self._activate()

    def remove(self, request: Request) -> None:
        """The request leaves that table; one that is not here changes nothing."""
        key = request.sequence.request_id
        for feature in request.features:
            if feature.requests.get(key) is request:
                del feature.requests[key]
                if "leave" in feature.hooks:
                    self.attempt(request, feature.leave, request)
        self._activate()

    def keep(self, requests: Iterable[Request]) -> None:
        """All requests but these are gone; an interrupt may have left anything here half done."""
        kept = {id(request): request for request in requests}
        for feature in self._all:
            for request in [one for one in feature.requests.values() if id(one) not in kept]:
                self.remove(request)
        for request in kept.values():
            self.add(request)

    def _activate(self) -> None:
        active = tuple([feature for feature in self._all if feature.requests])
        if active not in self._tables:
            self._tables[active] = _by_hook(active)
        self.active, self.having = active, self._tables[active]

    @staticmethod
    def start_over(request: Request, made: list[int]) -> bool:
        """Let a request go on behind this output; True: it ends there. What is raised is the request's own."""
        ends = False
        for feature in reversed(request.features):
            if "start_over" in feature.hooks:
                ends |= bool(feature.start_over(request, made))
        return ends

    def started(self, request: Request) -> None:
        """The request got its slot."""
        for feature in request.features:
            if "started" in feature.hooks:
                self.attempt(request, feature.started, request)

    # -- before a launch --------------------------------------------------------------------------------------------

    def due(self) -> list[Request]:
        """Requests whose time is over."""
        return [request for feature in self.having["due"] for request in feature.due()]

    def model_may_differ(self) -> bool:
        """Has the model to be compared with what it was?"""
        return any(feature.model_may_differ() for feature in self.having["model_may_differ"])

    def unfit(self, requests: list[Request]) -> list[tuple[Request, str]]:
        """Those of the requests that cannot run on the model as it is now, with errors."""
        return [found for feature in self.having["unfit"] for found in feature.unfit(requests)]

    def drafts(self, num_running: int, device_type: str) -> Drafts:
        """By slot, tokens that may follow."""
        for feature in self.having["drafts"]:
            if drafts := feature.drafts(num_running, device_type):
                return drafts
        return NO_DRAFTS

    def wanted(self, plan: StepPlan) -> Wanted:
        """What a launch has to bring besides tokens."""
        wanted = NOTHING
        for feature in self.having["before"]:
            wanted = feature.before(plan, wanted)
        return wanted

    def samples_late(self, plan: StepPlan) -> StepFeature | None:
        """The feature that makes masks under which the step is to draw its tokens, if any does."""
        return next((feature for feature in self.having["samples_late"] if feature.samples_late(plan)), None)

    # -- after it ---------------------------------------------------------------------------------------------------

    def ends(self, step: CommittedStep) -> list[int]:
        """Rows whose token is the last of their request."""
        if not self.having["ends"]:
            return []
        plan, tokens = step.plan, step.tokens
        sampled = (plan.samples if plan.drafts is None else plan.samples & confirmed(plan, tokens)) & (tokens >= 0)
        return [row for feature in self.having["ends"] for row in feature.ends(step, sampled)]

    def committed(self, step: CommittedStep, accepted: np.ndarray) -> None:
        """Give requests what a step brought with the tokens of these rows."""
        rows = accepted.tolist()
        for feature in self.having["tokens"]:
            if "take" in feature.hooks:
                for row in rows:
                    request = feature.of_row(step.plan, row)
                    if request is not None:
                        reason = self.attempt(request, feature.take, request, step, row)
                        if reason is not None and request.sequence.finish_reason is None:
                            self._end(request, reason)
            if "committed" in feature.hooks:
                feature.committed(step, rows)

    def weights_changed(self, version: int) -> None:
        """All tokens so far were made with the weights of this version, and later ones are not."""
        for feature in self.having["weights_changed"]:
            for request in list(feature.requests.values()):
                self.attempt(request, feature.weights_changed, request, version)

    def prepared(self) -> None:
        """The runner was prepared for the model as it is now."""
        for feature in self._all:
            if "prepared" in feature.hooks:
                feature.prepared()

    def lose_steps(self) -> None:
        """What was launched is lost."""
        for feature in self._all:
            if "lose_steps" in feature.hooks:
                feature.lose_steps()

    def forget(self) -> None:
        """Forget what is kept of earlier requests."""
        for feature in self._all:
            if "forget" in feature.hooks:
                feature.forget()


def _by_hook(features: tuple[StepFeature, ...]) -> dict[str, tuple[StepFeature, ...]]:
    table = {name: tuple([one for one in features if name in one.hooks]) for name in HOOKS}
    return table | {"tokens": tuple([one for one in features if one.hooks & {"ends", "take", "committed"}])}
