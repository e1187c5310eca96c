"""Requests whose output follows a grammar: matchers accept new tokens, and make masks of the tokens that may follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_paged.engine.features import CommittedStep, StepFeature
from hf_paged.engine.session import NAN_ERROR, LastOutput, Request
from hf_paged.engine.structured.grammars import Grammars
from hf_paged.engine.structured.mask_maker import MaskMaker
from hf_paged.engine.structured.matchers import Matcher
from hf_paged.sampling.token_mask import HostMasks
from hf_paged.scheduler import StepPlan

BARRED = ("where other settings bar all that the grammar allows (min_new_tokens, bad_words_ids, suppress_tokens, or an "
          "eos_token_id that the form needs inside of it), leave them out")

RequestOf = Callable[[StepPlan, int], Request | None]
# Called as (request, action, arguments); an exception of the action ends that request alone.
Attempt = Callable[..., Any]


class StructuredOutput(StepFeature):
    """Requests that follow a grammar. A step with such rows is launched up to its logits, and samples under masks that
    are made from the tokens of the step before.

    Args:
        grammars: compiles the grammars of requests.
        tokenizer: returns the engine's tokenizer, or None.
        device: returns the model's device.
    """

    def __init__(self, grammars: Grammars, tokenizer: Callable[[], Any], device: Callable[[], torch.device],
                 num_logits: int) -> None:
        super().__init__()
        self._grammars, self._tokenizer, self._device, self._num_logits = grammars, tokenizer, device, num_logits
        self._masks: MaskMaker | None = None

    def uses(self, request: Request) -> bool:
        return request.grammar is not None or request.spec.structured is not None

    def admit(self, request: Request) -> None:
        if request.grammar is None:
            assert request.spec.structured is not None
            request.grammar = self._grammars.compile(request.spec.structured, self._tokenizer())
        request.matcher = request.grammar.matcher(request.sequence.eos_token_ids)

    def start_over(self, request: Request, made: list[int]) -> bool:
        assert request.grammar is not None
        request.matcher, request.speculative_accept = request.grammar.matcher(request.sequence.eos_token_ids), None
        for token in made:
            self._match(request, token)
        return request.matcher.is_over

    def _match(self, request: Request, token: int) -> None:
        """Advance the request's matcher by a committed token.

        Raises:
            ValueError: the grammar does not allow it.
        """
        speculative_accept, request.speculative_accept = request.speculative_accept, None
        if isinstance(speculative_accept, Exception):
            raise speculative_accept
        assert request.matcher is not None
        if not (request.matcher.accept(token) if speculative_accept is None else speculative_accept):
            raise ValueError(f"structured: the grammar does not allow token {token} here; {BARRED}")

    def samples_late(self, plan: StepPlan) -> bool:
        return any(self.of_row(plan, row) is not None for row in np.flatnonzero(plan.samples).tolist())

    def masks(self, plan: StepPlan, before: tuple[StepPlan, np.ndarray] | None, *, beside: bool) -> PendingMasks:
        if before is not None:
            go_ahead(*before, self.of_row)
        if self._masks is None:
            self._masks = MaskMaker(self._num_logits, self._device())
        return PendingMasks(plan, self._masks, self.of_row, self.attempt, beside=beside)

    def take(self, request: Request, step: CommittedStep, row: int) -> str | None:
        self._match(request, step.token_list[row])
        assert request.matcher is not None
        return "stop" if request.error is None and request.matcher.is_over else None

    def complete(self, request: Request, last: LastOutput) -> None:
        if last.error == NAN_ERROR:
            last.error = f"{NAN_ERROR}; {BARRED}"
        told = last.completion.get("stop_reason")
        if told is not None and not isinstance(told, int) and request.matcher is not None and request.matcher.is_over:
            last.completion["stop_reason"] = None  # the end of the grammar ended the request, and no stop string did

    def lose_steps(self) -> None:
        self._masks = None  # a thread may still write to its buffer


def go_ahead(plan: StepPlan, tokens: np.ndarray, request_of: RequestOf) -> None:
    """Advance matchers by the tokens [R] of a step before its commit, which accepts all tokens of open requests.

    The result is kept in `Request.speculative_accept` for the commit; no other field of a request changes.
    """
    taken = tokens.tolist()
    for row in np.flatnonzero(plan.samples & (tokens >= 0)).tolist():
        request = request_of(plan, row)
        if request is not None and request.matcher is not None:
            try:
                request.speculative_accept = request.matcher.accept(taken[row])
            except Exception as error:
                request.speculative_accept = error


class PendingMasks:
    """Masks that are being made for the rows of a step that sample. Until `take`, no other code may use the matchers.

    Args:
        plan: the plan of the step; the matchers have accepted all earlier tokens.
        beside: make the masks in another thread while the caller goes on.
    """

    def __init__(self, plan: StepPlan, maker: MaskMaker, request_of: RequestOf, attempt: Attempt, *,
                 beside: bool) -> None:
        self._plan, self._maker, self._request_of, self._attempt = plan, maker, request_of, attempt
        self._rows = np.flatnonzero(plan.samples).tolist()
        self._matchers: list[Matcher | None] = [None] * len(self._rows)
        for index, row in enumerate(self._rows):
            request = request_of(plan, row)
            if request is not None and request.grammar is not None:
                self._matchers[index] = attempt(request, _open_matcher, request)
        self._end: Callable[[], HostMasks | None] = lambda: None
        if any(self._matchers):
            try:
                self._end = maker.begin(self._matchers) if beside else partial(maker.make, self._matchers)
            except Exception:  # raised by one matcher: `take` finds which one, and ends only its request
                self._end = self._make_without_failing

    def take(self) -> HostMasks | None:
        """Wait for the masks; returns None if no row has one. A request whose matcher raises ends with that error."""
        try:
            return self._end()
        except Exception:
            return self._make_without_failing()

    def _make_without_failing(self) -> HostMasks | None:
        for index, row in enumerate(self._rows):
            if self._matchers[index] is not None:
                request = self._request_of(self._plan, row)
                if request is None:
                    self._matchers[index] = None  # the request has ended since the masks were begun
                else:
                    self._attempt(request, self._try_alone, index)
        return self._maker.make(self._matchers) if any(self._matchers) else None

    def _try_alone(self, index: int) -> None:
        matcher, self._matchers[index] = self._matchers[index], None
        self._maker.make([matcher])
        self._matchers[index] = matcher


def _open_matcher(request: Request) -> Matcher | None:
    """Return the matcher that restricts the request's next token, or None."""
    is_lost = request.speculative_accept is not None and request.speculative_accept is not True
    return None if request.matcher is None or is_lost or request.matcher.is_over else request.matcher
