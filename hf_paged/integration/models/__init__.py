"""The model families that run on the paged cache, one file each."""

from __future__ import annotations

from transformers import PreTrainedModel

from hf_paged.integration.models.adapter import KVSpec, ModelAdapter, StepContext
from hf_paged.integration.models.qwen3 import Qwen3Adapter

ADAPTERS: tuple[type[ModelAdapter], ...] = (Qwen3Adapter,)


def find_adapter(model: PreTrainedModel) -> type[ModelAdapter] | None:
    """The adapter for the class of `model` or one it derives from, or None."""
    return next((a for a in ADAPTERS if isinstance(model, a.model_class)), None)


__all__ = ["ADAPTERS", "KVSpec", "ModelAdapter", "StepContext", "find_adapter"]
