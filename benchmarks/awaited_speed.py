"""Measure what awaited calls and metrics cost: one `generate` of all prompts, a task for each, streams, metrics.

    python benchmarks/awaited_speed.py [--model 0.6B] [--tasks 1024] [--new 128] [--runs 3] [--device cuda] [--out F]

Random weights of Qwen3's shapes; prompts of 16 to 64 random tokens, greedy, no EOS. Output tokens a second, medians of
runs in turn after one to warm up. Metrics stay on once they were switched on, so those runs come last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from workloads import QWEN3_SHAPES, qwen3

from hf_paged import PagedGenerator
from hf_paged.observe.registry import watch


def ways(generator: PagedGenerator, prompts: list[list[int]], new: int) -> dict[str, Callable[[], object]]:
    async def gather() -> None:
        await asyncio.gather(*[generator.agenerate(prompt, max_new_tokens=new) for prompt in prompts])

    async def stream(prompt: list[int]) -> None:
        async for _ in generator.astream(prompt, max_new_tokens=new):
            pass

    async def streams() -> None:
        await asyncio.gather(*[stream(prompt) for prompt in prompts])

    return {
        "generate": lambda: generator.generate(prompts, max_new_tokens=new, use_tqdm=False),
        "agenerate by task": lambda: asyncio.run(gather()),
        "stream": lambda: list(generator.stream(prompts, max_new_tokens=new)),
        "astream by task": lambda: asyncio.run(streams()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(QWEN3_SHAPES), default="0.6B")
    parser.add_argument("--tasks", type=int, default=1024)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = qwen3(args.model, torch.bfloat16 if args.device == "cuda" else torch.float32, args.device)
    model.generation_config.eos_token_id = None
    r = random.Random(0)
    prompts = [[r.randint(1, 10000) for _ in range(r.randint(16, 64))] for _ in range(args.tasks)]
    seconds: dict[str, list[float]] = {}
    blocks = None if args.device == "cuda" else args.tasks * 16
    with PagedGenerator(model, max_num_seqs=args.tasks, num_blocks=blocks, enable_prefix_caching=False,
                        max_num_batched_tokens=max(8192, args.tasks)) as generator:
        for with_metrics in (False, True):
            if with_metrics:
                watch(generator.engine)
            for turn in range(args.runs + 1):
                for name, run in ways(generator, prompts, args.new).items():
                    start = time.perf_counter()
                    run()
                    if turn:
                        key = f"{name}, metrics" if with_metrics else name
                        seconds.setdefault(key, []).append(time.perf_counter() - start)
    rates = {name: args.tasks * args.new / statistics.median(times) for name, times in seconds.items()}
    for name, rate in rates.items():
        plain = name.removesuffix(", metrics")
        base = plain if plain != name else "generate"
        print(f"{name:28} {rate:10,.0f} tok/s, {rate / rates[base]:.3f} of {base}")
    if args.out:
        args.out.write_text(json.dumps(rates, indent=1))


if __name__ == "__main__":
    main()
