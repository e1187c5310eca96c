"""Modules of a model with their expected classes: a family's own modules, and layers that are called as they stand."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from hf_paged.guards.families import Family
from hf_paged.parallel.layers import sharded_class

ACTIVATIONS = ("act_fn", "activation_fn")


class ModulePart(NamedTuple):
    """Module of a model; `expected` is the class it has to have, None for a layer of any known kind (linear, LoRA)."""

    name: str
    module: nn.Module
    expected: type | None
    is_activation: bool = False


def parts_of(model: nn.Module, family: Family) -> list[ModulePart]:
    """Return all modules inside `model`, except modules inside of a layer that is called as it stands."""
    parts: list[ModulePart] = []
    classes = {name: family.classes(name) for name in family.parts}
    if experts := classes.get("experts"):
        classes["experts"] = (*experts, *map(sharded_class, experts))
    if family.wrapper is None:
        _collect(parts, "", model, classes)
        return parts
    body: Any = model.model
    _add(parts, "model.language_model", body.language_model, classes["model"], classes)
    # Calls with text alone do not use the vision tower.
    beside = {name: module for name, module in model.named_children() if module is not body}
    _collect(parts, "", nn.ModuleDict(beside), classes)
    return parts


def _collect(parts: list[ModulePart], path: str, module: nn.Module, classes: dict[str, tuple[type, ...]]) -> None:
    for key, child in module._modules.items():
        if child is None:
            continue
        name = f"{path}.{key}" if path else key
        if key == "layers" and type(child) is nn.ModuleList:
            for i, layer in child._modules.items():
                assert layer is not None
                _add(parts, f"{name}.{i}", layer, classes["layers"], classes)
        elif key in classes:
            _add(parts, name, child, classes[key], classes)
        elif key in ACTIVATIONS:
            parts.append(ModulePart(name, child, None, is_activation=True))
        else:
            parts.append(ModulePart(name, child, nn.Dropout if type(child) is nn.Dropout else None))


def _add(parts: list[ModulePart], name: str, module: nn.Module, allowed: tuple[type, ...],
         classes: dict[str, tuple[type, ...]]) -> None:
    if type(module) in allowed:
        parts.append(ModulePart(name, module, type(module)))
        _collect(parts, name, module, classes)
    else:
        parts.append(ModulePart(name, module, allowed[0]))
