"""Compiles LoRA's kernels without a GPU, with the tiles that they have there; a JSON line a case: what each asks for.

    python compile_lora.py 80 '{"rows": 2048, "rank": 256, "dtype": "float32", "adapters": "float32"}' ...
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
from lora_cases import Case, make_case
from pretended_gpu import Driver, OnGpu, pretend
from triton.backends.compiler import GPUTarget

from hf_paged.kernels.layer.qk_norm_rope_store import HeadsToCache
from hf_paged.kernels.lora.lora_expand import (
    Delta,
    _expand_kernel,
    lora_expand_silu_mul_unchecked,
    lora_expand_unchecked,
)
from hf_paged.kernels.lora.lora_qk_norm_rope_store import (
    _lora_qk_norm_rope_store_kernel,
    lora_qk_norm_rope_store_triton,
)
from hf_paged.kernels.lora.lora_shrink import _shrink_kernel, lora_shrink_unchecked

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 1024, 8, 4, 128
SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10}  # bytes a block may have


def pretend_to_be(arch: int) -> None:
    """A GPU of such an architecture is the only one."""
    pretend()
    properties = SimpleNamespace(multi_processor_count=132, shared_memory_per_block_optin=SHARED_MEMORY[arch])
    Driver.get_current_target = lambda self: GPUTarget("cuda", arch, 32)  # type: ignore[method-assign]
    torch.cuda.get_device_capability = lambda device=None: divmod(arch, 10)
    torch.cuda.get_device_properties = lambda device=None: properties


def case_of(rows: int, rank: int, dtype: str, adapters: str, members: int) -> Case:
    sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM] if members == 3 else [WIDTH] * members
    return make_case(0, rows, WIDTH, sizes, [[[rank] * members]], dtype=getattr(torch, dtype),
                     adapters=getattr(torch, adapters), mixed=False)


def asked_for(kernel: Any) -> dict[str, int]:
    """What the newest compiled variant needs: bytes of a thread's stack (spilled registers), of shared memory; code."""
    compiled = list(kernel.device_caches[0][0].values())[-1]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {"stack": int(re.search(r"STACK:(\d+)", usage)[1]), "shared": compiled.metadata.shared,  # type: ignore[index]
            "lines": compiled.asm["ptx"].count("\n")}


def run(rows: int, rank: int, dtype: str, adapters: str) -> dict[str, dict[str, int]]:
    qkv, gate_up = (case_of(rows, rank, dtype, adapters, members) for members in (3, 2))
    found = {}
    with OnGpu():
        sums = lora_shrink_unchecked(qkv.x, qkv.table, None)
        found["shrink"] = asked_for(_shrink_kernel)
        lora_expand_unchecked(qkv.product, sums, qkv.table, None)
        found["expand"] = asked_for(_expand_kernel)
        lora_expand_silu_mul_unchecked(gate_up.product, sums[:, :, :, :2].contiguous(), gate_up.table, None)
        found["silu"] = asked_for(_expand_kernel)
        if rows <= 1024:
            norm, cos = torch.empty(HEAD_DIM).to(qkv.x), torch.empty(8, HEAD_DIM).to(qkv.x)
            numbers, cache = torch.zeros(rows, dtype=torch.int64), torch.empty(4, 16, KV_HEADS, HEAD_DIM).to(qkv.x)
            lora_qk_norm_rope_store_triton(qkv.product[:, : (HEADS + 2 * KV_HEADS) * HEAD_DIM],
                                           Delta(sums, qkv.table, None),
                                           HeadsToCache(norm, norm, 1e-6, cos, cos, numbers, numbers, cache, cache))
            found["rope"] = asked_for(_lora_qk_norm_rope_store_kernel)
    return found


if __name__ == "__main__":
    pretend_to_be(int(sys.argv[1]))
    for argument in sys.argv[2:]:
        print(json.dumps(run(**json.loads(argument))))
