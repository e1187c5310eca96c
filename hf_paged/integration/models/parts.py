"""The modules of a model by what has to stand where: own ones of a family, and layers that are called as they stand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from hf_paged.integration.models.families import Family


class Part(NamedTuple):
    """A module; `expected` is the class that has to stand there, None for a layer of any known kind (linear, LoRA)."""

    name: str
    module: nn.Module
    expected: type | None


def parts_of(model: nn.Module, family: Family) -> Iterator[Part]:
    """All modules inside `model` but activations; what is inside a layer that is called belongs to it."""
    return _inside("", model, {name: family.classes(name) for name in family.parts})


def activations_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name of the owner, activation module), in the order of the modules that call one."""
    found = ((name, activation_of(module)) for name, module in model.named_modules())
    return [(name, activation) for name, activation in found if activation is not None]


def activation_of(module: Any) -> nn.Module | None:
    """The activation module that a module calls, if it has one."""
    inside = module._modules
    return inside.get("act_fn", inside.get("activation_fn"))


def _inside(path: str, module: nn.Module, classes: dict[str, tuple[type, ...]]) -> Iterator[Part]:
    for key, child in module.named_children():
        name = f"{path}.{key}" if path else key
        if key == "layers" and type(child) is nn.ModuleList:
            for i, layer in child.named_children():
                yield from _part(f"{name}.{i}", layer, classes["layers"], classes)
        elif key in classes:
            yield from _part(name, child, classes[key], classes)
        elif type(child) is nn.Dropout:
            yield Part(name, child, nn.Dropout)
        elif child is not activation_of(module):
            yield Part(name, child, None)


def _part(name: str, module: nn.Module, allowed: tuple[type, ...],
          classes: dict[str, tuple[type, ...]]) -> Iterator[Part]:  # fmt: skip
    if type(module) in allowed:
        yield Part(name, module, type(module))
        yield from _inside(name, module, classes)
    else:
        yield Part(name, module, allowed[0])
