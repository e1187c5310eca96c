"""Ends of a request that the scheduler does not decide: stop strings and the end of a call's time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from transformers import StopStringCriteria


class CachedStopStrings:
    """transformers' criterion for some strings, which takes a while to make, and what it was made from."""

    def __init__(self, tokenizer: Any, strings: tuple[str, ...]) -> None:
        self._made_from = _traits(tokenizer), strings
        # Held, so that no other object gets their ids.
        self._held = tokenizer, getattr(tokenizer, "backend_tokenizer", None)
        with torch.device("cpu"):  # its tensors take the default device
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

    def push(self, token: int) -> tuple[int, int] | None:
        """Take a token in; rows of one key can be looked at by one call of their criterion, None: no stop strings."""
        if self.strings is None:
            return None
        self.tail.append(token)
        return id(self.strings), len(self.tail)

    def is_late(self, now: float) -> bool:
        """Is the time of the call over?"""
        return self.deadline is not None and now > self.deadline


def ended(accepted: Iterable[tuple[str, StopRule | None, int]]) -> dict[str, str | Exception]:
    """Which of (request id, rule, its new token) end: {request_id: finish_reason, or what the rule raised}."""
    result: dict[str, str | Exception] = {}
    groups: dict[tuple[int, int], list[tuple[str, StopRule]]] = {}
    now = time.time()
    for request_id, rule, token in accepted:
        if rule is None:
            continue
        try:
            key = rule.push(token)
            if rule.is_late(now):
                result[request_id] = "length"
        except Exception as error:
            result[request_id] = error
            continue
        if key is not None:
            groups.setdefault(key, []).append((request_id, rule))
    for watched in groups.values():
        result |= _matched(watched)
    return result


def _matched(watched: list[tuple[str, StopRule]]) -> dict[str, str | Exception]:
    """Those of rows with one criterion and tails of one length that it stops; where it raises, row by row."""
    criterion: Any = watched[0][1].strings
    try:
        tails = torch.tensor([list(rule.tail) for _, rule in watched], dtype=torch.int64, device="cpu")
        hits = criterion(tails, None).tolist()
    except Exception as error:
        if len(watched) == 1:
            return {watched[0][0]: error}
        return {key: end for one in watched for key, end in _matched([one]).items()}
    return {request_id: "stop" for (request_id, _), hit in zip(watched, hits, strict=True) if hit}
