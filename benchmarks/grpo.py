"""Time a GRPO step of TRL by engine: rollout, log-probs, update; and the peak of the device's memory.

    python benchmarks/grpo.py [--models 0.6B 1.7B] [--engines ours vllm stock] [--warmup 3] [--steps 2] [--out DIR]
    python benchmarks/grpo.py --models tiny --device cpu --scale 0.02      # does it run? seconds, no figures to quote

TRL's defaults (fp32 weights under bf16 autocast, activation checkpointing, micro-batches of 8) for every engine, over
random weights of Qwen3's shapes: 8 prompts of 512 tokens, 16 samples of 512 tokens of each, no EOS, one optimizer step
for all. `stock` is transformers' generate, `ours` the same program after `hf_paged.install()`, `vllm` TRL with vLLM
colocated and asleep during the update (its weights synchronised before each rollout, and the log-probs computed again
that TRL needs to correct its rollouts). "log-probs" are those without gradients. Memory is all that the device has in
use, sampled every 10 ms. Means of `--steps` after `--warmup` steps. Each engine and model has a process.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from random_checkpoint import make_checkpoint, word_tokenizer
from run_all import versions
from workloads import QWEN3_SHAPES

HERE = Path(__file__).resolve().parent
ENGINES = ("ours", "vllm", "stock")
# vLLM as built for dense models: no flashinfer, one process, nothing sent home.
VLLM_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "VLLM_PLUGINS": "",
    "VLLM_HOST_IP": "127.0.0.1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
COLUMNS = ("model", "engine", "s a step", "rollout", "log-probs", "update", "rollout tok/s", "peak GiB", "ready s", "")


def write_checkpoint(model: str, folder: Path) -> None:
    """Random weights in bf16, and a tokenizer of the whole vocabulary: the words <pad>, <eos>, t2, t3, ..."""
    make_checkpoint(model, folder)
    word_tokenizer(model, unk_token="<pad>", padding_side="left").save_pretrained(folder)


def workload(scale: float) -> dict[str, int]:
    """What a step makes; `scale` below 1: fewer and shorter samples."""
    def scaled(count: int) -> int:
        return max(2, round(count * scale))

    return {"prompts": scaled(8), "samples": scaled(16), "prompt_tokens": scaled(512), "new_tokens": scaled(512)}


def measure(job: dict[str, Any], out: Path, limit: float, vllm_site: str | None) -> dict[str, Any]:
    """Figures of one engine and model, or "error"."""
    name = f"{job['engine']}-{job['model']}"
    asked, found, log = (out / f"{name}{end}" for end in (".job.json", ".figures.json", ".log"))
    asked.write_text(json.dumps(job))
    found.unlink(missing_ok=True)
    sites = [str(HERE.parent), os.environ.get("PYTHONPATH"), vllm_site if job["engine"] == "vllm" else None]
    path = os.pathsep.join(filter(None, sites))
    environment = VLLM_ENVIRONMENT | os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, str(HERE / "grpo_worker.py"), str(asked), str(found)],
                                   stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment)
    deadline = time.monotonic() + limit
    try:
        # vLLM's threads may outlive the figures, and its process with them.
        while process.poll() is None and time.monotonic() < deadline and not found.exists():
            time.sleep(0.1)
        late = process.poll() is None and not found.exists()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if found.exists():
        return json.loads(found.read_text())
    last = next((line.strip() for line in reversed(log.read_text().splitlines()) if line.strip()), "")
    return {"error": f"took longer than {limit:.0f} s" if late else f"exit {process.returncode}: {last}"[:300]}


def cells(row: dict[str, Any]) -> list[str]:
    start = [row["model"], row["engine"]]
    if "error" in row:
        return [*start, *[""] * 7, row["error"]]
    peaks = row["peak_gib"]
    most = max(peaks, key=lambda phase: peaks[phase])
    notes = [f"peak in the {most}"]
    notes += [f"weight sync {row['weight sync']:.2f} s"] if row["weight sync"] else []
    notes += [f"{count} {path}" for path, count in row.get("paths", {}).items()] + row.get("reasons", [])
    return [*start, *(f"{row[name]:.2f}" for name in ("step", "rollout", "log-probs", "update")),
            f"{row['rollout tok/s']:,.0f}", f"{peaks[most]:.1f}", f"{row['ready_s']:.0f}", ", ".join(notes)]


def comparisons(rows: list[dict[str, Any]]) -> list[str]:
    """Ours against each other engine of a model: steps, and peak memory."""
    lines = []
    for ours in rows:
        for other in rows:
            if ours["engine"] == "ours" != other["engine"] and ours["model"] == other["model"] \
                    and "error" not in ours and "error" not in other:
                peak, theirs = (max(row["peak_gib"].values()) for row in (ours, other))
                lines.append(f"{ours['model']}: ours is {other['step'] / ours['step']:.2f} times as fast a step as "
                             f"{other['engine']}, with {peak / theirs:.0%} of its peak memory")
    return lines


def print_table(report: dict[str, Any]) -> None:
    lines = [list(COLUMNS), *map(cells, report["rows"])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(f"A GRPO step, {report['machine']}, {report['date']}: {report['workload']}")
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print("\n".join(comparisons(report["rows"])), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(QWEN3_SHAPES), default=["0.6B"])
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="that count")
    parser.add_argument("--micro-batch", type=int, default=8, help="rows of a forward of the update")
    parser.add_argument("--lora", action="store_true", help="train LoRA of rank 16 over all linear layers")
    parser.add_argument("--release", action="store_true", help="ours: give the KV pool back before the update")
    parser.add_argument("--sleep-level", type=int, choices=[1, 2], default=2, help="vLLM's; TRL's own is 2")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds an engine may take")
    parser.add_argument("--scale", type=float, default=1.0, help="below 1: fewer and shorter samples")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpoints", type=Path, help="a folder to keep them in for another call")
    parser.add_argument("--vllm-site", help="a folder with vLLM's packages, for that engine alone")
    parser.add_argument("--keep", action="store_true", help="rows of another call that --out has stay in the report")
    parser.add_argument("--out", type=Path, default=Path("figures"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "machine": machine,
        "versions": versions(), "command": sys.argv, "workload": workload(args.scale), "rows": [],
    }
    if args.keep and (args.out / "grpo.json").exists():
        report["rows"] = json.loads((args.out / "grpo.json").read_text())["rows"]
    with tempfile.TemporaryDirectory() as scratch:
        for model in args.models:
            checkpoint = (args.checkpoints or Path(scratch)) / model
            if not (checkpoint / "tokenizer.json").exists():
                write_checkpoint(model, checkpoint)
            for engine in args.engines:
                job = {
                    "engine": engine, "model": model, "checkpoint": str(checkpoint), "folder": f"{scratch}/trainer",
                    "device": args.device, "warmup": args.warmup, "steps": args.steps, "lora": args.lora,
                    "micro_batch": args.micro_batch, "release": args.release, "sleep_level": args.sleep_level,
                    **report["workload"],
                }
                figures = measure(job, args.out, args.limit, args.vllm_site)
                report["rows"].append({"model": model, "engine": engine, **figures})
                (args.out / "grpo.json").write_text(json.dumps(report, indent=1) + "\n")
                print_table(report)


if __name__ == "__main__":
    main()
