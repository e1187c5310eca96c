"""Prompt GEMMs of the models, whole and cut along either side: does cuBLAS choose well for each? TFLOP/s on a GPU.

    python benchmarks/gemm_shapes.py

On an H200 the gate_up product of an 8B step of 8,192 tokens ran at 708 TFLOP/s where the layer's other products reach
832 (profile of 2026-11-21, docs/performance.md); this shows whether parts of it do better.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from kernel_speed import graph_time

# outputs, inputs: qkv, o, gate_up, down of 4B and 8B
SHAPES = [(6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728),
          (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]  # fmt: skip


def by_outputs(x: torch.Tensor, weight: torch.Tensor, parts: int, out: torch.Tensor) -> None:
    for columns, rows in zip(out.chunk(parts, 1), weight.chunk(parts), strict=True):
        torch.mm(x, rows.t(), out=columns)


def by_tokens(x: torch.Tensor, weight: torch.Tensor, parts: int, out: torch.Tensor) -> None:
    for rows, piece in zip(out.chunk(parts), x.chunk(parts), strict=True):
        torch.mm(piece, weight.t(), out=rows)


def main() -> None:
    for (outputs, inputs), tokens in ((shape, tokens) for shape in SHAPES for tokens in (8192, 4096, 2048)):
        x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
        weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(2)]
        out = torch.empty(tokens, outputs, device="cuda", dtype=torch.bfloat16)
        flops = 2 * tokens * outputs * inputs

        def rate(run, *more, weights=weights, x=x, flops=flops) -> str:  # type: ignore[no-untyped-def]
            return f"{flops / graph_time([partial(run, x, weight, *more) for weight in weights], 5) / 1e12:.0f}"

        cut = [f"outputs/{n} {rate(by_outputs, n, out)}" for n in (2, 3, 4, 6) if outputs % (8 * n) == 0]
        cut += [f"tokens/{n} {rate(by_tokens, n, out)}" for n in (2, 4)]
        print(f"{tokens} x {outputs} x {inputs}: whole {rate(F.linear)}, {', '.join(cut)}", flush=True)


if __name__ == "__main__":
    main()
