"""Time one model over several GPUs: seconds to ready from a checkpoint, tokens per second of the workloads.

    python benchmarks/tensor_parallel.py --model 8B --size 2 [--workloads nano single] [--folder /dev/shm/qwen3-8B]
                                         [--runs 1] [--warmup 3] [--options '{"top_k": 50}'] [--out figures.json]
                                         [field=value of PagedConfig ...]

The checkpoint has random weights and is made where it is not there yet. "ready" is from the call of `from_pretrained`
to its return: processes started, weights loaded, KV pool made; "first token" comes on top.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from random_checkpoint import make_checkpoint
from workloads import QWEN3_SHAPES, WORKLOADS, Workload, generation_configs, make_workload

from hf_paged import PagedGenerator


def run(generator: PagedGenerator, workload: Workload, options: dict[str, Any]) -> tuple[float, list[list[int]]]:
    """Seconds, and the tokens made."""
    generator.engine.reset_prefix_cache()
    start = time.perf_counter()
    made = generator.generate(workload.prompts, generation_configs(workload), use_tqdm=False, seed=0, **options)
    return time.perf_counter() - start, [completion.token_ids for completion in made]


def measure(generator: PagedGenerator, name: str, args: argparse.Namespace) -> dict[str, Any]:
    workload = make_workload(name, args.scale)
    seconds = []
    for _ in range(args.warmup + args.runs):
        took, made = run(generator, workload, args.options)
        assert [len(tokens) for tokens in made] == [n for n in workload.output_lengths for _ in range(workload.samples)]
        seconds.append(took)
    rates = [workload.output_tokens / took for took in seconds[args.warmup :]]
    return {"workload": name, "tok_s": statistics.median(rates), "runs": rates,
            "first_run": workload.output_tokens / seconds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(QWEN3_SHAPES), default="8B")
    parser.add_argument("--size", type=int, default=2)
    parser.add_argument("--workloads", nargs="*", choices=list(WORKLOADS), default=["nano", "single"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--options", type=json.loads, default={}, help="of generate, over the workloads' own; JSON")
    parser.add_argument("--out", type=Path)
    parser.add_argument("fields", nargs="*", help="fields of PagedConfig, name=value")
    args = parser.parse_args()
    folder = args.folder or Path("/dev/shm") / f"qwen3-{args.model}"
    report: dict[str, Any] = {
        "model": args.model, "size": args.size, "options": args.options, "torch": torch.__version__,
    }
    if torch.cuda.is_available():
        report["machine"] = torch.cuda.get_device_name()
    if not (folder / "model.safetensors.index.json").exists():
        report["made_s"] = make_checkpoint(args.model, folder)
        print(f"checkpoint made in {report['made_s']:.1f} s", flush=True)
    fields = {name: json.loads(value) for name, _, value in (field.partition("=") for field in args.fields)}
    start = time.perf_counter()
    with PagedGenerator.from_pretrained(str(folder), tensor_parallel_size=args.size, **fields) as generator:
        report["ready_s"] = time.perf_counter() - start
        generator.generate([[1, 2, 3]], max_new_tokens=1, use_tqdm=False)
        report["first_token_s"] = time.perf_counter() - start
        report["blocks"] = generator.engine.stats().num_blocks
        print(f"{args.model} over {args.size}: ready {report['ready_s']:.1f} s, first token "
              f"{report['first_token_s']:.1f} s, {report['blocks']} blocks", flush=True)
        report["rows"] = []
        for name in args.workloads:
            row = measure(generator, name, args)
            report["rows"].append(row)
            print(f"{args.model} over {args.size}: {name} {row['tok_s']:,.1f} tok/s (first run "
                  f"{row['first_run']:,.1f})", flush=True)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
