"""Requests whose kernels are not compiled wait for them, while the steps of other requests go on.

A step that launches a missing kernel waits for its compiler, and all requests with it. So the first request with an
option is held (`Scheduler.hold`) while other processes compile what its steps will launch. Nothing is held once no
other request can run: the step then compiles what it needs, side by side.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from hf_paged.engine.features import StepFeature
from hf_paged.engine.session import Request
from hf_paged.sampling.log_probs import top_name
from hf_paged.scheduler import Scheduler

logger = logging.getLogger(__name__)


class KernelNeeds(NamedTuple):
    """What decides which kernels the steps of a request launch besides those of every request.

    ``stages``: edits of logits. ``scored``: names in `LOGPROBS` and `TOPS`. ``masked``: sampling under token masks.
    ``named``: the request names an adapter.
    """

    stages: frozenset[str] = frozenset()
    scored: tuple[str, ...] = ()
    masked: bool = False
    named: bool = False

    @classmethod
    def of(cls, request: Request) -> KernelNeeds:
        """Return the needs of a request, also of one that no feature has admitted yet."""
        spec, row = request.spec, request.row
        scored = [] if spec.logprobs is None else [spec.logprobs]
        if spec.logprobs is not None and spec.top_logprobs is not None:
            scored.append(top_name(spec.logprobs, spec.top_logprobs))
        is_masked = spec.grammar is not None or spec.structured is not None
        return cls(row.stages, tuple(sorted(scored)), is_masked, row.adapter is not None)

    def beside(self, others: KernelNeeds) -> KernelNeeds:
        """Return the needs of a step that samples for both; steps with named adapters are looked at alone."""
        return self._replace(stages=self.stages | others.stages, masked=self.masked or others.masked,
                             scored=tuple(sorted({*self.scored, *others.scored})))


class KernelWaits(StepFeature):
    """The first requests with an option, until its kernels are compiled.

    Args:
        find_missing: begins to compile, elsewhere, the kernels that steps with these needs miss; returns their futures.
        is_on: whether requests may wait.
    """

    def __init__(self, find_missing: Callable[[KernelNeeds], list[Future[Any]]], is_on: Callable[[], bool]) -> None:
        super().__init__()
        self._find_missing, self._is_on = find_missing, is_on
        self._known = {KernelNeeds()}
        self._others = KernelNeeds()  # of requests that were let go
        self._coming: dict[KernelNeeds, list[Future[Any]]] = {}

    def uses(self, request: Request) -> bool:
        return self._is_on() and KernelNeeds.of(request) not in self._known

    def hold(self, scheduler: Scheduler) -> None:
        waiting = [request for request in self.requests.values() if request.started is None]
        if scheduler.num_running or scheduler.num_waiting > len(waiting):
            are_there = self._are_there
        else:  # no other request can run
            are_there = self._let_go
        for request in waiting:
            if are_there(KernelNeeds.of(request)):
                scheduler.release(request.sequence)
            else:
                scheduler.hold(request.sequence)

    def forget(self) -> None:
        self._coming.clear()

    def _are_there(self, needs: KernelNeeds) -> bool:
        if needs in self._known:
            return True
        coming = self._coming.get(needs)
        if coming is not None and not all(kernel.done() for kernel in coming):
            return False
        try:
            for kernel in coming or ():
                kernel.result()
            missing = self._find_missing(needs.beside(self._others))
        except Exception as error:  # the launch raises what there is to raise
            logger.info("hf_paged: kernels of %s are compiled at their first launch: %r", needs, error)
            missing = []
        if not missing:
            return self._let_go(needs)
        self._coming[needs] = missing
        return False

    def _let_go(self, needs: KernelNeeds) -> bool:
        """Note that requests with these needs may run; returns True."""
        self._coming.pop(needs, None)
        self._known.add(needs)
        self._others = needs.beside(self._others)
        return True
