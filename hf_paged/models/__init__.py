"""The model families that run on the paged cache: some fused, the others as stock modules around paged attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedModel

from hf_paged.models.base import KVSpec, ModelExecutor, StepContext
from hf_paged.models.families import FAMILIES, family_of
from hf_paged.models.fused import FusedExecutor
from hf_paged.models.generic import GenericExecutor

SUPPORTED = tuple(family.model_name for family in FAMILIES)


def find_executor(model: PreTrainedModel) -> Callable[..., ModelExecutor] | None:
    """What makes the executor for the class of `model` or one it derives from, or None."""
    family = family_of(model)
    if family is None:
        return None
    return partial(FusedExecutor if family.fused else GenericExecutor, family=family)


__all__ = ["SUPPORTED", "KVSpec", "ModelExecutor", "StepContext", "find_executor"]
