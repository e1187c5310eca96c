"""Checks whether a value in transformers' or torch's code is the original one, which their own source files define.

Other code may have patched it before hf_paged was imported. So a function counts as original if its name and its code's
file are those of its place, and an imported name if it is what the module of origin holds. Other callables and
descriptors never count as original.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from transformers import GenerationMixin

from hf_paged.guards.hub_kernels import function_inside

_TORCH, _TRANSFORMERS = (f"{Path(str(package.__file__)).parent}{os.sep}" for package in (torch, transformers))
# Methods by which torch gets from a module's call to its forward; other methods of nn.Module compute nothing.
CALL_CHAIN = ("__call__", "_wrapped_call_impl", "_call_impl", "_slow_forward")
ABSENT = type("Absent", (), {"__repr__": lambda self: "nothing"})()  # value of an empty place
_HOMES_OF_C = ("torch", "builtins", "io", "_io")  # modules of functions in C; `open` is in io or _io
_GRAD_MODES = (torch.no_grad, torch.enable_grad, torch.inference_mode)
_IMPORT_FROM = re.compile(r"^[ \t]*from[ \t]+(\S+)[ \t]+import[ \t]+(\([^)]*\)|[^\n(]+)", re.MULTILINE)
_IMPORT = re.compile(r"^[ \t]*import[ \t]+(\S+)(?:[ \t]+as[ \t]+(\w+))?", re.MULTILINE)


class PatchPoint(NamedTuple):
    """Name in a class, a module, a function or another object, which may hold a value."""

    holder: Any
    name: str

    def __str__(self) -> str:
        holder = self.holder
        if isinstance(holder, FunctionType):
            return f"{holder.__qualname__}.{self.name}"
        return f"{getattr(holder, '__name__', type(holder).__name__)}.{self.name}"


def is_original(place: PatchPoint, value: Any) -> bool:
    """Return whether `value` is original: written for this place, by its own name and file."""
    if isinstance(place.holder, ModuleType):
        return _is_modules(place.holder, place.name, value)
    if isinstance(place.holder, type) and value is not ABSENT:
        return _is_classes(place.holder, place.name, value)
    return True  # a part of a function that is original, or ABSENT


def is_method_of_mixin(name: str, function: Any) -> bool:
    """Return whether `function` is the decoding method that transformers' `GenerationMixin` defines as `name`."""
    return is_original(PatchPoint(GenerationMixin, name), function)


def is_own_function(function: Any) -> bool:
    """Return whether an entry of a registry is a function of one of transformers' modules."""
    inner = _innermost(function)
    module = str(getattr(inner, "__module__", None))
    return module.startswith("transformers.") and _is_written_in(module, "", inner.__qualname__, function)


def is_state(module: ModuleType, name: str) -> bool:
    """Return whether functions of the module assign this global while they run."""
    return name in _source_of(module).states


def package_of(of: Any) -> str:
    """Return the top-level package of a module or class."""
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


def cells_of(function: FunctionType) -> Iterator[tuple[types.CellType, Any]]:
    """Yield the cells that a function closes over, each with its content."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            yield cell, cell.cell_contents


def _is_modules(module: ModuleType, name: str, value: Any) -> bool:
    if value is ABSENT or (module.__name__ == "builtins" and _is_of_c(name, value)):
        return True
    source = _source_of(module)
    if name in source.imports:
        return any(_is_imported(origin, attribute, value) for origin, attribute in source.imports[name])
    if package_of(module) == "torch":  # its objects may have the importing module as `__module__`
        return _is_of_torchs_module(name, value)
    if isinstance(value, ModuleType):
        return value.__name__ == f"{module.__name__}.{name}"
    if isinstance(value, type):
        return (value.__module__, value.__qualname__) == (module.__name__, name)
    function = function_inside(value) or value
    if isinstance(_innermost(function), FunctionType):
        return _is_written_in(module.__name__, "", name, function)
    if name in source.assigned and package_of(type(value)) == package_of(module):
        return True
    return name not in source.defined and _is_data(value)


def _is_imported(origin: str, attribute: str | None, value: Any) -> bool:
    """Return whether `value` is what `from origin import attribute` or `import origin` gives, and original there."""
    module = sys.modules.get(origin)
    if attribute is None or module is None:
        return value is module is not None
    if vars(module).get(attribute, ABSENT) is not value:
        return False
    if isinstance(value, ModuleType):
        return value is sys.modules.get(value.__name__)
    return package_of(module) not in ("torch", "transformers") or _is_modules(module, attribute, value)


def _is_of_torchs_module(name: str, value: Any) -> bool:
    inner = _innermost(value)
    if isinstance(value, ModuleType):
        return package_of(value) == "torch"
    if isinstance(value, type):
        return value.__name__ == name or vars(sys.modules[value.__module__]).get(value.__qualname__) is value
    if isinstance(inner, FunctionType):
        return inner.__name__ in (name, "fn") and all(map(_is_torchs, chain_of(value)))
    return _is_of_c(name, value) or _is_data(value)


def _is_classes(kind: type, name: str, value: Any) -> bool:
    if issubclass(kind, torch.Tensor):  # methods are of several files, operators of other names
        named = name.startswith("__") or getattr(_innermost(value), "__name__", None) == name
        return (named and all(map(_is_torchs, chain_of(value)))) or _is_data(value)
    if isinstance(_innermost(value), FunctionType):
        return _is_written_in(kind.__module__, kind.__qualname__, name, value)
    return isinstance(value, type) or _is_of_c(name, value) or _is_data(value)


def _is_of_c(name: str, value: Any) -> bool:
    """Return whether `value` has that name, and is a function in C or a class of torch or Python."""
    return getattr(value, "__name__", "").lstrip("_") == name.lstrip("_") and _home_of(value) in _HOMES_OF_C


def _home_of(value: Any) -> str:
    home = getattr(value, "__module__", None) or getattr(value, "__objclass__", type(getattr(value, "__self__", None)))
    return str(getattr(home, "__module__", home)).split(".")[0]


def _is_data(value: Any) -> bool:
    """Return whether `value` is neither callable nor a descriptor, or is one of typing's forms."""
    kind = type(value)
    return kind.__module__ == "typing" or not (callable(value) or hasattr(kind, "__get__"))


