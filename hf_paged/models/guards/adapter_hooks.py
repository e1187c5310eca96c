"""The hooks by which PEFT gives each row of a `generate` call an adapter of its own (`adapter_names`).

PEFT puts one on every LoRA layer for the length of the call; it hands the names to the layer's forward, one for each
row of the batch. The engine reads the names off the hooks and has them never called: its batches are packed tokens.
"""

from __future__ import annotations

import sys
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


def names_in(hook: Any) -> list[str] | None:
    """The names that one of PEFT's hooks hands to its layer; None for any other hook."""
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
        type(hook) is RowHook or names_in(hook) is not None for hook in hooks.values())


def without_names(hooks: dict) -> dict:
    """A LoRA layer's hooks without those of PEFT, and of ours."""
    return {key: hook for key, hook in hooks.items() if type(hook) is not RowHook and names_in(hook) is None}


def names_in_force(layers: list[nn.Module]) -> list[str] | Reason | None:
    """The adapters that a forward of these LoRA layers would give its rows, by PEFT's hooks; None: there are none."""
    hooks = [[hook for hook in layer._forward_pre_hooks.values() if type(hook) is not RowHook] for layer in layers]
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
    """Calls of the model in here give their rows these adapters, as in PEFT's `generate`."""
    hook = partial(getattr(sys.modules[_HOME], _NAME), adapter_names=names)
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield
