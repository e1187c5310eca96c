"""Original functions that a call runs through: recorded at import, and when a family's modeling file is first used."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import Any

from torch import nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import logits_process, stopping_criteria
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged.guards.activations import ELEMENTWISE
from hf_paged.guards.families import FAMILIES, Family, Wrapper
from hf_paged.guards.origin import PatchPoint, is_own_function
from hf_paged.guards.original_code import OriginalCode, of_tensors

# Methods that decide the inputs of stock generate's forward and the use of its result.
DECIDING_METHODS = (
    "forward", "__call__", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_sample",
    "_prefill", "_get_logits_processor", "_get_stopping_criteria", "_optimize_model_for_decode",
    "_has_unfinished_sequences", "get_compiled_call",
)
_FAMILIES: dict[tuple[str, Wrapper | None], OriginalCode] = {}
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
    key = family.package, family.wrapper
    if key not in _FAMILIES:
        bindings = [PatchPoint(family.modeling, name) for name in family.class_names()]
        if (wrapper := family.wrapper) is not None:
            bindings += [PatchPoint(wrapper.modeling, kind.__name__) for kind in (family.model_class, wrapper.body)]
        classes = OriginalCode(bindings)
        if classes.patched() is not None:  # unknown classes: they must not be recorded as original
            return classes
        _FAMILIES[key] = _of_family(family, bindings)
    return _FAMILIES[key]


def _of_family(family: Family, bindings: list[PatchPoint]) -> OriginalCode:
    parts = {kind for part in family.parts for kind in family.classes(part)}
    roots = [
        (kind, name) for kind in sorted(parts, key=lambda kind: kind.__name__)
        for name in ("forward", "__call__", *_functions_of(kind)) if name not in _NOT_IN_A_FORWARD
    ]
    model_class = family.model_class
    deciding = [(model_class, name) for name in DECIDING_METHODS if hasattr(model_class, name)]
    if family.wrapper is not None:
        deciding += [(family.wrapper.body, name) for name in ("forward", "__call__")]
    return OriginalCode([*bindings, *roots, *deciding, *of_tensors()])


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


def _take_early() -> None:
    """Record what is imported already, before other code has much time to patch it."""
    for module in (logits_process, stopping_criteria):
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                of_class(kind)
    for kind in (nn.Linear, nn.Embedding, nn.Dropout, nn.Identity, nn.ModuleList, nn.ModuleDict, *ELEMENTWISE):
        of_class(kind)
    for registry in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS, ALL_EXPERTS_FUNCTIONS):
        for name in registry.keys():  # noqa: SIM118 - not every registry is a mapping in full
            if is_own_function(registry[name]):
                patched_entry(registry[name])
    for family in FAMILIES:
        if family.module_name in sys.modules:
            of_family(family)


MERGING = OriginalCode([
    (GenerationMixin, "_prepare_generation_config"), (GenerationConfig, "update"), (GenerationConfig, "validate"),
])
_take_early()
