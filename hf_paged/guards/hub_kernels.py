"""Detection of Hub kernels, which the `kernels` package puts in place of transformers' modules and functions.

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

from torch import nn

from hf_paged.errors import Reason
from hf_paged.guards.hints import UNDO_REPLACEMENT
from hf_paged.guards.wrapped_forward import called_name

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


def replacement_reason(name: str, module: nn.Module, *, calls_modules: bool) -> Reason | None:
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
