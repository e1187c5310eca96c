"""Observers of an engine: objects whose methods the loop calls for each event of its steps and requests."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, Protocol

import numpy as np

from hf_paged.engine.session import Request
from hf_paged.outputs import StepOutput
from hf_paged.runner.device_times import TimedSection
from hf_paged.scheduler import StepPlan

logger = logging.getLogger(__name__)


class Launched(NamedTuple):
    """A step that was just launched; its device work may not have begun. Times are of `time.perf_counter`.

    Attributes:
        plan: the plan of the rows of requests. None if the step computes only rows of lockstep calls: then no
            `Committed` follows.
        number: number of the step, counted from 1 (`EngineStats.num_steps` after the launch).
        joined: plans of rows of lockstep calls, which are computed in front of the plan's own rows.
        num_preempted: number of requests that were preempted for the step.
        began: when the engine began to prepare the step.
        scheduled: when the plan was made.
        launched: when the last work of the step was enqueued.
        pieces: device times of the step's graphs and eager parts, while `device_times` records them; empty on a CPU.
    """

    plan: StepPlan | None
    number: int
    joined: list[StepPlan]
    num_preempted: int
    began: float
    scheduled: float
    launched: float
    pieces: tuple[TimedSection, ...] = ()


class Committed(NamedTuple):
    """A step whose tokens were just committed; requests that end with the step have not ended yet. Times as in
    `Launched`.

    Attributes:
        plan: the same object as in the `Launched` of the step; plans are committed in the order of their launches.
        tokens: [R] int64, a token of each row; undefined for rows that sample nothing, -1 if logits were invalid.
        accepted: [N] rows, ascending, whose token was appended to its request.
        waited: when the engine began to wait for the tokens.
        ready: when the tokens had been copied to the host.
    """

    plan: StepPlan
    tokens: np.ndarray
    accepted: np.ndarray
    waited: float
    ready: float


class Observer(Protocol):
    """Protocol of an observer. A class may leave methods out; an observer that raises is removed.

    The thread that steps calls the methods while it holds the engine's lock: a method has to be quick, must change
    nothing, and must call nothing that waits.

    An observer that was added while requests ran may get a `Committed` whose `Launched` came earlier, and ends of
    requests for which `queued` was not called.
    """

    def queued(self, request: Request) -> None:
        """Handle a request that was queued (with a sharded model: on this rank's scheduler)."""

    def launched(self, step: Launched) -> None:
        """Handle a launched step. Requests in ``step.plan.admitted`` run from now on, for the first time or again."""

    def committed(self, step: Committed) -> None:
        """Handle a step whose tokens were committed."""

    def delivered(self, plan: StepPlan) -> None:
        """Handle a committed step whose outputs, streamed tokens and completions, are all in their sessions."""

    def finished(self, request: Request, output: StepOutput) -> None:
        """Handle a request that ended with this last output."""

    def started_over(self, unfinished: list[Request]) -> None:
        """Handle a restart: launched steps that were not committed never will be. The ``unfinished`` requests are
        queued again, with or without their output; any other request for which `finished` was not called was dropped.

        A restart follows an interrupt, a launch that raised, or a model that was moved to another device."""


class Observers:
    """The observers of one engine.

    Attributes:
        all: the observers; empty if there is none, so that a step without observers only reads this tuple.
    """

    def __init__(self) -> None:
        self.all: tuple[Any, ...] = ()

    def add(self, observer: Observer) -> None:
        """Call an observer from now on."""
        self.all = (*self.all, observer)

    def remove(self, observer: Observer) -> None:
        """Stop calling an observer; does nothing if it is not registered."""
        self.all = tuple(one for one in self.all if one is not observer)

    def tell(self, what: str, *args: Any) -> None:
        """Call the method named ``what`` of each observer that has it; remove an observer that raises."""
        for observer in self.all:
            try:
                if (told := getattr(observer, what, None)) is not None:
                    told(*args)
            except Exception as error:
                logger.warning("hf_paged: %r is not told of the engine's steps any more, since it raised %r",
                               observer, error, exc_info=error)
                self.remove(observer)
