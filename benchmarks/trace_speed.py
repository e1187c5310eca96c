"""Measure what `hf_paged.trace` costs, and in how much of a run it finds the GPU at work.

    python benchmarks/trace_speed.py [--model 0.6B] [--workload nano] [--scale 1] [--runs 3] [--out trace.json]

The same workload takes turns without a trace and with one. A line for each: output tokens a second, median of the runs.
Below it, of the last run with a trace: spans of the GPU (their number, what share of the run they cover), the bytes of
the file, and the longest kinds of spans. Without a GPU the tiny model runs on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from workloads import generation_configs, make_workload, qwen3

import hf_paged
from hf_paged import PagedGenerator


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--workload", default="nano")
    parser.add_argument("--scale", type=float, default=1.0 if torch.cuda.is_available() else 0.02)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "trace.json")
    arguments = parser.parse_args()
    workload = make_workload(arguments.workload, arguments.scale)
    configs = generation_configs(workload)
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    taken: dict[bool, list[float]] = {False: [], True: []}
    with PagedGenerator(qwen3(arguments.model, dtype, device)) as generator:
        for run in range(-1, arguments.runs):
            for traced in (False, True):
                generator.engine.reset_prefix_cache()
                with hf_paged.trace(arguments.out) if traced else nullcontext():
                    started = time.perf_counter()
                    generator.generate(workload.prompts, configs, seed=run + 1, use_tqdm=False)
                    taken[traced].append(time.perf_counter() - started)
    for traced, seconds in taken.items():
        speed = workload.output_tokens / statistics.median(seconds[1:])
        print(f"{'with a trace' if traced else 'without     '}: {speed:,.0f} output tokens/s")
    report(json.loads(arguments.out.read_text()), os.path.getsize(arguments.out), taken[True][-1])


def report(events: list[dict[str, Any]], size: int, seconds: float) -> None:
    """Print what the trace holds."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    by_track: dict[str, list[float]] = defaultdict(list)
    by_graph: dict[str, list[float]] = defaultdict(list)
    for event in (e for e in events if e["ph"] == "X"):
        track = names[event["pid"], event["tid"]]
        by_track[track].append(event["dur"])
        if track == "GPU":
            by_graph[event["name"]].append(event["dur"])
    print(f"{len(events):,} events, {size / 1e6:.1f} MB")
    for track in ("schedule", "launch", "wait", "commit", "emit", "GPU"):
        if found := by_track.get(track):
            print(f"{track:9} {len(found):6} spans, median {statistics.median(found):8.1f} us, "
                  f"{sum(found) / 1e4 / seconds:5.1f} % of the run")
    for name, found in sorted(by_graph.items(), key=lambda item: -sum(item[1]))[:6]:
        print(f"  {name:24} {len(found):5} times, median {statistics.median(found):8.1f} us")


if __name__ == "__main__":
    main()
