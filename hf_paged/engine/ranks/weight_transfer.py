"""Transfer of named tensors into a model's weights, on every rank of the model, while the engine runs no step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from hf_paged.errors import PartlyLoadedError
from hf_paged.parallel.adapters import activate, add_adapter, remove_adapter
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.named_weights import NamedWeights, ShardRange, check_tensor, write

# The most bytes that `named_weights` gathers from the ranks at a time.
BUCKET_BYTES = 256 << 20


class Tensor(NamedTuple):
    """A message before the rows of a tensor. `is_known`: a tied name was written before, and is compared with it."""

    name: str
    is_known: bool


class NewAdapter(NamedTuple):
    """A message before the tensors of a new adapter."""

    name: str
    config: Any

    def apply(self, model: Any) -> None:
        add_adapter(model, self.name, self.config)


class NoAdapter(NamedTuple):
    """A message that an adapter is removed."""

    name: str

    def apply(self, model: Any) -> None:
        remove_adapter(model, self.name)


class ActiveAdapters(NamedTuple):
    """A message that these adapters are the active ones."""

    names: tuple[str, ...]

    def apply(self, model: Any) -> None:
        activate(model, self.names)


class WeightLoader:
    """A loader that writes the tensors of one `Engine.load_weights` into the weights.

    Args:
        model: this rank's model.
        group: the ranks to which tensors are sent; `SINGLE` if each rank's caller has the tensors.
        together: makes a context that is entered for each tensor that is sent.
        partial: some tensors may be missing.
        only: the names that are accepted; None for all names of the model.

    Attributes:
        written: the names of the tensors that were written.
    """

    def __init__(self, model: Any, group: ParallelGroup, together: Callable[[], AbstractContextManager], *,
                 partial: bool = False, only: Collection[str] | None = None) -> None:
        self._weights = NamedWeights(model)
        self._group, self._together, self._partial, self._only = group, together, partial, only
        self._covered: set[ShardRange] = set()
        self.written: list[str] = []

    def checked(self, weights: Any) -> Iterable[Any]:
        """Return the pairs, which are checked before anything is written; an iterator is returned unchecked."""
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
        """Check and write one pair after the other.

        Raises:
            PartlyLoadedError: any error after the first tensor was written.
        """
        try:
            for pair in pairs:
                self._take(pair)
            self._check_complete(self._covered)
        except Exception as error:
            if self.written:
                raise PartlyLoadedError(error, tuple(self.written)) from error
            raise

    def _place(self, pair: Any) -> Any:
        """Return the weight of a pair after checking it; None for a name that transformers ignores, too."""
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
        self.written.append(name)

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
    """Receive weights and adapters from rank 0 until its update ends."""
    weights: NamedWeights | None = None
    while (what := group.broadcast()) is not None:
        if isinstance(what, Tensor):
            weights = weights or NamedWeights(model)
            write(weights.place(what.name), None, group, compare=what.is_known)
        else:
            weights = None
            what.apply(model)


def buckets(model: Any) -> Iterator[tuple[str, ...]]:
    """Yield the names of a model's weights in buckets of at most `BUCKET_BYTES`, or of one tensor."""
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
