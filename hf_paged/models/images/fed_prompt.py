"""What the decoder is fed of one prompt besides the embeddings and the plain positions of its token ids."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from hf_paged.device.cuda import to_host

# Inputs of a decoder that have a row for each token, [B, T, ...].
EMBEDS, PER_LAYER = "inputs_embeds", "per_layer_inputs"
# What is added behind each of the first layers; a fed row holds those of all layers, [layers, hidden_size].
DEEPSTACK = "deepstack_visual_embeds"


class FedRun(NamedTuple):
    """Tokens of a prompt, one after the other, for which the decoder is fed rows that are not those of their ids.

    Attributes:
        first: position of the first token.
        identity: the number of these rows; equal rows have the same one (`FedContents`).
        rows: [n, ...] by the name of the decoder's input, on the device or the host.
    """

    first: int
    identity: int
    rows: Mapping[str, torch.Tensor]

    @property
    def end(self) -> int:
        """Position behind the last token."""
        return self.first + len(self.rows[EMBEDS])


class FedPart(NamedTuple):
    """Tokens `first` to `end` - 1 of a prompt, which a run feeds, with their rows by the name of the input."""

    first: int
    end: int
    rows: Mapping[str, torch.Tensor]


class _Marks:
    """Which tokens of a prompt are marked, given as [T] bool; those behind it are not."""

    def __init__(self, marked: np.ndarray) -> None:
        self._before = [0, *np.cumsum(marked).tolist()]  # marked ones in front of each place

    def any_in(self, first: int, end: int) -> bool:
        """Return whether one of the tokens `first` to `end` - 1 is marked."""
        before = self._before
        return first < len(before) and before[first] < before[min(end, len(before) - 1)]


class _TokenNumbers:
    """Numbers of each token of a prompt, as bytes.

    Args:
        numbers: [n, T] int64.
        of_text: Those of text without images, [n, T] or for all alike.
        behind: Those of each token behind the prompt; none: they are left out.

    Attributes:
        is_odd, odd: [T] bool, True where some of a token's numbers are not those of text; the same as marks.
    """

    def __init__(self, numbers: np.ndarray, of_text: np.ndarray | int, behind: Sequence[int] = ()) -> None:
        self.is_odd = (numbers != of_text).any(0)
        self.odd = _Marks(self.is_odd)
        self._each, self._behind = 8 * len(numbers), _bytes(behind)
        self._raw = numbers.astype(np.int64).T.tobytes()

    def of(self, first: int, end: int) -> bytes:
        """Return the numbers of the tokens `first` to `end` - 1, token by token."""
        return self._raw[first * self._each : end * self._each] + self._behind * (end - max(first, len(self.is_odd)))


@dataclass(frozen=True, eq=False)
class FedPrompt:
    """What a prompt's decoder is fed in place of its ids.

    Attributes:
        ids: The prompt's token ids.
        runs: In order, apart from each other.
        positions: [A, T] int64, RoPE's positions of the prompt's tokens, for each axis; None: 0, 1, ... for all axes.
        sights: By the window of attention calls, the first and the last position that each token sees, [2, T] int64;
            without calls in which all tokens see what they see without images.
    """

    ids: Sequence[int]
    runs: tuple[FedRun, ...]
    positions: np.ndarray | None = None
    sights: Mapping[int | None, np.ndarray] = field(default_factory=dict)

    @property
    def content(self) -> Hashable:
        """All that the prompt is, for finding equal ones."""
        sights = tuple((window, sight.tobytes()) for window, sight in self.sights.items())
        axes = None if self.positions is None else (len(self.positions), self.positions.tobytes())
        return tuple(self.ids), tuple((run.first, run.end, run.identity) for run in self.runs), axes, sights

    def on_host(self) -> FedPrompt:
        """Return a copy whose rows lie on the host until a step needs them: those of prompts that wait would fill the
        device."""
        return replace(self, runs=tuple(
            run._replace(rows={name: to_host(rows) for name, rows in run.rows.items()}) for run in self.runs))

    def parts(self, first: int, end: int) -> Iterator[FedPart]:
        """Yield what is fed of the tokens `first` to `end` - 1, in order."""
        for run in self.runs:
            start, stop = max(first, run.first), min(end, run.end)
            if start < stop:
                rows = {name: rows[start - run.first : stop - run.first] for name, rows in run.rows.items()}
                yield FedPart(start, stop, rows)

    @property
    def offsets(self) -> np.ndarray | None:
        """By how much RoPE's positions behind the prompt are above those of the cache [A]; None if they are the same.
        """
        return None if self.positions is None else self.positions[:, -1] - (self.positions.shape[1] - 1)

    @property
    def num_positions(self) -> int:
        """One more than the largest position of RoPE."""
        return len(self.ids) if self.positions is None else int(self.positions.max()) + 1

    def positions_of(self, first: int, end: int) -> np.ndarray | None:
        """Return RoPE's positions [A, n] of the tokens `first` to `end` - 1; None if they are `first`, `first` + 1, ...

        Behind the prompt each axis goes on from its own last position, as in stock's `generate`.
        """
        if self.positions is None:
            return None
        length = self.positions.shape[1]
        later = np.arange(max(first, length), end) + self.positions[:, -1:] - (length - 1)
        return np.concatenate([self.positions[:, first:end], later], axis=1)

    def chunk_end(self, first: int, end: int) -> int:
        """Return the last place up to `end` where a chunk from `first` on may end, since no token of it sees a later
        one; without such a place the first one behind `end`."""
        if first >= len(self._ends) or end >= len(self._ends):
            return end
        places = self._places(first)
        before = places[places <= end]
        return int(before[-1] if len(before) else places[0])

    @property
    def longest_chunk(self) -> int:
        """The number of tokens that have to be computed at once; 1 if each can be computed alone."""
        return int(np.diff(self._places(0), prepend=0).max()) if len(self._ends) else 1

    def _places(self, first: int) -> np.ndarray:
        """Return the places behind `first` with no token in front, from `first` on, that sees a later one."""
        farthest = np.maximum.accumulate(self._ends[first:])
        return first + 1 + np.flatnonzero(farthest <= np.arange(first + 1, len(self._ends) + 1))

    def _end_of_seen(self, first: int, end: int) -> int:
        """Return the first place from `end` on behind all that tokens from `first` up to it see."""
        ends = self._ends
        while first < min(end, len(ends)) and (seen := int(ends[first:end].max())) > end:
            end = seen
        return end

    @cached_property
    def _ends(self) -> np.ndarray:
        """The places behind the last token that each token sees [T]; empty if none sees a later one."""
        lasts = [sight[1] for sight in self.sights.values()]
        return np.maximum.reduce(lasts) + 1 if lasts else np.empty(0, np.int64)

    def block_key(self, first: int, end: int) -> bytes:
        """Return what keys and values of the tokens `first` to `end` - 1 depend on besides their ids and the tokens in
        front; b"" if on nothing.

        Where tokens see later ones, the key goes on to the last token that counts. Positions count by their steps, so
        that the key of tokens behind the prompt is b"". The number of bytes is odd, unlike that of ids and cache keys,
        and the key says where it ends: no key is the beginning of another one.
        """
        if not self._marks.any_in(first, end):
            return b""
        if (known := self._keys.get((first, end))) is not None:
            return known
        return self._keys.setdefault((first, end), self._key(first, end))

    @cached_property
    def _keys(self) -> dict[tuple[int, int], bytes]:
        return {}

    def _key(self, first: int, end: int) -> bytes:
        """Make the key of tokens of which one is marked."""
        last = self._end_of_seen(first, end)
        runs: list[int] = []
        spans, ends = self._spans
        for start, stop, identity in spans[bisect_right(ends, first) :]:
            if start >= last:
                break
            inside = max(first, start)
            runs += identity, inside - start, inside - first, min(last, stop) - inside
        steps = self._steps.of(first, last) if self._steps.odd.any_in(first, last) else b""
        seen = [(window or 0, sight.of(first, last)) for window, sight in self._sights.items()
                if sight.odd.any_in(first, last)]
        found = [_bytes((len(runs), len(steps), len(seen), last - end, *runs)), steps]
        for window, own in seen:
            found += _bytes((window, len(own))), own
        return b"".join((*found, _bytes(self.ids[end:last]), b"\0"))

    @cached_property
    def _spans(self) -> tuple[list[tuple[int, int, int]], list[int]]:
        """First token, end and identity of each run, and the ends."""
        spans = [(run.first, run.end, run.identity) for run in self.runs]
        return spans, [end for _, end, _ in spans]

    @cached_property
    def _steps(self) -> _TokenNumbers:
        """By how much the position of each token is above that of the token before, on each axis."""
        given = np.empty((0, 0), np.int64) if self.positions is None else self.positions
        return _TokenNumbers(np.diff(given, axis=1, prepend=-1), 1, behind=[1] * len(given))

    @cached_property
    def _sights(self) -> dict[int | None, _TokenNumbers]:
        return {window: _TokenNumbers(sight, plain_sight(sight.shape[1], window))
                for window, sight in self.sights.items()}

    @cached_property
    def _marks(self) -> _Marks:
        """The tokens that are fed, or whose position or sight are not those of text alone."""
        numbers = [self._steps, *self._sights.values()]
        marked = np.zeros(max(len(self.ids), *(len(each.is_odd) for each in numbers)), bool)
        for start, stop, _ in self._spans[0]:
            marked[start:stop] = True
        for each in numbers:
            marked[: len(each.is_odd)] |= each.is_odd
        return _Marks(marked)


def _bytes(numbers: Sequence[int]) -> bytes:
    return array("q", numbers).tobytes()


def plain_sight(length: int, window: int | None) -> np.ndarray:
    """Return the first and the last position [2, T] that each of the first tokens sees without images."""
    at = np.arange(length)
    return np.stack([np.zeros_like(at) if window is None else np.maximum(at - window + 1, 0), at])
