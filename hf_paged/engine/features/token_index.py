"""An index of texts that finds where the last tokens of a text occurred before, to guess the tokens that follow.

Each run of three tokens is chained to the previous equal run, as in LZ77 compressors (RFC 1951, section 4), and a
look-up takes the run of the chain with the longest common text before it. So a token costs one dict entry and one list
entry (nodes of a suffix tree take several times that), and a look-up a bounded number of comparisons.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NGRAM = 3  # tokens in common at least: fewer predict the next token badly
_MOST_CANDIDATES = 32
_MOST_COMMON = 32
_NOWHERE = -1
_POSITION_BITS = 32
_TOKEN_BITS = 21  # different runs may have equal keys: a look-up compares the tokens themselves


class Match(NamedTuple):
    """The tokens before ``position`` of a text are the last ``common`` ones of the text that was looked up."""

    text: int
    position: int
    common: int


class TokenIndex:
    """Texts of token ids, each of which may grow at its end.

    Attributes:
        num_tokens: number of tokens of all texts.
        texts: the texts; only `extend` may change them.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.texts: list[list[int]] = []
        self._before: list[list[int]] = []  # for each chained token, the place of the previous equal run
        self._latest: dict[int, int] = {}  # key of a run -> place of the last token of its latest occurrence
        self._grown: set[int] = set()  # texts with tokens that are not chained yet

    def add(self, tokens: Sequence[int]) -> int:
        """Add a text, and return its number."""
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
        """Append tokens to a text. They are chained by the next look-up, so that `extend` itself is cheap."""
        self.texts[text] += tokens
        self.num_tokens += len(tokens)
        self._grown.add(text)

    def look_up(self, text: int) -> Match | None:
        """Return the longest match of the text's end among its latest occurrences with a next token, or None."""
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
        """Return at most `count` tokens after a match of `text`; a match in the text's own end is repeated."""
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
    """Return the key of the run of three tokens that ends at ``position``."""
    return (tokens[position - 2] << 2 * _TOKEN_BITS) ^ (tokens[position - 1] << _TOKEN_BITS) ^ tokens[position]
