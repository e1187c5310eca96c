"""Compiles the kernel for all layers without a GPU; prints a JSON line a shape: counts of instructions, shared memory.

    python compile_layers.py '[1024, 3072, 16, 8, 28, 16, true, 1]' ...
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

from hf_paged.kernels.hopper.decoder_layers.kernel import layers_kernel
from hf_paged.kernels.hopper.decoder_layers.shape import LayerFields, LayersShape

UNALIGNED = ("slots", "positions", "slot_mapping")
TYPES = {"table": "*i64", "words32": "*i32", "words64": "*i64", "epoch": "*i32", "block_table": "*i32",
         "table_stride": "i32", "eps": "fp32", "scale_log2": "fp32"} | dict.fromkeys(UNALIGNED, "*i64")


def compiled(shape: LayersShape) -> Any:
    def box(*sizes: int) -> str:
        return f"tensordesc<bf16{[1, *sizes, 64]},{gl.NVMMASharedLayout(128, 16, 4)!r}>"

    boxes = dict.fromkeys(("qkv", "o", "gate_up", "down"), box(shape.lines, 8)) | {"cache": box(16, 1)}
    constants = {"S": shape, "FIELDS": len(LayerFields._fields)}
    names = layers_kernel.arg_names
    types = {name: "constexpr" if name in constants else {**TYPES, **boxes}.get(name, "*bf16") for name in names}
    aligned = [name for name, kind in types.items() if kind.startswith("*") and name not in UNALIGNED]
    source = GluonASTSource(
        layers_kernel, types, {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": 8, "launch_cooperative_grid": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


for argument in sys.argv[1:]:
    kernel = compiled(LayersShape(*json.loads(argument)))
    sass = disassembled(kernel.asm["cubin"])
    counts = {name: sass.count(name) for name in ("HMMA", "UTMALDG", "STL")}
    print(json.dumps({**counts, "shared": kernel.metadata.shared}))
