"""Ends of a request that the scheduler does not decide: stop strings and the end of a call's time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Literal

import torch
from transformers import StopStringCriteria

from hf_paged.engine.detokenizer import TextStream


class CachedStopStrings:
    """transformers' criterion for some strings, which takes a while to make, and what it was made from."""

    def __init__(self, tokenizer: Any, strings: tuple[str, ...]) -> None:
        self._made_from = tokenizer_traits(tokenizer), strings
        # Held, so that no other object gets their ids.
        self._held = tokenizer, getattr(tokenizer, "backend_tokenizer", None)
        with torch.device("cpu"):  # its tensors take the default device
            self.criterion = StopStringCriteria(tokenizer, list(strings))

    def is_of(self, tokenizer: Any, strings: tuple[str, ...]) -> bool:
        """Would the criterion be the same if it were made now? Asked with every request: no look at each token."""
        return (tokenizer_traits(tokenizer), strings) == self._made_from


def tokenizer_traits(tokenizer: Any) -> tuple:
    """What a tokenizer's stop strings depend on: tokens are added to it, and parts of it replaced, in place."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else len(tokenizer.get_vocab())
    return id(tokenizer), size, id(backend), None if decoder is None else decoder.__getstate__()


def deadline_after(max_time: float | None) -> float | None:
    """The `time.time` at which seconds that begin now are over; None: never."""
    return None if max_time is None else time.time() + max_time


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

    def resume(self, tokens: list[int]) -> bool:
        """Begin behind output of before; True: its last token is one at which the request ends."""
        self.restart()
        key: tuple[int, int] | str | None = None
        for token in tokens:
            key = self.push(token)
        if not isinstance(key, tuple):
            return key == "stop"
        end = _matched([("", self)]).get("")
        if isinstance(end, Exception):
            raise end
        return end is not None

    def without_deadline(self) -> StopRule | None:
        """What is left for ranks whose clocks do not count; None: nothing."""
        return StopRule(self.strings, None, self.before) if self.strings is not None else None

    def push(self, token: int) -> tuple[int, int] | Literal["stop"] | None:
        """Take a token in; rows of one key can be looked at by one call of their criterion.

        Returns:
            "stop": it ended here; None: there are no stop strings.
        """
        if self.strings is None:
            return None
        self.tail.append(token)
        return id(self.strings), len(self.tail)

    def is_late(self, now: float) -> bool:
        """Is the time of the call over?"""
        return self.deadline is not None and now > self.deadline


class TextStopRule(StopRule):
    """Ends a request whose output, decoded with its special tokens, holds one of some texts.

    Unlike transformers' criterion, which looks at every token of the vocabulary first (seconds for a large one), it
    costs nothing to make, and it finds characters that several tokens make up. Text of the prompt does not count.

    Args:
        texts: none of them empty.
        tokenizer: decodes the output.
        deadline: as in `StopRule`.
    """

    def __init__(self, texts: tuple[str, ...], tokenizer: Any, deadline: float | None = None) -> None:
        self._texts = texts
        self._tokenizer = tokenizer
        self._longest = max(map(len, texts))
        super().__init__(None, deadline, [])

    def restart(self) -> None:
        self._stream: TextStream | None = None  # other ranks get the rule before its first token, as bytes
        self._end = ""

    def without_deadline(self) -> StopRule:
        return TextStopRule(self._texts, self._tokenizer)

    def push(self, token: int) -> Literal["stop"] | None:
        if self._stream is None:
            self._stream = TextStream(self._tokenizer, skip_special_tokens=False)
        text = self._end + self._stream.push([token])
        self._end = text[-self._longest :]
        return "stop" if any(stop in text for stop in self._texts) else None


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
            if key == "stop":
                result[request_id] = key
            elif rule.is_late(now):
                result[request_id] = "length"
        except Exception as error:
            result[request_id] = error
            continue
        if isinstance(key, tuple):
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
