"""Techniques that `run_all.py --ab` switches off, one at a time.

Most techniques have a field of `PagedConfig`. A technique that is switched off for measuring alone has none: a row
without it names it under `WITHOUT`, and functions of the package are replaced while the engine of the row lives.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

from hf_paged import PagedConfig

WITHOUT = "without"
# Boolean fields that say how to run, not how fast; and guesses, which no workload asks for: speculation_speed.py.
NO_TECHNIQUES = {"strict", "speculation"}


def switches() -> dict[str, dict[str, Any]]:
    """Techniques by name, with the overrides of a row that switch each off."""
    found: dict[str, dict[str, Any]] = {
        "attention_backend": {"attention_backend": "torch"}, "hopper": {"attention_backend": "triton"},
    }
    for field in dataclasses.fields(PagedConfig):
        if "bool" in str(field.type) and field.name not in NO_TECHNIQUES:
            found[field.name] = {field.name: False if field.default is None else not field.default}
    return found | {name: {WITHOUT: name} for name in _REPLACED}


def replaced(name: str) -> ExitStack:
    """A context in which engines are made without a technique of `WITHOUT`, and run without it until they are gone."""
    stack = ExitStack()
    for target, replacement in _REPLACED[name]:
        stack.enter_context(mock.patch(target, replacement))
    return stack


_REPLACED: dict[str, list[tuple[str, Callable[..., Any]]]] = {
    # Prompts that share a prefix read it row by row; rows that decode go on reading it once for several.
    "prompt_groups": [("hf_paged.attention.triton_backend.TritonBackend.plan_prompts", lambda *_: None)],
    # The last layer computes every token of a prompt, and not the last one alone.
    "narrow_layer": [("hf_paged.models.fused.narrow_layer", lambda num_layers: num_layers)],
    # Decode rows beside long prompts have a graph, and products, of their own.
    "mixed_steps": [("hf_paged.runner.padded_steps.PaddedSteps.mixed_size", lambda *_: 0)],
    # Tiles of prompts of unlike lengths are dealt to programs in place of taken from a queue.
    "tile_queue": [("hf_paged.attention.hopper_backend.HopperBackend.wants_queue", lambda *_: False)],
    # Products of few rows that come in parts are added up by a launch of their own, and not by the kernel behind them
    # (a norm; behind q, k and v that of head norms and RoPE).
    "joined_norms": [("hf_paged.models.fused.makes_parts", lambda _: False)],
    # Full garbage collections look through the heap of torch and transformers while requests run.
    "frozen_heap": [("hf_paged.engine.engine_registry.is_left_to_program", lambda: True)],
}
