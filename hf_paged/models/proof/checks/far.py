"""Check: rows at and beyond each number that may be a length get stock's logits, behind caches of random content."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.models.proof.interface import answered_by
from hf_paged.models.proof.packed import BLOCK, RecurrentSteps
from hf_paged.models.proof.stock import Entry, WatchedCache, cache_argument, filled_cache, forward
from hf_paged.models.proof.subject import TOLERANCE, CausalAttention, Subject, distance
from hf_paged.models.proof.verdict import Refused

FARTHEST = 40_000  # a proof ends in front of a number beyond it
_EDGE, _LOUD = 6, 100.0  # positions around an edge of a mask have values so many times larger
_LIE = 1_000_000

Filling = dict[int, tuple[torch.Tensor, torch.Tensor]]  # by layer of a cache: keys [S, Hkv, D], values [S, Hkv, Dv]


class Reach(NamedTuple):
    """Tokens of a sequence up to which stock and packed steps agree (None: any number), and at what that was tried."""

    max_length: int | None
    differs: bool = False  # beyond it; else it was not tried


class _Row(NamedTuple):
    name: str
    first: int  # tokens that its cache holds
    tokens: list[int]


def check_far(subject: Subject, lengths: list[int]) -> Reach:
    """Compare around each of the sorted `lengths`; raises `Refused` if rows differ below the first that differs."""
    if cache_argument(subject.model) is None:
        raise Refused("its forward takes no cache, so that nothing far from a sequence's begin can be compared")
    far = _Far(subject, lengths)
    for length in lengths:
        if length > FARTHEST:
            return Reach(length - 2)
        far.fill(length)
        try:
            worst = far.worst(far.rows(length - 4, 8), _Row("beyond", length + 6, far.tokens(1)))
        except (IndexError, RuntimeError):  # stock has a table of positions, and no more
            return far.reach_of_table(length)
        if worst >= TOLERANCE:
            below = far.worst(far.rows(length - 10, 8), _Row("last", length - 4, far.tokens(1)))
            if below >= TOLERANCE:
                raise Refused(f"behind a cache of {length - 10} tokens, logits differ by {below:.1e} of their standard "
                              "deviation")
            return Reach(length - 2, differs=True)
    return Reach(None)


def length_readers(subject: Subject) -> list[str]:
    """Return where modeling code asks the cache for its length, if other logits come of another answer."""
    told, readers = [], set[str]()
    for lie in (0, _LIE):
        cache = WatchedCache(subject.model, lie)
        try:
            told.append(forward(subject.model, subject.prompts[2][:7], 0, cache))
        except Exception:
            return sorted(readers)  # of the first pass: the second one believed the lie
        readers |= cache.readers
    return sorted(readers) if distance(told[1], told[0]) >= TOLERANCE else []


class _Far:
    """Caches of random keys and values, and rows behind them."""

    def __init__(self, subject: Subject, lengths: list[int]) -> None:
        self._subject, self._lengths = subject, lengths
        self._generator = torch.Generator().manual_seed(5)
        entries = self._given_entries()
        self._shapes = {entry.layer: (entry.keys.shape, entry.values.shape) for entry in entries}
        self._filling: Filling = {}
        self._states = {key: torch.randn(state.shape, generator=self._generator).to(state.dtype)
                        for key, state in subject.states.items()}

    def tokens(self, count: int) -> list[int]:
        return torch.randint(3, 120, (count,), generator=self._generator).tolist()

    def rows(self, first: int, count: int) -> list[_Row]:
        """Return rows of a step: a new one, one of `count` tokens behind `first` others, and a short one."""
        if self._subject.whole_prompts:  # behind a cache there are decode rows alone
            return [_Row("new", 0, self.tokens(5)),
                    *(_Row(f"across {at}", at, self.tokens(1)) for at in range(first, first + count))]
        return [_Row("new", 0, self.tokens(5)), _Row("across", first, self.tokens(count)),
                _Row("short", 30, self.tokens(3))]

    def fill(self, length: int) -> None:
        """Draw keys and values of some more tokens than `length`, loud where a mask of it has an edge."""
        tokens = length + 7
        loud = torch.ones(tokens, 1, 1, dtype=torch.float64)
        for edge in {length, *self._lengths}:
            for at in (tokens - edge, edge, tokens - 9 - edge, tokens - 1 - edge):
                loud[max(0, at - _EDGE) : max(0, at + _EDGE + 1)] = _LOUD
        drawn = {shapes: [torch.randn(tokens, shape[1], shape[3], generator=self._generator).double()
                          for shape in shapes] for shapes in dict.fromkeys(self._shapes.values())}
        self._filling = {layer: (drawn[shapes][0], drawn[shapes][1] * loud) for layer, shapes in self._shapes.items()}

    def worst(self, rows: list[_Row], *more: _Row) -> float:
        """Return the largest distance of one packed step of these rows to stock's forwards of each one alone."""
        rows = [*rows, *more]
        wanted = [self._stock(row) for row in rows]
        steps = self._subject.steps(sum((row.first + 16) // BLOCK + 2 for row in rows))
        for row in rows:
            if row.first:
                steps.fill(row.name, row.first, *self._given(row.first))
                if isinstance(steps, RecurrentSteps):
                    steps.fill_states(row.name, self._states)
        got = steps.step([(row.name, row.tokens) for row in rows])
        return max(distance(got[row.name], logits) for row, logits in zip(rows, wanted, strict=True))

    def reach_of_table(self, length: int) -> Reach:
        """Return the reach of a model whose table of positions ends at about `length`."""
        try:
            worst = self.worst(self.rows(length - 8, 8))
        except (IndexError, RuntimeError):
            return Reach(length - 10)
        if worst >= TOLERANCE:
            raise Refused(f"in front of {length} tokens, where its positions end, logits differ by {worst:.1e} of "
                          "their standard deviation")
        return Reach(length)

    def _stock(self, row: _Row) -> torch.Tensor:
        return forward(self._subject.model, row.tokens, row.first,
                       filled_cache(self._subject.model, self._filling, row.first, self._states))

    def _given_entries(self) -> list[Entry]:
        """Return the entries of a cache; sets for each attention call the layer whose entry it gets as it is."""
        cache = WatchedCache(self._subject.model)
        spy = CausalAttention()
        with answered_by(self._subject.model, spy):
            forward(self._subject.model, self.tokens(7), 0, cache)
        if len(spy.given) != len(self._subject.calls):
            raise Refused(f"a forward makes {len(spy.given)} attention calls with a cache, and "
                          f"{len(self._subject.calls)} without")
        self._layers = [next((entry.layer for entry in cache.entries if _same(entry.keys, keys)
                              and _same(entry.values, values)), None) for keys, values in spy.given]
        return cache.entries

    def _given(self, first: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return what each attention call gets of the cache's first tokens: keys [S, Hkv, D], values [S, Hkv, Dv]."""
        layers = [layer for layer in self._layers if layer is not None]
        if len(layers) == len(self._layers):
            return ([self._filling[layer][0][:first] for layer in layers],
                    [self._filling[layer][1][:first] for layer in layers])
        # The cache holds what keys and values are computed from (latents): they are taken where attention gets them.
        spy = CausalAttention()
        with answered_by(self._subject.model, spy):
            self._stock(_Row("", first, [5]))
        return tuple([_padded(pair[part][0, :, :-1].transpose(0, 1), first) for pair in spy.given]
                     for part in (0, 1))  # type: ignore[return-value]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _padded(states: torch.Tensor, tokens: int) -> torch.Tensor:
    """Put zeros in front of the last tokens' states, which are all that a sliding window's cache holds."""
    return torch.cat([states.new_zeros(tokens - len(states), *states.shape[1:]), states])
