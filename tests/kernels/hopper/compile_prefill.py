"""Compiles the Hopper kernel without a GPU; prints a JSON line a shape: counts of instructions and what was said.

    python compile_prefill.py '{"head_dim": 64, "block_n": 128, "stages": 3}' ...
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from compiled_code import disassembled
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from hf_paged.kernels.hopper.prefill import HopperShape, _hopper_prefill_kernel

DEFAULTS = {"query_heads": 32, "kv_heads": 8, "packed": 4, "block_size": 16, "programs": 132, "has_window": False,
            "has_softcap": False, "has_sinks": False}
POINTERS = {"out": "*bf16", "sinks": "*bf16", "query_start": "*i32", "seq_lens": "*i32", "block_table": "*i32",
            "slots": "*i32", "queue": "*i32"}
NUMBERS = {"has_queue": "i32", "num_rows": "i32", "num_items": "i32", "table_stride": "i32", "window": "i32",
           "scale_log2": "fp32", "softcap_log2": "fp32"}


def compiled(shape: HopperShape) -> Any:
    def box(*sizes: int) -> str:
        return f"tensordesc<bf16{[*sizes, 64]},{gl.NVMMASharedLayout(128, 16, 3)!r}>"

    page = box(shape.page, 1)
    signature = {"q": box(shape.half, shape.packed), "k_cache": page, "v_cache": page, **POINTERS, **NUMBERS}
    constants = {"S": shape} | ({} if shape.has_sinks else {"sinks": None})
    names = _hopper_prefill_kernel.arg_names
    source = GluonASTSource(
        _hopper_prefill_kernel, {name: "constexpr" if name in constants else signature[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in ("out", "block_table")},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 168})


for argument in sys.argv[1:]:
    kernel = compiled(HopperShape(**{**DEFAULTS, **json.loads(argument)}))
    sass = disassembled(kernel.asm["cubin"])
    counts = {name: sass.count(name) for name in ("HGMMA", "WARPGROUP.DEPBAR", "UTMALDG", "STL")}
    print(json.dumps({**counts, "shared": kernel.metadata.shared}))
