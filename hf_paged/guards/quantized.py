"""Weights that quantizers made of several tensors, and forwards and mappings that they put on the modules of a model.

Changes of a quantized weight show in the bytes of the plain tensors that it consists of. compressed-tensors also puts
forwards of its own on the modules, and mappings in place of their dicts of tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn

from hf_paged.errors import Reason

PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
_BITSANDBYTES = "bitsandbytes."
# Functions that make the wrappers of a layer's forward: one rounds, the other moves arguments to the device.
_ROUNDING = ("compressed_tensors.quantization.lifecycle.forward", "set_forward_quantized")
_MOVING = ("compressed_tensors.offload.module", "offload_module")


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
    tensors, found = list(tensors), list[torch.Tensor]()
    if set(map(type, tensors)) <= PLAIN:  # usual, and found without a loop in Python
        return tensors
    with torch._C.DisableTorchFunctionSubclass():  # dispatch by the wrappers would take most of the time
        for tensor in tensors:
            if type(tensor) in PLAIN:
                found.append(tensor)
            else:
                found += inner_tensors(tensor) or [tensor]
    return found


def beside_bytes(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the scales and code books of bitsandbytes' parameters among tensors, quicker than `watched`."""
    found: list[Any] = []
    for tensor in tensors:
        if type(tensor) not in PLAIN:
            state = vars(tensor).get("quant_state")
            while type(state).__module__.startswith(_BITSANDBYTES):
                found += vars(state).values()
                state = vars(state).get("state2")
    return [value for value in found if type(value) is torch.Tensor]


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


# -- compressed-tensors ------------------------------------------------------------------------------------------------


def is_quantized_forward(module: nn.Module) -> bool:
    """Return whether the instance's forward is the wrapper that rounds weights and activations around torch's own."""
    return type(module) in (nn.Linear, nn.Embedding) and _is_made_by(_behind(module), _ROUNDING)


def is_known_forward(module: nn.Module) -> bool:
    """Return whether the instance's forward rounds in that way, or only calls the forward of the module's class."""
    behind = _behind(module)
    return behind is not None and (behind is type(module).forward or is_quantized_forward(module))


def why_not_offloaded(name: str, module: nn.Module) -> Reason | None:
    """Return why the tensors of a module do not lie on the device that it computes on, or None."""
    for held in (module._parameters, module._buffers):
        if not isinstance(held, dict):
            here, kept = str(getattr(held, "onload_device", None)), str(getattr(held, "offload_device", None))
            if here != kept:
                return Reason("the tensors of {} are kept on {} and computed with on {}", name or "the model", kept,
                              here,
                              remedy="compressed-tensors offloads the weights. Load the whole model onto one device.")
    return None


def as_dicts(mappings: Iterable[Any]) -> list[dict[str, torch.Tensor | None]]:
    """Return each of the modules' mappings of parameters or buffers as the dict that it is or holds."""
    mappings = list(mappings)
    if set(map(type, mappings)) <= {dict}:  # usual, and found without a loop in Python
        return mappings
    return [held if isinstance(held, dict) else held.offloaded_values for held in mappings]


def places(mappings: Iterable[Any]) -> list[tuple]:
    """Return, for each mapping that is no dict, its class and the devices that its tensors compute and are kept on."""
    mappings = list(mappings)
    if set(map(type, mappings)) <= {dict}:
        return []
    return [(type(held), str(held.onload_device), str(held.offload_device))
            for held in mappings if not isinstance(held, dict)]


def _behind(module: nn.Module) -> Any:
    """Return the function of the instance's forward, without the wrapper that moves arguments; None if no method."""
    forward = vars(module).get("forward")
    if not isinstance(forward, MethodType) or forward.__self__ is not module:
        return None
    function = forward.__func__
    return vars(module).get("_original_forward_func") if _is_made_by(function, _MOVING) else function


def _is_made_by(function: Any, maker: tuple[str, str]) -> bool:
    home = sys.modules.get(maker[0])
    code = getattr(function, "__code__", None)
    return home is not None and code is not None and code in getattr(home, maker[1]).__code__.co_consts
