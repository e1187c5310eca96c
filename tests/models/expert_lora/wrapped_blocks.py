"""Blocks of experts that PEFT wraps."""

from __future__ import annotations

from typing import Any

import torch
from expert_blocks import block_of
from lora_models import EXPERTS, with_expert_adapter
from torch import nn


class Model(nn.Module):
    """A block alone."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.mlp = block


def wrapped_block(name: str = "mixtral", dtype: torch.dtype = torch.bfloat16, adapters: torch.dtype = torch.float32,
                  parameters: tuple[str, ...] = EXPERTS, **options: Any) -> Any:
    """A PeftModel of a block with two adapters, of which the first is active; ``adapters``: their dtype."""
    wrapped: Any = Model(block_of(name, dtype))
    for adapter, seed in (("default", 5), ("second", 6)):
        wrapped = with_expert_adapter(wrapped, adapter, seed, parameters, (), task_type=None, scale=0.3, **options)
    for path, parameter in wrapped.named_parameters():
        if "lora" in path:
            parameter.data = parameter.data.to(adapters)
    return wrapped


def block_in(wrapped: Any) -> Any:
    return wrapped.base_model.model.mlp
