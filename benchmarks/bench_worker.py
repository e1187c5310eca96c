"""Run rows of one model on one engine, in a process of its own that run_all.py starts and may lose.

    python benchmarks/bench_worker.py job.json events.jsonl

An event is a line of JSON: {"event": "loaded"}, then {"event": "begin", "row": i} and {"event": "row", "row": i, ...}
for every row. A row that raises carries "error" and ends the process; the rest is for another one.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from bench_engines import ENGINES, UNDER_AUTOCAST, Engine, dtype_of
from floors import floor, measure_ceilings
from workloads import make_workload, qwen3_config


def measure(engine: Engine, job: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """Figures of one row. The first run of the row stands by itself; warm-up runs do not count into the median."""
    workload, cuda = make_workload(row["workload"], job["scale"]), job["device"] == "cuda"
    if cuda and engine.holds_model:
        torch.cuda.reset_peak_memory_stats()
    ready = engine.open(workload, row["overrides"])
    wanted = [n for n in workload.output_lengths for _ in range(workload.samples)]
    seconds: list[float] = []
    begin, warmup = time.perf_counter(), job["warmup"]
    # A slow engine has its say once: the budget trims runs, warm-up first.
    while len(seconds) < warmup + job["runs"]:
        if seconds and time.perf_counter() - begin + seconds[-1] > job["budget"]:
            break
        engine.prepare(workload)
        start = time.perf_counter()
        made = engine.run(workload)
        seconds.append(time.perf_counter() - start)
        assert made == wanted, "every request must end with the tokens it was asked for"
        if len(seconds) == warmup == job["warmup"]:
            waited = time.perf_counter()
            warmup += engine.settle()
            begin += time.perf_counter() - waited
    counted = seconds[warmup:] or seconds[-1:]
    rates = [workload.output_tokens / s for s in counted]
    least = floor(workload, qwen3_config(job["model"]), dtype_of(job["device"]).itemsize, job["ceilings"])
    rate = statistics.median(rates)
    figures: dict[str, Any] = {
        "tok_s": rate, "runs": rates, "first_run": workload.output_tokens / seconds[0], "ready_s": ready,
        "requests": workload.num_requests, "output_tokens": workload.output_tokens,
        "of_floor": rate * least.seconds / workload.output_tokens,
        "of_floor_unshared": rate * least.seconds_unshared / workload.output_tokens,
        "floor_tok_s": workload.output_tokens / least.seconds, "floor_s": least._asdict(), "stats": engine.stats(),
    }
    if cuda:
        free, total = torch.cuda.mem_get_info()
        # What the device has in use: an engine may have processes, graphs and caches that torch's statistics leave out.
        figures["peak_gib"] = (total - free) / 2**30
    else:
        figures["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return figures


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    with Path(sys.argv[2]).open("a", buffering=1) as events:

        def tell(event: str, **fields: Any) -> None:
            events.write(json.dumps({"event": event, **fields}) + "\n")

        if job["engine"] == "ceilings":
            tell("row", row=0, **measure_ceilings(job["device"]))
            return
        engine = (ENGINES | UNDER_AUTOCAST)[job["engine"]](job["model"], job["device"])
        tell("loaded")
        for row in job["rows"]:
            tell("begin", row=row["row"])
            try:
                with engine.around():
                    figures = measure(engine, job, row)
            except Exception as error:
                traceback.print_exc()
                figures = {"error": f"{type(error).__name__}: {error}"[:300]}
            tell("row", row=row["row"], **figures)
            if "error" in figures:
                sys.exit(1)  # whatever it left behind (a broken CUDA context, say) is not for the next row
        engine.close()


if __name__ == "__main__":
    main()
