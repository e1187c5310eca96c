"""Snapshot of all that the checks of a model, and the digest of its state, read: while it holds, so do their results.

The full checks take milliseconds on a large model, which rarely changes between two checks. `ModelSnapshot` remembers
the model column by column and compares at the speed of C. It keeps no module, tensor or object of the user's alive:
values other than numbers, names and containers of these are held by weak references.
"""

from __future__ import annotations

import operator
import weakref
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_paged.guards.adapter_hooks import without_names
from hf_paged.guards.compressed import as_dicts, places
from hf_paged.guards.inner_tensors import PLAIN, watched
from hf_paged.guards.plain_tensors import ATOMS, STANDARD

_PARAMETERS, _BUFFERS, _CHILDREN, _HOOKS, _PRE_HOOKS = map(
    operator.itemgetter, ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
)
_STORAGE, _NBYTES = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes
_DTYPE, _DEVICE, _SHAPE = map(operator.attrgetter, ("dtype", "device", "shape"))
_QUANTIZERS = ("torchao.", "compressed_tensors.")
_MOST_MODULES = 100_000  # a module that contains itself is left to the full checks


class _Same:
    """Value that equals one object only, without keeping that object alive."""

    __slots__ = ("_reference",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._reference = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        return self._reference() is other


class _Record:
    """Value that equals objects of the same class with equal fields, for settings of quantizers."""

    __slots__ = ("_fields", "_kind")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._kind, self._fields = type(value), _frozen_inside(vars(value))

    def __eq__(self, other: object) -> bool:
        return type(other) is self._kind and self._fields == vars(other)


class _Never:
    """Value that equals nothing, in place of values that cannot be compared cheaply and safely."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False


class ModelSnapshot:
    """Snapshot of a model's modules, attributes, tensors, hooks and configs."""

    def __init__(self, model: nn.Module) -> None:
        modules, namespaces = _walk(model, _MOST_MODULES) or ([], [])
        self._num_modules = len(modules)
        names = [tuple(name for name in namespace if _is_own(name)) for namespace in namespaces]
        # At least two names: an itemgetter of one returns no tuple.
        self._getters = [operator.itemgetter("training", "training", *own) for own in names]
        self._values = [
            tuple(map(_frozen, getter(namespace)))
            for getter, namespace in zip(self._getters, namespaces, strict=True)
        ]
        self._structure = _structure(modules, namespaces)
        self._columns, wrappers = _columns(namespaces)
        self._parameter_kinds = None if wrappers else _parameter_kinds(namespaces)
        self._wrappers = [_frozen_inside(vars(wrapper)) for wrapper in wrappers]
        # A hook may hold a module, as FSDP2's do.
        self._hooks = [{key: _frozen(hook) for key, hook in hooks.items()} for hooks in _lasting_hooks(namespaces)]
        found = (value for namespace in namespaces for value in namespace.values())
        configs = {id(value): value for value in found if isinstance(value, PreTrainedConfig) or _is_record(value)}
        self._configs = [(weakref.ref(config), _frozen(vars(config))) for config in configs.values()]

    def hold(self, model: nn.Module) -> bool:
        """Return whether nothing changed; False also if the comparison fails."""
        try:
            return self._compare(model, with_tensors=True)
        except Exception:  # an attribute was removed, or a new value cannot be compared
            return False

    def hold_but_for_tensors(self, model: nn.Module) -> bool:
        """Return whether nothing changed but hooks, and tensors within their classes.

        Takes less than half the time of `hold`. False also if a tensor is not plain: it may have settings of its own.
        """
        if self._parameter_kinds is None:
            return False
        try:
            return self._compare(model, with_tensors=False)
        except Exception:
            return False

    def _compare(self, model: nn.Module, *, with_tensors: bool) -> bool:
        if not self._num_modules or (walked := _walk(model, self._num_modules)) is None:
            return False
        modules, namespaces = walked
        if self._structure != _structure(modules, namespaces):
            return False
        if with_tensors:
            columns, wrappers = _columns(namespaces)
            if self._columns != columns or self._wrappers != list(map(vars, wrappers)):
                return False
            if self._hooks != _hooks(namespaces) and self._hooks != _lasting_hooks(namespaces):
                return False
        elif self._parameter_kinds != _parameter_kinds(namespaces):
            return False
        # Remembered values on the left, so that their __eq__ decides.
        for values, getter, namespace in zip(self._values, self._getters, namespaces, strict=True):
            if values != getter(namespace):
                return False
        return all((config := ref()) is not None and frozen == vars(config) for ref, frozen in self._configs)


def _is_own(name: str) -> bool:
    return name not in STANDARD


def _walk(model: nn.Module, most: int) -> tuple[list[nn.Module], list[dict]] | None:
    """Return all modules inside, shared ones repeatedly, and the attributes of each; None if more than `most`."""
    level, modules, namespaces = [model], [], []
    while level:
        held = list(map(vars, level))
        modules += level
        namespaces += held
        if len(modules) > most:
            return None
        children = chain.from_iterable(map(dict.values, filter(None, map(_CHILDREN, held))))
        level = [child for child in children if child is not None]
    return modules, namespaces


def tensors_inside(model: nn.Module) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return all parameters, each once, and all buffers, in a fixed order; torch's own walk takes ten times as long."""
    if (walked := _walk(model, _MOST_MODULES)) is None:
        return list(model.parameters()), list(model.buffers())
    _, namespaces = walked
    parameters, buffers = (chain.from_iterable(map(dict.values, filter(None, as_dicts(map(of, namespaces)))))
                           for of in (_PARAMETERS, _BUFFERS))
    own = {id(tensor): tensor for tensor in parameters if tensor is not None}
    return list(own.values()), [tensor for tensor in buffers if tensor is not None]


def _structure(modules: list[nn.Module], namespaces: list[dict]) -> tuple:
    """Return the modules' classes and numbers of attributes, and the names and numbers of their children."""
    children = list(map(_CHILDREN, namespaces))
    return (list(map(type, modules)), list(map(len, namespaces)),
            list(chain.from_iterable(filter(None, children))), list(map(len, children)))


def _parameter_kinds(namespaces: list[dict]) -> list[type] | None:
    """Return the classes of all parameters; None if a module keeps its parameters in no dict."""
    full = list(filter(None, map(_PARAMETERS, namespaces)))
    if not set(map(type, full)) <= {dict}:
        return None
    return list(map(type, chain.from_iterable(map(dict.values, full))))


def _columns(namespaces: list[dict]) -> tuple[tuple, list[torch.Tensor]]:
    """Return names of the modules' tensors, and class, dtype, device, shape, attributes and storage size of each.

    Tensors inside of others (quantized weights) follow behind; the second result lists the tensors that hold others.
    """
    mappings = [*map(_PARAMETERS, namespaces), *map(_BUFFERS, namespaces)]
    tensors_by_module = as_dicts(mappings)
    full = list(filter(None, tensors_by_module))
    tensors = [tensor for tensor in chain.from_iterable(map(dict.values, full)) if tensor is not None]
    wrappers = [tensor for tensor in tensors if type(tensor) not in PLAIN]
    tensors += watched(wrappers)
    with torch._C.DisableTorchFunctionSubclass():
        kinds = list(map(type, tensors)), list(map(_DTYPE, tensors)), list(map(_DEVICE, tensors))
        sizes = list(map(_SHAPE, tensors)), _storage_sizes(tensors)
    columns = (
        list(chain.from_iterable(full)), list(map(len, tensors_by_module)),
        places(mappings), kinds, sizes, [list(own) for own in map(vars, tensors) if own],
    )
    return columns, wrappers


def _storage_sizes(tensors: list[Any]) -> Any:
    """Return the bytes of each tensor's storage, which may be resized so that the tensor lies outside of it."""
    try:
        return list(map(_NBYTES, map(_STORAGE, tensors)))
    except Exception:  # a tensor has no storage
        return _Never()


def _hooks(namespaces: list[dict]) -> list[dict]:
    return [*map(_HOOKS, namespaces), *map(_PRE_HOOKS, namespaces)]


def _lasting_hooks(namespaces: list[dict]) -> list[dict]:
    """Return all hooks but PEFT's on LoRA layers, which come and go with calls that name adapters."""
    children = list(map(_CHILDREN, namespaces))
    return [without_names(hooks) if hooks and "lora_A" in inside else hooks
            for inside, hooks in zip(children * 2, _hooks(namespaces), strict=True)]


def _frozen(value: Any, *, inside: bool = False) -> Any:
    """Return an object that equals `value` as long as `value` is unchanged, without keeping it alive."""
    if type(value) in ATOMS:
        return value
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return _frozen_inside(value)
    if isinstance(value, PreTrainedConfig):  # its fields are compared where a module holds it
        return _Never() if inside else _Same(value)
    if inside and _is_record(value):
        return _Record(value)
    try:
        return _Same(value)
    except TypeError:
        return _Never()


def _is_record(value: Any) -> bool:
    """Return whether `value` holds a quantizer's settings: names and numbers, which may be changed in place."""
    kind = type(value)
    return kind.__module__.startswith(_QUANTIZERS) and not {"__dataclass_fields__", "__pydantic_fields__"}.isdisjoint(
        dir(kind))


def _frozen_inside(value: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple):
        with suppress(RecursionError):  # a container that holds itself
            return kind([_frozen(inner, inside=True) for inner in value])
    elif kind is dict and all(type(key) in ATOMS for key in value):
        with suppress(RecursionError):
            return {key: _frozen(inner, inside=True) for key, inner in value.items()}
    elif kind in (set, frozenset) and all(type(inner) in ATOMS for inner in value):
        return kind(value)
    return _Never()
