"""Outlines of tiny models, read off one plain forward of each: what a `DerivedExecutor` runs by."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_paged.models.base import AttentionMask
from hf_paged.models.derivation.executor import OUTLINES, AttentionLayout, ModelOutline, constants_of
from hf_paged.models.executor import KNOWN_LAYERS
from hf_paged.models.rope import longest_length

NAME = "hf_paged_recorded"
TOKENS = 64  # more than any window of a tiny model
_calls: list[tuple[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] = []


def _record(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
            **others: Any) -> tuple[torch.Tensor, None]:
    _calls.append((module, query, key, value, attention_mask))
    return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register(NAME, _record)
ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, eager_mask)


def outlined(model: PreTrainedModel) -> PreTrainedModel:
    """Let hf_paged run this model by its outline."""
    OUTLINES[model] = outline_of(model)
    return model


def outline_of(model: PreTrainedModel) -> ModelOutline:
    modules = dict(model.named_modules())
    paths = {id(module): path for path, module in modules.items()}
    called = frozenset(path for path, module in modules.items() if type(module) in KNOWN_LAYERS)
    constants = constants_of(model, called)
    entered: list[str] = []
    hooks = [module.register_forward_pre_hook(lambda module, _: entered.append(paths[id(module)]))
             for module in modules.values() if module is not model]
    implementations = [(module.config, module.config._attn_implementation) for module in modules.values()
                       if hasattr(module, "config")]
    _calls.clear()
    try:
        for config, _ in implementations:
            config._attn_implementation = NAME
        with torch.no_grad():
            logits = model(torch.ones(1, TOKENS, dtype=torch.int64), use_cache=False).logits
    finally:
        for config, name in implementations:
            config._attn_implementation = name
        for hook in hooks:
            hook.remove()
    calls = tuple(AttentionLayout(paths[id(module)], query.shape[1], key.shape[1], query.shape[3], value.shape[3],
                                  _mask(mask)) for module, query, key, value, mask in _calls)
    assert calls, "the class does not call the attention interface"
    body = next(path for path in entered if all(call.module.startswith(f"{path}.") for call in calls))
    return ModelOutline(type(model), body, calls, {path: type(module) for path, module in modules.items() if path},
                        logits.shape[-1], *[longest_length(model.config, None)] * 2, constants)


def _mask(mask: torch.Tensor) -> AttentionMask:
    """Whether all tokens see the positions that a window, or a chunk, lets them see."""
    seen = mask[0, 0] == 0
    position, largest = torch.arange(TOKENS), int(seen.sum(-1).max())
    causal = position <= position[:, None]
    if largest == TOKENS:
        assert torch.equal(seen, causal)
        return AttentionMask(None)
    if torch.equal(seen, causal & (position > position[:, None] - largest)):
        return AttentionMask(largest)
    assert torch.equal(seen, causal & (position // largest == position[:, None] // largest))
    return AttentionMask(None, largest)
