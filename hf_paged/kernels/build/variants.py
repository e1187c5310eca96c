"""Records of kernel variants: JSON from which another process makes Triton compile, or find on the disk, the same ones.

A record has what decides the variant: the kernel's name, its arguments (of a tensor dtype and alignment) and launch
options. It is carried out as a launch with such arguments, of which Triton makes the key under which it keeps the
variant, as of any launch. So a record that is wrong costs time, and never puts a kernel in another one's place;
`JITFunction.preload` would take the key from the record. It names kernels, dtypes and tuples of constants alone.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

_PACKAGE = __package__.partition(".")[0]
_CONSTANTS = f"{_PACKAGE}.kernels._triton:constants"  # imports this package
_ALIGNMENT = 16  # bytes; Triton looks at it


def record_of(kernel: Any, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> str | None:
    """Return the record of a launch, or None if another process could not repeat it: a kernel or a class that is not
    found by name, an argument of another kind (a descriptor of Gluon).

    Args:
        arguments: all arguments of the kernel, in order.
        options: the other keywords of the launch.
    """
    try:
        name = _name_of(kernel.fn.__module__, kernel.__name__)
        return json.dumps([name, [_encoded(value) for value in arguments.values()],
                           {key: _encoded(value) for key, value in options.items()}])
    except (TypeError, ValueError):
        return None


def launch_of(record: str) -> Callable[[], object]:
    """Return a function that launches the kernel of a record, for a dry run.

    Raises:
        Exception: it is no record, or of another version of the package.
    """
    name, arguments, options = json.loads(record)
    kernel = _named(name)
    if isinstance(kernel, type) or not hasattr(kernel, "device_caches"):
        raise ValueError(f"{name}: expected a kernel")
    values, named = [_decoded(value) for value in arguments], {key: _decoded(value) for key, value in options.items()}
    return lambda: kernel[(1,)](*values, **named)


def _name_of(module: str, name: str) -> str:
    if module.partition(".")[0] != _PACKAGE or not hasattr(sys.modules.get(module), name):
        raise ValueError(f"{module}.{name}: expected a name in a module of {_PACKAGE}")
    return f"{module}:{name}"


def _named(name: str) -> Any:
    module, _, inside = name.partition(":")
    if module.partition(".")[0] != _PACKAGE:
        raise ValueError(f"{name!r}: expected a name in a module of {_PACKAGE}")
    return getattr(importlib.import_module(module), inside)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r}: expected a dtype")
    return found


def _encoded(value: Any) -> Any:
    """Return a value as JSON: a scalar as it is, anything else as a list that begins with its kind."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype).removeprefix("torch."), value.data_ptr() % _ALIGNMENT == 0]
    kind = type(value)
    if hasattr(kind, "_fields") and kind.__reduce__ is not tuple.__reduce__:  # made by `constants`, of a NamedTuple
        _, (plain,) = value.__reduce__()
        return ["constants", _name_of(type(plain).__module__, type(plain).__name__), *map(_encoded, plain)]
    if kind is tuple:
        return ["tuple", *map(_encoded, value)]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    raise TypeError(f"{value!r:.80}: expected a scalar, a tensor, a tuple or constants")


def _decoded(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *rest = value
    if kind == "tensor":
        dtype, is_aligned = rest
        memory = torch.empty(64, dtype=torch.uint8, device="cpu")
        found = memory[-memory.data_ptr() % _ALIGNMENT :][:_ALIGNMENT].view(_dtype(dtype))
        return found if is_aligned else found[1:]
    if kind == "dtype":
        return _dtype(rest[0])
    if kind == "constants":
        of, *fields = rest
        if not (isinstance(shape := _named(of), type) and issubclass(shape, tuple) and hasattr(shape, "_fields")):
            raise ValueError(f"{of!r}: expected a NamedTuple")
        return _named(_CONSTANTS)(shape(*map(_decoded, fields)))
    if kind != "tuple":
        raise ValueError(f"{kind!r}: expected a kind of argument")
    return tuple(map(_decoded, rest))
