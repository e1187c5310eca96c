"""What may watch an engine: its steps and the requests in them, each told at the point where it happens."""

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
        plan: of the rows of requests; None: only rows of calls in lockstep were computed, and no commit comes.
        number: of the step, counted from 1 (`EngineStats.num_steps` from now on).
        joined: plans of rows of calls in lockstep that are computed in front of the plan's own.
        num_preempted: requests that had to give their blocks back for the step.
        began: when the engine turned to this step.
        scheduled: when the plan was made.
        launched: when the last of it was enqueued.
        pieces: graphs and eager steps of it, where somebody asks for them (`device_times`); none on a CPU.
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
    """A step whose tokens were just taken in, before the requests end that end with it. Times as in `Launched`.

    Attributes:
        plan: the very object of its `Launched`; plans are committed in the order in which they were launched.
        tokens: [R] int64 of its rows; undefined for rows that sample nothing, -1 where logits were invalid.
        accepted: [N] rows, ascending, whose token was appended to its request.
        waited: when the engine began to wait for the device.
        ready: when the tokens were there.
    """

    plan: StepPlan
    tokens: np.ndarray
    accepted: np.ndarray
    waited: float
    ready: float


class Observer(Protocol):
    """Told of everything by the thread that steps, which holds the engine's lock: it has to be quick, to change
    nothing, and to call nothing that waits. One that raises is not told anything any more.

    What a class leaves out is not told to its objects.

    Where it began to watch while requests ran, it is told of the commit of a step whose launch it was not told of, and
    of ends of requests that it never saw come.
    """

    def queued(self, request: Request) -> None:
        """A request came (of a sharded model: reached this rank's scheduler)."""

    def launched(self, step: Launched) -> None:
        """A step was launched. Requests in ``step.plan.admitted`` run from now on, for the first time or again."""

    def committed(self, step: Committed) -> None:
        """The tokens of a step were taken in."""

    def delivered(self, plan: StepPlan) -> None:
        """All that a committed step brought was handed out: tokens that are streamed, and the ends of requests."""

    def finished(self, request: Request, output: StepOutput) -> None:
        """A request ended, with its last output."""

    def started_over(self, unfinished: list[Request]) -> None:
        """Launched steps that were not committed never will be. These requests wait anew, with their output or without;
        any other one that had not `finished` is gone without an output.

        Follows an interrupt, a launch that raised, or a model that went to another device."""


class Observers:
    """Those of one engine.

    Attributes:
        all: the observers. An engine without any pays for a look at this.
    """

    def __init__(self) -> None:
        self.all: tuple[Any, ...] = ()

    def add(self, observer: Observer) -> None:
        """Tell it what happens from now on."""
        self.all = (*self.all, observer)

    def remove(self, observer: Observer) -> None:
        """Tell it nothing any more; one that is not there is left alone."""
        self.all = tuple(one for one in self.all if one is not observer)

    def tell(self, what: str, *args: Any) -> None:
        """Call this method of each."""
        for observer in self.all:
            try:
                if (told := getattr(observer, what, None)) is not None:
                    told(*args)
            except Exception as error:
                logger.warning("hf_paged: %r is not told of the engine's steps any more, since it raised %r",
                               observer, error, exc_info=error)
                self.remove(observer)
