"""Which adapters (LoRA and the like) a forward would apply right now."""

from __future__ import annotations

from typing import Any

from torch import nn


def tuner_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The layers of `model` that apply adapters. Duck-typed on PEFT's `BaseTunerLayer`: PEFT need not be installed."""
    modules = model.named_modules()
    return [(n, m) for n, m in modules if hasattr(m, "active_adapters") and hasattr(m, "merged_adapters")]


def adapter_state(layers: list[tuple[str, Any]]) -> list[tuple]:
    """All of `tuner_layers` that is no parameter: active and merged adapters, scaling, switched off."""
    return [
        (name, tuple(layer.active_adapters), layer.disable_adapters, tuple(layer.merged_adapters),
         sorted(getattr(layer, "scaling", {}).items()))
        for name, layer in layers
    ]  # fmt: skip
