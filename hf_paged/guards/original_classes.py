"""Original functions that a call runs through: recorded at import, and when a family's modeling file is first used."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from torch import nn
from transformers import GenerationConfig, GenerationMixin
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_paged.guards.families import SILU, Family
from hf_paged.guards.origin import PatchPoint, is_own_function, package_of
from hf_paged.guards.original_code import OriginalCode

# Methods that decide the inputs of stock generate's forward and the use of its result.
DECIDING_METHODS = (
    "forward", "__call__", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample",
    "_prefill", "_get_logits_processor", "_get_stopping_criteria", "_optimize_model_for_decode",
    "_has_unfinished_sequences", "get_compiled_call",
)
_FAMILIES: dict[str, OriginalCode] = {}
_ENTRIES: dict[Any, OriginalCode] = {}  # by transformers' function in a registry
_NOT_IN_A_FORWARD = frozenset({"extra_repr", "reset_parameters", "_init_weights", "kernel_condition"})


@functools.cache
def of_class(kind: type) -> OriginalCode:
    """Return the originals of a class of modules, processors or criteria: what its objects run when made and called."""
    names: Iterable[str] = _functions_of(kind)
    if issubclass(kind, nn.Module):
        names = ("__call__", "forward") if kind.forward is not nn.Module.forward else ("__call__",)  # or a container
    package = kind.__module__.split(".")[0]
    return OriginalCode([(kind, name) for name in names], packages=() if package == "torch" else (f"{package}.",))


def of_family(family: Family) -> OriginalCode:
    """Return the originals of all classes that a model of this family may contain; imports its modeling file."""
    if family.package not in _FAMILIES:
        bindings = [PatchPoint(family.modeling, name) for name in family.class_names()]
        classes = OriginalCode(bindings)
        if classes.patched() is not None:  # unknown classes: they must not be recorded as original
            return classes
        parts = {SILU[1], *(kind for part in family.parts for kind in family.classes(part))}
        _FAMILIES[family.package] = OriginalCode([*bindings, *_roots(family.model_class, parts)])
    return _FAMILIES[family.package]


@functools.cache
def of_model_class(model_class: type, kinds: frozenset[type]) -> OriginalCode:
    """Return the originals of a class of models and of transformers' classes of modules in them."""
    known = sorted((kind for kind in {model_class, *kinds} if package_of(kind) == "transformers"), key=_full_name)
    bindings = [PatchPoint(sys.modules[kind.__module__], kind.__name__) for kind in known]
    return OriginalCode([*bindings, *_roots(model_class, set(known) - {model_class})])


def _roots(model_class: type, kinds: Iterable[type]) -> list[tuple[type, str]]:
    """Return the functions that a forward and the loop of stock's generate begin with, by class and name."""
    roots = [
        (kind, name) for kind in sorted(kinds, key=_full_name)
        for name in ("forward", "__call__", *_functions_of(kind)) if name not in _NOT_IN_A_FORWARD
    ]
    deciding = [(model_class, name) for name in DECIDING_METHODS if hasattr(model_class, name)]
    # What `DynamicCache.update` calls: objects of classes that no name in its code gives.
    cached = [(kind, name) for kind in (DynamicLayer, DynamicSlidingWindowLayer) for name in _functions_of(kind)]
    return [*roots, *deciding, *cached]


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def patched_class(kinds: Iterable[type]) -> str | None:
    """Return the first replaced method or function among all that objects of these classes run, or None."""
    return next((place for kind in kinds if (place := of_class(kind).patched()) is not None), None)


def patched_entry(function: Any) -> str | None:
    """Return `patched_class` of an entry of a registry; its own name if it is no function of transformers."""
    if function not in _ENTRIES:
        if not is_own_function(function):
            return str(getattr(function, "__qualname__", function))
        _ENTRIES[function] = OriginalCode(functions=[function])
    return _ENTRIES[function].patched()


def _functions_of(kind: type) -> Iterator[str]:
    """Yield names of the functions that a class defines; if it is no module, also of inherited ones and `__init__`."""
    definers = (kind,) if issubclass(kind, nn.Module) else kind.__mro__[:-1]
    for definer in definers:
        for name, value in vars(definer).items():
            special = name.startswith("__") and issubclass(kind, nn.Module)
            if isinstance(getattr(value, "__func__", value), FunctionType) and not special:
                yield name


MERGING = OriginalCode([
    (GenerationMixin, "_prepare_generation_config"), (GenerationConfig, "update"), (GenerationConfig, "validate"),
])
