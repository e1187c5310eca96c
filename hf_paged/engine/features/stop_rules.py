"""Requests that end at a stop string, or at the time limit (``max_time``) of their call."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from typing import Any

import numpy as np
import torch
from transformers import StopStringCriteria

from hf_paged.engine.features import CommittedStep, StepFeature
from hf_paged.engine.session import Request
from hf_paged.engine.text import StopTexts, TextStream


def deadline_after(max_time: float | None) -> float | None:
    """Return the `time.time` that is ``max_time`` seconds from now, or None for None."""
    return None if max_time is None else time.time() + max_time


class StopRule:
    """A rule that ends one request at a stop string or a deadline.

    Args:
        strings: transformers' criterion for the request's stop strings, or None. Requests of one call share it.
        deadline: of `time.time`, or None; a request gets its first token even after it.
        before: the left padding with which stock would see the prompt, and the prompt.
    """

    def __init__(self, strings: StopStringCriteria | None, deadline: float | None, before: list[int]) -> None:
        self.strings = strings
        self.deadline = deadline
        self.before = before
        self.restart()

    def restart(self) -> None:
        """Forget the output."""
        self.tail = deque(self.before, maxlen=self.strings.maximum_token_len if self.strings is not None else 0)

    def resume(self, tokens: list[int]) -> bool:
        """Restart behind an earlier output; returns whether the request ends at its last token."""
        self.restart()
        for token in tokens:
            self.push(token)
        return bool(tokens) and self.which_stop([self])[0]

    def without_deadline(self) -> StopRule | None:
        """Return the rule without its deadline, for ranks whose clocks do not count; None if nothing is left."""
        return StopRule(self.strings, None, self.before) if self.strings is not None else None

    def push(self, token: int) -> Hashable:
        """Append a token, and return a key: `which_stop` can check rules with equal keys in one call."""
        if self.strings is None:
            return None
        self.tail.append(token)
        return id(self.strings), len(self.tail)

    @staticmethod
    def which_stop(rules: list[Any]) -> list[bool]:
        """Return for each of the rules, which have one key, whether the last token ends its request."""
        criterion: Any = rules[0].strings
        if criterion is None:
            return [False] * len(rules)
        tails = torch.tensor([list(rule.tail) for rule in rules], dtype=torch.int64, device="cpu")
        hits: list[bool] = criterion(tails, None).tolist()
        return hits

    def is_late(self, now: float) -> bool:
        """Return whether the deadline has passed."""
        return self.deadline is not None and now > self.deadline


class TextStopRule(StopRule):
    """A rule that ends a request whose output, decoded with its special tokens, contains one of some texts.

    Making the rule is cheap, while transformers' criterion reads every token of the vocabulary first (seconds for a
    large one); the rule also finds characters that consist of several tokens. Text of the prompt does not count.

    Args:
        texts: the stop texts, none of them empty.
        tokenizer: decodes the output.
        deadline: as in `StopRule`.
    """

    def __init__(self, texts: tuple[str, ...], tokenizer: Any, deadline: float | None = None) -> None:
        self._texts = texts
        self._tokenizer = tokenizer
        super().__init__(None, deadline, [])

    def restart(self) -> None:
        self._stream: TextStream | None = None  # made at the first token: other ranks get the rule pickled before it
        self._watch, self.is_met = StopTexts(self._texts), False

    def without_deadline(self) -> StopRule:
        return TextStopRule(self._texts, self._tokenizer)

    def push(self, token: int) -> Hashable:
        if self._stream is None:
            self._stream = TextStream(self._tokenizer, skip_special_tokens=False)
        self._watch.push(self._stream.push([token]))
        self.is_met = self._watch.is_met
        if self.is_met:
            self._watch = StopTexts(self._texts)  # `resume` may push an earlier output that continues behind a text
        return TextStopRule

    @staticmethod
    def which_stop(rules: list[Any]) -> list[bool]:
        return [rule.is_met for rule in rules]


class StopRules(StepFeature):
    """Requests that a `StopRule` may end."""

    def __init__(self) -> None:
        super().__init__()
        self._reasons: dict[int, str] = {}  # finish reasons by row, for the step that is being committed

    def uses(self, request: Request) -> bool:
        return request.spec.stop is not None

    def start_over(self, request: Request, made: list[int]) -> bool:
        assert request.spec.stop is not None
        return request.spec.stop.resume(made)

    def ends(self, step: CommittedStep, sampled: np.ndarray) -> list[int]:
        self._reasons = {}
        waiting: dict[str, list[int]] = {}  # rows of each request that were not checked yet
        for row in np.flatnonzero(sampled).tolist():
            if (request := self.of_row(step.plan, row)) is not None:
                waiting.setdefault(request.request_id, []).append(row)
        while waiting:  # one token of each request a round: no guess counts behind a token that ends the request
            groups: dict[Hashable, list[tuple[Request, int]]] = {}
            for key, rows in waiting.items():
                request = self.requests[key]
                pushed = self.attempt(request, self._push, request, step.token_list[rows[0]])
                if pushed is not None:
                    groups.setdefault(pushed, []).append((request, rows[0]))
            for group in groups.values():
                self._look(group)
            waiting = {key: rows[1:] for key, rows in waiting.items() if len(rows) > 1
                       and rows[0] not in self._reasons and key in self.requests and self.requests[key].error is None}
        return list(self._reasons)

    def _push(self, request: Request, token: int) -> tuple[Hashable]:
        """Push a token to the request's rule; returns the key of rules that one `which_stop` call can check."""
        assert request.spec.stop is not None
        return (request.spec.stop.push(token),)

    def _look(self, group: list[tuple[Request, int]]) -> None:
        """Check the rules of requests with one key together, and note which of the requests end."""
        rules = [request.spec.stop for request, _ in group]
        try:
            stops = rules[0].which_stop(rules)
        except Exception as error:
            if len(group) == 1:
                self.attempt(group[0][0], _raise, error)
            for one in group if len(group) > 1 else ():
                self._look([one])
            return
        for (request, row), stop in zip(group, stops, strict=True):
            self.attempt(request, self._note, request, row, stop)

    def _note(self, request: Request, row: int, stops: bool) -> None:
        """Note the finish reason if the request ends with the token of this row."""
        assert request.spec.stop is not None
        if stops:
            self._reasons[row] = "stop"
        elif request.spec.stop.is_late(time.time()):
            self._reasons[row] = "length"

    def take(self, request: Request, step: CommittedStep, row: int) -> str | None:
        return self._reasons.get(row)


def _raise(error: Exception) -> None:
    raise error
