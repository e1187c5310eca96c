"""Autocast of a call: the dtype to which the call casts the weights, if any.

Autocast comes from two places: the state of the caller's thread, and the context that accelerate's mixed precision puts
around a model's forward, which is the inner one. Any thread may drive the steps, so each call carries the autocast that
its own thread had.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_paged.guards.wrapped_forward import autocast_of_wrapper


def autocast_of_call(model: Any) -> torch.dtype | None:
    """Return the dtype to which a forward of `model` in this thread would cast now; None without autocast."""
    first = next(model.parameters(), None)  # the model is not checked yet: it may have no parameters
    device = "cpu" if first is None else first.device.type
    if "forward" in model.__dict__ and (context := autocast_of_wrapper(model, device)) is not None:
        return context.fast_dtype if context._enabled else None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
