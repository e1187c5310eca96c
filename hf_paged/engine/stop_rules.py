"""Rules that end a request outside of the scheduler: stop strings and the time limit of a call (``max_time``)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from typing import Any

import torch
from transformers import StopStringCriteria

from hf_paged.engine.text import StopTexts, TextStream


class CachedStopStrings:
    """A `StopStringCriteria` of transformers, which takes long to make, and the tokenizer's state at that time."""

    def __init__(self, tokenizer: Any, strings: tuple[str, ...]) -> None:
        self._made_from = tokenizer_traits(tokenizer), strings
        # References, so that no other object gets the ids which `tokenizer_traits` compares.
        self._held = tokenizer, getattr(tokenizer, "backend_tokenizer", None)
        with torch.device("cpu"):  # its tensors would be made on the caller's default device
            self.criterion = StopStringCriteria(tokenizer, list(strings))

    def is_of(self, tokenizer: Any, strings: tuple[str, ...]) -> bool:
        """Return whether the criterion still fits; called for each request, and so without comparing all tokens."""
        return (tokenizer_traits(tokenizer), strings) == self._made_from


def tokenizer_traits(tokenizer: Any) -> tuple:
    """Return the state of a tokenizer on which stop strings depend, which changes when the tokenizer is changed in
    place."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = getattr(backend, "decoder", None)
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else len(tokenizer.get_vocab())
    return id(tokenizer), size, id(backend), None if decoder is None else decoder.__getstate__()


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
