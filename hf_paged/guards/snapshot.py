"""Snapshot of all that the checks of a model, and the digest of its state, read: while it holds, so do their results.

The full checks take milliseconds on a large model, which rarely changes between two checks. `ModelSnapshot` remembers
the model column by column and compares at the speed of C. It keeps no module, tensor or object of the user's alive:
values other than numbers, names and containers of these are held by weak references.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from hf_paged.errors import Reason
from hf_paged.guards.hints import DEQUANTIZE, ONE_DEVICE
from hf_paged.guards.hooks import without_names
from hf_paged.guards.quantized import PLAIN, as_dicts, places, watched

_PARAMETERS, _BUFFERS, _CHILDREN, _HOOKS, _PRE_HOOKS = map(
    operator.itemgetter, ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
)
_STORAGE, _NBYTES = torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes
_DTYPE, _DEVICE, _SHAPE = map(operator.attrgetter, ("dtype", "device", "shape"))
_QUANTIZERS = ("torchao.", "compressed_tensors.")
# Attributes of every module; none of them holds tensors other than parameters and buffers.
STANDARD = frozenset(vars(nn.Module()))
ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type})
_CONTAINERS = (list, tuple, dict)
# What stock's generate keeps of the images of a call: native steps are given positions, and do not read it.
KEPT_BY_GENERATE = "rope_deltas"
EXPERTS = "_experts_implementation_internal"  # the field of a config that names the implementation of experts
# RoPE of the "longrope" type makes this tensor in its first forward, and reads it beyond the lengths that run natively.
_NOT_WATCHED = ("long_inv_freq", KEPT_BY_GENERATE)
# Implementations of experts that stock switches between within a call, before and after its prompts: they are one.
_SWITCHED_BY_STOCK = frozenset({"grouped_mm", "batched_mm"})
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
    """Value that equals objects of the same class with equal fields: settings of quantizers, configs in a config."""

    __slots__ = ("_fields", "_kind")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Any) -> None:
        self._kind, self._fields = type(value), _frozen_inside(vars(value))

    def __eq__(self, other: object) -> bool:
        return type(other) is self._kind and self._fields == vars(other)


class _SwitchedByStock:
    """Value that equals the implementations of experts that stock switches between."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return type(other) is str and other in _SWITCHED_BY_STOCK


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
        names = [tuple(namespace.keys() - STANDARD - {KEPT_BY_GENERATE}) for namespace in namespaces]
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

    def hold(self, model: nn.Module, *, with_tensors: bool = True) -> bool:
        """Return whether nothing changed; False also if the comparison fails.

        Without ``with_tensors`` hooks may change, and tensors within their classes, which takes less than half the
        time. False also if a tensor is not plain: it may have settings of its own.
        """
        try:
            return self._compare(model, with_tensors)
        except Exception:  # an attribute was removed, or a new value cannot be compared
            return False

    def _compare(self, model: nn.Module, with_tensors: bool) -> bool:
        if not self._num_modules or (walked := _walk(model, self._num_modules)) is None:
            return False
        modules, namespaces = walked
        if self._structure != _structure(modules, namespaces):
            return False
        if with_tensors:
            columns, wrappers = _columns(namespaces)
            if self._columns != columns or self._wrappers != list(map(vars, wrappers)):
                return False
            hooks = [*map(_HOOKS, namespaces), *map(_PRE_HOOKS, namespaces)]
            if self._hooks != hooks and self._hooks != _lasting_hooks(namespaces):
                return False
        elif self._parameter_kinds is None or self._parameter_kinds != _parameter_kinds(namespaces):
            return False
        # Remembered values on the left, so that their __eq__ decides.
        for values, getter, namespace in zip(self._values, self._getters, namespaces, strict=True):
            if values != getter(namespace):
                return False
        return all((config := ref()) is not None and frozen == vars(config) for ref, frozen in self._configs)


