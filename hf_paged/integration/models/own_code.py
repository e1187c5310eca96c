"""Is the code that the native path stands in for still what transformers and torch brought along?

`Originals` holds what classes and modules held when it was made: every function that is reached from some methods, by
the names that their code mentions. A look compares identities. Somebody may have patched a function before that, so a
value is taken for an original only where it is at home: written under that very name, in that class or module's file.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import BuiltinFunctionType, BuiltinMethodType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

_TORCH, _TRANSFORMERS, _OURS = (
    f"{Path(str(package)).parent}{os.sep}" for package in (torch.__file__, transformers.__file__, Path(__file__).parent)
)
# Functions of these modules are looked into for what they call.
_ENTERED = ("transformers.", "torch.nn.modules.", "hf_paged.integration.parallel.layers")
_PACKAGES = ("torch", "transformers", "hf_paged")
# How torch gets from a module's call to its forward; what else a module inherits from nn.Module is not computing.
CALL_CHAIN = ("__call__", "_wrapped_call_impl", "_call_impl", "_slow_forward")
# What these define is how modules and models are made, moved and saved.
_NOT_COMPUTING = frozenset(PreTrainedModel.__mro__) - frozenset(GenerationMixin.__mro__)
_BUILTIN = (BuiltinFunctionType, BuiltinMethodType)
_WATCHED = (FunctionType, property, type, *_BUILTIN)
_GRAD_MODES = (torch.no_grad, torch.enable_grad, torch.inference_mode)
_MISSING = object()


class Place(NamedTuple):
    """An attribute of a class or module that holds code."""

    holder: Any
    name: str

    def __str__(self) -> str:
        if isinstance(self.holder, FunctionType):
            return f"{self.holder.__qualname__}.{self.name}"
        return f"{self.holder.__name__}.{self.name}"


class Originals:
    """What the code reached from `roots` was when this was made.

    Args:
        roots: methods to start from, as attributes of classes or modules.
        functions: functions that stand in no class or module under a name of their own (entries of a registry).
        packages: modules whose names begin so are looked into, besides transformers and torch's layers.
    """

    def __init__(self, roots: Iterable[tuple[Any, str]] = (), functions: Iterable[Any] = (),
                 packages: tuple[str, ...] = ()) -> None:  # fmt: skip
        walk = _Walk((*_ENTERED, *packages))
        for holder, name in roots:
            walk.watch(holder, name)
        for function in functions:
            walk.enter(function, None)
        self.places = list(walk.places)
        self._holders, self._names = [p.holder for p in self.places], [p.name for p in self.places]
        self._values: list[Any] = [
            value if is_at_home(place, value) else _MISSING for place, value in walk.places.items()
        ]

        self._versions: list[list[Any]] = []

    def patched(self) -> str | None:
        """The first place that holds other code than it did, or that never held its own; None: all is as it was."""
        if self._is_as_it_was():
            return None
        for i, place in enumerate(self.places):
            value = _value(place)
            if value is self._values[i]:
                continue
            if self._values[i] is _MISSING and is_at_home(place, value):  # a patch that was there first is gone
                self._values[i] = value
                continue
            return str(place)
        return None

    def _is_as_it_was(self) -> bool:
        try:
            return all(map(operator.is_, map(getattr, self._holders, self._names), self._values))
        except Exception:  # a place is empty, or a descriptor of the user's raises
            return False

    def version(self) -> int:
        """A number that is the same whenever the places hold the very same code."""
        now = [_value(place) for place in self.places]
        for number, values in enumerate(self._versions):
            if all(map(operator.is_, now, values)):
                return number
        self._versions.append(now)  # held, so that no other function gets its id
        return len(self._versions) - 1


def _value(place: Place) -> Any:
    try:
        value = getattr(place.holder, place.name, None)
    except Exception:  # a descriptor of the user's that raises is no original
        return None
    return value


class _Walk:
    """Collects the places that some code reaches. Names are not told apart by what they are attributes of."""

    def __init__(self, entered: tuple[str, ...]) -> None:
        self.places: dict[Place, Any] = {}
        self._entered_modules = entered
        self._entered: set[tuple[FunctionType, Any]] = set()

    def watch(self, holder: Any, name: str) -> None:
        """A place, and what its code reaches."""
        place = Place(holder, name)
        if place in self.places or not isinstance(value := _value(place), _WATCHED):
            return
        if isinstance(value, type) and not value.__module__.startswith(_PACKAGES):
            return
        self.places[place] = value
        if not isinstance(value, type):
            self.enter(value, holder if isinstance(holder, type) else None)

    def enter(self, function: Any, owner: type | None) -> None:
        """Everything that a function's code, and that of what it wraps, names; as a method of `owner`."""
        for layer in chain_of(function):
            if not isinstance(layer, FunctionType) or (layer, owner) in self._entered:
                continue
            if not str(layer.__globals__.get("__name__")).startswith(self._entered_modules):
                continue
            self._entered.add((layer, owner))
            self.places[Place(layer, "__code__")] = layer.__code__
            names = _names_in(layer.__code__)
            for content in _cells(layer):
                if isinstance(content, FunctionType):
                    self.enter(content, owner)
            module = sys.modules.get(layer.__globals__["__name__"])
            for name in names:
                if owner is not None and not name.startswith("__") and _is_method(owner, name):
                    self.watch(owner, name)
                if module is not None and (value := layer.__globals__.get(name)) is not None:
                    self._reach(module, name, value, names)

    def _reach(self, module: ModuleType, name: str, value: Any, names: set[str]) -> None:
        if isinstance(value, ModuleType):
            if not value.__name__.startswith(("torch", "transformers")):
                return
            for attribute in names:
                inner = vars(value).get(attribute)
                if isinstance(inner, ModuleType):
                    if inner.__name__.startswith(f"{value.__name__}."):
                        self._reach(value, attribute, inner, names)
                else:
                    self.watch(value, attribute)
        elif isinstance(value, _WATCHED):
            self.watch(module, name)
        elif type(value).__module__.startswith("transformers."):  # a registry: how it is asked
            for attribute in names:
                if not attribute.startswith("__") and _is_method(type(value), attribute):
                    self.watch(type(value), attribute)


