"""Which adapters (LoRA and the like) a forward would apply right now."""

from __future__ import annotations

from torch import nn


def adapter_state(model: nn.Module) -> list[tuple]:
    """Every tuner layer's state that is no parameter: active and merged adapters, scaling, switched off.

    Duck-typed on PEFT's `BaseTunerLayer`, so that PEFT need not be installed.
    """
    return [
        (name, tuple(layer.active_adapters), layer.disable_adapters, tuple(layer.merged_adapters),
         sorted(getattr(layer, "scaling", {}).items()))
        for name, layer in model.named_modules()
        if _has(layer, "active_adapters") and _has(layer, "merged_adapters")
    ]


def _has(layer: nn.Module, name: str) -> bool:
    """`hasattr` without a module's search among parameters and submodules, which is slow where it finds nothing."""
    return hasattr(type(layer), name) or name in layer.__dict__
