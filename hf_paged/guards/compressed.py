"""Forwards, and mappings in place of dicts, that compressed-tensors puts on the modules of a model."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import MethodType
from typing import Any

import torch
from torch import nn

from hf_paged.errors import Reason

# Functions that make the wrappers of a layer's forward: one rounds, the other moves arguments to the device.
_ROUNDING = ("compressed_tensors.quantization.lifecycle.forward", "set_forward_quantized")
_MOVING = ("compressed_tensors.offload.module", "offload_module")


def is_quantized_forward(module: nn.Module) -> bool:
    """Return whether the instance's forward is the wrapper that rounds weights and activations around torch's own."""
    return type(module) in (nn.Linear, nn.Embedding) and _is_made_by(_behind(module), _ROUNDING)


def is_known_forward(module: nn.Module) -> bool:
    """Return whether the instance's forward rounds in that way, or only calls the forward of the module's class."""
    behind = _behind(module)
    return behind is not None and (behind is type(module).forward or is_quantized_forward(module))


def offload_reason(name: str, module: nn.Module) -> Reason | None:
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
    if _are_dicts(mappings):
        return mappings
    return [held if isinstance(held, dict) else held.offloaded_values for held in mappings]


def places(mappings: Iterable[Any]) -> list[tuple]:
    """Return, for each mapping that is no dict, its class and the devices that its tensors compute and are kept on."""
    mappings = list(mappings)
    if _are_dicts(mappings):
        return []
    return [(type(held), str(held.onload_device), str(held.offload_device))
            for held in mappings if not isinstance(held, dict)]


def _are_dicts(mappings: list[Any]) -> bool:
    """Return whether all mappings are dicts, which is usual and found without a loop in Python."""
    return set(map(type, mappings)) <= {dict}


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
