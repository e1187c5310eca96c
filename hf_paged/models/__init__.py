"""Executors of model families on the paged cache: fused ones, and stock modules around paged attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedModel

from hf_paged.guards.families import FAMILIES, WRAPPERS, family_of
from hf_paged.guards.hub_kernels import runs_kernels
from hf_paged.models.base import KVSpec, ModelExecutor, StepContext
from hf_paged.models.fused import FusedExecutor
from hf_paged.models.generic import GenericExecutor

SUPPORTED = tuple(one.model_name for one in (*FAMILIES, *WRAPPERS))


def find_executor(model: PreTrainedModel) -> Callable[..., ModelExecutor] | None:
    """Return a factory of the executor for the class of `model` or a base class, or None.

    A model that runs kernels of the Hub keeps them: hf_paged replaces none of its modules.
    """
    family = family_of(model)
    if family is None:
        return None
    is_fused = family.fused and not runs_kernels(model, family.modeling)
    return partial(FusedExecutor if is_fused else GenericExecutor, family=family)


__all__ = ["SUPPORTED", "KVSpec", "ModelExecutor", "StepContext", "find_executor"]
