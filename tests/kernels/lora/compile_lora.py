"""Compiles LoRA's kernels without a GPU, with the tiles that they have there; a JSON line a case: what each asks for.

    python compile_lora.py 80 '{"rows": 2048, "rank": 256, "dtype": "float32", "adapters": "float32"}' ...
"""

from __future__ import annotations

import json
import sys

import torch
from compiled_for import asked_for, pretend_to_be
from lora_cases import Case, make_case
from pretended_gpu import OnGpu

from hf_paged.kernels.layer.qk_norm_rope_store import HeadsToCache
from hf_paged.kernels.lora.lora_expand import (
    Delta,
    _expand_kernel,
    lora_expand,
    lora_expand_silu_mul,
)
from hf_paged.kernels.lora.lora_qk_norm_rope_store import (
    _lora_qk_norm_rope_store_kernel,
    lora_qk_norm_rope_store_triton,
)
from hf_paged.kernels.lora.lora_shrink import _shrink_kernel, lora_shrink

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 1024, 8, 4, 128


def case_of(rows: int, rank: int, dtype: str, adapters: str, members: int) -> Case:
    sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM] if members == 3 else [WIDTH] * members
    return make_case(0, rows, WIDTH, sizes, [[[rank] * members]], dtype=getattr(torch, dtype),
                     adapters=getattr(torch, adapters), mixed=False)


def run(rows: int, rank: int, dtype: str, adapters: str) -> dict[str, dict[str, int]]:
    qkv, gate_up = (case_of(rows, rank, dtype, adapters, members) for members in (3, 2))
    found = {}
    with OnGpu():
        sums = lora_shrink(qkv.x, qkv.table, None)
        found["shrink"] = asked_for(_shrink_kernel)
        lora_expand(qkv.product, sums, qkv.table, None)
        found["expand"] = asked_for(_expand_kernel)
        lora_expand_silu_mul(gate_up.product, sums[:, :, :, :2].contiguous(), gate_up.table, None)
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
