"""Images, or videos, of a call of an encoder: what of its arguments belongs to each, and which are equal."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

_PLAIN = (bool, int, float, str, type(None))
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a number


@dataclass(frozen=True, eq=False)
class Items:
    """Images of one call, each with a number of rows of each tensor, one image after the other.

    Attributes:
        arguments: of the call, by name.
        ends: by the name of a tensor, the row behind the last one of each image [n].
    """

    arguments: Mapping[str, Any]
    ends: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(next(iter(self.ends.values())))

    @property
    def device(self) -> torch.device:
        device: torch.device = self.arguments[next(iter(self.ends))].device
        return device

    @property
    def kind(self) -> Hashable:
        """What calls with the same arguments besides rows have in common."""
        rest = repr({name: value for name, value in self.arguments.items() if name not in self.ends})
        return rest, tuple((name, self.arguments[name].ndim, len(ends) == len(self.arguments[name]))
                           for name, ends in self.ends.items())

    def parts(self, item: int) -> tuple[torch.Tensor, ...]:
        """Return the rows of an image, of each tensor."""
        return tuple(self.arguments[name][self._first(ends, item) : ends[item]] for name, ends in self.ends.items())

    def only(self, items: Sequence[int]) -> Items:
        """Return the arguments for these images alone."""
        chosen = [self.parts(item) for item in items]
        cut = {name: torch.cat(rows) for name, rows in zip(self.ends, zip(*chosen, strict=True), strict=True)}
        ends = {name: np.cumsum([ends[item] - self._first(ends, item) for item in items])
                for name, ends in self.ends.items()}
        return Items({**self.arguments, **cut}, ends)

    def among(self, count: int) -> Items:
        """Return the arguments for the first image as the second one of `count`: the others are the same image with all
        numbers negated."""
        first, found = self.only([0]), dict(self.arguments)
        for name in self.ends:
            own = first.arguments[name]
            other = -own if own.is_floating_point() else own
            found[name] = torch.cat([other, own, *[other] * (count - 2)])
        return Items(found, {name: np.arange(1, count + 1) * ends[0] for name, ends in first.ends.items()})

    @staticmethod
    def _first(ends: np.ndarray, item: int) -> int:
        return int(ends[item - 1]) if item else 0

    @cached_property
    def keys(self) -> list[Hashable]:
        """Keys that equal images have in common; other images may have them, too."""
        columns = []
        for name, ends in self.ends.items():
            tensor, starts = self.arguments[name], np.concatenate([[0], ends[:-1]])
            sums = np.add.reduceat(_bits(tensor).flatten(1).sum(1, dtype=torch.int64).cpu().numpy(), starts)
            kind = tensor.dtype, tensor.device, tensor.shape[1:]
            columns.append([(*kind, *own) for own in zip((ends - starts).tolist(), sums.tolist(), strict=True)])
        return list(zip(*columns, strict=True))

    def blank(self) -> np.ndarray:
        """Return [n], True for images of which all numbers are 0: some classes leave these out."""
        found = np.zeros(len(self), bool)
        for name, ends in self.ends.items():
            if (tensor := self.arguments[name]).is_floating_point():
                starts = np.concatenate([[0], ends[:-1]])
                found |= ~np.logical_or.reduceat((tensor != 0).flatten(1).any(1).cpu().numpy(), starts)
        return found


def are_equal(parts: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Return whether tensors of the same dtypes and devices are equal bit for bit."""
    return all(torch.equal(_bits(part), _bits(other)) for part, other in zip(parts, others, strict=True))


def divided(arguments: Mapping[str, Any], settings: object) -> Items | None:
    """Return the images of a call with these arguments by name; None where it is not known what belongs to which.

    Either each image has one row of each tensor; or it has one row of a grid [n, 3], and of other tensors one row, or
    as many as its grid has places. ``settings``: the model's config; lists in it belong to no image.
    """
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    for name, value in arguments.items():
        is_setting = isinstance(value, (list, tuple)) and value == getattr(settings, name, None)
        if name not in tensors and not is_setting and not isinstance(value, _PLAIN):
            return None
    if not tensors or not all(map(_is_plain, tensors.values())):
        return None
    lengths = set(map(len, tensors.values()))
    if len(lengths) == 1:
        each = np.arange(1, lengths.pop() + 1)
        return Items(arguments, dict.fromkeys(tensors, each))
    for grid in tensors.values():
        if grid.dtype in (torch.int64, torch.int32) and grid.ndim == 2 and grid.shape[1] == 3:
            places = grid.prod(1).cpu().numpy()
            each, ends = np.arange(1, len(grid) + 1), np.cumsum(places)
            if lengths == {len(grid), int(ends[-1])} and places.min() > 0:
                return Items(arguments, {name: each if len(tensor) == len(grid) else ends
                                         for name, tensor in tensors.items()})
    return None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has rows whose bits can be compared."""
    return (type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.element_size() in _WORDS
            and tensor.ndim > 1 and tensor.numel() > 0)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(_WORDS[tensor.element_size()])
