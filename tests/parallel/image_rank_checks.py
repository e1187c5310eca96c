"""What the ranks of test_images_over_ranks.py run where every rank runs the script."""

from __future__ import annotations

from typing import Any

import torch

import hf_paged
from hf_paged.models import check_over_ranks
from hf_paged.parallel.group import ParallelGroup
from hf_paged.parallel.loading import load


def generate(group: ParallelGroup, folder: str, calls: dict[str, list[dict[str, torch.Tensor]]],
             options: dict[str, Any]) -> dict[str, list[list[list[int]]]]:
    """Tokens of each call of each model."""
    found = {}
    for name, given in calls.items():
        model = load(f"{folder}/{name}", group, device="cpu", check_class=check_over_ranks)
        hf_paged.enable(model, num_blocks=64, strict=True)
        found[name] = [model.generate(**call, **options).tolist() for call in given]
        hf_paged.disable(model)
    return found
