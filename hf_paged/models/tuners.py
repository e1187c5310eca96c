"""Adapters (LoRA and the like) that a forward would apply now, and adapters that rows can name.

Duck-typed on PEFT's layers, so that PEFT need not be installed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

from hf_paged.errors import Reason
from hf_paged.guards.hints import UNDO_PATCH
from hf_paged.guards.original_classes import patched_class

BASE = "__base__"  # PEFT's name for rows that no adapter is applied to
# Classes of PEFT that apply an adapter row by row, with the arithmetic of `lora_rows`.
_ROW_BY_ROW = ("peft.tuners.lora.layer.Linear", "peft.tuners.lora.layer.Embedding",
               "peft.tuners.lora.torchao.TorchaoLoraLinear")
_ONE_AT_A_TIME = ("Give all rows of a call one adapter with `set_adapter`, or call `generate(adapter_names=...)` of "
                  "the PeftModel, which runs in stock what PEFT can do.")


def adapter_state(model: nn.Module) -> list[tuple]:
    """Return every tuner layer's state besides parameters: active, disabled and merged adapters, scaling."""
    return [
        (name, tuple(layer.active_adapters), layer.disable_adapters, tuple(layer.merged_adapters),
         sorted(getattr(layer, "scaling", {}).items()))
        for name, layer in model.named_modules()
        if _has(layer, "active_adapters") and _has(layer, "merged_adapters")
    ]


def is_lora(layer: nn.Module) -> bool:
    """Return whether a layer is one of PEFT's LoRA layers."""
    return "lora_A" in layer._modules and _has(layer, "active_adapters")


def adapters_of(layer: Any) -> set[str]:
    """Return the names of the adapters that a LoRA layer has weights of."""
    return {*layer.lora_A.keys(), *layer.lora_embedding_A.keys()} - {BASE}


def states_by_adapter(layers: Iterable[tuple[str, Any]]) -> dict[str, str]:
    """Return, for each adapter that rows can name (sorted) and `BASE`, what its result depends on besides tensors.

    Args:
        layers: the model's LoRA layers with their paths.
    """
    layers = list(layers)
    held = [(path, layer, adapters_of(layer)) for path, layer in layers]
    names = sorted(set().union(*(own for _, _, own in held)))
    around = [(path, bool(layer.disable_adapters), tuple(layer.merged_adapters)) for path, layer in layers]
    return {
        name: repr((around, [(path, layer.scaling.get(name)) for path, layer, own in held if name in own]))
        for name in (*names, BASE)
    }


def row_reason(layers: Iterable[tuple[str, Any]], name: str) -> Reason | None:
    """Return why rows that name this adapter (of the model, or `BASE`) cannot run beside other rows, or None."""
    layers = list(layers)
    if (place := patched_class(tuple({type(layer): None for _, layer in layers}))) is not None:
        return Reason("{} is patched", place, remedy=UNDO_PATCH)
    for path, layer in layers:
        if layer.disable_adapters:
            return Reason("the adapters of {} are switched off", path, remedy="Switch them on again, or name none.")
        if layer.merged_adapters:
            return Reason("{} is merged into {}", ", ".join(layer.merged_adapters), path,
                          remedy="Call `unmerge_adapter()`: what is merged is part of every row.")
        if name not in adapters_of(layer):
            continue
        kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
        if kind not in _ROW_BY_ROW:
            return Reason("{} is a {}, which is not run for single rows", path, kind, remedy=_ONE_AT_A_TIME)
        if name in getattr(layer, "lora_variant", ()):
            return Reason("adapter {} is a {} in {}", repr(name), type(layer.lora_variant[name]).__name__, path,
                          remedy=_ONE_AT_A_TIME)
    return None


class AdapterCounts:
    """Record of how many adapters each LoRA layer had when it was made. Keeps no layer alive."""

    def __init__(self, layers: Iterable[Any]) -> None:
        self._layers = list(map(weakref.ref, layers))
        self._counts = self._count()

    def hold(self) -> bool:
        """Return whether no adapter was added or removed since."""
        return self._count() == self._counts

    def _count(self) -> list[int]:
        return [0 if (layer := ref()) is None else len(layer.lora_A) + len(layer.lora_embedding_A)
                for ref in self._layers]


def _has(layer: nn.Module, name: str) -> bool:
    """Return `hasattr` without a module's search among parameters and submodules, which is slow if it finds nothing."""
    return hasattr(type(layer), name) or name in layer.__dict__
