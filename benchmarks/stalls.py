"""Compare the first run of each workload with the second, and name what the slowest step of each waited for.

    python benchmarks/stalls.py --model 0.6B --out stalls.json            # an empty and a filled Triton cache
    python benchmarks/stalls.py --model 0.6B --warmup full                # ready means ready
    python benchmarks/stalls.py --model 0.6B --adapter bf16 --autocast    # a trainer's model with LoRA
    python benchmarks/stalls.py --model tiny --device cpu --scale 0.05    # shows that it runs

Each case is a process of its own that makes a `PagedGenerator` and runs one workload after the other, twice each: what
an earlier workload has compiled or captured is there, as in a service. A step's delay is the host's time from the
engine's first look at the step to its last launch; its cause is what was compiled, loaded, captured or dropped during
it, or that it ran without a graph. Late steps: of both runs' delays, longest first, those of the first run that are
50 ms above the second's. Ready: seconds from the call of the constructor to the end of one request of one token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from bench_engines import Ours, OursUnderAutocast
from lora_speed import adapted
from workloads import make_workload

from hf_paged.engine.observer import Launched

WORKLOADS = ("single", "nano", "short", "prompts-7k", "no-prefix", "warm-prefix", "nano")
LATE_MS, ROWS = 50.0, 256
ADAPTERS = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Stalls:
    """An observer that keeps each step's delay, and what happened during it."""

    def __init__(self, engine: Ours) -> None:
        self._engine, self.counts = engine, Counter[str]()
        self._seen = Counter[str]()
        self.steps: list[tuple[float, dict[str, int]]] = []  # milliseconds, causes

    def begin(self) -> None:
        """What was done until now, no step waits for."""
        self._engine.generator.engine.watch(self)
        self._look()
        self._seen = Counter(self.counts)

    def compiled(self, *, cache_hit: bool, **_: Any) -> None:
        """Triton's listener."""
        self.counts["loaded" if cache_hit else "compiled"] += 1

    def launched(self, step: Launched) -> None:
        self._look()
        causes, self._seen = self.counts - self._seen, Counter(self.counts)
        self.steps.append(((step.launched - step.began) * 1e3, dict(causes)))

    def _look(self) -> None:
        graphs = self._engine.generator.engine._core.pool.runner.graphs
        if graphs is not None:
            self.counts["captured"], self.counts["dropped"] = graphs.num_captured, graphs.num_dropped
            self.counts["uncaptured"] = graphs._runs.total()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device, names = options.device, options.workloads
    warmup = True if options.warmup == "true" else options.warmup
    engine = (OursUnderAutocast if options.autocast else Ours)(options.model, device)
    if options.adapter:
        engine.model = adapted(engine.model, ADAPTERS[options.adapter], count=1)
    stalls = Stalls(engine)
    if device == "cuda":
        import triton

        triton.knobs.compilation.listener = stalls.compiled
    rows, ready = [], None
    for at, name in enumerate(names):
        workload = make_workload(name, options.scale)
        with engine.around():
            opened = engine.open(workload, {"max_num_seqs": ROWS, "warmup": warmup})
        if opened is not None:
            ready = opened if ready is None else ready
            stalls.begin()
        seconds, steps = [], []
        for _ in range(2):
            engine.prepare(workload)
            stalls.steps.clear()
            began = time.perf_counter()
            with engine.around():
                made = sum(engine.run(workload))
            seconds.append(time.perf_counter() - began)
            steps.append(list(stalls.steps))
        slowest, causes = max(steps[0], key=lambda step: step[0])
        delays = zip(*(sorted((delay for delay, _ in run), reverse=True) for run in steps), strict=False)
        every = sum((Counter(causes) for _, causes in steps[0]), Counter[str]())
        rows.append({
            "workload": name, "again": name in names[:at], "tokens": made, "first_s": seconds[0],
            "second_s": seconds[1], "first_over_second": seconds[1] / seconds[0], "slowest_step_ms": slowest,
            "slowest_step": causes, "late_steps": sum(first > second + LATE_MS for first, second in delays),
            "first": dict(every),
        })
        print(json.dumps(rows[-1]), flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {"model": options.model, "device": name, "ready_s": ready, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS))
    parser.add_argument("--warmup", choices=("true", "full"), default="true")
    parser.add_argument("--caches", nargs="*", choices=("cold", "warm"), default=["cold", "warm"])
    parser.add_argument("--adapter", choices=tuple(ADAPTERS), help="one rank-16 adapter of all linear layers")
    parser.add_argument("--autocast", action="store_true", help="float32 weights under autocast to bfloat16")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measure(options)))
        return
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for case in ("cold", "warm"):
            if case == "cold" or case in options.caches:
                command = [sys.executable, __file__, "--here", *sys.argv[1:]]
                done = subprocess.run(command, env={**os.environ, "TRITON_CACHE_DIR": cache}, text=True, check=True,
                                      stdout=subprocess.PIPE)
                found[case] = json.loads(done.stdout.splitlines()[-1])
    if options.out:
        options.out.write_text(json.dumps(found, indent=1))
    print("| cache | workload | first / second | slowest step | during it | late steps | during the first run |")
    print("|---|---|---|---|---|---|---|")
    for case, result in found.items():
        for row in result["rows"]:
            print(f"| {case} | {row['workload']} | {row['first_over_second']:.2f} | {row['slowest_step_ms']:.0f} ms | "
                  f"{_words(row['slowest_step'])} | {row['late_steps']} | {_words(row['first'])} |")
        print(f"{case}: {result['model']} on {result['device']}, ready in {result['ready_s']:.2f} s")


def _words(causes: dict[str, int]) -> str:
    return ", ".join(f"{count} {cause}" for cause, count in causes.items()) or "nothing"


if __name__ == "__main__":
    main()