def _is_method(owner: type, name: str) -> bool:
    """Does `owner` have code under this name, of more than what every module inherits?"""
    definer = next((kind for kind in owner.__mro__ if name in vars(kind)), object)
    if definer in _NOT_COMPUTING:
        return definer is nn.Module and name in CALL_CHAIN
    return definer.__module__.startswith(_PACKAGES)


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # not filled yet
            yield cell.cell_contents


def chain_of(function: Any) -> Iterator[Any]:
    """A function, without what binds it, and what it wraps, from the outside in."""
    while function is not None:
        function = getattr(function, "__func__", function)
        if isinstance(function, property):
            function = function.fget
            continue
        yield function
        function = getattr(function, "__wrapped__", None)


# -- at home ---------------------------------------------------------------------------------------------------------


def is_at_home(place: Place, value: Any) -> bool:
    """Was `value` written for this place, as far as it says so itself?"""
    if isinstance(place.holder, FunctionType):  # the code of a function that was found at home
        return True
    if isinstance(value, _BUILTIN):
        return value.__name__ == place.name and _is_torchs_builtin(value)
    if isinstance(value, type):
        return _is_class_of(place, value)
    if isinstance(place.holder, type):
        definer = next((kind for kind in place.holder.__mro__ if place.name in vars(kind)), place.holder)
        return _is_written_in(definer.__module__, definer.__qualname__, place.name, value)
    return _is_modules_function(place, value)


def is_method_of_mixin(name: str, function: Any) -> bool:
    """Is this the decoding method that transformers' `GenerationMixin` defines under the name?"""
    return is_at_home(Place(GenerationMixin, name), function)


def is_own_function(function: Any) -> bool:
    """Is this, an entry of a registry, a function of one of transformers' modules?"""
    inner = _innermost(function)
    module = str(getattr(inner, "__module__", None))
    return module.startswith("transformers.") and _is_written_in(module, "", inner.__qualname__, function)


