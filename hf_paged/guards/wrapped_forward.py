"""Wrappers that libraries put around a model's forward on the instance, and that do not change its result."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from hf_paged.errors import Reason
from hf_paged.guards.hints import UNDO_REPLACEMENT


def wrapped_forward_reason(model: Any) -> Reason | None:
    """Return why the instance's forward is unknown, or None (accelerate, TRL's fused head, torch.compile)."""
    if _autocast_contexts(model.__dict__["forward"], model) is None:
        return Reason("forward is replaced on the instance by {}, a wrapper that hf_paged does not know",
                      called_name(model.__dict__["forward"]), remedy=UNDO_REPLACEMENT)
    return None


def autocast_of_wrapper(model: Any, device_type: str) -> torch.autocast | None:
    """Return the autocast for this type of device that known wrappers enter last before the forward, or None."""
    contexts = _autocast_contexts(model.__dict__["forward"], model) or []
    return next((context for context in reversed(contexts) if context.device == device_type), None)


def called_name(wrapper: Any) -> str:
    """Return the full name of a function, or of the class of another callable."""
    function = getattr(wrapper, "__func__", wrapper)
    named = function if isinstance(function, FunctionType) else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _autocast_contexts(wrapper: Any, model: Any) -> list[torch.autocast] | None:
    """Return the autocast contexts between a wrapper and the class's forward; None if there is an unknown wrapper."""
    contexts: list[torch.autocast] = []
    own = _with_wrapped(type(model).forward)  # accelerate's unwrap_model(keep_fp32_wrapper=False) removes decorators
    while (wrapper := getattr(wrapper, "__func__", wrapper)) not in own:
        if (bound := _wrapped_method(wrapper)) is not None:
            if getattr(bound, "__self__", None) is not model:  # a deep copy's wrapper still runs the original's forward
                return None
            wrapper = bound
            continue
        if isinstance(wrapper, FunctionType) and wrapper.__code__.co_name == "decorate_autocast":
            cells = [cell.cell_contents for cell in wrapper.__closure__ or ()]
            contexts += [cell for cell in cells if isinstance(cell, torch.autocast)]
        elif not type(wrapper).__module__.startswith("accelerate.") and not (
            isinstance(wrapper, FunctionType) and str(wrapper.__module__).startswith("accelerate.")
        ):
            return None
        wrapper = getattr(wrapper, "__dict__", {}).get("__wrapped__")
    return contexts


def _with_wrapped(function: Any) -> list[Any]:
    chain = [function]
    while (function := getattr(function, "__wrapped__", None)) is not None:
        chain.append(function)
    return chain


def _wrapped_method(wrapper: Any) -> Any:
    """Return the method that `torch.compile` compiled or TRL's `add_fused_lm_head` replaced; None for other wrappers.

    TRL's wrapper calls the replaced method unless `fused_lm_head=True` is given.
    """
    if not isinstance(wrapper, FunctionType):
        return None
    module, code = wrapper.__globals__.get("__name__"), wrapper.__code__
    if module == "torch._dynamo.eval_frame":
        return wrapper.__dict__.get("_torchdynamo_orig_callable")
    if (module, code.co_name) != ("trl.trainer.utils", "_fused_forward"):
        return None
    if (wrapper.__kwdefaults__ or {}).get("fused_lm_head") is not False:
        return None
    cells = dict(zip(code.co_freevars, wrapper.__closure__ or (), strict=True))
    return cells["original_forward"].cell_contents if "original_forward" in cells else None
