"""Checks whether a value in transformers' or torch's code is the original one.

A program may have patched the code before hf_paged was imported. So a function counts as original if it names its
place, and its code lies in the file of its module; an imported function or class if it names its own place, in a module
of transformers, torch or Python.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, NamedTuple

import torch
import transformers
from transformers import GenerationMixin

from hf_paged.guards.replaced_forwards import function_inside

_TORCH, _TRANSFORMERS = (f"{Path(str(package.__file__)).parent}{os.sep}" for package in (torch, transformers))
# Wrappers that change what a function computes (autocast), or that compile it.
_CHANGING = tuple(f"{_TORCH}{folder}{os.sep}" for folder in ("amp", "_dynamo"))
# Packages that transformers' modules import functions and classes from.
_PACKAGES = frozenset({"torch", "transformers", "huggingface_hub", "kernels", "numpy", "packaging",
                       *sys.stdlib_module_names})
_OF_C = (BuiltinFunctionType, GetSetDescriptorType, MethodDescriptorType, WrapperDescriptorType)
# Methods by which torch gets from a module's call to its forward; other methods of nn.Module compute nothing.
CALL_CHAIN = ("__call__", "_wrapped_call_impl", "_call_impl", "_slow_forward")
_ALIASES = {"Module.__call__": "Module._wrapped_call_impl"}


class PatchPoint(NamedTuple):
    """Name in a class or a module, under which code finds a function, class or module."""

    holder: Any
    name: str

    @property
    def value(self) -> Any:
        """The value that code finds now, None if there is none."""
        return getattr(self.holder, self.name, None)

    @property
    def definer(self) -> Any:
        """The module, or the class in the holder's MRO, that has the value."""
        line = self.holder.__mro__ if isinstance(self.holder, type) else (self.holder,)
        return next((definer for definer in line if self.name in vars(definer)), self.holder)

    def __str__(self) -> str:
        return f"{self.definer.__name__}.{self.name}"


def is_original(place: PatchPoint, value: Any) -> bool:
    """Return whether `value` is what transformers' or torch's code defines or imports at this place."""
    if isinstance(value, ModuleType):
        return sys.modules.get(value.__name__, value) is value
    packages = _PACKAGES | {package_of(place.definer)}
    if isinstance(value, type):
        home = sys.modules.get(value.__module__)
        return package_of(value) in sys.stdlib_module_names or (
            package_of(value) in packages and getattr(home, place.name, None) is value)
    *wrappers, inner = chain_of(function_inside(value) or value)
    if not all(map(_is_harmless_wrapper, wrappers)):
        return False
    if isinstance(inner, FunctionType):
        return _is_written_at(place, inner, packages)
    if isinstance(inner, _OF_C):
        return _has_name(inner, place.name)
    return type(inner).__module__ in ("torch._ops", "typing") or package_of(type(inner)) == "transformers"


def _has_name(function: Any, name: str) -> bool:
    """Return whether a function of C is named like its place: `linalg_solve` of `torch._C._linalg` may be `solve`."""
    space = str(getattr(function, "__module__", None)).rpartition(".")[2].strip("_")
    found = function.__name__.replace("_", "")
    return name.replace("_", "") in (found, found.removeprefix(space))


def is_method_of_mixin(name: str, function: Any) -> bool:
    """Return whether `function` is the decoding method that transformers' `GenerationMixin` defines as `name`."""
    return is_original(PatchPoint(GenerationMixin, name), function)


def is_own_function(function: Any) -> bool:
    """Return whether an entry of a registry is a function of one of transformers' modules."""
    *_, inner = chain_of(function)
    module = sys.modules.get(str(getattr(inner, "__module__", None)))
    return module is not None and package_of(module) == "transformers" and isinstance(inner, FunctionType) and (
        is_original(PatchPoint(module, inner.__qualname__), function))


def is_state(module: ModuleType, name: str) -> bool:
    """Return whether functions of the module assign this global while they run, as FlashAttention's is when loaded."""
    return re.search(rf"^[ \t]+global .*\b{name}\b", inspect.getsource(module), re.MULTILINE) is not None


def package_of(of: Any) -> str:
    name: str = of.__name__ if isinstance(of, ModuleType) else of.__module__
    return name.split(".")[0]


def chain_of(function: Any) -> Iterator[Any]:
    """Yield a function without its binding, then each function that it wraps, from the outside in."""
    while function is not None:
        function = getattr(function, "__func__", function)
        if isinstance(function, property):
            function = function.fget
            continue
        yield function
        function = getattr(function, "__wrapped__", None)


def _is_written_at(place: PatchPoint, function: FunctionType, packages: frozenset[str]) -> bool:
    """Return whether a function has the place's name, in its own module's file, and may be found at the place."""
    definer, name = place.definer, place.name
    home = sys.modules.get(function.__module__)
    if home is None or package_of(home) not in packages:
        return False
    if package_of(home) in sys.stdlib_module_names:
        return function.__name__ == name
    if function.__qualname__ == f"_default{name}":  # transformers' decorators add methods to a class that lacks them
        return function.__code__.co_filename == home.__file__
    if isinstance(definer, type) and not issubclass(definer, torch.Tensor):
        named = f"{definer.__qualname__}.{name}"
        return (home.__name__ == definer.__module__ and function.__qualname__ in (named, _ALIASES.get(named))
                and function.__code__.co_filename == home.__file__)
    names = (name, name.lstrip("_")) if package_of(home) == "torch" else (name,)  # it imports some as private ones
    if function.__name__ not in names and function.__qualname__ != "boolean_dispatch.<locals>.fn":
        return False
    if package_of(home) == "torch":  # its functions and methods of tensors name other modules than that of their file
        return function.__code__.co_filename.startswith(_TORCH)
    # A modeling file imports nothing from those of other models, which have functions of the same names.
    is_of_other_model = home is not definer and home.__name__.startswith("transformers.models.")
    return function.__code__.co_filename == home.__file__ and not is_of_other_model


def _is_harmless_wrapper(wrapper: Any) -> bool:
    """Return whether a wrapper is transformers' own, a cache, or one of torch's that leaves results unchanged."""
    if isinstance(wrapper, functools._lru_cache_wrapper):
        return True
    if not isinstance(wrapper, FunctionType):
        return False
    path = wrapper.__code__.co_filename
    if path == contextlib.__file__:
        return wrapper.__code__.co_name == "helper"  # made by `contextmanager`, not by a context manager as decorator
    if path.startswith(_CHANGING):
        return getattr(wrapper, "_torchdynamo_disable", False) is True
    return path.startswith((_TORCH, _TRANSFORMERS))
