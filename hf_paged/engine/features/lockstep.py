"""Rows of calls in lockstep as a part of the engine's steps: who joins a step, who waits, and who gives blocks back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch

from hf_paged.engine.features.adapters import Adapters
from hf_paged.engine.lockstep import BlockShortage, LockstepBatch
from hf_paged.engine.lockstep_throttle import LockstepThrottle
from hf_paged.engine.session import Request
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.lockstep_rows import OutOfBlocksError

# Rows whose next tokens a step computes in front of the scheduler's rows, and the plan of them.
Joined = list[tuple[LockstepBatch, StepPlan]]


class Loop(Protocol):
    """What joining rows ask the engine's loop for."""

    requests: Mapping[str, Request]

    def model_changed(self) -> bool: ...
    def recover_if_dirty(self) -> None: ...
    def commit_in_flight(self) -> bool: ...


class JoiningRows:
    """Lets rows that a `LockstepBatch` holds take part in steps.

    They are rows of no request, so that none of the other features meets them. What goes wrong in a part of theirs is
    answered to their caller, and nobody else notices.

    Args:
        core: the engine's loop.
        batches: all open calls in lockstep; the engine adds and removes them.
        adapters: says which adapters rows cannot name.

    Attributes:
        logits: [N, V] of the rows that joined the last step.
    """

    def __init__(self, core: Loop, batches: list[LockstepBatch], adapters: Adapters) -> None:
        self._core, self.batches, self._adapters = core, batches, adapters
        self.logits: torch.Tensor | None = None
        self._pace = LockstepThrottle()
        self._launched_before = False, False  # did the last step only decode requests' rows; did others join it?

    def waiting(self) -> list[LockstepBatch]:
        """Those whose callers wait for logits, once rows are ended whose call is gone."""
        self.end_orphans()
        return [batch for batch in self.batches if batch.is_waiting]

    def may_join(self) -> bool:
        """Do they owe no steps of their own to the requests that run?"""
        if not self._core.requests:
            self._pace.rest()
        return self._pace.may_join()

    def end_orphans(self) -> None:
        """End rows whose call is gone without having ended them: an interrupt came in its very end."""
        for batch in [batch for batch in self.batches if batch.is_orphan]:
            batch.close()
            self.batches.remove(batch)

    def prepare(self, waiting: list[LockstepBatch]) -> Joined | None:
        """Compute what the waiting calls need before their next tokens; returns the decode rows that join the step.
        None: an exception left the scheduler's books in doubt, and all requests started over.
        """
        joining, others_wait = [], False
        for batch in sorted(waiting, key=lambda batch: batch.arrival):
            if others_wait and batch.rows is None:
                continue  # who came first gets the blocks first
            if not batch.has_checked_adapters:
                if (error := next(iter(self._adapters.errors(batch.adapters).values()), None)) is not None:
                    batch.give_back()
                    batch.fail(ValueError(error))
                    continue
                batch.has_checked_adapters = True
            try:
                if (plan := self._prepare_batch(batch)) is not None:
                    joining.append((batch, plan))
            except torch.OutOfMemoryError as error:
                batch.give_back()
                batch.fail(error)
            except Exception as error:
                batch.fail(error)
                self._core.recover_if_dirty()
                return None
            others_wait |= batch.is_short
        return [(batch, plan) for batch, plan in joining if batch.rows is not None]  # some gave way to others

    def _prepare_batch(self, batch: LockstepBatch) -> StepPlan | None:
        """`LockstepBatch.prepare`, with blocks of others where it needs them."""
        while True:
            try:
                return batch.prepare()
            except OutOfBlocksError as error:
                way = self.free_blocks_for(batch)
                if way is BlockShortage.NONE:
                    raise torch.OutOfMemoryError(str(error)) from error
                batch.is_short = True
                if way is BlockShortage.WAIT:
                    return None

    def free_blocks_for(self, asking: LockstepBatch | None) -> BlockShortage:
        """Have others' rows give blocks back, if they may lose them.

        Args:
            asking: for whom; None: for the scheduler's own sequences.
        """
        if asking is not None and self._core.commit_in_flight():  # requests that have ended hold blocks until then
            return BlockShortage.FREE
        holding = [batch for batch in self.batches if batch.rows is not None and batch is not asking]
        for batch in holding:
            if batch.may_lose(asking):
                batch.give_back()
                return BlockShortage.FREE
        return BlockShortage.WAIT if holding else BlockShortage.NONE

    def answer(self, joining: Joined, *, has_looked: bool) -> None:
        """Hand out the logits of a launched step. Where the model has changed since the last one, once more."""
        logits, self.logits = self.logits, None
        assert logits is not None
        if not has_looked and self._core.model_changed():  # looked at while the device computes
            for batch, _ in joining:
                if batch.rows is not None:
                    batch.rollback_tokens(batch.rows, 1)
            return
        pieces = logits.split([len(plan.slots) for _, plan in joining])
        for (batch, _), piece in zip(joining, pieces, strict=True):
            self._attempt_for(batch, partial(batch.answer, piece))
        if len(joining) == 1 and not self._core.requests:
            batch = joining[0][0]
            self._attempt_for(batch, batch.plan_ahead)  # the device still computes

    def _attempt_for(self, batch: LockstepBatch, action: Callable[[], None]) -> None:
        """Do what belongs to one caller's rows: where it raises, that caller gets the exception, and nobody else."""
        try:
            action()
        except Exception as error:
            batch.give_back()
            batch.fail(error)

    def give_back(self, joining: Joined) -> None:
        """The step that these rows joined was not computed: they are computed anew."""
        self.logits = None
        for batch, _ in joining:
            batch.give_back()

    def lose(self) -> None:
        """Slots and blocks go, with the scheduler that lent them."""
        for batch in self.batches:
            batch.lose()

    def note_pace(self, plan: StepPlan | None, *, joined: bool, overlapped: bool, seconds: float) -> None:
        """What was waited for in this step: with overlap, the step before it."""
        if plan is None:
            self._pace.rest()
        decodes = plan is not None and plan.num_decode_rows == len(plan.slots)
        before, self._launched_before = self._launched_before, (decodes, joined)
        decodes, joined = before if overlapped else self._launched_before
        if decodes:
            self._pace.took(seconds, joined=joined)
