"""The plain tensors that a weight of a quantized kind is made of: theirs are the bytes to watch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
_BITSANDBYTES = "bitsandbytes."


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """A plain tensor itself, of a wrapper all that it holds, in a fixed order; None where that cannot be told.

    Wrappers (torchao, optimum-quanto) say it by `__tensor_flatten__`, as torch asks of those that it compiles.
    bitsandbytes' parameters are bytes of their own and hold the scales in an object beside them.
    """
    kind = type(tensor)
    if kind in PLAIN:
        return [tensor]
    if hasattr(kind, "__tensor_flatten__"):
        inner: list[torch.Tensor] = []
        for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
            found = inner_tensors(getattr(tensor, name))
            if found is None:
                return None
            inner += found
        return inner
    if kind.__module__.startswith(_BITSANDBYTES):
        return [tensor, *_of_state(vars(tensor).get("quant_state"))]
    return None


def watched(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """All of them, each by its inner tensors."""
    found: list[torch.Tensor] = []
    with torch._C.DisableTorchFunctionSubclass():  # the wrappers' own, which takes longer than all the rest
        for tensor in tensors:
            if type(tensor) in PLAIN:
                found.append(tensor)
            else:
                found += inner_tensors(tensor) or [tensor]
    return found


def made_of(tensor: torch.Tensor) -> Any:
    """What a wrapper says of itself besides its tensors (shape, group size, how activations are rounded), or None."""
    if type(tensor) in PLAIN or not hasattr(type(tensor), "__tensor_flatten__"):
        return None
    names, meta = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return type(tensor).__qualname__, meta, [made_of(getattr(tensor, name)) for name in names]


def _of_state(state: Any) -> Iterator[torch.Tensor]:
    """Scales and code book of a bitsandbytes `QuantState`, and of the one that its scales were quantized with."""
    if not type(state).__module__.startswith(_BITSANDBYTES):
        return
    for value in vars(state).values():
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from _of_state(value)