def _is_written_in(module: str, owner: str, name: str, value: Any) -> bool:
    """Return whether the innermost function is named `owner`.`name` in this module, and its code lies in its file."""
    inner = _innermost(value)
    if not isinstance(inner, FunctionType):
        return False
    if inner.__qualname__ == f"_default{name}":  # transformers' decorators add methods to a class that lacks them
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
    """Return whether all names are of the call chain: `nn.Module.__call__` is an alias of another method of it."""
    return named <= {f"{owner}.{name}" for name in CALL_CHAIN}


def _is_torchs(function: Any) -> bool:
    """Return whether `function` is torch's own, and no wrapper that computes in another dtype."""
    if not isinstance(function, FunctionType):
        return not isinstance(function, functools.partial) and _home_of(function) in _HOMES_OF_C
    path = function.__code__.co_filename
    return path.startswith((_TORCH, contextlib.__file__)) and not path.startswith(f"{_TORCH}amp{os.sep}")


def _innermost(value: Any) -> Any:
    layer = None
    for layer in chain_of(value):  # noqa: B007
        pass
    return layer


def _is_harmless_wrapper(wrapper: Any) -> bool:
    """Return whether a wrapper is transformers' own, a cache, or one of torch's that leaves results unchanged."""
    if isinstance(wrapper, functools._lru_cache_wrapper):
        return True
    if not isinstance(wrapper, FunctionType):
        return False
    path = wrapper.__code__.co_filename
    if path.startswith(_TRANSFORMERS):
        return True
    if path == contextlib.__file__:
        return wrapper.__code__.co_name == "helper"  # made by `contextmanager`, not by a context manager as decorator
    if path == f"{_TORCH}_dynamo{os.sep}eval_frame.py":
        return getattr(wrapper, "_torchdynamo_disable", False) is True
    if path == f"{_TORCH}utils{os.sep}_contextlib.py":
        contexts = (getattr(content, "__self__", content) for _, content in cells_of(wrapper))
        return any(isinstance(context, _GRAD_MODES) for context in contexts)
    return False


# -- names in a module's source file -----------------------------------------------------------------------------------


class _Source(NamedTuple):
    defined: frozenset[str]  # functions and classes
    assigned: frozenset[str]
    states: frozenset[str]  # names that functions declare `global`
    imports: dict[str, list[tuple[str, str | None]]]  # by name: module and its attribute


def _source_of(module: ModuleType) -> _Source:
    return _read(str(getattr(module, "__file__", None)), str(getattr(module, "__package__", None)))


@functools.cache
def _read(path: str, package: str) -> _Source:
    try:
        text = Path(path).read_text(encoding="utf-8") if path.endswith(".py") else ""
    except OSError:
        text = ""
    states = ",".join(re.findall(r"^[ \t]+global[ \t]+(.+)$", text, re.MULTILINE))
    return _Source(
        frozenset(re.findall(r"^(?:def|class) (\w+)", text, re.MULTILINE)),
        frozenset(re.findall(r"^(\w+)(?:: [^=\n]+)? = ", text, re.MULTILINE)),
        frozenset(re.findall(r"\w+", states)), _imports(text, package),
    )


def _imports(text: str, package: str) -> dict[str, list[tuple[str, str | None]]]:
    found: dict[str, list[tuple[str, str | None]]] = {}
    for origin, alias in _IMPORT.findall(text):
        bound = alias or origin.split(".")[0]
        found.setdefault(bound, []).append((origin if alias else bound, None))
    for origin, names in _IMPORT_FROM.findall(text):
        with contextlib.suppress(ImportError):  # more dots than packages: text that is no import of this module
            origin = importlib.util.resolve_name(origin, package)
        for part in re.sub(r"#.*", "", names).strip("() \t").split(","):
            if words := part.split():
                found.setdefault(words[-1], []).append((origin, words[0]))
    return found
