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
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._texts: list[list[int]] = []
        self._before: list[list[int]] = []  # of each token: the place of the equal run before the one that it ends
        self._latest: dict[int, int] = {}  # key of a run -> place of the last token of its latest occurrence

    @property
    def texts(self) -> list[list[int]]:
        """All of them, not to be changed."""
        return self._texts

    def add(self, tokens: Sequence[int]) -> int:
        """A new text; returns its number."""
        text = len(self._texts)
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
        self._texts.append(list(tokens))
        self._before.append(before.tolist())
        self.num_tokens += len(tokens)
        return text

    def append(self, text: int, token: int) -> None:
        """A text grows."""
        tokens, before = self._texts[text], _NOWHERE
        tokens.append(token)
        if len(tokens) >= NGRAM:
            key = _last_key(tokens)
            before = self._latest.get(key, _NOWHERE)
            self._latest[key] = (text << _POSITION_BITS) + len(tokens) - 1
        self._before[text].append(before)
        self.num_tokens += 1

    def look_up(self, text: int) -> Match | None:
        """Where the end of a text stood before and something follows: of the latest places the longest match."""
        tokens, best = self._texts[text], None
        most, common = len(tokens), NGRAM - 1
        place = self._latest.get(_last_key(tokens), _NOWHERE) if most >= NGRAM else _NOWHERE
        for _ in range(_MOST_CANDIDATES):
            if place == _NOWHERE:
                break
            other, position = place >> _POSITION_BITS, place & ((1 << _POSITION_BITS) - 1)
            found = self._texts[other]
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
        found = self._texts[match.text]
        tokens = found[match.position : match.position + count]
        if match.text == text and tokens:
            period = len(found) - match.position
            while len(tokens) < count:
                tokens.append(tokens[-period])
        return tokens


def _last_key(tokens: list[int]) -> int:
    """Of the run at the end."""
    return (tokens[-3] << 2 * _TOKEN_BITS) ^ (tokens[-2] << _TOKEN_BITS) ^ tokens[-1]
