"""In which dtypes a call computes: those of the weights, or what autocast makes of them.

Autocast comes from two places: the state of the caller's thread, and the context that accelerate's mixed precision puts
around a model's forward, which is the inner one. Steps run on whichever thread drives them, so what a call found is
carried by the call.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.guards.wrapped_forward import autocast_of_wrapper


def autocast_of_call(model: Any) -> torch.dtype | None:
    """The dtype to which a forward of `model` would cast here and now; None: there is no autocast on its device."""
    first = next(model.parameters(), None)  # of a module that may be of any class as yet
    device = "cpu" if first is None else first.device.type
    if "forward" in model.__dict__ and (context := autocast_of_wrapper(model, device)) is not None:
        return context.fast_dtype if context._enabled else None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
