"""Tensors that modules keep as plain attributes: neither parameters nor buffers, yet used in computing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from hf_paged.errors import Reason
from hf_paged.guards.hints import DEQUANTIZE, ONE_DEVICE

# Attributes of every module; none of them holds tensors other than parameters and buffers.
STANDARD = frozenset(vars(nn.Module()))
ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type})
_CONTAINERS = (list, tuple, dict)
# RoPE of the "longrope" type makes this tensor in its first forward, and reads it beyond the lengths that run natively.
_MADE_BY_FORWARDS = "long_inv_freq"


def plain_tensors(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of every plain attribute, also in lists, tuples and dicts, in a fixed order."""
    found: list[tuple[str, torch.Tensor]] = []
    for path, module in modules:
        for key, value in vars(module).items():
            if type(value) not in ATOMS and key not in STANDARD and not key.endswith(_MADE_BY_FORWARDS):
                found += _inside(f"{path}.{key}" if path else key, value, ())
    return found


def _inside(name: str, value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, _CONTAINERS) and id(value) not in above:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in list(items):
            if type(inner) not in ATOMS:
                yield from _inside(f"{name}[{key!r}]", inner, (*above, id(value)))


def unwatchable(found: list[tuple[str, torch.Tensor]], device: torch.device) -> Reason | None:
    """Return why changes of one of these tensors cannot be detected, or None. `device` is the model's."""
    for name, tensor in found:
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            return Reason("{} is a {}, whose bytes cannot be watched for changes", name, type(tensor).__name__,
                          remedy=DEQUANTIZE)
        if tensor.layout != torch.strided or tensor.is_quantized:
            return Reason("{} is no dense tensor, so its bytes cannot be watched for changes", name, remedy=DEQUANTIZE)
        if tensor.device != device:
            return Reason("{} is on {}, the model on {}", name, tensor.device, device, remedy=ONE_DEVICE)
    return None
