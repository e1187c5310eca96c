"""Detection of patches in the code of transformers and torch that the native path stands in for.

`OriginalCode` records the functions, classes and modules that code, reached from some methods, finds by the names in
it. A check compares their identities, all in one pass.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterable
from itertools import repeat
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from hf_paged.guards.origin import CALL_CHAIN, PatchPoint, chain_of, is_original, is_state, package_of
from hf_paged.guards.replaced_forwards import function_inside

# Modules whose functions are searched for what they call.
_ENTERED = ("transformers.", "torch.nn.modules.", "torch.nn.functional", "hf_paged.parallel.layers")
# Classes whose methods make, move and save modules and models.
_NOT_COMPUTING = frozenset(PreTrainedModel.__mro__) - frozenset(GenerationMixin.__mro__)
# Modules whose classes matter only if an option uses them.
_LEFT_TO_OPTIONS = ("transformers.generation.logits_process", "transformers.generation.stopping_criteria")
_CODE = operator.attrgetter("__code__")


class OriginalCode:
    """Record of the code reached from `roots`, attributes of classes or modules, as it was when the record was made.

    ``functions`` are further ones to start from, which no class or module has under their name (registry entries).
    ``packages`` are prefixes of further modules to search, besides transformers and torch's layers.
    """

    def __init__(self, roots: Iterable[tuple[Any, str]] = (), functions: Iterable[Any] = (),
                 packages: tuple[str, ...] = ()) -> None:
        self._roots, self._functions, self._packages = tuple(roots), tuple(functions), packages
        self._versions: list[list[Any]] = []
        self._record = self._recorded()

    def _recorded(self) -> _Record:
        record = _Record((*_ENTERED, *self._packages))
        for holder, name in self._roots:
            record.watch(holder, name)
        for function in self._functions:
            record.enter(function, None)
        record.close()
        return record

    @property
    def places(self) -> list[PatchPoint]:
        return list(self._record.places.values())

    def names(self, holder: Any) -> frozenset[str]:
        """Return the names of methods that code looks up in this class."""
        return frozenset(name for held_by, name in self.places if held_by is holder)

    def patched(self) -> str | None:
        """Return the first place, as text, that does not hold its original value, or whose code was exchanged, or None.
        """
        while (place := self._record.patched_first) is not None:
            if not is_original(place, place.value):
                return str(place)
            self._record = self._recorded()  # the patch was undone: what the original code reaches was unknown before
        record = self._record
        now = record.values_now()
        if not all(map(operator.is_, now, record.values)):
            for place, value, before in zip(record.places.values(), now, record.values, strict=True):
                if _without_deepspeed(value) is not _without_deepspeed(before):
                    return str(place)
        if list(map(_CODE, record.functions)) == record.codes:
            return None
        return next(f"{function.__qualname__}.__code__"
                    for function, code in zip(record.functions, record.codes, strict=True) if function.__code__ != code)

    def version(self) -> int:
        """Return a number that is the same whenever the places hold the same values."""
        if self._record.patched_first is not None:
            self.patched()  # to record what the original code reaches once the patch is undone
        now = [*self._record.values_now(), *map(_CODE, self._record.functions)]
        for number, values in enumerate(self._versions):
            if len(values) == len(now) and all(map(operator.is_, now, values)):
                return number
        self._versions.append(now)  # kept alive, so that no other function gets its id
        return len(self._versions) - 1


class _Record:
    """The places that some code reaches, whatever object a name in the code is an attribute of, with their values.

    Attributes:
        places: the watched places, by the id of their holder and their name.
        functions: the Python functions among their values and inside of wrappers.
    """

    def __init__(self, entered: tuple[str, ...]) -> None:
        self.places: dict[tuple[int, str], PatchPoint] = {}
        self.functions: dict[FunctionType, None] = {}
        self._entered_modules = entered
        self._entered: set[tuple[FunctionType, Any]] = set()
        self._names: set[str] = set()  # that occur in any entered code
        self._owners: dict[type, None] = {}  # classes that code reaches or belongs to, in order

    def watch(self, holder: Any, name: str) -> None:
        """Watch a function, class or module that a holder has under a name, and what its code reaches."""
        place, key = PatchPoint(holder, name), (id(holder), name)
        value = place.value
        if key in self.places or not _is_code(value) or place.value is not value:
            return
        self.places[key] = place
        if not isinstance(value, (type, ModuleType)):
            self.enter(value, holder if isinstance(holder, type) else None)

    def enter(self, function: Any, owner: type | None) -> None:
        """Watch every name in the code of a function, a method of `owner`, and of the functions that it wraps."""
        for layer in chain_of(function):
            if not isinstance(layer, FunctionType) or (layer, owner) in self._entered:
                continue
            self._entered.add((layer, owner))
            self.functions[layer] = None
            module = sys.modules.get(str(layer.__globals__.get("__name__")))
            if module is None or not module.__name__.startswith(self._entered_modules):
                continue
            names = {name for name in _names_in(layer.__code__) if not name.startswith("__")}
            self._names |= names
            for name in names:
                self._reach(module, name, names)
                self.watch(nn.Parameter, name)
            if owner is not None:
                self._owners.setdefault(owner)
                self._watch_methods(owner, names)

    def close(self) -> None:
        """Watch all collected names in all collected classes: code also calls methods of other objects."""
        known = -1
        while known < len(self.places):
            known = len(self.places)
            for owner in list(self._owners):
                if not issubclass(owner, GenerationMixin):
                    self._watch_methods(owner, self._names)
        held = list(self.places.values())
        self._holders, self._held_names = [place.holder for place in held], [place.name for place in held]
        self.values = self.values_now()
        self.codes = list(map(_CODE, self.functions))
        self.patched_first = next((place for place in held if not is_original(place, _without_deepspeed(place.value))),
                                  None)

    def values_now(self) -> list[Any]:
        return list(map(getattr, self._holders, self._held_names, repeat(None)))

    def _watch_methods(self, owner: type, names: set[str]) -> None:
        for name in names.intersection(dir(owner)):
            if name in CALL_CHAIN or PatchPoint(owner, name).definer not in _NOT_COMPUTING:
                self.watch(owner, name)

    def _reach(self, module: ModuleType, name: str, names: set[str]) -> None:
        """Watch what the code of a module reaches by the name of a global."""
        value = vars(module).get(name)
        if isinstance(value, type):
            if package_of(value) == "transformers" and value.__module__ not in _LEFT_TO_OPTIONS:
                self._owners.setdefault(value)
        elif isinstance(value, ModuleType):
            if package_of(value) in ("torch", "transformers"):
                self._reach_into(value, names)
        elif function_inside(value) is not None:
            self.watch(type(value), "forward")
        elif not _is_code(value):
            if type(value).__module__.startswith("transformers."):  # a registry
                self._owners.setdefault(type(value))
            return
        elif not is_original(PatchPoint(module, name), value) and is_state(module, name):
            return
        self.watch(module, name)

    def _reach_into(self, module: ModuleType, names: set[str]) -> None:
        for name in names.intersection(vars(module)):
            self.watch(module, name)
            inner = vars(module)[name]
            if isinstance(inner, ModuleType) and inner.__name__.startswith(f"{module.__name__}."):
                self._reach_into(inner, names)


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, ModuleType) or hasattr(type(value), "__get__")


def _without_deepspeed(value: Any) -> Any:
    """Return a value, or torch's `linear` for ZeRO-3's: the same product, which only keeps less for a backward."""
    named = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return torch._C._nn.linear if named == ("deepspeed.runtime.zero.linear", "zero3_linear_wrap") else value


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names
