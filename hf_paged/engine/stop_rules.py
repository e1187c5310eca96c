"""Rules that end a request and that the scheduler does not know: stop strings and the end of a call's time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable
from typing import Any

import torch
from transformers import StopStringCriteria

from hf_paged.engine.text import StopTexts, TextStream


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
        for token in tokens:
            self.push(token)
        return bool(tokens) and self.which_stop([self])[0]

    def without_deadline(self) -> StopRule | None:
        """What is left for ranks whose clocks do not count; None: nothing."""
        return StopRule(self.strings, None, self.before) if self.strings is not None else None

    def push(self, token: int) -> Hashable:
        """Take a token in. Rules for which equal keys are returned can be given to one call of `which_stop`."""
        if self.strings is None:
            return None
        self.tail.append(token)
        return id(self.strings), len(self.tail)

    @staticmethod
    def which_stop(rules: list[Any]) -> list[bool]:
        """Of rules of one key: does the last token end the request?"""
        criterion: Any = rules[0].strings
        if criterion is None:
            return [False] * len(rules)
        tails = torch.tensor([list(rule.tail) for rule in rules], dtype=torch.int64, device="cpu")
        hits: list[bool] = criterion(tails, None).tolist()
        return hits

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
        super().__init__(None, deadline, [])

    def restart(self) -> None:
        self._stream: TextStream | None = None  # other ranks get the rule before its first token, as bytes
        self._watch, self.is_met = StopTexts(self._texts), False

    def without_deadline(self) -> StopRule:
        return TextStopRule(self._texts, self._tokenizer)

    def push(self, token: int) -> Hashable:
        if self._stream is None:
            self._stream = TextStream(self._tokenizer, skip_special_tokens=False)
        self._watch.push(self._stream.push([token]))
        self.is_met = self._watch.is_met
        if self.is_met:
            self._watch = StopTexts(self._texts)  # output of before may go on behind one
        return TextStopRule

    @staticmethod
    def which_stop(rules: list[Any]) -> list[bool]:
        return [rule.is_met for rule in rules]
