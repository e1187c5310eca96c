"""The model families that run on the paged cache: Qwen3 fused, the others as stock modules around paged attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedModel, Qwen3ForCausalLM

from hf_paged.integration.models.adapter import KVSpec, ModelAdapter, StepContext
from hf_paged.integration.models.families import FAMILIES, family_of
from hf_paged.integration.models.generic import GenericAdapter
from hf_paged.integration.models.qwen3 import Qwen3Adapter

SUPPORTED = (Qwen3ForCausalLM.__name__, *(family.model_name for family in FAMILIES))


def find_adapter(model: PreTrainedModel) -> Callable[..., ModelAdapter] | None:
    """What makes the adapter for the class of `model` or one it derives from, or None."""
    if isinstance(model, Qwen3ForCausalLM):
        return Qwen3Adapter
    family = family_of(model)
    return None if family is None else partial(GenericAdapter, family=family)


__all__ = ["SUPPORTED", "KVSpec", "ModelAdapter", "StepContext", "find_adapter"]
