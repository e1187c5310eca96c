"""Detection of patches in the code of transformers and torch that the native path stands in for.

`OriginalCode` records the values that code, reached from some methods, finds by the names in it. A check compares their
identities, all in one pass.
"""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from hf_paged.guards import origin as at_home
from hf_paged.guards.hub_kernels import function_inside
from hf_paged.guards.origin import ABSENT, CALL_CHAIN, PatchPoint, is_original, package_of

# Modules whose functions are searched for what they call.
_ENTERED = ("transformers.", "torch.nn.modules.", "torch.nn.functional", "hf_paged.parallel.layers")
# Methods that Python's syntax calls without a name in the code.
_UNNAMED = ("__call__", "__getattribute__", "__getattr__", "__getitem__", "__iter__", "__len__", "__bool__",
            "__contains__")
# Operators and other special methods of tensors.
_OPERATORS = tuple(name for name in dir(torch.Tensor) if name.startswith("__"))
# Classes whose methods make, move and save modules and models.
_NOT_COMPUTING = frozenset(PreTrainedModel.__mro__) - frozenset(GenerationMixin.__mro__)
# Modules whose classes matter only if an option uses them.
_LEFT_TO_OPTIONS = ("transformers.generation.logits_process", "transformers.generation.stopping_criteria")
_MODULES_OWN = frozenset((*CALL_CHAIN, *_UNNAMED))
_PARTS = ("__code__", "__defaults__", "__kwdefaults__")
_MISSING = object()
_MADE_AT_RUN_TIME = 1 << 9  # Py_TPFLAGS_HEAPTYPE


class OriginalCode:
    """Record of the code reached from `roots`, as it was when the record was made.

    Args:
        roots: methods to start from, as attributes of classes or modules.
        functions: further functions to start from, which no class or module has under their name (registry entries).
        packages: prefixes of the names of further modules to search, besides transformers and torch's layers.
    """

    def __init__(self, roots: Iterable[tuple[Any, str]] = (), functions: Iterable[Any] = (),
                 packages: tuple[str, ...] = ()) -> None:
        self._roots, self._functions, self._packages = tuple(roots), tuple(functions), packages
        self._versions: list[list[Any]] = []
        self._table = self._take(_Table({}, {}))

    def _take(self, before: _Table) -> _Table:
        """Return the table of what the code reaches now and of places watched `before`, which keep their originals."""
        walk = _Walk((*_ENTERED, *self._packages))
        for holder, name in self._roots:
            walk.watch(holder, name)
        for function in self._functions:
            walk.enter(function, None)
        walk.close()
        places = {_key(place): place for place in before.places} | walk.places
        return _Table(places, {key: _own_value(place) for key, place in places.items()} | before.originals())

    @property
    def places(self) -> list[PatchPoint]:
        """All watched places."""
        return self._table.places

    def names(self, holder: Any) -> frozenset[str]:
        """Return the names that code looks up in this class or module."""
        return frozenset(name for held_by, name in self.places if held_by is holder)

    def patched(self) -> str | None:
        """Return the first place, as text, that does not hold its original value; None if all places hold theirs."""
        table = self._latest()
        if table.holds():
            return None
        others = ((place, found) for place, value in table.expected() if (found := value_of(place)) is not value)
        return next((str(place) for place, found in others if not _is_deepspeeds_linear(place, found)), None)

    def version(self) -> int:
        """Return a number that is the same whenever the places hold the same values; 0 if these are the originals."""
        table = self._latest()
        if table.holds():
            return 0
        now = list(map(value_of, table.places))
        for number, values in enumerate(self._versions):
            if len(values) == len(now) and all(map(operator.is_, now, values)):
                return number + 1
        self._versions.append(now)  # kept alive, so that no other function gets its id
        return len(self._versions)

    def _latest(self) -> _Table:
        table = self._table
        patched_first = [place for place, value in table.expected() if value is _MISSING] if table.lacks_any else ()
        if any(is_original(place, value_of(place)) for place in patched_first):
            # A patch was undone: what the original code reaches was unknown before.
            self._table = table = self._take(table)
        return table


def _is_deepspeeds_linear(place: PatchPoint, value: Any) -> bool:
    """Return whether `value` is ZeRO-3's `linear`: the same product, which only keeps less for a backward."""
    named = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return (place.holder is torch.nn.functional and place.name == "linear"
            and named == ("deepspeed.runtime.zero.linear", "zero3_linear_wrap"))


def _key(place: PatchPoint) -> tuple[int, str]:
    return id(place.holder), place.name


def _own_value(place: PatchPoint) -> Any:
    return value if is_original(place, value := value_of(place)) else _MISSING


class _Table:
    """Table that reads many places at the speed of C, from the dicts of their holders: no user's code runs."""

    def __init__(self, by_key: dict[tuple[int, str], PatchPoint], values: dict[tuple[int, str], Any]) -> None:
        """Arrange places and their original `values`: an object, `ABSENT`, or `_MISSING` if the original is unknown."""
        held = [place for key, place in by_key.items() if values[key] is not ABSENT]
        nothing = [place for key, place in by_key.items() if values[key] is ABSENT]
        spaces = _by_holder([place for place in held if not isinstance(place.holder, _OF_PARTS)])
        self._getters, self._names = [_space(holder).get for holder, _ in spaces], [names for _, names in spaces]
        parts = [place for place in held if isinstance(place.holder, _OF_PARTS)]
        self._owners, self._parts = [place.holder for place in parts], [place.name for place in parts]
        held = [PatchPoint(holder, name) for holder, names in spaces for name in names] + parts
        self._values = [values[_key(place)] for place in held]
        self.places = held + nothing
        self.lacks_any = any(value is _MISSING for value in self._values)
        # A value put into an empty place would shadow what the code finds otherwise.
        empty = _by_holder(nothing)
        self._keys, self._missing = [_space(holder).keys() for holder, _ in empty], [frozenset(n) for _, n in empty]

    def expected(self) -> Iterator[tuple[PatchPoint, Any]]:
        """Return every place with its original value."""
        return zip(self.places, itertools.chain(self._values, itertools.repeat(ABSENT)), strict=False)

    def originals(self) -> dict[tuple[int, str], Any]:
        """Return the known original values."""
        return {_key(place): value for place, value in self.expected() if value is not _MISSING}

    def holds(self) -> bool:
        """Return whether every place holds its original value, and empty places are empty."""
        found = itertools.chain.from_iterable(map(map, self._getters, self._names, itertools.repeat(_ABSENTS)))
        try:
            if not all(map(_ARE_DISJOINT, self._keys, self._missing)):
                return False
            found = itertools.chain(found, map(getattr, self._owners, self._parts))
            return all(map(operator.is_, found, self._values))
        except ValueError:  # a function's cell was emptied
            return False


_OF_PARTS = (FunctionType, CellType)  # holders of attributes; other holders have a dict
_ABSENTS = itertools.repeat(ABSENT)
_ARE_DISJOINT: Callable[[Any, Any], bool] = type({}.keys()).isdisjoint


def value_of(place: PatchPoint) -> Any:
    """Return the value that a place holds now, or `ABSENT`."""
    if not isinstance(place.holder, _OF_PARTS):
        return _space(place.holder).get(place.name, ABSENT)
    try:
        return getattr(place.holder, place.name)
    except ValueError:  # a cell without content
        return ABSENT


def _space(holder: Any) -> Mapping[str, Any]:
    """Return the dict of a class, module or other object; a function's keyword defaults are a dict themselves."""
    return holder if type(holder) is dict else vars(holder)


def _by_holder(places: list[PatchPoint]) -> list[tuple[Any, list[str]]]:
    groups: dict[int, tuple[Any, list[str]]] = {}
    for holder, name in places:
        groups.setdefault(id(holder), (holder, []))[1].append(name)
    return list(groups.values())


