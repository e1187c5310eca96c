"""What the checks of a model, and the digest of its state, read off its modules: all alike, the answers are alike.

The full checks take milliseconds on a large model, and most looks find what the last one found. `Facts` remembers the
last look column by column and compares at the speed of C. It holds no module, no tensor and no object of the user's:
what is no number, name or list of such is remembered by a weak reference.
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
    """Equal to one object only, which it does not keep alive."""

    __slots__ = ("_reference",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._reference = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        return self._reference() is other


class _Record:
    """Equal to an object of the same class that holds the same, as quantizers' settings are compared."""

    __slots__ = ("_fields", "_kind")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._kind, self._fields = type(value), _frozen_inside(vars(value))

    def __eq__(self, other: object) -> bool:
        return type(other) is self._kind and self._fields == vars(other)


class _Never:
    """Equal to nothing: what cannot be compared cheaply and safely."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False


class Facts:
    """What a model was at a look."""

    def __init__(self, model: nn.Module) -> None:
        modules, namespaces = _walk(model, _MOST_MODULES) or ([], [])
        self._num_modules = len(modules)
        names = [tuple(name for name in namespace if _is_own(name)) for namespace in namespaces]
        # Two names at least, since a getter of one gives no tuple.
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
        """Is everything as it was? False also where that cannot be told."""
        try:
            return self._compare(model, with_tensors=True)
        except Exception:  # something is gone that was there, or what is there now cannot be compared
            return False

    def hold_but_for_tensors(self, model: nn.Module) -> bool:
        """Is everything as it was besides tensors, which stay of their classes, and hooks?

        Takes less than half the time. False also where some tensor is no plain one: such have settings of their own.
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
        # The remembered values on the left: they are asked whether they equal the others.
        for values, getter, namespace in zip(self._values, self._getters, namespaces, strict=True):
            if values != getter(namespace):
                return False
        return all((config := ref()) is not None and frozen == vars(config) for ref, frozen in self._configs)


def _is_own(name: str) -> bool:
    return name not in STANDARD


def _walk(model: nn.Module, most: int) -> tuple[list[nn.Module], list[dict]] | None:
    """All modules inside, shared ones again and again, and what each holds; None if there are more than `most`."""
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
    """All parameters, each once, and all buffers, in a fixed order; torch's own walk takes ten times as long."""
    if (walked := _walk(model, _MOST_MODULES)) is None:
        return list(model.parameters()), list(model.buffers())
    _, namespaces = walked
    parameters, buffers = (chain.from_iterable(map(dict.values, filter(None, as_dicts(map(of, namespaces)))))
                           for of in (_PARAMETERS, _BUFFERS))
    own = {id(tensor): tensor for tensor in parameters if tensor is not None}
    return list(own.values()), [tensor for tensor in buffers if tensor is not None]


def _structure(modules: list[nn.Module], namespaces: list[dict]) -> tuple:
    """Classes and sizes of modules, names and numbers of the modules in each."""
    children = list(map(_CHILDREN, namespaces))
    return (list(map(type, modules)), list(map(len, namespaces)),
            list(chain.from_iterable(filter(None, children))), list(map(len, children)))


def _parameter_kinds(namespaces: list[dict]) -> list[type] | None:
    """Classes of all parameters; None where a module keeps its own in no dict."""
    full = list(filter(None, map(_PARAMETERS, namespaces)))
    if not set(map(type, full)) <= {dict}:
        return None
    return list(map(type, chain.from_iterable(map(dict.values, full))))


def _columns(namespaces: list[dict]) -> tuple[tuple, list[torch.Tensor]]:
    """Names of the modules' tensors; of each its class, dtype, device, shape, added names, bytes of its storage.

    Tensors that hold others (quantized weights) stand after that by what they hold, and are returned beside.
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
    """Bytes of each; a storage may be resized, so that a tensor lies outside of it."""
    try:
        return list(map(_NBYTES, map(_STORAGE, tensors)))
    except Exception:  # one has no storage
        return _Never()


def _hooks(namespaces: list[dict]) -> list[dict]:
    return [*map(_HOOKS, namespaces), *map(_PRE_HOOKS, namespaces)]


def _lasting_hooks(namespaces: list[dict]) -> list[dict]:
    """Without PEFT's hooks on LoRA layers, which come and go with calls that name adapters."""
    children = list(map(_CHILDREN, namespaces))
    return [without_names(hooks) if hooks and "lora_A" in inside else hooks
            for inside, hooks in zip(children * 2, _hooks(namespaces), strict=True)]


def _frozen(value: Any, *, inside: bool = False) -> Any:
    """What is equal to `value` as long as that is as it is, and does not keep it alive."""
    if type(value) in ATOMS:
        return value
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return _frozen_inside(value)
    if isinstance(value, PreTrainedConfig):  # remembered by what it holds, where a module has it
        return _Never() if inside else _Same(value)
    if inside and _is_record(value):
        return _Record(value)
    try:
        return _Same(value)
    except TypeError:
        return _Never()


def _is_record(value: Any) -> bool:
    """Is it of a quantizer's classes for settings? They may be changed in place, and hold names and numbers."""
    kind = type(value)
    return kind.__module__.startswith(_QUANTIZERS) and not {"__dataclass_fields__", "__pydantic_fields__"}.isdisjoint(
        dir(kind))


def _frozen_inside(value: Any) -> Any:
    kind = type(value)
    if kind in (list, tuple):
        with suppress(RecursionError):  # it holds itself
            return kind([_frozen(inner, inside=True) for inner in value])
    elif kind is dict and all(type(key) in ATOMS for key in value):
        with suppress(RecursionError):
            return {key: _frozen(inner, inside=True) for key, inner in value.items()}
    elif kind in (set, frozenset) and all(type(inner) in ATOMS for inner in value):
        return kind(value)
    return _Never()
