"""Models with LoRA adapters whose B is not zero, so that each of them changes the answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import peft
import torch

EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def lora_config(targets: Iterable[str] = ALL_LINEAR, **options: Any) -> peft.LoraConfig:
    """Of rank 4, for these modules, where the options say nothing else."""
    options = {"r": 4, "lora_alpha": 16, "target_modules": list(targets), "task_type": "CAUSAL_LM"} | options
    return peft.LoraConfig(**options)


def with_adapter(model: Any, name: str = "default", seed: int = 5, targets: Iterable[str] = ALL_LINEAR, *,
                 scale: float = 0.15, **options: Any) -> Any:
    """`model`, in a PeftModel where it is none, with one more adapter; it is active if it is the first."""
    config = lora_config(targets, **options)
    if isinstance(model, peft.PeftModel):
        model.add_adapter(name, config)
    else:
        model = peft.get_peft_model(model, config, adapter_name=name)
    randomize(model, name, seed, scale)
    return model.eval()


def with_expert_adapter(model: Any, name: str = "default", seed: int = 5, parameters: Iterable[str] = EXPERTS,
                        targets: Iterable[str] = ("q_proj",), **options: Any) -> Any:
    """`with_adapter` on these weights of experts, and on some linear layers."""
    return with_adapter(model, name, seed, targets, target_parameters=list(parameters), **options)


def randomize(model: Any, name: str, seed: int, scale: float = 0.15) -> None:
    """Give an adapter weights that are always the same for one seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if f".{name}." in parameter_name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
