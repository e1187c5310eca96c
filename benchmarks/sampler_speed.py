"""Time `sample_tokens` on a GPU, by CUDA-graph replay, against the time that a read of the logits takes.

    python benchmarks/sampler_speed.py [--out sampler.json] [--vocab 151936] [--quick]

bf16 logits, normal with deviation 3 (and 0.5, "flat": top-p then keeps tens of thousands, and the row is searched).
Calls rotate over tensors larger than L2 together, up to 24 of them; few rows stay in L2, as after the head's GEMM.
``--quick`` measures 8 and 256 rows only. Last the torch reference at 256 rows, launches included.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernel_speed import L2_BYTES, ceilings, graph_time, show

from hf_paged.sampling.sample_tokens import sample_tokens
from hf_paged.sampling.sampler import SamplingRows, sample_reference
from hf_paged.sampling.table import SamplingTable

# temperature, top_p, min_p, top_k
SETTINGS = {
    "greedy": (0.0, 1.0, 0.0, 0),
    "temperature": (0.7, 1.0, 0.0, 0),
    "k50 p0.9": (0.7, 0.9, 0.0, 50),
    "p0.95": (0.7, 0.95, 0.0, 0),
    "min_p": (0.7, 1.0, 0.05, 0),
    "k500": (0.7, 1.0, 0.0, 500),
}
ROWS = (1, 8, 64, 256, 512, 1024)


def make_table(names: list[str]) -> SamplingTable:
    chosen = [SETTINGS[name] for name in names]
    floats = torch.tensor([(heat, 1.0 - p, min_p) for heat, p, min_p, _ in chosen], device="cuda")
    ints = torch.tensor([(i * 7919 + 3, row[3], 0) for i, row in enumerate(chosen)], device="cuda")
    return SamplingTable(floats, ints, torch.full((len(chosen), 2), -1, device="cuda"))


def measure(rows: int, vocab: int, copy: float) -> dict[str, Any]:
    """us of every setting, of the settings mixed, and of two on flat logits."""
    nbytes = 2 * rows * vocab
    count = min(24, max(2, -(-L2_BYTES // nbytes)))
    logits = [torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16) * 3 for _ in range(count)]
    slots = torch.arange(rows, device="cuda")
    position = torch.full((rows,), 100, dtype=torch.int32, device="cuda")
    history = torch.zeros(rows, 200, dtype=torch.int32, device="cuda")
    result: dict[str, Any] = {"row": f"{rows} rows", "read": nbytes / copy / 1e12 * 1e6}

    def run(name: str, names: list[str]) -> None:
        call = partial(sample_tokens, table=make_table(names), slots=slots, position=position, history=history)
        result[name] = graph_time([partial(call, x) for x in logits], 7) * 1e6

    for name in SETTINGS:
        run(name, [name] * rows)
    run("mixed", [list(SETTINGS)[i % len(SETTINGS)] for i in range(rows)])
    for x in logits:
        x.mul_(1 / 6)
    run("flat k50 p0.9", ["k50 p0.9"] * rows)
    run("flat p0.95", ["p0.95"] * rows)
    return result


def reference_us(rows: int, vocab: int, name: str) -> float:
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16) * 3
    settings = SamplingRows.of(make_table([name] * rows), *(torch.arange(rows, device="cuda") for _ in range(2)))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    sample_reference(logits, settings)
    begin.record()
    for _ in range(3):
        sample_reference(logits, settings)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 3 * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--quick", action="store_true", help="8 and 256 rows only")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    copy = ceilings()["copy_tb_s"]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {copy:.2f} TB/s; us:")
    rows = [show(measure(rows, arguments.vocab, copy)) for rows in ((8, 256) if arguments.quick else ROWS)]
    reference = {name: reference_us(256, arguments.vocab, name) for name in ("temperature", "k50 p0.9")}
    rows.append(show({"row": "torch reference, 256 rows"} | reference))
    if arguments.out:
        arguments.out.write_text(json.dumps({"copy_tb_s": copy, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
