"""Which adapters (LoRA and the like) a forward would apply right now, as bytes for the prefix-cache key."""

from __future__ import annotations

import xxhash
from torch import nn


def adapter_key(model: nn.Module) -> bytes:
    """A digest of every tuner layer's state that is no parameter: active and merged adapters, scaling, switched off.

    b"" for a model without tuner layers. Duck-typed on PEFT's `BaseTunerLayer`, so that PEFT need not be installed.
    """
    state = [
        (name, tuple(module.active_adapters), module.disable_adapters, tuple(module.merged_adapters),
         sorted(getattr(module, "scaling", {}).items()))
        for name, module in model.named_modules()
        if hasattr(module, "active_adapters") and hasattr(module, "merged_adapters")
    ]  # fmt: skip
    return xxhash.xxh3_128_digest(repr(state).encode()) if state else b""
