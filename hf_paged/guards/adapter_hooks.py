"""The hooks by which PEFT gives each row of a `generate` call an adapter of its own (`adapter_names`).

PEFT puts one on every LoRA layer for the length of the call; it hands the names to the layer's forward, one for each
row of the batch. The engine reads the names off the hooks and has them never called: its batches are packed tokens.
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
    """A hook of ours, on a LoRA layer for the length of a step, of the thread that steps."""

    def __init__(self, hook: Callable) -> None:
        self._hook = hook

    def __call__(self, *args: Any) -> Any:
        return self._hook(*args)


class NamedRows:
    """A hook as PEFT's, for calls of one thread alone: those of others meet it on the same layer."""

    def __init__(self, names: list[str]) -> None:
        self.names, self._thread = list(names), threading.get_ident()

    def __call__(self, layer: Any, args: Any, kwargs: Any) -> Any:
        return (args, kwargs | {"adapter_names": self.names}) if self.is_here else None

    @property
    def is_here(self) -> bool:
        """Is it this thread's?"""
        return threading.get_ident() == self._thread


def names_in(hook: Any) -> list[str] | None:
    """The names that one of PEFT's hooks, or of ours like them, hands to its layer; None for any other hook."""
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
    """Are all pre-forward hooks of a LoRA layer PEFT's, called with keywords as PEFT has it?"""
    hooks = layer._forward_pre_hooks
    return hooks.keys() <= layer._forward_pre_hooks_with_kwargs.keys() and all(
        type(hook) is RowHook or names_in(hook) is not None for hook in list(hooks.values()))


def without_names(hooks: dict) -> dict:
    """A LoRA layer's hooks without those of PEFT, and of ours."""
    return {key: hook for key, hook in list(hooks.items()) if type(hook) is not RowHook and names_in(hook) is None}


def names_in_force(layers: list[nn.Module]) -> list[str] | Reason | None:
    """The adapters that a forward of these LoRA layers would give its rows here, by hooks; None: there are none."""
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
    """Other hooks than those that name rows are looked at elsewhere."""
    return hook.is_here if type(hook) is NamedRows else names_in(hook) is not None


@contextmanager
def naming(layers: Iterable[nn.Module], names: list[str]) -> Iterator[None]:
    """Calls of the model that this thread makes in here give their rows these adapters, as in PEFT's `generate`."""
    hook = NamedRows(names)
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield
