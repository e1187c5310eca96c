"""Named tensors into the weights of a model whose engine holds still, on every rank that holds a part of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from hf_paged.errors import PartlyLoadedError
from hf_paged.parallel.adapters import add_adapter, remove_adapter
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.named_weights import NamedWeights, ShardRange, check_tensor, write

# What `named_weights` brings from the ranks at a time.
BUCKET_BYTES = 256 << 20


class Tensor(NamedTuple):
    """Its rows follow. `is_known`: another name brought what it covers, which it is compared with."""

    name: str
    is_known: bool


class NewAdapter(NamedTuple):
    """Its tensors follow."""

    name: str
    config: Any

    def apply(self, model: Any) -> None:
        add_adapter(model, self.name, self.config)


class NoAdapter(NamedTuple):
    """It is gone."""

    name: str

    def apply(self, model: Any) -> None:
        remove_adapter(model, self.name)


class WeightLoader:
    """Writes the tensors of one `Engine.load_weights` where they belong.

    Args:
        model: this rank's.
        group: over whose ranks tensors are sent; `SINGLE` where each rank is given them itself.
        together: entered for each tensor that is sent.
        partial: some tensors may be missing.
        only: names of the tensors that may come, if not all may.
    """

    def __init__(self, model: Any, group: ParallelGroup, together: Callable[[], AbstractContextManager], *,
                 partial: bool = False, only: Collection[str] | None = None) -> None:
        self._weights = NamedWeights(model)
        self._group, self._together, self._partial, self._only = group, together, partial, only
        self._covered: set[ShardRange] = set()
        self._written: list[str] = []

    def checked(self, weights: Any) -> Iterable[Any]:
        """What can be looked at before anything is written is; an iterator is not."""
        if not isinstance(weights, Iterable) or isinstance(weights, torch.Tensor):
            raise TypeError(f"weights: expected a dict of tensors or pairs of a name and a tensor, got "
                            f"{type(weights).__name__}")
        if not isinstance(weights, (Mapping, Sequence)):
            return weights
        pairs = list(weights.items() if isinstance(weights, Mapping) else weights)
        first: dict[ShardRange, tuple[str, torch.Tensor]] = {}
        for pair in pairs:
            if (place := self._place(pair)) is not None:
                name, tensor = first.setdefault(place.covers, pair)
                if tensor is not pair[1] and not torch.equal(*(t.detach().to("cpu", place.data.dtype)
                                                               for t in (tensor, pair[1]))):
                    raise _unequal(pair[0], name)
        self._check_complete(set(first))
        return pairs

    def __call__(self, pairs: Iterable[Any]) -> None:
        """Write them as they come.

        Raises:
            PartlyLoadedError: anything that is raised once a tensor was written.
        """
        try:
            for pair in pairs:
                self._take(pair)
            self._check_complete(self._covered)
        except Exception as error:
            if self._written:
                raise PartlyLoadedError(error, tuple(self._written)) from error
            raise

    @property
    def written(self) -> tuple[str, ...]:
        """Names of the tensors that were."""
        return tuple(self._written)

    def _place(self, pair: Any) -> Any:
        """Where a pair goes; None: nowhere, as with transformers."""
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"weights: expected pairs of a name and a tensor, got {type(pair).__name__}")
        name, tensor = pair
        if isinstance(name, str) and self._weights.is_ignored(name):
            return None
        if self._only is not None and name not in self._only:
            raise ValueError(f"{name!r} is no tensor of the adapter that its config describes")
        check_tensor(name, tensor, self._weights)
        return self._weights.place(name)

    def _take(self, pair: Any) -> None:
        if (place := self._place(pair)) is None:
            return
        name, tensor = str.__str__(pair[0]), pair[1]
        is_known = place.covers in self._covered
        with self._together():
            self._group.broadcast(Tensor(name, is_known))
            same = write(place, tensor.detach(), self._group, compare=is_known)
        if is_known and not same:
            raise _unequal(name, place.covers.name)
        self._covered.add(place.covers)
        self._written.append(name)

    def _check_complete(self, covered: set[ShardRange]) -> None:
        missing = [] if self._partial else self._weights.missing(covered)
        if missing := [name for name in missing if self._only is None or name in self._only]:
            others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
            what = "the model, or partial=True" if self._only is None else "the adapter"
            raise ValueError(f"weights lack {missing[0]!r}{others}: expected every tensor of {what}")


def _unequal(name: str, other: str) -> ValueError:
    return ValueError(f"{name!r} has other values than {other!r}, with which it shares its memory in the model: "
                      "expected equal tensors, or one of them")


def receive(model: Any, group: ParallelGroup) -> None:
    """Take part in what rank 0 does with the weights, until its update is over."""
    weights: NamedWeights | None = None
    while (what := group.broadcast()) is not None:
        if isinstance(what, Tensor):
            weights = weights or NamedWeights(model)
            write(weights.place(what.name), None, group, compare=what.is_known)
        else:
            weights = None
            what.apply(model)


def buckets(model: Any) -> Iterator[tuple[str, ...]]:
    """Names of a model's weights, as many together as `BUCKET_BYTES` hold."""
    weights, bucket, size = NamedWeights(model), list[str](), 0
    for name in weights:
        nbytes = weights.nbytes(name)
        if bucket and size + nbytes > BUCKET_BYTES:
            yield tuple(bucket)
            bucket, size = [], 0
        bucket.append(name)
        size += nbytes
    if bucket:
        yield tuple(bucket)