class _Walk:
    """Walk that collects the places that some code reaches, whatever object a name in the code is an attribute of."""

    def __init__(self, entered: tuple[str, ...]) -> None:
        self.places: dict[tuple[int, str], PatchPoint] = {}
        self._entered_modules = entered
        self._entered: set[tuple[FunctionType, Any]] = set()
        self._names: set[str] = set()  # that occur in any entered code
        self._owners: dict[type, None] = {}  # classes that code reaches or belongs to, in order
        self._changeable: dict[type, tuple[type, ...]] = {}  # patchable classes of a class's MRO

    def watch(self, holder: Any, name: str) -> None:
        """Watch a name of a holder, present or absent, and what its code reaches; for a class along its MRO."""
        for inherited in self._line_of(holder) if isinstance(holder, type) else (holder,):
            value = vars(inherited).get(name, ABSENT)
            if self._add(inherited, name) and value is not ABSENT and not isinstance(value, type):
                self.enter(value, holder if isinstance(holder, type) else None)
            if value is not ABSENT:
                return

    def _line_of(self, holder: type) -> tuple[type, ...]:
        line = self._changeable.get(holder)
        if line is None:
            line = self._changeable[holder] = tuple(filter(_is_changeable, holder.__mro__))
        return line

    def _add(self, holder: Any, name: str) -> bool:
        key = id(holder), name
        if key in self.places:
            return False
        self.places[key] = PatchPoint(holder, name)
        return True

    def enter(self, function: Any, owner: type | None) -> None:
        """Watch every name in the code of a function, a method of `owner`, and of the functions that it wraps."""
        for layer in at_home.chain_of(function):
            if not isinstance(layer, FunctionType) or (layer, owner) in self._entered:
                continue
            self._entered.add((layer, owner))
            self._watch_parts(layer, owner)
            module = sys.modules.get(str(layer.__globals__.get("__name__")))
            if module is None or not module.__name__.startswith(self._entered_modules):
                continue
            names = _names_in(layer.__code__)
            self._names |= names
            for name in names:
                if not name.startswith("__"):
                    self._reach(module, name, names)
                if hasattr(nn.Parameter, name):
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
                    names = self._names if issubclass(owner, nn.Module) else self._names.intersection(dir(owner))
                    self._watch_methods(owner, names)

    def _watch_parts(self, function: FunctionType, owner: type | None) -> None:
        for name in _PARTS:
            self._add(function, name)
        for name in function.__kwdefaults__ or ():
            self._add(function.__kwdefaults__, name)
        for cell, content in at_home.cells_of(function):
            self._add(cell, "cell_contents")
            if isinstance(content, FunctionType):
                self.enter(content, owner)

    def _watch_methods(self, owner: type, names: Iterable[str]) -> None:
        for name in (*_UNNAMED, *names):
            if (not name.startswith("__") or name in _UNNAMED) and _matters(owner, name):
                self.watch(owner, name)

    def _reach(self, module: ModuleType, name: str, names: set[str]) -> None:
        """Watch what the code of a module reaches by the name of a global."""
        value = vars(module).get(name, ABSENT)
        builtins = sys.modules["builtins"]
        if value is ABSENT:
            if hasattr(builtins, name):  # a global of that name would shadow the builtin
                self._add(module, name)
                self._add(builtins, name)
            return
        if at_home.is_state(module, name):
            return
        self.watch(module, name)
        if isinstance(value, ModuleType):
            self._reach_into(value, names)
        elif function_inside(value) is not None:
            self.watch(type(value), "forward")
        elif isinstance(value, type):
            if package_of(value) == "transformers" and value.__module__ not in _LEFT_TO_OPTIONS:
                self._owners.setdefault(value)
        elif type(value).__module__.startswith("transformers."):  # a registry: watch its look-ups
            asked = {attribute for attribute in names if hasattr(type(value), attribute)}
            self._watch_methods(type(value), asked)
            for attribute in asked:
                self._add(value, attribute)

    def _reach_into(self, module: ModuleType, names: set[str]) -> None:
        if package_of(module) not in ("torch", "transformers"):
            return
        for attribute in names:
            inner = vars(module).get(attribute, ABSENT)
            if inner is ABSENT or at_home.is_state(module, attribute):
                continue
            self.watch(module, attribute)
            if isinstance(inner, ModuleType) and inner.__name__.startswith(f"{module.__name__}."):
                self._reach_into(inner, names)


def _is_changeable(kind: type) -> bool:
    return package_of(kind) not in sys.stdlib_module_names and bool(kind.__flags__ & _MADE_AT_RUN_TIME)


def _matters(owner: type, name: str) -> bool:
    """Return whether the name in `owner` is absent, or more than what every module inherits."""
    for definer in owner.__mro__:
        if name in vars(definer):
            return definer not in _NOT_COMPUTING or (definer is nn.Module and name in _MODULES_OWN)
    return True


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def of_tensors() -> list[tuple[Any, str]]:
    """Return roots for the methods that Python's syntax runs on tensors."""
    return [(kind, name) for kind in (nn.Parameter, torch.Tensor) for name in _OPERATORS]
