"""Default configs of the families, with what some of them lack."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from hf_paged.guards.families import Family

_MISSING: dict[str, dict[str, Any]] = {"Ministral": {"head_dim": 128}}


def config_of(family: Family, **overrides: Any) -> PreTrainedConfig:
    return family.model_class.config_class(**(_MISSING.get(family.prefix, {}) | overrides))


def attention_of(family: Family) -> str:
    """Return the implementation that stock takes for a family: sdpa ignores sinks, and caps of scores."""
    return "eager" if family.beyond_sdpa else "sdpa"
