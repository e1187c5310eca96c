"""Forwards that libraries put on an instance, and that do not change its result: Hub kernels on modules, and wrappers
around a model's forward.

With `kernels` installed, each function that a kernel may replace (RoPE) becomes a module around itself when a modeling
file is imported. `kernelize`, which `use_kernels=True` calls, puts the forward of a kernel's class on modules and on
such functions, or their own forward if it has no kernel for them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from hf_paged.errors import Reason
from hf_paged.guards.hints import UNDO_REPLACEMENT

# Layers that a kernel may replace, by transformers' names: each of these computes each token by itself.
TOKENWISE = frozenset({
    "RMSNorm", "SiLU", "GeLU", "GeluTanh", "NewGELU", "FastGELU", "QuickGELU", "SwiGLUMLP", "GeGLUMLP", "Linear",
    "rotary_pos_emb",
})
_LAYERS = "kernels.layer.layer"  # the module that loads kernels
_numbers: dict[Any, int] = {}  # by forward of a kernel, kept alive so that no later one equals it


def function_inside(value: Any) -> FunctionType | None:
    """Return the function that `kernels` made the module `value` of; None if `value` is no such module."""
    if not (isinstance(value, nn.Module) and type(value).__module__ == _LAYERS):
        return None
    forward = vars(type(value)).get("forward")
    cells = getattr(forward, "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if isinstance(cell.cell_contents, FunctionType)), None)


def functions_of(modeling: ModuleType) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of every function of a modeling file that a kernel may replace."""
    return [(name, value) for name, value in vars(modeling).items() if function_inside(value) is not None]


def replaced_forward(module: nn.Module) -> Any:
    """Return the instance's own forward; None if it has none or it is the forward of its class."""
    forward = vars(module).get("forward")
    if type(forward) is not MethodType or forward.__self__ is not module:
        return forward
    return None if forward.__func__ is type(module).forward else forward.__func__


def kernel_of(module: nn.Module) -> str | None:
    """Return the name of the kernel that runs in place of the module's forward, or None."""
    forward = replaced_forward(module)
    return forward.__qualname__.removesuffix(".forward") if forward is not None and forward in _loaded() else None


def runs_kernels(model: nn.Module, modeling: ModuleType) -> bool:
    """Return whether a kernel runs in place of a module's forward, or of a function of the modeling file."""
    if not _loaded():
        return False
    modules = itertools.chain(model.modules(), (function for _, function in functions_of(modeling)))
    return any("forward" in vars(module) and kernel_of(module) for module in modules)


def kernel_numbers(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, int]]:
    """Return (name, number) of the modules that a kernel runs for: the same number for the very same kernel."""
    forwards = [(name, replaced_forward(module)) for name, module in modules if "forward" in vars(module)]
    loaded = _loaded() if forwards else set()
    return [(name, _numbers.setdefault(forward, len(_numbers))) for name, forward in forwards if forward in loaded]


def why_not_replaced(name: str, module: nn.Module, *, calls_modules: bool) -> Reason | None:
    """Return why the instance's forward cannot run natively, or None; `calls_modules`: the executor calls modules."""
    if replaced_forward(module) is None:
        return None
    if (kernel := kernel_of(module)) is None:
        return Reason("the forward of {} is replaced on the instance by {}", name, called_name(vars(module)["forward"]),
                      remedy=UNDO_REPLACEMENT)
    layer = getattr(type(module), "kernel_layer_name", None)
    if layer not in TOKENWISE:
        return Reason("{} runs the Hub kernel {} as {}, which may look at batch rows", name, kernel, layer,
                      remedy="Kernels for norms, activations, gated MLPs, linear layers and RoPE run natively. Leave "
                             "this one out of the `KernelConfig`.")
    if not calls_modules:
        return Reason("{} runs the Hub kernel {} only since the model was enabled", name, kernel,
                      remedy="`use_kernels=True` came after `enable`. Call `hf_paged.disable(model)` and "
                             "`hf_paged.enable(model)`: the model's own modules then run, kernels included, around "
                             "paged attention.")
    return None


def _loaded() -> set[Any]:
    """Return the forwards of all kernels that were loaded in this process."""
    layers = getattr(sys.modules.get(_LAYERS), "_CACHED_LAYER", {})
    return {layer.forward for layer in list(layers.values())}


# -- wrappers of a model's forward -------------------------------------------------------------------------------------


def why_not_wrapped_forward(model: Any) -> Reason | None:
    """Return why the instance's forward is unknown, or None (accelerate, TRL's fused head, torch.compile)."""
    if _autocast_contexts(model.__dict__["forward"], model) is None:
        return Reason("forward is replaced on the instance by {}, a wrapper that hf_paged does not know",
                      called_name(model.__dict__["forward"]), remedy=UNDO_REPLACEMENT)
    return None


def autocast_of_call(model: Any) -> torch.dtype | None:
    """Return the dtype to which a forward of `model` in this thread would cast now; None without autocast.

    Autocast comes from the thread's state, and from contexts that known wrappers (accelerate's mixed precision) enter
    around the forward, of which the last for the model's device is the inner one. Any thread may drive the steps, so
    each call carries the autocast that its own thread had.
    """
    first = next(model.parameters(), None)  # the model is not checked yet: it may have no parameters
    device = "cpu" if first is None else first.device.type
    wrapper = model.__dict__.get("forward")
    contexts = [] if wrapper is None else _autocast_contexts(wrapper, model) or []
    for context in reversed(contexts):
        if context.device == device:
            return context.fast_dtype if context._enabled else None
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def called_name(wrapper: Any) -> str:
    """Return the full name of a function, or of the class of another callable."""
    function = getattr(wrapper, "__func__", wrapper)
    named = function if isinstance(function, FunctionType) else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _autocast_contexts(wrapper: Any, model: Any) -> list[torch.autocast] | None:
    """Return the autocast contexts between a wrapper and the class's forward; None if there is an unknown wrapper."""
    contexts: list[torch.autocast] = []
    own = [type(model).forward]
    while (inner := getattr(own[-1], "__wrapped__", None)) is not None:
        own.append(inner)  # accelerate's unwrap_model(keep_fp32_wrapper=False) removes decorators
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
