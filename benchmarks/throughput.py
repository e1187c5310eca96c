"""Output tokens per second of `PagedGenerator` on a workload.

    python benchmarks/throughput.py --workload nano --model 0.6B [--runs 3] [--out figures.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
import transformers
import triton
from transformers import GenerationConfig
from workloads import QWEN3_SHAPES, WORKLOADS, Workload, qwen3

from hf_paged import PagedGenerator


def configs(workload: Workload) -> list[GenerationConfig]:
    sampling = {"do_sample": True, "temperature": workload.temperature, "top_k": 0} if workload.temperature else {}
    return [GenerationConfig(max_new_tokens=n, **sampling) for n in workload.output_lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="nano")
    parser.add_argument("--model", choices=sorted(QWEN3_SHAPES), default="0.6B")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]()
    model = qwen3(args.model, torch.bfloat16, args.device)
    rates = []
    start = time.perf_counter()
    with PagedGenerator(model) as generator:
        generator.generate([workload.prompts[0][:64]], max_new_tokens=4, use_tqdm=False)
        ready = time.perf_counter() - start
        for _ in range(args.runs):
            generator.engine.reset_prefix_cache()
            start = time.perf_counter()
            outputs = generator.generate(workload.prompts, configs(workload), use_tqdm=False)
            seconds = time.perf_counter() - start
            made = [len(c.token_ids) for c in outputs]
            assert made == workload.output_lengths, "every request must end with the tokens it asked for"
            rates.append(sum(made) / seconds)
        stats = generator.engine.stats()
    peak = torch.cuda.max_memory_allocated() / 2**30 if args.device == "cuda" else 0.0
    device = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    print(f"{args.workload} Qwen3-{args.model}: {statistics.median(rates):,.0f} tok/s "
          f"(runs: {', '.join(f'{r:,.0f}' for r in rates)}), {sum(made):,} output tokens, ready after "
          f"{ready:.1f} s, peak {peak:.1f} GiB, {stats.num_preemptions} preemptions, {stats.num_blocks} blocks; "
          f"{device}, torch {torch.__version__}, triton {triton.__version__}, transformers {transformers.__version__}")
    if args.out:
        figures = {"workload": args.workload, "model": args.model, "rates": rates, "ready": ready}
        args.out.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
