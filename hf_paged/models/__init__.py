"""Executors of models on the paged cache: fused families, and stock modules around paged attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from transformers import PreTrainedModel

from hf_paged.errors import Reason, UnsupportedModelError
from hf_paged.guards.families import Family, family_of
from hf_paged.guards.replaced_forwards import runs_kernels
from hf_paged.models.base import KVSpec, StepContext
from hf_paged.models.derivation import derive, derived, rows_in
from hf_paged.models.derivation.executor import DerivedExecutor
from hf_paged.models.derivation.recurrent_executor import RecurrentExecutor
from hf_paged.models.executor import ModelExecutor
from hf_paged.models.fused import FusedExecutor
from hf_paged.parallel.group import group_of


def find_executor(model: PreTrainedModel) -> Callable[..., ModelExecutor] | None:
    """Return a factory of the executor for the class of `model` or a base class, or None.

    A class that is not fused is proved to run at the first look at a model, and at the first call after its config
    changed: seconds, where no proof is stored.

    A model that runs kernels of the Hub keeps them: hf_paged replaces none of its modules.
    """
    family = _fused_family(model)
    if family is None:
        outline = derived(model)
        if isinstance(outline, Reason):
            return None
        kind = RecurrentExecutor if outline.states else DerivedExecutor
        return partial(kind, outline=outline, derive=derive, rows_in=rows_in)
    return partial(FusedExecutor, family=family)


def why_no_executor(model: PreTrainedModel, *, anew: bool = False) -> Reason | None:
    """Return why `find_executor` returns None for a model, or None; ``anew``: of the model as it is now."""
    if _fused_family(model) is not None:
        return None
    outline = derive(model) if anew else derived(model)
    return outline if isinstance(outline, Reason) else None


def _fused_family(model: PreTrainedModel) -> Family | None:
    """Return the fused family of a model; None also if kernels of the Hub run for it, and of a derived class that is
    cut over ranks."""
    family = family_of(model)
    if family is None or runs_kernels(model, family.modeling):
        return None
    return None if group_of(model).is_parallel and type(model).__name__ != family.model_name else family


def check_over_ranks(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError if a rank's part of a model does not run natively."""
    if (reason := why_no_executor(model)) is not None:
        raise UnsupportedModelError(f"model={type(model).__name__} over {group_of(model).size} ranks: {reason}. "
                                    "Expected another class, or tensor_parallel_size=1")


__all__ = ["KVSpec", "ModelExecutor", "StepContext", "check_over_ranks", "find_executor",
           "why_no_executor"]
