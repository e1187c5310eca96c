"""Where the last tokens of a text stood before, in that text or in others, so that what followed there can be guessed.

Runs of three tokens are chained to the one before, as in LZ77 compressors (RFC 1951, section 4), and of those in a
chain the one with the longest text before it in common is taken. So a token costs one entry of a dict and one of a list
(a suffix tree's nodes take several times that), and the look-up a bounded number of comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NGRAM = 3  # fewer tokens in common say little about what comes
_MOST_CANDIDATES = 32
_MOST_COMMON = 32
_NOWHERE = -1
_POSITION_BITS = 32
_TOKEN_BITS = 21  # keys of other tokens may be equal, too: what a chain leads to is compared


class Match(NamedTuple):
    """The tokens before ``position`` of a text are the last ``common`` ones of the text that was looked up."""

    text: int
    position: int
    common: int


class TokenIndex:
    """Texts of token ids, each of which may grow at its end.

    Attributes:
        num_tokens: of all texts.
        texts: all of them; they grow by `extend` alone.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.texts: list[list[int]] = []
        self._before: list[list[int]] = []  # of each chained token: the place of the equal run before its own
        self._latest: dict[int, int] = {}  # key of a run -> place of the last token of its latest occurrence
        self._grown: set[int] = set()  # texts some of whose tokens are not chained yet

    def add(self, tokens: Sequence[int]) -> int:
        """A new text; returns its number."""
        text = len(self.texts)
        before = np.full(len(tokens), _NOWHERE, np.int64)
        if len(tokens) >= NGRAM:
            ids = np.asarray(tokens, np.int64)
            keys = (ids[:-2] << 2 * _TOKEN_BITS) ^ (ids[1:-1] << _TOKEN_BITS) ^ ids[2:]
            places = (text << _POSITION_BITS) + np.arange(NGRAM - 1, len(ids))
            order = np.argsort(keys, kind="stable")
            again = keys[order[1:]] == keys[order[:-1]]
            ends = before[NGRAM - 1 :]
            ends[order[1:][again]] = places[order[:-1][again]]
            if self._latest:
                first = order[np.append(True, ~again)]
                ends[first] = [self._latest.get(key, _NOWHERE) for key in keys[first].tolist()]
            self._latest.update(zip(keys.tolist(), places.tolist(), strict=True))  # the last of equal keys stays
        self.texts.append(list(tokens))
        self._before.append(before.tolist())
        self.num_tokens += len(tokens)
        return text

    def extend(self, text: int, tokens: Sequence[int]) -> None:
        """A text grows. It is chained when it is next looked for, so that a text that is followed costs nothing."""
        self.texts[text] += tokens
        self.num_tokens += len(tokens)
        self._grown.add(text)

    def look_up(self, text: int) -> Match | None:
        """Where the end of a text stood before and something follows: of the latest places the longest match."""
        while self._grown:
            self._chain(self._grown.pop())
        tokens, best = self.texts[text], None
        most, common = len(tokens), NGRAM - 1
        place = self._latest.get(_key(tokens, most - 1), _NOWHERE) if most >= NGRAM else _NOWHERE
        for _ in range(_MOST_CANDIDATES):
            if place == _NOWHERE:
                break
            other, position = place >> _POSITION_BITS, place & ((1 << _POSITION_BITS) - 1)
            found = self.texts[other]
            if position + 1 < len(found):
                longest = min(most, position + 1, _MOST_COMMON)
                count = 0
                while count < longest and found[position - count] == tokens[most - 1 - count]:
                    count += 1
                if count > common:
                    common, best = count, Match(other, position + 1, count)
            place = self._before[other][position]
        return best

    def continuation(self, text: int, match: Match, count: int) -> list[int]:
        """At most `count` tokens from a match of `text` on; where a text repeats its own end, it goes on doing so."""
        found = self.texts[match.text]
        tokens = found[match.position : match.position + count]
        if match.text == text and tokens:
            period = len(found) - match.position
            while len(tokens) < count:
                tokens.append(tokens[-period])
        return tokens

    def _chain(self, text: int) -> None:
        tokens, before, latest = self.texts[text], self._before[text], self._latest
        for position in range(len(before), len(tokens)):
            key = _key(tokens, position) if position >= NGRAM - 1 else _NOWHERE
            before.append(latest.get(key, _NOWHERE))
            if key != _NOWHERE:
                latest[key] = (text << _POSITION_BITS) + position


def _key(tokens: list[int], position: int) -> int:
    """Of the run that ends there."""
    return (tokens[position - 2] << 2 * _TOKEN_BITS) ^ (tokens[position - 1] << _TOKEN_BITS) ^ tokens[position]
