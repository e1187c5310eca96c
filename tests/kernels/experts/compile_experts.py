"""Compiles the products of experts without a GPU, as an H100 would; a JSON line a case: what each asks for.

    python compile_experts.py '{"rows": 64, "rank": 16, "adapters": "float32"}' ...
"""

from __future__ import annotations

import json
import sys

import torch
from compiled_for import asked_for, pretend_to_be
from pretended_gpu import OnGpu

from hf_paged.kernels.experts.down import _down_kernel, down_triton
from hf_paged.kernels.experts.fold import ExpertUpdate
from hf_paged.kernels.experts.gate_up import ExpertsConfig, ExpertWeights, _gate_up_kernel, gate_up_triton
from hf_paged.kernels.experts.route import Routes, grouped

WIDTH, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8  # Qwen3-30B-A3B's


def weights_of(rows: int, columns: int, rank: int, adapters: str, *, transposed: bool) -> ExpertWeights:
    """Weights without numbers."""
    shape = (EXPERTS, columns, rows) if transposed else (EXPERTS, rows, columns)
    update = ExpertUpdate(torch.empty(EXPERTS * rank, columns, dtype=getattr(torch, adapters)),
                          torch.empty(rows, rank * EXPERTS, dtype=getattr(torch, adapters)), 2.0)
    bias = torch.empty(EXPERTS, rows, dtype=torch.bfloat16) if transposed else None
    return ExpertWeights(torch.empty(shape, dtype=torch.bfloat16), bias, transposed, update if rank else None)


def run(rows: int, rank: int, adapters: str = "float32", transposed: bool = False,
        config: list[int] | None = None) -> dict[str, dict[str, int]]:
    x = torch.empty(rows, WIDTH, dtype=torch.bfloat16)
    experts = torch.arange(rows * TOP_K, dtype=torch.int32).view(rows, TOP_K) % EXPERTS
    routes = Routes(torch.empty(rows, TOP_K, dtype=torch.bfloat16), experts, *grouped(experts, EXPERTS))
    gate_up = weights_of(2 * INNER, WIDTH, rank, adapters, transposed=transposed)
    down = weights_of(WIDTH, INNER, rank, adapters, transposed=transposed)
    chosen = None if config is None else ExpertsConfig(*config)
    with OnGpu():
        inner = gate_up_triton(x, gate_up, routes, config=chosen)
        found = {"gate_up": asked_for(_gate_up_kernel)}
        down_triton(inner, down, routes, chosen)
        return found | {"down": asked_for(_down_kernel)}


if __name__ == "__main__":
    pretend_to_be(90)
    for argument in sys.argv[1:]:
        print(json.dumps(run(**json.loads(argument))), flush=True)
