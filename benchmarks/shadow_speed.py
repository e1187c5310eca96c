"""Time the renewal of the copies of weights that calls under autocast compute with.

    python benchmarks/shadow_speed.py [--models 0.6B 8B] [--dtype float32] [--device cuda] [--out f.json]

All layers of the published Qwen3 shapes, random weights. "renewed": the copies are made; "unchanged": the device finds
equal checksums and makes none; "checksum": that of all weights, which every call that finds the engine idle starts in
any case; "host": what it takes to enqueue a renewal. "GB/s" counts what a renewal reads and writes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from workloads import QWEN3_SHAPES, qwen3

from hf_paged.kernels.weights_checksum import ChecksumPlan
from hf_paged.models import find_executor

REPEATS = 20


def milliseconds(run: Callable[[], Any], device: str) -> tuple[float, float]:
    """Medians of the device and of the host, after a first run."""
    run()
    on_device, on_host = [], []
    for _ in range(REPEATS):
        if device == "cuda":
            torch.cuda.synchronize()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        started = time.perf_counter()
        run()
        on_host.append((time.perf_counter() - started) * 1e3)
        if device == "cuda":
            end.record()
            torch.cuda.synchronize()
            on_device.append(begin.elapsed_time(end))
    return statistics.median(on_device or on_host), statistics.median(on_host)


def measure(size: str, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Figures of one model."""
    model = qwen3(size, dtype, device)
    make = find_executor(model)
    assert make is not None
    executor = make(model)
    executor.autocast = torch.bfloat16 if dtype is not torch.bfloat16 else torch.float16
    executor.prepare(4096)
    parameters, checksum = list(model.parameters()), ChecksumPlan()
    renewed, host = milliseconds(lambda: executor.refresh(None), device)
    now = checksum(parameters)
    executor.refresh(now)
    unchanged, _ = milliseconds(lambda: executor.refresh(now), device)
    summed, _ = milliseconds(lambda: checksum(parameters), device)
    copies, moved = executor.copied_bytes, executor.copied_bytes * (1 + dtype.itemsize / 2)
    executor.release()
    return {"renewed_ms": renewed, "unchanged_ms": unchanged, "checksum_ms": summed, "host_ms": host,
            "copies_gb": copies / 1e9, "gb_s": moved / renewed / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=sorted(QWEN3_SHAPES), default=["0.6B", "8B"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures = {}
    for size in args.models:
        figures[size] = found = measure(size, getattr(torch, args.dtype), args.device)
        if args.device == "cuda":
            torch.cuda.empty_cache()
        print(f"{size:5}", "  ".join(f"{name} {value:.3f}" for name, value in found.items()), flush=True)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
