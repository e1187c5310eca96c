"""Greedy tokens of stock while the weights change; ``changes``: {tokens made: what is done to the model then}."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from support import stock_generate
from transformers import DynamicCache

Changes = Mapping[int, Callable[[Any], object]]


@torch.no_grad()
def kept(model: Any, prompt: list[int], count: int, changes: Changes) -> list[int]:
    """Of forwards over one growing cache."""
    cache, ids, made = DynamicCache(), torch.tensor([prompt], device=model.device), []
    while len(made) < count:
        if len(made) in changes:
            changes[len(made)](model)
        ids = model(input_ids=ids, past_key_values=cache).logits[:, -1].argmax(-1)[:, None]
        made.append(ids.item())
    return made


def recomputed(model: Any, prompt: list[int], count: int, changes: Changes) -> list[int]:
    """Where every piece is computed from the tokens before it alone."""
    made: list[int] = []
    for end in sorted([*changes, count]):
        ids = torch.tensor([prompt + made], device=model.device)
        if end > len(made):
            made = stock_generate(model, input_ids=ids, max_new_tokens=end - len(made))[0, len(prompt) :].tolist()
        if end in changes:
            changes[end](model)
    return made


ORACLES = {"recompute": recomputed, "keep": kept}