def _is_torchs_builtin(value: Any) -> bool:
    home = getattr(value, "__module__", None) or type(getattr(value, "__self__", None)).__module__
    return str(home).split(".")[0] in ("torch", "builtins")


def _is_modules_function(place: Place, value: Any) -> bool:
    inner = _innermost(value)
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    if not isinstance(inner, FunctionType) or module is None:
        return False
    if place.holder.__name__.split(".")[0] == "torch":  # some of torch's say that they live where they are imported
        return inner.__name__ in (place.name, "fn") and all(map(_is_torchs, chain_of(value)))
    if module is place.holder:
        return _is_written_in(module.__name__, "", place.name, value)
    if _defines(place.holder, place.name):  # and yet it is another module's
        return False
    return vars(module).get(inner.__qualname__) is value and _is_written_in(
        module.__name__, "", inner.__qualname__, value
    )


def _is_class_of(place: Place, value: type) -> bool:
    """Is this the module's own class of that name, or, where it defines none, one that is to be had elsewhere?"""
    if isinstance(place.holder, ModuleType) and _defines(place.holder, place.name):
        return (value.__module__, value.__qualname__) == (place.holder.__name__, place.name)
    return value.__name__ == place.name or vars(sys.modules[value.__module__]).get(value.__qualname__) is value


def _is_written_in(module: str, owner: str, name: str, value: Any) -> bool:
    """Does the innermost function say that it is `owner`.`name` of this module, and lies its code in its file?"""
    inner = _innermost(value)
    if not isinstance(inner, FunctionType):
        return False
    if inner.__qualname__ == f"_default{name}":  # transformers' decorators give a class what it does not define
        return is_own_function(value)
    if inner.__module__ != module:
        return False
    expected = f"{owner}.{name}" if owner else name
    named = {inner.__qualname__, getattr(inner.__code__, "co_qualname", inner.__qualname__)}
    if named != {expected} and not (name.startswith("__") and _is_call_chain(named, owner)):
        return False
    return inner.__code__.co_filename == getattr(sys.modules.get(module), "__file__", None) and all(
        map(_is_harmless_wrapper, list(chain_of(value))[:-1])
    )


def _is_call_chain(named: set[str], owner: str) -> bool:
    """`nn.Module.__call__` is another of its methods under this name."""
    return named <= {f"{owner}.{name}" for name in CALL_CHAIN}


def _is_torchs(function: Any) -> bool:
    """torch's own function, and none that computes in another dtype."""
    path = getattr(getattr(function, "__code__", None), "co_filename", "")
    return path.startswith((_TORCH, contextlib.__file__)) and not path.startswith(f"{_TORCH}amp{os.sep}")


def _innermost(value: Any) -> Any:
    layer = None
    for layer in chain_of(value):  # noqa: B007
        pass
    return layer


def _is_harmless_wrapper(wrapper: Any) -> bool:
    """transformers' own decorators, and of torch's those that leave alone what is computed."""
    if not isinstance(wrapper, FunctionType):
        return False
    path = wrapper.__code__.co_filename
    if path.startswith(_TRANSFORMERS):
        return True
    if path == contextlib.__file__:
        return wrapper.__code__.co_name == "helper"  # of `contextmanager`, not of a context manager as decorator
    if path == f"{_TORCH}utils{os.sep}_contextlib.py":
        contexts = (getattr(cell, "__self__", cell) for cell in _cells(wrapper))
        return any(isinstance(context, _GRAD_MODES) for context in contexts)
    return False


@functools.cache
def _source(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8") if path.endswith(".py") else ""
    except OSError:
        return ""


def _defines(module: ModuleType, name: str) -> bool:
    """Has the module's file a function or class of this name of its own?"""
    source = _source(str(getattr(module, "__file__", None)))
    return bool(re.search(rf"^(?:def|class) {re.escape(name)}\b", source, re.MULTILINE))
