"""Hooks by which PEFT gives each row of a `generate` call an adapter of its own (`adapter_names`).

PEFT puts a hook on every LoRA layer during the call; the hook hands the names to the layer's forward, one for each row
of the batch. The engine reads the names off the hooks and never calls the hooks: its batches are packed tokens.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

from hf_paged.errors import Reason

_HOME, _NAME = "peft.tuners.lora.model", "_adapter_names_pre_forward_hook"


def _known(target: Any, args: Any, kwargs: Any, adapter_names: Any) -> Any:
    kwargs["adapter_names"] = adapter_names
    return args, kwargs


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


def names_in(hook: Any) -> list[str] | None:
    """Return the names that a hook of PEFT or a `NamedRows` hands to its layer; None for any other hook."""
    if type(hook) is NamedRows:
        return hook.names
    if type(hook) is not partial or hook.args or hook.keywords.keys() != {"adapter_names"}:
        return None
    function, names = hook.func, hook.keywords["adapter_names"]
    if not isinstance(function, FunctionType) or function.__globals__ is not vars(sys.modules.get(_HOME, sys)):
        return None
    code, known = function.__code__, _known.__code__
    if any(getattr(code, part) != getattr(known, part) for part in ("co_code", "co_names", "co_consts")):
        return None
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
    hooks = [list(filter(_is_in_force, list(layer._forward_pre_hooks.values()))) for layer in layers]
    if not any(hooks):
        return None
    found = [names_in(hook) for of_layer in hooks for hook in of_layer]
    if not all(hooks) or any(names != found[0] for names in found):
        return Reason("the LoRA layers have hooks for different adapter_names (of several calls at once?)",
                      remedy="PEFT's hooks are the model's, and every call meets them. Give all rows to one call, or "
                             "make one call after the other.")
    return found[0]


def _is_in_force(hook: Any) -> bool:
    """Return whether a hook names rows for this thread; other hooks are checked elsewhere."""
    return hook.is_here if type(hook) is NamedRows else names_in(hook) is not None


@contextmanager
def naming(layers: Iterable[nn.Module], names: list[str]) -> Iterator[None]:
    """Give these adapters to the rows of this thread's calls of the model, as PEFT's `generate` does, in a ``with``."""
    hook = NamedRows(names)
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield
