"""Plain tensors that a quantized weight consists of: changes of the weight show in their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
_BITSANDBYTES = "bitsandbytes."


def inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return a plain tensor itself, or the plain tensors in a wrapper, in a fixed order; None if these are unknown.

    Wrappers (torchao, optimum-quanto) list them by `__tensor_flatten__`, which torch requires of compiled subclasses.
    A parameter of bitsandbytes holds bytes itself, and the scales in an object beside them.
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
    """Return the plain tensors, and of other tensors the inner ones."""
    found: list[torch.Tensor] = []
    with torch._C.DisableTorchFunctionSubclass():  # dispatch by the wrappers would take most of the time
        for tensor in tensors:
            if type(tensor) in PLAIN:
                found.append(tensor)
            else:
                found += inner_tensors(tensor) or [tensor]
    return found


def made_of(tensor: torch.Tensor) -> Any:
    """Return a wrapper's settings besides its tensors (shape, group size, rounding of activations), or None."""
    if type(tensor) in PLAIN or not hasattr(type(tensor), "__tensor_flatten__"):
        return None
    names, meta = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return type(tensor).__qualname__, meta, [made_of(getattr(tensor, name)) for name in names]


def _of_state(state: Any) -> Iterator[torch.Tensor]:
    """Yield scales and code book of a bitsandbytes `QuantState`, and of the state that quantized its scales."""
    if not type(state).__module__.startswith(_BITSANDBYTES):
        return
    for value in vars(state).values():
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from _of_state(value)
