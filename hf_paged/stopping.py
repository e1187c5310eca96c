"""Ends of a request that the scheduler knows nothing of: stop strings and the end of a call's time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from transformers import StopStringCriteria

if TYPE_CHECKING:
    from hf_paged.session import Request


class CachedStopStrings:
    """transformers' criterion for some strings, which takes a while to make, and what it was made from."""

    def __init__(self, tokenizer: Any, strings: tuple[str, ...]) -> None:
        self._made_from = _traits(tokenizer), strings
        self._held = tokenizer, getattr(tokenizer, "backend_tokenizer", None)  # whose ids nobody else may get
        self.criterion = StopStringCriteria(tokenizer, list(strings))

    def is_of(self, tokenizer: Any, strings: tuple[str, ...]) -> bool:
        """Would the criterion be the same if it were made now? Asked with every request: no look at each token."""
        return (_traits(tokenizer), strings) == self._made_from


def _traits(tokenizer: Any) -> tuple:
    """What a tokenizer's stop strings depend on: tokens are added to it, and parts of it replaced, in place."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else len(tokenizer.get_vocab())
    return id(tokenizer), size, id(backend), None if decoder is None else decoder.__getstate__()


class StopRule:
    """What ends one request besides EOS and its length.

    Args:
        strings: transformers' own criterion for the request's stop strings, or None. Requests of one call share it.
        deadline: of `time.time`, or None; a request gets its first token however late it is.
        before: tokens that stock would see in front of the prompt (left padding), and the prompt.
    """

    def __init__(self, strings: StopStringCriteria | None, deadline: float | None, before: list[int]) -> None:
        self.strings = strings
        self.deadline = deadline
        self.before = before
        self.restart()

    def restart(self) -> None:
        """Forget the output."""
        self.tail = deque(self.before, maxlen=self.strings.maximum_token_len if self.strings is not None else 0)


def ended(accepted: Iterable[tuple[Request, int]]) -> dict[str, str]:
    """Which requests end with the token that they just got: {request_id: finish_reason}."""
    result: dict[str, str] = {}
    watched = [(request, token) for request, token in accepted if request.stop is not None]
    now = time.time()
    groups: dict[tuple[int, int], list[Request]] = {}  # rows that one call of one criterion can look at
    for request, token in watched:
        rule = request.stop
        assert rule is not None
        if rule.deadline is not None and now > rule.deadline:
            result[request.request_id] = "length"
        if rule.strings is not None:
            rule.tail.append(token)
            groups.setdefault((id(rule.strings), len(rule.tail)), []).append(request)
    for requests in groups.values():
        rules: list[Any] = [request.stop for request in requests]
        matched = rules[0].strings(torch.tensor([list(rule.tail) for rule in rules]), None)
        result |= {request.request_id: "stop" for request, hit in zip(requests, matched.tolist(), strict=True) if hit}
    return result
