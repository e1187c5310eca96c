"""What the ranks of test_expert_adapters_over_ranks.py run where every rank runs the script."""

from __future__ import annotations

import torch

import hf_paged
from hf_paged.models import check_over_ranks
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.loading import load


def adapters_between_calls(group: ParallelGroup, path: str, prompts: list[list[int]],
                           count: int) -> list[list[list[int]]]:
    """Tokens of calls of this rank, between which adapters are loaded, switched, trained and deleted."""
    model = load(f"{path}/base", group, device="cpu", check_class=check_over_ranks)
    hf_paged.enable(model, num_blocks=64, strict=True)
    engine, found = hf_paged.get_engine(model), []

    def generate() -> None:
        calls = [model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False) for prompt in prompts]
        found.append([call[0, len(prompt):].tolist() for prompt, call in zip(prompts, calls, strict=True)])

    engine.load_adapter("red", f"{path}/red")
    generate()
    engine.set_adapter("red")
    generate()
    engine.load_adapter("blue", f"{path}/blue")
    engine.set_adapter(["red", "blue"])
    generate()
    for layer in model.modules():
        if "lora_A" in layer._modules:
            layer.set_adapter("blue")
    generate()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if ".blue." in key:
                parameter += 0.05
    generate()
    engine.delete_adapter("blue")
    generate()
    hf_paged.disable(model)
    return found
