"""Executors of models on the paged cache: fused families, and stock modules around paged attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedModel

from hf_paged.errors import Reason
from hf_paged.guards.families import SUPPORTED, family_of
from hf_paged.guards.replaced_forwards import runs_kernels
from hf_paged.models.base import KVSpec, StepContext
from hf_paged.models.derivation import derive, derived
from hf_paged.models.derivation.executor import DerivedExecutor
from hf_paged.models.derivation.recurrent_executor import RecurrentExecutor
from hf_paged.models.executor import ModelExecutor
from hf_paged.models.family_executor import FamilyExecutor
from hf_paged.models.fused import FusedExecutor


def find_executor(model: PreTrainedModel) -> Callable[..., ModelExecutor] | None:
    """Return a factory of the executor for the class of `model` or a base class, or None.

    A class that is in no table is proved to run at the first look at a model: seconds, where no proof is stored.

    A model that runs kernels of the Hub keeps them: hf_paged replaces none of its modules.
    """
    family = family_of(model)
    if family is None:
        outline = derived(model)
        if isinstance(outline, Reason):
            return None
        return partial(RecurrentExecutor if outline.states else DerivedExecutor, outline=outline)
    is_fused = family.fused and not runs_kernels(model, family.modeling)
    return partial(FusedExecutor if is_fused else FamilyExecutor, family=family)


def why_no_executor(model: PreTrainedModel, *, anew: bool = False) -> Reason | None:
    """Return why `find_executor` returns None for a model, or None; ``anew``: of the model as it is now."""
    if family_of(model) is not None:
        return None
    outline = derive(model) if anew else derived(model)
    return outline if isinstance(outline, Reason) else None


__all__ = ["SUPPORTED", "KVSpec", "ModelExecutor", "StepContext", "find_executor", "why_no_executor"]
