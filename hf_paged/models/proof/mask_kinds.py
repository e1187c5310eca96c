"""What a mask lets each position see, found from the function that stock hands to its mask interface."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from hf_paged.models.proof.verdict import Refused

# Positions at which a mask is evaluated, besides fractions of the farthest one: around usual windows and chunks.
_POSITIONS = (0, 1, 2, 7, 63, 100, 511, 1000, 4095, 4096, 8191, 8192, 8200)


class MaskKind(NamedTuple):
    """Causal mask: all earlier positions, the last `size` ones, or those of the same chunk of `size`."""

    name: Literal["full", "sliding", "chunked"]
    size: int | None = None

    def sees(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return which keys' positions [S] each query's position [T] sees, as bool [T, S]."""
        queries, keys = queries[:, None], keys[None]
        seen = keys <= queries
        if self.size is None:
            return seen
        if self.name == "sliding":
            return seen & (keys > queries - self.size)
        return seen & (keys // self.size == queries // self.size)


FULL = MaskKind("full")


def mask_kind(function: Callable, heads: int, farthest: int) -> MaskKind:
    """Return the kind of a mask function, which is evaluated at positions below `farthest`; may raise `Refused`."""
    _give_numbers(function, set())
    positions = {*_POSITIONS, farthest - 1, farthest // 2, farthest // 3}
    first_seen = {at: _first_seen(function, heads, at) for at in sorted(positions) if 0 <= at < farthest}
    if not any(first_seen.values()):
        return FULL
    window = max(at - first + 1 for at, first in first_seen.items())
    if all(first == max(0, at - window + 1) for at, first in first_seen.items()):
        return MaskKind("sliding", window)
    cut = sorted({first for first in first_seen.values() if first})
    for size in sorted({math.gcd(*cut), *cut}):
        if all(first == at // size * size for at, first in first_seen.items()):
            return MaskKind("chunked", size)
    raise Refused(f"a mask is neither full, sliding nor chunked: the first positions that it shows, by position, "
                  f"are {first_seen}")


def _first_seen(function: Callable, heads: int, at: int) -> int:
    keys = torch.arange(at + 64)
    rows = [torch.as_tensor(function(torch.tensor(0), torch.tensor(head), torch.tensor(at), keys)).expand(len(keys))
            for head in {0, heads - 1}]
    if not torch.equal(rows[0], rows[-1]):
        raise Refused("a mask differs between heads")
    seen = rows[0].nonzero().view(-1).tolist()
    if not seen or seen[-1] != at or len(seen) != at - seen[0] + 1:
        raise Refused(f"a mask is not causal, or has gaps: position {at} sees {len(seen)} positions, "
                      f"{f'{seen[0]} to {seen[-1]}' if seen else 'not its own'}")
    return seen[0]


def _give_numbers(function: Callable, met: set[int]) -> None:
    """Replace tensors of the meta device that a mask function closes over: counts of padding tokens, all 0."""
    if id(function) in met:
        return
    met.add(id(function))
    for cell in getattr(function, "__closure__", None) or ():
        held = cell.cell_contents
        for inner in held if isinstance(held, tuple) else (held,):
            if callable(inner):
                _give_numbers(inner, met)
        if isinstance(held, torch.Tensor) and held.is_meta:
            cell.cell_contents = torch.zeros(held.shape, dtype=held.dtype)
