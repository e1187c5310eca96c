"""Run every workload on every engine, and write one table, figures.json and figures.png.

    python benchmarks/run_all.py [--workloads nano single ...] [--models 0.6B 4B 8B] [--batches 1 8 64 512 1024]
                                 [--engines ours stock generate_batch vllm nano-vllm] [--ab overlap ... | --ab all]
                                 [--autocast]
                                 [--runs 3] [--warmup 3] [--budget 60] [--limit 300] [--out DIR]
    python benchmarks/run_all.py --plot-from DIR/figures.json      # draw where matplotlib is, measure elsewhere
    python benchmarks/report.py DIR/figures.json                   # make docs/performance.md of it
    python benchmarks/run_all.py --models tiny --device cpu --scale 0.02 --batches 4     # does it run? minutes: none

A row is the median of `--runs` after `--warmup` runs in one process (behind three, steps that come once a run have
their graphs); `--budget` seconds a row trim them for slow engines. Kernels that the last warm-up compiled in the
background are waited for, and used by one more run. "ready" is from the model in memory (vLLM, nano-vllm: from their
start) to the first token, where an engine was started for a row; "first run" is the rate of the row's very first run.
"of floor": see floors.py.
`--ab` repeats our rows with one technique off (techniques.py lists them), `--autocast` ours and stock's with fp32
weights under bf16 autocast. What compiling kernels side by side brings is seen in processes of their own
(first_token.py --one-by-one), and what guesses bring where text repeats (speculation_speed.py).
Each engine and model has a process; one that dies or takes longer than `--limit` for a row costs that row, and the rest
goes on in a new one.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bench_report
import torch
from bench_engines import ENGINES, MODULES, UNDER_AUTOCAST
from techniques import switches
from workloads import QWEN3_SHAPES, WORKLOADS

HERE = Path(__file__).resolve().parent
VERSIONS = ("torch", "transformers", "triton", "numpy", "vllm", "nano-vllm", "flash-attn")


def engines(args: argparse.Namespace) -> list[str]:
    """Those asked for, each followed by itself under autocast where that is asked for and it knows it."""
    named = [(name, f"{name}-autocast") for name in args.engines]
    return [one for name, cast in named for one in (name, cast)
            if one == name or (args.autocast and cast in UNDER_AUTOCAST)]


def make_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    names = [*args.workloads, *(f"batch {n}" for n in args.batches)]
    off = switches()
    techniques = list(off) if args.ab == ["all"] else args.ab
    rows = []
    for model in args.models:
        for engine in engines(args):
            variants: list[dict[str, Any]] = [{}]
            variants += [off[name] for name in techniques] if engine == "ours" else []
            rows += [{"workload": workload, "model": model, "engine": engine, "overrides": overrides}
                     for overrides in variants for workload in names]
    return [{"row": i, **row} for i, row in enumerate(rows)]


def run_job(job: dict[str, Any], folder: Path, limit: float) -> dict[int, dict[str, Any]]:
    """Figures (or "error") of every row of a job, in as many processes as it takes."""
    results: dict[int, dict[str, Any]] = {}
    todo = list(job["rows"])
    while todo:
        done, current, reason = _run_process({**job, "rows": todo}, folder, limit)
        results |= done
        if reason is None:
            break
        if current is None and not done:  # it did not even load: the other rows would meet the same
            return results | {row["row"]: {"error": reason} for row in todo}
        if current is not None:
            results[current] = {"error": reason}
        todo = [row for row in todo if row["row"] not in results]
    return results


def _run_process(job: dict[str, Any], folder: Path, limit: float) -> tuple[dict, int | None, str | None]:
    """(rows that ended, row in progress or None, why the process failed or None)."""
    name = f"{job['engine']}-{job['model']}"
    events, log = folder / f"{name}.jsonl", folder / f"{name}.log"
    events.write_text("")
    (folder / f"{name}.json").write_text(json.dumps(job))
    command = [sys.executable, str(HERE / "bench_worker.py"), str(folder / f"{name}.json"), str(events)]
    path = os.pathsep.join(filter(None, [str(HERE.parent), os.environ.get("PYTHONPATH")]))
    with log.open("a") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                                   env={**os.environ, "PYTHONPATH": path})
    results: dict[int, dict[str, Any]] = {}
    current: int | None = None
    seen, deadline, ended = 0, time.monotonic() + limit, False
    try:
        while True:
            lines = events.read_text().splitlines(keepends=True)
            for line in [line for line in lines[seen:] if line.endswith("\n")]:
                event = json.loads(line)
                seen, deadline = seen + 1, time.monotonic() + limit
                kind, row = event.pop("event"), event.pop("row", None)
                current = row if kind == "begin" else None
                if kind == "row":
                    results[row] = event
                    print(f"{name}: row {row} {event.get('error') or _rate(event)}", flush=True)
            if ended:
                break
            if time.monotonic() > deadline:
                return results, current, f"took longer than {limit:.0f} s"
            ended = process.poll() is not None  # and then once more what it wrote last
            if not ended:
                time.sleep(0.2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # an engine may have processes of its own
        process.wait()
    if process.returncode == 0:
        return results, None, None
    last = next((line.strip() for line in reversed(log.read_text().splitlines()) if line.strip()), "")
    return results, current, f"exit {process.returncode}: {last}"[:300]


def _rate(event: dict[str, Any]) -> str:
    return f"{event['tok_s']:,.0f} tok/s" if "tok_s" in event else json.dumps(event)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in VERSIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def commit() -> str | None:
    """Return the commit of the working tree, followed by "-dirty" if files differ; None without git."""
    try:
        found = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=HERE, check=True,
                               text=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    rows = make_rows(args)
    cuda = args.device == "cuda"
    machine = torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "machine": machine,
        "versions": versions(), "command": sys.argv, "commit": args.commit or commit(),
        "settings": {"runs": args.runs, "warmup": args.warmup, "budget": args.budget, "scale": args.scale},
    }
    shared = {"device": args.device, "scale": args.scale, "runs": args.runs, "warmup": args.warmup,
              "budget": args.budget}
    measured = run_job({"engine": "ceilings", "model": "any", "rows": [{"row": 0}], **shared}, args.out, args.limit)[0]
    if "error" in measured:
        raise SystemExit(f"ceilings: {measured['error']}")
    report["ceilings"] = measured
    results: dict[int, dict[str, Any]] = {}
    for model in args.models:
        for engine in engines(args):
            mine = [row for row in rows if (row["model"], row["engine"]) == (model, engine)]
            if importlib.util.find_spec(MODULES[engine]) is None:
                results |= {row["row"]: {"error": "not installed"} for row in mine}
                continue
            job = {"engine": engine, "model": model, "ceilings": measured, "rows": mine, **shared}
            results |= run_job(job, args.out, args.limit)
    report["rows"] = [{**row, **results[row["row"]]} for row in rows]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 64, 512, 1024], help="uniform batches")
    parser.add_argument("--models", nargs="+", choices=list(QWEN3_SHAPES), default=["0.6B"])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--ab", nargs="+", choices=["all", *switches()], default=[], help="our rows, too, with one off")
    parser.add_argument("--autocast", action="store_true", help="also fp32 weights under bf16 autocast")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--budget", type=float, default=60.0, help="seconds of runs a row")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds a row may take in all")
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: fewer and shorter requests")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="for the report; without it what git says of the working tree")
    parser.add_argument("--out", type=Path, default=Path("figures"))
    parser.add_argument("--plot-from", type=Path, help="measure nothing: table and plot of this figures.json")
    args = parser.parse_args()
    if args.plot_from:
        report, png = json.loads(args.plot_from.read_text()), args.plot_from.with_suffix(".png")
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        for old in args.out.glob("*.log"):
            old.unlink()
        report, png = measure(args), args.out / "figures.png"
        (args.out / "figures.json").write_text(json.dumps(report, indent=1) + "\n")
    bench_report.print_table(report)
    if bench_report.plot(report, png):
        print(f"plot: {png}")
    else:
        print("no plot: matplotlib is not installed; --plot-from figures.json draws it where it is")


if __name__ == "__main__":
    main()
