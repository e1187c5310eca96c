"""The protocol of features: functions beyond sampled tokens that only some requests use, each in a file of its own.

A feature is a `StepFeature`. It holds the requests that use it, and has methods (hooks) that the engine's loop calls at
fixed points of a step. A step calls a hook only of features that an unfinished request uses and that define the hook.

A hook whose first argument is ``request`` works for that one request and runs through `attempt`: an exception ends that
request and no other. `FeatureSet` calls such hooks so; a hook that gets several requests, or none, passes its work for
each request through `self.attempt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from inspect import isfunction
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hf_paged.engine.session import LastOutput, Request
from hf_paged.runner.model_runner import StepHandle
from hf_paged.runner.prompt_scores import Wanted
from hf_paged.scheduler import Scheduler, StepPlan
from hf_paged.scheduler.plan import NO_DRAFTS, Drafts

if TYPE_CHECKING:
    from hf_paged.engine.features.grammars import PendingMasks


class CommittedStep:
    """A step whose tokens are on the host.

    Attributes:
        plan: the plan of its R rows.
        handle: the other results of the step.
        tokens: [R] int64, undefined for rows that sample nothing, -1 if logits were invalid.
        weights_version: version of the weights that computed the step.
    """

    def __init__(self, plan: StepPlan, handle: StepHandle, tokens: np.ndarray, weights_version: int) -> None:
        self.plan, self.handle, self.tokens, self.weights_version = plan, handle, tokens, weights_version

    @cached_property
    def token_list(self) -> list[int]:
        found: list[int] = self.tokens.tolist()
        return found


class StepFeature:
    """A function beyond sampled tokens that some requests use. Each method below is a hook, which by default does
    nothing.

    Attributes:
        requests: the unfinished requests that use the feature, by id.
        attempt: ``attempt(request, action, *args)`` returns what the action returns; None if the action raised, which
            ends the request with that error.
        hooks: names of the hooks that the class defines.
    """

    hooks: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.attempt: Callable[..., Any] = _unguarded

    def __init_subclass__(cls) -> None:
        cls.hooks = frozenset(name for name in HOOKS if getattr(cls, name) is not getattr(StepFeature, name))

    def of_row(self, plan: StepPlan, row: int) -> Request | None:
        """Return the unfinished request of a row if it uses the feature, else None; one that got its id is another."""
        sequence = plan.sequences[row]
        request = self.requests.get(sequence.request_id)
        return request if request is not None and request.sequence is sequence else None

    # -- a request comes and goes -----------------------------------------------------------------------------------

    def uses(self, request: Request) -> Any:
        """Return whether the request uses the feature. Called once, when the request is made."""
        raise NotImplementedError

    def admit(self, request: Request) -> None:
        """Set the request up in its caller's thread before it is queued; an exception is raised to the caller."""

    def start_over(self, request: Request, made: list[int]) -> bool | None:
        """Set the request up to continue the earlier output ``made``; returns True if the request ends there."""

    def started(self, request: Request) -> None:
        """Handle a request that got its slot, for the first time or again."""

    def leave(self, request: Request) -> None:
        """Clean up after a request that has ended or was dropped."""

    # -- before a launch --------------------------------------------------------------------------------------------

    def due(self) -> Iterable[Request]:
        """Return the requests whose deadline has passed."""
        return ()

    def model_may_differ(self) -> bool:
        """Return whether the feature's part of the model changed, so that the model has to be compared."""
        return False

    def prepared(self) -> None:
        """Handle a runner that was prepared for the model as it is now; called also if no request uses the feature."""

    def unfit(self, requests: Iterable[Request]) -> list[tuple[Request, str]]:
        """Return the requests that cannot run on the model as it is now, each with its error message."""
        return []

    def hold(self, scheduler: Scheduler) -> None:
        """Hold waiting requests out of the next step's plan, or release them."""

    def drafts(self, num_running: int, device_type: str) -> Drafts:
        """Return guesses of the next tokens by slot; rows of the next step check them."""
        return NO_DRAFTS

    def before(self, plan: StepPlan, wanted: Wanted) -> Wanted:
        """Add to ``wanted`` the results besides tokens that the feature needs of the step to be launched."""
        return wanted

    def samples_late(self, plan: StepPlan) -> bool:
        """Return whether the step is to sample under masks that are made after the launch (see `masks`)."""
        return False

    def masks(self, plan: StepPlan, before: tuple[StepPlan, np.ndarray] | None, *, beside: bool) -> PendingMasks:
        """Begin to make the masks of a launched step that samples late.

        Args:
            plan: the plan of the step.
            before: the plan of the step before and its tokens [R], if that step is not committed yet.
            beside: make the masks in other threads while this thread goes on.
        """
        raise NotImplementedError

    # -- after it ---------------------------------------------------------------------------------------------------

    def ends(self, step: CommittedStep, sampled: np.ndarray) -> Iterable[int]:
        """Return the rows among ``sampled`` [R] whose token is the last of their request; called before the commit.
        The scheduler then accepts no guess behind such a row; `take` of the row returns why the request ends."""
        return ()

    def committed(self, step: CommittedStep, rows: list[int]) -> None:
        """Give requests the results of the step. ``rows``: rows whose token was accepted, ascending."""

    def take(self, request: Request, step: CommittedStep, row: int) -> str | None:
        """Give one request the results of one row; returns the ``finish_reason`` if the request ends now, else None."""

    def weights_changed(self, request: Request, version: int) -> None:
        """Note that weights of this version generated all tokens so far, and other weights will generate the next."""

    def stream(self, request: Request, step: CommittedStep, row: int, fields: dict[str, Any]) -> None:
        """Add fields to a `StepOutput` with one new token."""

    def complete(self, request: Request, last: LastOutput) -> None:
        """Add fields to a request's last output."""

    def lose_steps(self) -> None:
        """Drop the state of launched steps, which were lost; called also if no request uses the feature."""

    def forget(self) -> None:
        """Drop what is kept of earlier requests, with the prefix cache; called also if no request uses the feature."""


HOOKS = [name for name, value in vars(StepFeature).items() if isfunction(value) and not name.startswith("_")]


def _unguarded(request: Request, action: Callable[..., Any], *args: Any) -> Any:
    return action(*args)
