"""The protocol of features: what some requests want beyond their tokens, each in a file of its own.

A feature is a `StepFeature`. It has the requests that use it, and methods (hooks) that the engine's loop calls at fixed
points of a step. A step calls a hook only of features that a running request uses, and only if the feature defines it.

A method whose first argument is ``request`` does something for that one request: it runs through `attempt`, so that
what it raises ends that request and no other. `FeatureSet` does so for the hooks that it calls itself; a hook that is
given several requests, or none, passes each through `self.attempt`.
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
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.drafts import NO_DRAFTS, Drafts

if TYPE_CHECKING:
    from hf_paged.engine.features.grammars import PendingMasks


class CommittedStep:
    """A step whose tokens have come.

    Attributes:
        plan: of its R rows.
        handle: what the device brought besides the tokens.
        tokens: [R] int64, undefined for rows that sample nothing, -1 where logits were invalid.
        weights_version: of the weights that made the tokens.
    """

    def __init__(self, plan: StepPlan, handle: StepHandle, tokens: np.ndarray, weights_version: int) -> None:
        self.plan, self.handle, self.tokens, self.weights_version = plan, handle, tokens, weights_version

    @cached_property
    def token_list(self) -> list[int]:
        """The tokens as Python's numbers."""
        found: list[int] = self.tokens.tolist()
        return found


class StepFeature:
    """What some requests want beyond their tokens. Each method below is a hook that does nothing by default.

    Attributes:
        requests: the unfinished ones that use the feature, by id.
        attempt: ``attempt(request, action, *args)`` returns what the action does; None where it raised, and the
            request has ended with that.
        hooks: names of those that the class defines.
    """

    hooks: ClassVar[frozenset[str]] = frozenset()

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.attempt: Callable[..., Any] = _unguarded

    def __init_subclass__(cls) -> None:
        cls.hooks = frozenset(name for name in HOOKS if getattr(cls, name) is not getattr(StepFeature, name))

    def of_row(self, plan: StepPlan, row: int) -> Request | None:
        """The request of a row, if it uses the feature and has not ended: another may have its id by now."""
        sequence = plan.sequences[row]
        request = self.requests.get(sequence.request_id)
        return request if request is not None and request.sequence is sequence else None

    # -- a request comes and goes -----------------------------------------------------------------------------------

    def uses(self, request: Request) -> Any:
        """Is the feature to meet this request? Asked once, when its settings are there."""
        raise NotImplementedError

    def admit(self, request: Request) -> None:
        """Set the request up, in its caller's thread and before it is queued: what is raised here, the caller gets."""

    def start_over(self, request: Request, made: list[int]) -> bool | None:
        """Go on behind this output: of a request that came with it, or was interrupted. True: it ends there."""

    def started(self, request: Request) -> None:
        """The request got its slot, for the first time or again."""

    def leave(self, request: Request) -> None:
        """The request has ended, or its caller is gone."""

    # -- before a launch --------------------------------------------------------------------------------------------

    def due(self) -> Iterable[Request]:
        """Requests whose time is over."""
        return ()

    def model_may_differ(self) -> bool:
        """Has the model to be compared with what it was, since the feature's part of it changed?"""
        return False

    def prepared(self) -> None:
        """The runner was prepared for the model as it is now. Told also while no request uses the feature."""

    def unfit(self, requests: Iterable[Request]) -> list[tuple[Request, str]]:
        """Those of the requests that cannot run on the model as it is now, each with the error that says why."""
        return []

    def drafts(self, num_running: int, device_type: str) -> Drafts:
        """By slot, tokens that may follow; rows of the next step check them."""
        return NO_DRAFTS

    def before(self, plan: StepPlan, wanted: Wanted) -> Wanted:
        """What a launch has to bring besides tokens, added to what others want."""
        return wanted

    def samples_late(self, plan: StepPlan) -> bool:
        """Is the step to draw its tokens under masks that come after the launch (see `masks`)?"""
        return False

    def masks(self, plan: StepPlan, before: tuple[StepPlan, np.ndarray] | None, *, beside: bool) -> PendingMasks:
        """Begin to make the masks of a launched step that samples late.

        Args:
            plan: of the step.
            before: the step before it with its tokens [R], where that is not committed yet.
            beside: while this thread goes on.
        """
        raise NotImplementedError

    # -- after it ---------------------------------------------------------------------------------------------------

    def ends(self, step: CommittedStep, sampled: np.ndarray) -> Iterable[int]:
        """Rows, of those marked in ``sampled`` [R], whose token is the last of their request, before it is committed.
        The scheduler counts no guess behind such a row; `take` of the row says why the request ends."""
        return ()

    def committed(self, step: CommittedStep, rows: list[int]) -> None:
        """Give requests what the step brought. ``rows``: those whose token was taken, ascending."""

    def take(self, request: Request, step: CommittedStep, row: int) -> str | None:
        """Give one request what the step brought with one token; the reason for which it ends now, if it does."""

    def weights_changed(self, request: Request, version: int) -> None:
        """All tokens so far were made with the weights of this version, and later ones are not."""

    def stream(self, request: Request, step: CommittedStep, row: int, fields: dict[str, Any]) -> None:
        """Add to the fields of a `StepOutput` with one new token."""

    def complete(self, request: Request, last: LastOutput) -> None:
        """Add to a request's last output."""

    def lose_steps(self) -> None:
        """What was launched is lost: after an interrupt, or with the pool. Told also while no request uses the
        feature."""

    def forget(self) -> None:
        """Forget what is kept of earlier requests, with the prefix cache. Told also while no request uses the
        feature."""


HOOKS = [name for name, value in vars(StepFeature).items() if isfunction(value) and not name.startswith("_")]


def _unguarded(request: Request, action: Callable[..., Any], *args: Any) -> Any:
    return action(*args)
