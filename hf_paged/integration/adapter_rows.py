"""Adapters by row for `model.generate` of any model with LoRA layers, as PEFT's `generate` has it (`adapter_names`)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from transformers import GenerationConfig

from hf_paged.guards.adapter_hooks import naming
from hf_paged.models.tuners import adapters_of, is_lora


def adapter_names(model: Any) -> list[str]:
    """The LoRA adapters of a model, sorted."""
    return sorted(set().union(*(adapters_of(layer) for layer in _layers(model))))


def each_under(model: Any, names: list[str], config: GenerationConfig) -> AbstractContextManager[None]:
    """In here `model.generate` of a prompt for each of `names` gives all rows of the prompt that adapter.

    Args:
        config: of the call, merged: stock makes as many rows of a prompt as it has beams, or sequences to return.
    """
    copies = [n for n in (config.num_beams, config.num_return_sequences, 1) if isinstance(n, int)]
    return naming(_layers(model), [name for name in names for _ in range(max(copies))])


def rows_under(model: Any, adapters: list[str | None]) -> AbstractContextManager[None]:
    """In here forwards of the model in this thread give each row its adapter; None for all: the active ones."""
    names = [name for name in adapters if name is not None]
    return naming(_layers(model), names) if names else nullcontext()


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if is_lora(module)]
