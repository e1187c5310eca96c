"""Compiles the products of experts without a GPU, as an H100 would; a JSON line a case: what each asks for.

    python compile_experts.py '{"rows": 64, "rank": 16, "adapters": "float32"}' ...
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import triton
from pretended_gpu import Driver, OnGpu, pretend
from triton.backends.compiler import GPUTarget

from hf_paged.kernels.experts.down import _down_kernel, down_triton
from hf_paged.kernels.experts.fold import ExpertUpdate
from hf_paged.kernels.experts.gate_up import ExpertsConfig, ExpertWeights, _gate_up_kernel, gate_up_triton
from hf_paged.kernels.experts.route import Routes, grouped

WIDTH, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8  # Qwen3-30B-A3B's


def pretend_to_be_an_h100() -> None:
    pretend()
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
    Driver.get_current_target = lambda self: GPUTarget("cuda", 90, 32)  # type: ignore[method-assign]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: properties


def asked_for(kernel: Any) -> dict[str, int]:
    """What the newest compiled variant needs: a thread's registers and bytes of stack (spilled ones), shared memory."""
    compiled = list(kernel.device_caches[0][0].values())[-1]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name.lower(): int(re.search(rf"{name}:(\d+)", usage)[1])  # type: ignore[index]
             for name in ("REG", "STACK")}
    return found | {"shared": compiled.metadata.shared, "warps": compiled.metadata.num_warps}


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
    pretend_to_be_an_h100()
    for argument in sys.argv[1:]:
        print(json.dumps(run(**json.loads(argument))), flush=True)
