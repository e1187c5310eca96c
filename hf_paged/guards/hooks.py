"""Hooks that change nothing, or only what the engine carries out itself, and global hooks and modes that change all.

PEFT gives each row of a `generate` call an adapter of its own (`adapter_names`) by a hook on every LoRA layer, which
hands the names to the layer's forward, one for each row of the batch. The engine reads the names off the hooks and
never calls the hooks: its batches are packed tokens.

transformers collects hidden states, attentions and router logits by hooks that it installs at the first forward with
one of these outputs, and leaves on the modules. They do nothing unless a collector is set for the context, which each
forward of a decoder does anew.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.utils import output_capturing

from hf_paged.errors import Reason
from hf_paged.guards.hints import REMOVE_HOOK

# -- adapters of rows --------------------------------------------------------------------------------------------------


class RowHook:
    """Hook of hf_paged on a LoRA layer during a step, for calls of the thread that runs the step."""

    def __init__(self, hook: Callable) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        return self._hook(*args)


class NamedRows:
    """Hook that names rows as PEFT's does, for calls of one thread only: other threads call the same layer."""

    def __init__(self, names: list[str]) -> None:
        self.names, self._thread = list(names), threading.get_ident()

    def __call__(self, layer: Any, args: Any, kwargs: Any) -> Any:
        return (args, kwargs | {"adapter_names": self.names}) if self.is_here else None

    @property
    def is_here(self) -> bool:
        """Whether the hook belongs to the current thread."""
        return threading.get_ident() == self._thread


class ReplayHook:
    """Hook of hf_paged on a decoder or a router, for a trainer's forwards of this very module.

    It does nothing for other modules: for the views that steps run, and for copies of the model.
    """

    def __init__(self, module: nn.Module | None = None, run: Callable | None = None) -> None:
        self._module, self._run = None if module is None else weakref.ref(module), run

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        is_here = self._run is not None and self._module is not None and self._module() is module
        return self._run(module, *args) if is_here and self._run is not None else None

    def __reduce__(self) -> tuple:
        return ReplayHook, ()


def only_replays(hooks: dict) -> bool:
    """Return whether all hooks of a module are `ReplayHook`s."""
    return all(type(hook) is ReplayHook for hook in list(hooks.values()))


def names_in(hook: Any) -> list[str] | None:
    """Return the names that a hook of PEFT or a `NamedRows` hands to its layer; None for any other hook."""
    if type(hook) is NamedRows:
        return hook.names
    peft = sys.modules.get("peft.tuners.lora.model")
    if type(hook) is not partial or peft is None or hook.func is not peft._adapter_names_pre_forward_hook:
        return None
    names = hook.keywords["adapter_names"]
    return list(names) if isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names) else None


def has_only_names(layer: nn.Module) -> bool:
    """Return whether all pre-forward hooks of a LoRA layer name adapters, registered with keywords as PEFT does."""
    hooks = layer._forward_pre_hooks
    return hooks.keys() <= layer._forward_pre_hooks_with_kwargs.keys() and all(
        type(hook) is RowHook or names_in(hook) is not None for hook in list(hooks.values()))


def without_names(hooks: dict) -> dict:
    """Return a LoRA layer's hooks without PEFT's and hf_paged's hooks that name adapters."""
    return {key: hook for key, hook in list(hooks.items()) if type(hook) is not RowHook and names_in(hook) is None}


def names_in_force(layers: list[nn.Module]) -> list[str] | Reason | None:
    """Return the adapter names that hooks of these LoRA layers give to a forward in this thread; None without hooks."""
    # Hooks for other threads, and hooks that name nothing, which other checks look at, are left out.
    hooks = [[hook for hook in list(layer._forward_pre_hooks.values())
              if names_in(hook) is not None and (type(hook) is not NamedRows or hook.is_here)] for layer in layers]
    if not any(hooks):
        return None
    found = [names_in(hook) for of_layer in hooks for hook in of_layer]
    if not all(hooks) or any(names != found[0] for names in found):
        return Reason("the LoRA layers have hooks for different adapter_names (of several calls at once?)",
                      remedy="PEFT's hooks are the model's, and every call meets them. Give all rows to one call, or "
                             "make one call after the other.")
    return found[0]


@contextmanager
def naming(layers: Iterable[nn.Module], names: list[str]) -> Iterator[None]:
    """Give these adapters to the rows of this thread's calls of the model, as PEFT's `generate` does, in a ``with``."""
    hook = NamedRows(names)
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


# -- outputs that transformers collects --------------------------------------------------------------------------------


def only_captures(hook: Any) -> bool:
    """Return whether `hook` is transformers' own capturing hook, which does nothing if no collector is set."""
    return (isinstance(hook, FunctionType) and hook.__name__ == "output_capturing_hook"
            and hook.__globals__ is vars(output_capturing))


# -- hooks of all modules, and modes -----------------------------------------------------------------------------------


def why_not_global_state() -> Reason | None:
    """Return why global hooks or modes keep the engine from computing as stock would, or None."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return Reason("global forward hooks are registered", remedy=REMOVE_HOOK)
    for mode in (*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()):
        if type(mode) is not DeviceContext:  # a default device, which the engine keeps off its own tensors
            return Reason("a {} is active, which sees or changes every function of torch", type(mode).__qualname__,
                          remedy="Leave the torch mode (`with` block) before generating.")
    return None
