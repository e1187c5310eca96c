"""Adapters by row (`adapter_names` of PEFT's `generate`) for `model.generate` of any model with LoRA layers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers import GenerationConfig

from hf_paged.guards.adapter_hooks import naming
from hf_paged.models.tuners import adapters_of, is_lora


def adapter_names(model: Any) -> list[str]:
    """Return the names of a model's LoRA adapters, sorted."""
    return sorted(set().union(*(adapters_of(layer) for layer in _layers(model))))


def each_under(model: Any, names: list[str], config: GenerationConfig) -> AbstractContextManager[None]:
    """Use for each prompt of a `model.generate` call in this context the adapter at its index in `names`.

    Args:
        config: The call's merged config: stock makes a row per beam or returned sequence of a prompt.
    """
    copies = [n for n in (config.num_beams, config.num_return_sequences, 1) if isinstance(n, int)]
    return naming(_layers(model), [name for name in names for _ in range(max(copies))])


def rows_under(model: Any, adapters: list[str | None]) -> AbstractContextManager[None]:
    """Use these adapters by row for forwards of the model in this thread, within the context; without names, the active
    adapters."""
    names = [name for name in adapters if name is not None]
    return naming(_layers(model), names) if names else nullcontext()


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if is_lora(module)]
