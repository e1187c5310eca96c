"""Numbers that may be lengths at which a model begins to compute otherwise: of its config, code and modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from hf_paged.models.proof.reduced import is_size

SHORTEST, LONGEST = 40, 1 << 20
# Ends of names of fields whose numbers count no tokens.
_NO_LENGTHS = ("token_id", "token_index", "theta", "base", "vocab_size", "_dim", "hidden_size", "intermediate_size")


def config_lengths(config: PreTrainedConfig) -> set[int]:
    """Return the numbers of a config that may be lengths."""
    return {int(value) for field, value in _numbers(config.to_dict())
            if is_length(value) and not field.endswith(_NO_LENGTHS) and not is_size(field)}


def module_lengths(model: PreTrainedModel) -> set[int]:
    """Return plain numbers that modules hold, which may be computed from the config, and may be lengths."""
    held = (value for module in model.modules() for value in vars(module).values())
    return {int(value) for value in held if is_length(value) and value > 128}


def is_length(value: Any) -> bool:
    return (isinstance(value, (int, float)) and not isinstance(value, bool) and SHORTEST <= value <= LONGEST
            and float(value).is_integer())


def _numbers(value: Any, field: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _numbers(inner, str(name))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _numbers(inner, field)
    elif isinstance(value, (int, float)):
        yield field, value
