"""Rows of lockstep calls in the engine's steps: which rows join a step, which wait, and which free their blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hf_paged.engine.features.adapters import Adapters
from hf_paged.engine.lockstep import BlockShortage, LockstepBatch
from hf_paged.scheduler import StepPlan
from hf_paged.scheduler.lockstep_rows import OutOfBlocksError

# Rows whose next tokens a step computes in front of the scheduler's rows, and the plan of them.
Joined = list[tuple[LockstepBatch, StepPlan]]
# A step of requests alone reduces the debt (the extra time of a joined step) by this fraction of its own time.
_PAID = 0.4
_MEMORY = 0.8  # weight of earlier joined steps in the running mean of their time
_FORGOTTEN = 1.01  # growth per step of the shortest time of a step alone, so that it follows longer sequences


class LockstepThrottle:
    """Times of steps with and without joining rows, and the debt to the requests.

    A step with many rows takes longer than one with few. If every other step had lockstep rows, a single request would
    wait for them most of its time. So the extra time of a step with joining rows is paid off by steps without them.
    """

    def __init__(self) -> None:
        self._alone: float | None = None
        self._joined: float | None = None
        self._debt = 0.0

    def may_join(self) -> bool:
        """Return whether rows may join the next step of requests."""
        return self._debt <= 0.0

    def took(self, seconds: float, *, joined: bool) -> None:
        """Note the time of a step in which all requests decoded, with or without joined rows."""
        if joined:
            self._joined = seconds if self._joined is None else _MEMORY * self._joined + (1.0 - _MEMORY) * seconds
            if self._alone is not None:
                self._debt = max(0.0, self._joined - self._alone)
        else:
            self._alone = seconds if self._alone is None else min(seconds, _FORGOTTEN * self._alone)
            self._debt -= _PAID * self._alone

    def rest(self) -> None:
        """Clear the debt, since no request decodes."""
        self._debt = 0.0


class JoiningRows:
    """The part of the loop by which rows of a `LockstepBatch` take part in steps.

    The rows belong to no request, so that no other feature handles them. An exception in the work for one batch is
    raised to the caller of that batch, and affects no other caller.

    Args:
        core: the engine's loop (`EngineCore`, which imports this module).
        batches: all open lockstep calls; the engine adds and removes them.
        adapters: knows which adapters rows cannot use.

    Attributes:
        logits: [N, V], logits of the rows that joined the last step.
    """

    def __init__(self, core: Any, batches: list[LockstepBatch], adapters: Adapters) -> None:
        self._core, self.batches, self._adapters = core, batches, adapters
        self.logits: torch.Tensor | None = None
        self._pace = LockstepThrottle()
        self._launched_before = False, False  # of the last step: all requests' rows were decode rows; others joined it

    def waiting(self) -> list[LockstepBatch]:
        """End batches whose call has ended, and return the batches whose callers wait for logits."""
        self.end_orphans()
        return [batch for batch in self.batches if batch.is_waiting]

    def may_join(self) -> bool:
        """Return whether rows may join the next step: False while requests are owed steps without them."""
        if not self._core.requests:
            self._pace.rest()
        return self._pace.may_join()

    def end_orphans(self) -> None:
        """Close batches whose call ended without closing them, since an interrupt came while it did."""
        for batch in [batch for batch in self.batches if batch.is_orphan]:
            batch.close()
            self.batches.remove(batch)

    def prepare(self, waiting: list[LockstepBatch]) -> Joined | None:
        """Compute what waiting calls need before their next tokens, and return the decode rows that join the step.
        Returns None if an exception may have left the scheduler inconsistent, so that all requests started over.
        """
        joining, others_wait = [], False
        for batch in sorted(waiting, key=lambda batch: batch.arrival):
            if others_wait and batch.rows is None:
                continue  # a batch that came earlier waits for blocks, and must not starve
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
        return [(batch, plan) for batch, plan in joining if batch.rows is not None]  # others may have taken its blocks

    def _prepare_batch(self, batch: LockstepBatch) -> StepPlan | None:
        """Call `LockstepBatch.prepare`, and free blocks of other rows while it runs out of blocks."""
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
        """Free the blocks of another batch that may lose them.

        Args:
            asking: the batch that needs blocks; None for the scheduler's own sequences.
        """
        if asking is not None and self._core.commit_in_flight():  # frees blocks of requests that ended in that step
            return BlockShortage.FREE
        holding = [batch for batch in self.batches if batch.rows is not None and batch is not asking]
        for batch in holding:
            if batch.may_lose(asking):
                batch.give_back()
                return BlockShortage.FREE
        return BlockShortage.WAIT if holding else BlockShortage.NONE

    def answer(self, joining: Joined, *, has_looked: bool) -> None:
        """Hand out the logits of a launched step; if the model changed before the step, have them computed again."""
        logits, self.logits = self.logits, None
        assert logits is not None
        if not has_looked and self._core.model_changed():  # checked here, while the device computes
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
        """Call ``action`` for one caller's rows; an exception is raised to that caller and to no other."""
        try:
            action()
        except Exception as error:
            batch.give_back()
            batch.fail(error)

    def give_back(self, joining: Joined) -> None:
        """Free the rows that joined a step which was not computed, so that they are computed again."""
        self.logits = None
        for batch, _ in joining:
            batch.give_back()

    def lose(self) -> None:
        """Forget the slots and blocks of all rows, with the scheduler that had allocated them."""
        for batch in self.batches:
            batch.lose()

    def note_pace(self, plan: StepPlan | None, *, joined: bool, overlapped: bool, seconds: float) -> None:
        """Give the time of a step to the throttle; with overlap it is that of the step before, for which it waited."""
        if plan is None:
            self._pace.rest()
        decodes = plan is not None and plan.num_decode_rows == len(plan.slots)
        before, self._launched_before = self._launched_before, (decodes, joined)
        decodes, joined = before if overlapped else self._launched_before
        if decodes:
            self._pace.took(seconds, joined=joined)
