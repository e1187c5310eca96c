"""What an encoder made of images: its output cut into the part of each image, and put together again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only
from transformers.utils import ModelOutput

_ROWS, _LAYERS = "pooler_output", "deepstack_features"
_LISTS = (list, tuple)


class Encoded(NamedTuple):
    """What a decoder is given of one image: ``rows`` [tokens, H], and adds for layers, [tokens, H] each."""

    rows: torch.Tensor
    layers: tuple[torch.Tensor, ...] = ()

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Encoded:
        return Encoded(change(self.rows), tuple(map(change, self.layers)))

    @property
    def is_finite(self) -> bool:
        return all(bool(part.isfinite().all()) for part in (self.rows, *self.layers))

    def is_close(self, other: Encoded) -> bool:
        """Return whether two are the same but for rounding, as of batches of other sizes."""
        return len(self.layers) == len(other.layers) and all(
            own.shape == given.shape and is_close(own, given)
            for own, given in zip((self.rows, *self.layers), (other.rows, *other.layers), strict=True))


class Form(NamedTuple):
    """How an output holds what it has of images: classes of the output, of its rows, of its layers and of a layer."""

    output: type
    rows: type
    layers: type | None
    of_layer: type | None
    others: tuple[str, ...]  # names of further fields that are not None

    def joined(self, parts: Sequence[Encoded], whole: Callable[[], Any]) -> Any:
        """Return the output for these images; further fields are those of the output of `whole`, once they are read."""
        rows, found = [part.rows for part in parts], dict[str, Any]()
        found[_ROWS] = torch.stack(rows) if self.rows is torch.Tensor else self.rows(rows)
        if self.layers is not None and self.of_layer is not None:
            layers = list(zip(*(part.layers for part in parts), strict=True))
            found[_LAYERS] = self.layers(
                torch.cat(layer) if self.of_layer is torch.Tensor else self.of_layer(layer) for layer in layers)
        whole = cache(whole)
        found |= {name: _Late(whole, name) for name in self.others}
        fields = [field.name for field in dataclasses.fields(self.output)]
        output = self.output(**{fields[0]: None})
        for name in filter(found.__contains__, fields):
            output[name] = found.pop(name)
        for name, value in found.items():  # that some classes set without a field
            setattr(output, name, value)
        return output


def split(output: Any, count: int) -> tuple[Form, list[Encoded]] | None:
    """Return the form of an encoder's output, and the part of each of `count` images; None if it is not known."""
    if not isinstance(output, ModelOutput):
        return None
    rows, layers = getattr(output, _ROWS, None), getattr(output, _LAYERS, None)
    held = _held(rows, count)
    if rows is None or held is None:
        return None
    lengths, columns = [len(own) for own in rows], []
    for layer in layers or ():
        if isinstance(layer, torch.Tensor) and len(layer) == sum(lengths):
            columns.append(list(layer.split(lengths)))
        elif type(layer) in _LISTS and _held(layer, count):
            columns.append(list(layer))
        else:
            return None
    kinds = {torch.Tensor if isinstance(layer, torch.Tensor) else type(layer) for layer in layers or ()}
    if len(kinds) > 1 or (columns and type(layers) not in _LISTS):
        return None
    others = tuple(name for name, value in output.items() if name not in (_ROWS, _LAYERS) and value is not None)
    form = Form(type(output), held, type(layers) if columns else None, kinds.pop() if kinds else None, others)
    return form, [Encoded(own, tuple(column[item] for column in columns)) for item, own in enumerate(rows)]


def _held(rows: Any, count: int) -> type | None:
    """Return the class of what holds a tensor of rows for each of `count` images; None if it does not."""
    if isinstance(rows, torch.Tensor):
        return torch.Tensor if rows.ndim > 2 and len(rows) == count else None
    if type(rows) not in _LISTS or len(rows) != count:
        return None
    return type(rows) if all(isinstance(own, torch.Tensor) and own.ndim > 1 for own in rows) else None


def is_close(own: torch.Tensor, given: torch.Tensor) -> bool:
    is_precise = own.dtype in (torch.float32, torch.float64) and not torch.is_autocast_enabled(own.device.type)
    own, given = own.double(), given.double()
    return bool((own - given).norm() <= (2e-3 if is_precise else 0.05) * given.norm())


class _Late:
    """Field of an output that is computed when it is read: no decoder of a known class is given it."""

    __slots__ = ("_name", "_whole")

    def __init__(self, whole: Callable[[], Any], name: str) -> None:
        self._whole, self._name = whole, name

    def _value(self) -> Any:
        return getattr(self._whole(), self._name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy without its attributes, for instance
            raise AttributeError(name)
        return getattr(self._value(), name)

    def __getitem__(self, at: Any) -> Any:
        return self._value()[at]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._value())

    def __len__(self) -> int:
        return len(self._value())

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(cls, cls._value, (args, kwargs or {}))
        return function(*args, **kwargs)


def _applied(name: str) -> Callable[..., Any]:
    return lambda late, *others: getattr(late._value(), name)(*others)


for _operator in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "neg"):
    setattr(_Late, f"__{_operator}__", _applied(f"__{_operator}__"))
