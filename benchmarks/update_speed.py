"""Measure what updates of weights under running requests, and log-probabilities, cost on a GPU.

    python benchmarks/update_speed.py [--model 0.6B] [--scale 0.5] [--every 0.3] [--out f.json]

Tokens per second of the nano workload (random weights, bf16): as it is; with an update by another thread every so many
seconds that writes all weights in place, keys and values kept or computed again; with ``logprobs`` of each kind.
Besides: milliseconds from entering `weight_update` to leaving it where the block does nothing, while requests run, and
microseconds of `token_log_probs` by CUDA-graph replay beside the time that a read of the logits takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from kernel_speed import ceilings, graph_time
from transformers import GenerationConfig
from workloads import make_workload, qwen3

from hf_paged import PagedGenerator
from hf_paged.sampling.log_probs import token_log_probs


def run(generator: PagedGenerator, workload: Any, every: float | None = None, empty: bool = False,
        **options: Any) -> dict[str, float]:
    """Tokens per second, the number of updates, and how long one took, of one run."""
    engine, parameters = generator.engine, list(generator.model.parameters())
    configs = [GenerationConfig(max_new_tokens=count, do_sample=True, temperature=0.6, top_k=0)
               for count in workload.output_lengths]
    over, took = threading.Event(), []

    def update() -> None:
        while not over.wait(every):
            start = time.perf_counter()
            with torch.no_grad(), engine.weight_update():
                if not empty:
                    torch._foreach_mul_(parameters, 1.0)
            took.append(time.perf_counter() - start)

    thread = threading.Thread(target=update)
    if every is not None:
        thread.start()
    start = time.perf_counter()
    try:
        made = generator.generate(workload.prompts, configs, seed=1, use_tqdm=False, **options)
    finally:
        seconds = time.perf_counter() - start
        over.set()
        if every is not None:
            thread.join()
    generator.engine.reset_prefix_cache()
    tokens = sum(len(one.token_ids) for one in made)
    return {"tok/s": tokens / seconds, "updates": len(took),
            "ms an update": 1e3 * statistics.median(took) if took else 0.0}


def kernel(rows: int, vocab: int, copy: float) -> tuple[float, float]:
    """us of `token_log_probs`, and of a read of its logits."""
    logits = [torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    tokens = torch.randint(0, vocab, (rows,), device="cuda")
    out = torch.empty(rows, device="cuda")
    seconds = graph_time([lambda x=x: token_log_probs(x, tokens, out) for x in logits], 7)
    return seconds * 1e6, 2 * rows * vocab / copy / 1e12 * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B")
    parser.add_argument("--scale", type=float, default=0.5)
    parser.add_argument("--every", type=float, default=0.3)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    workload = make_workload("nano", arguments.scale)
    rows: dict[str, Any] = {}
    with PagedGenerator(qwen3(arguments.model, torch.bfloat16, "cuda")) as generator:
        run(generator, workload)  # captures the graphs
        run(generator, workload, logprobs="raw")
        run(generator, workload, logprobs="processed")
        every = arguments.every
        cases: dict[str, dict[str, Any]] = {
            "as it is": {}, "empty blocks": {"every": every, "empty": True, "on_weight_change": "keep"},
            "keep": {"every": every, "on_weight_change": "keep"},
            "recompute": {"every": every, "on_weight_change": "recompute"},
            "logprobs raw": {"logprobs": "raw"}, "logprobs processed": {"logprobs": "processed"}, "as it is again": {},
        }
        for name, options in cases.items():
            rows[name] = run(generator, workload, **options)
    copy = ceilings()["copy_tb_s"]
    for name, row in rows.items():
        updates = f"{row['updates']:3.0f} updates, {row['ms an update']:7.2f} ms each" if row["updates"] else ""
        print(f"{name:20} {row['tok/s']:9,.0f} tok/s  {updates}")
    for count in (1, 8, 64, 256):
        took, read = kernel(count, 151_936, copy)
        rows[f"kernel {count}"] = {"us": took, "read": read}
        print(f"token_log_probs {count:4} rows {took:7.1f} us, reading the logits {read:6.1f} us")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