def experts_implementation(config: PreTrainedConfig) -> str | None:
    """Return the implementation of experts in a config, one name for all that stock switches between in a call.

    On every device but a CPU stock's decoding loop takes "batched_mm" after the prompts in place of "grouped_mm".
    """
    name: str | None = config._experts_implementation
    return "grouped_mm" if name in _SWITCHED_BY_STOCK else name


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
    """Return the modules, their classes and numbers of attributes, and the names and numbers of their children."""
    children = list(map(_CHILDREN, namespaces))
    return (list(map(weakref.ref, modules)), list(map(type, modules)), list(map(len, namespaces)),
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
        try:  # a storage may be resized so that the tensor lies outside of it
            storages: Any = list(map(_NBYTES, map(_STORAGE, tensors)))
        except Exception:  # a tensor has no storage
            storages = _Never()
        sizes = list(map(_SHAPE, tensors)), storages
    columns = (
        list(chain.from_iterable(full)), list(map(len, tensors_by_module)),
        places(mappings), kinds, sizes, [list(own) for own in map(vars, tensors) if own],
    )
    return columns, wrappers


def _lasting_hooks(namespaces: list[dict]) -> list[dict]:
    """Return all hooks but PEFT's on LoRA layers, which come and go with calls that name adapters."""
    children = list(map(_CHILDREN, namespaces))
    return [without_names(hooks) if hooks and "lora_A" in inside else hooks
            for inside, hooks in zip(children * 2, chain(map(_HOOKS, namespaces), map(_PRE_HOOKS, namespaces)),
                                     strict=True)]


def _frozen(value: Any, *, inside: bool = False) -> Any:
    """Return an object that equals `value` as long as `value` is unchanged, without keeping it alive."""
    if type(value) in ATOMS:
        return value
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        return _frozen_inside(value)
    if inside and (isinstance(value, PreTrainedConfig) or _is_record(value)):  # a config's text config, for instance
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
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):  # a rank's part of a tensor, for instance
        with suppress(RecursionError):
            return tuple.__new__(kind, [_frozen(inner, inside=True) for inner in value])  # its own may differ
    elif kind is dict and all(type(key) in ATOMS for key in value):
        with suppress(RecursionError):
            frozen = {key: _frozen(inner, inside=True) for key, inner in value.items()}
            if (switched := _SwitchedByStock()) == value.get(EXPERTS):
                frozen[EXPERTS] = switched
            return frozen
    elif kind in (set, frozenset) and all(type(inner) in ATOMS for inner in value):
        return kind(value)
    return _Never()


# -- tensors in plain attributes: neither parameters nor buffers, yet used in computing --------------------------------


def plain_tensors(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, torch.Tensor]]:
    """Return (name, tensor) of every plain attribute, also in lists, tuples and dicts, in a fixed order."""
    found: list[tuple[str, torch.Tensor]] = []
    for path, module in modules:
        for key, value in vars(module).items():
            if type(value) not in ATOMS and key not in STANDARD and not key.endswith(_NOT_WATCHED):
                found += _inside(f"{path}.{key}" if path else key, value, ())
    return found


def _inside(name: str, value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, _CONTAINERS) and id(value) not in above:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in list(items):
            if type(inner) not in ATOMS:
                yield from _inside(f"{name}[{key!r}]", inner, (*above, id(value)))


def why_not_watched(found: list[tuple[str, torch.Tensor]], device: torch.device) -> Reason | None:
    """Return why changes of one of these tensors cannot be detected, or None. `device` is the model's."""
    for name, tensor in found:
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
            return Reason("{} is a {}, whose bytes cannot be watched for changes", name, type(tensor).__name__,
                          remedy=DEQUANTIZE)
        if tensor.layout != torch.strided or tensor.is_quantized:
            return Reason("{} is no dense tensor, so its bytes cannot be watched for changes", name, remedy=DEQUANTIZE)
        if tensor.device != device:
            return Reason("{} is on {}, the model on {}", name, tensor.device, device, remedy=ONE_DEVICE)
    return None
