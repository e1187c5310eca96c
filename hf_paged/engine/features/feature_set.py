"""All features of one engine: which of them running requests use, and the calls of their hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hf_paged.engine.features import HOOKS, CommittedStep, StepFeature
from hf_paged.engine.session import Request
from hf_paged.runner.prompt_scores import NOTHING, Wanted
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.plan import NO_DRAFTS, Drafts, confirmed


class FeatureSet:
    """The features of one engine, in the order in which their hooks are called; `start_over` goes the other way.

    Args:
        features: all features of the engine.
        fail: ends a request with an exception that a hook raised for it.
        end: ends a request with a ``finish_reason``.

    Attributes:
        active: the features that unfinished requests use.
        having: the active features that define a hook, by the hook's name; "tokens": the active features that define
            `ends`, `take` or `committed`.
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
        """Return what ``action`` for one request returns; None if it raises, which ends that request alone."""
        try:
            return action(*args)
        except Exception as error:
            self._fail(request, error)

    # -- requests come and go ---------------------------------------------------------------------------------------

    def admit(self, request: Request) -> None:
        """Set up a new request in its caller's thread; an exception is raised to the caller."""
        request.features = tuple([feature for feature in self._all if feature.uses(request)])
        for feature in request.features:
            feature.admit(request)

    def add(self, request: Request) -> None:
        """Register an unfinished request with the features that it uses."""
        for feature in request.features:
            feature.requests[request.sequence.request_id] = request
        self._activate()

    def remove(self, request: Request) -> None:
        """Remove a request from its features; does nothing for a request that is not registered."""
        key = request.sequence.request_id
        for feature in request.features:
            if feature.requests.get(key) is request:
                del feature.requests[key]
                if "leave" in feature.hooks:
                    self.attempt(request, feature.leave, request)
        self._activate()

    def keep(self, requests: Iterable[Request]) -> None:
        """Keep these requests, and remove all others, which repairs what an interrupt in `add` or `remove` left."""
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
        """Set a request up to continue this output; returns True if it ends there. Raises what a feature raises."""
        ends = False
        for feature in reversed(request.features):
            if "start_over" in feature.hooks:
                ends |= bool(feature.start_over(request, made))
        return ends

    def started(self, request: Request) -> None:
        """Call `started` of a request that got its slot."""
        for feature in request.features:
            if "started" in feature.hooks:
                self.attempt(request, feature.started, request)

    # -- before a launch --------------------------------------------------------------------------------------------

    def drafts(self, num_running: int, device_type: str) -> Drafts:
        """Return guesses of the next tokens by slot, of the first feature that has any."""
        for feature in self.having["drafts"]:
            if drafts := feature.drafts(num_running, device_type):
                return drafts
        return NO_DRAFTS

    def wanted(self, plan: StepPlan) -> Wanted:
        """Return the results besides tokens that features need of a launch."""
        wanted = NOTHING
        for feature in self.having["before"]:
            wanted = feature.before(plan, wanted)
        return wanted

    def samples_late(self, plan: StepPlan) -> StepFeature | None:
        """Return the feature that makes masks for sampling after the launch, or None."""
        return next((feature for feature in self.having["samples_late"] if feature.samples_late(plan)), None)

    # -- after it ---------------------------------------------------------------------------------------------------

    def ends(self, step: CommittedStep) -> list[int]:
        """Return the rows whose token is the last of their request."""
        if not self.having["ends"]:
            return []
        plan, tokens = step.plan, step.tokens
        sampled = (plan.samples if plan.drafts is None else plan.samples & confirmed(plan, tokens)) & (tokens >= 0)
        return [row for feature in self.having["ends"] for row in feature.ends(step, sampled)]

    def committed(self, step: CommittedStep, accepted: np.ndarray) -> None:
        """Give requests the results of a step for the rows whose token was accepted."""
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
        """Note that weights of this version generated all tokens so far, and other weights will generate the next."""
        for feature in self.having["weights_changed"]:
            for request in list(feature.requests.values()):
                self.attempt(request, feature.weights_changed, request, version)

    def call(self, hook: str) -> None:
        """Call a hook without arguments of all features, also of those that no request uses."""
        for feature in self._all:
            if hook in feature.hooks:
                getattr(feature, hook)()


def _by_hook(features: tuple[StepFeature, ...]) -> dict[str, tuple[StepFeature, ...]]:
    table = {name: tuple([one for one in features if name in one.hooks]) for name in HOOKS}
    return table | {"tokens": tuple([one for one in features if one.hooks & {"ends", "take", "committed"}])}
