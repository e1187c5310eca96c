"""Requests whose output follows a grammar: matchers go on by new tokens, and say which tokens may follow."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from hf_paged.engine.features import CommittedStep, StepFeature
from hf_paged.engine.grammars import Grammars
from hf_paged.engine.mask_maker import MaskMaker
from hf_paged.engine.matchers import Matcher
from hf_paged.engine.session import NAN_ERROR, LastOutput, Request
from hf_paged.sampling.token_mask import HostMasks
from hf_paged.scheduler import StepPlan

BARRED = ("where other settings bar all that the grammar allows (min_new_tokens, bad_words_ids, suppress_tokens, or an "
          "eos_token_id that the form needs inside of it), leave them out")

RequestOf = Callable[[StepPlan, int], Request | None]
# (request, action, arguments): called so that an exception ends that request alone.
Attempt = Callable[..., Any]


class StructuredOutput(StepFeature):
    """Requests that follow a grammar. A step with such rows ends at its logits, and draws under masks that are made of
    the tokens of the step before.

    Args:
        grammars: compiles what requests ask for.
        tokenizer: returns the engine's tokenizer, or None.
        device: returns the model's.
    """

    def __init__(self, grammars: Grammars, tokenizer: Callable[[], Any], device: Callable[[], torch.device],
                 num_logits: int) -> None:
        super().__init__()
        self._grammars, self._tokenizer, self._device, self._num_logits = grammars, tokenizer, device, num_logits
        self._masks: MaskMaker | None = None

    def uses(self, request: Request) -> bool:
        return request.grammar is not None or request.settings.structured is not None

    def admit(self, request: Request) -> None:
        if request.grammar is None:
            assert request.settings.structured is not None
            request.grammar = self._grammars.compile(request.settings.structured, self._tokenizer())
        request.matcher = request.grammar.matcher(request.sequence.eos_token_ids)

    def start_over(self, request: Request, made: list[int]) -> bool:
        assert request.grammar is not None
        request.matcher, request.speculative_accept = request.grammar.matcher(request.sequence.eos_token_ids), None
        for token in made:
            self._match(request, token)
        return request.matcher.is_over

    def _match(self, request: Request, token: int) -> None:
        """Go on in the grammar by a committed token.

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
            last.completion["stop_reason"] = None  # the grammar came to its end

    def lose_steps(self) -> None:
        self._masks = None  # a thread may still write to its buffer


def go_ahead(plan: StepPlan, tokens: np.ndarray, request_of: RequestOf) -> None:
    """Let matchers go on by the tokens [R] of a step before its commit, which takes all tokens of open requests.

    The commit learns from `Request.speculative_accept` what that led to: until then, nothing else of a request changes.
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
    """What may follow in each row of a step that samples, in the making. Nobody may use the matchers meanwhile.

    Args:
        plan: of the step, all tokens before which the matchers know.
        beside: in a thread, while the caller goes on.
    """

    def __init__(self, plan: StepPlan, maker: MaskMaker, request_of: RequestOf, attempt: Attempt, *,
                 beside: bool) -> None:
        self._plan, self._maker, self._request_of, self._attempt = plan, maker, request_of, attempt
        self._rows = np.flatnonzero(plan.samples).tolist()
        self._matchers: list[Matcher | None] = [None] * len(self._rows)
        for index, row in enumerate(self._rows):
            request = request_of(plan, row)
            if request is not None and request.grammar is not None:
                try:
                    self._matchers[index] = _open_matcher(request)
                except Exception as error:
                    attempt(request, _raise, error)
        self._end: Callable[[], HostMasks | None] = lambda: None
        if any(self._matchers):
            try:
                self._end = maker.begin(self._matchers) if beside else partial(maker.make, self._matchers)
            except Exception:  # of a single matcher
                self._end = self._make_without_failing

    def take(self) -> HostMasks | None:
        """Wait for them. A request whose own matcher raises ends with that. None: no row has a mask."""
        try:
            return self._end()
        except Exception:
            return self._make_without_failing()

    def _make_without_failing(self) -> HostMasks | None:
        for index, row in enumerate(self._rows):
            if self._matchers[index] is not None:
                request = self._request_of(self._plan, row)
                if request is None:
                    self._matchers[index] = None  # it has ended meanwhile
                else:
                    self._attempt(request, self._try_alone, index)
        return self._maker.make(self._matchers) if any(self._matchers) else None

    def _try_alone(self, index: int) -> None:
        matcher, self._matchers[index] = self._matchers[index], None
        self._maker.make([matcher])
        self._matchers[index] = matcher


def _open_matcher(request: Request) -> Matcher | None:
    """That by which the request's next token is chosen, if any."""
    is_lost = request.speculative_accept is not None and request.speculative_accept is not True
    return None if request.matcher is None or is_lost or request.matcher.is_over else request.matcher


def _raise(error: Exception) -> None:
    raise error
