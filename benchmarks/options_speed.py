"""Measure what options cost on a GPU: edited logits on the nano workload, and lockstep against stock generate.

    python benchmarks/options_speed.py [--model 0.6B] [--runs 3] [--scale 1.0] [--device cuda] [--out f.json]

Options: tokens per second with temperature 0.7 alone, and with more options, in turn (limit for "all": 1.10 times the
time of plain temperature). Lockstep: 64 ragged prompts of 32 to 256 tokens, 128 new ones, one user processor, greedy,
by the enabled model and by stock generate (at least 3 times as fast). Medians after a warm-up run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from workloads import QWEN3_SHAPES, make_workload, qwen3

import hf_paged

FILTERS: dict[str, Any] = {"top_p": 0.9, "top_k": 50}
VARIANTS: dict[str, dict[str, Any]] = {
    "temperature": {"top_k": 0},
    "filters": FILTERS,
    "repetition_penalty": {"top_k": 0, "repetition_penalty": 1.1},
    "all": {**FILTERS, "repetition_penalty": 1.1},
}


class Nudge(LogitsProcessor):
    """Stands for a user's processor: a few device operations over the scores."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 9] += 0.1 * (input_ids[:, -1] % 2)
        return scores


def timed(run: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def options(model: Any, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of a nano run by variant."""
    work = make_workload("nano", args.scale)
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with hf_paged.PagedGenerator(model, max_num_seqs=256, enable_prefix_caching=False) as generator:
        for turn in range(args.runs + 1):
            for name, extra in VARIANTS.items():
                base = {"do_sample": True, "temperature": 0.7, **extra}
                configs = [GenerationConfig(max_new_tokens=n, **base) for n in work.output_lengths]
                once = timed(lambda configs=configs: generator.generate(work.prompts, configs, use_tqdm=False),  # type: ignore[misc]
                             args.device)
                if turn:
                    seconds[name].append(once)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, value in medians.items():
        rate, against = work.output_tokens / value, value / medians["temperature"]
        print(f"{name}: {rate:,.0f} tok/s, {against:.3f} x the time of temperature alone", flush=True)
    return medians


def lockstep(model: Any, args: argparse.Namespace) -> dict[str, float]:
    """Median seconds of the call by path."""
    random.seed(0)
    count, width, new = max(2, int(64 * args.scale)), max(8, int(256 * args.scale)), max(4, int(128 * args.scale))
    lengths = [random.randint(max(1, width // 8), width) for _ in range(count)]
    ids = torch.randint(1, 10000, (count, width), device=args.device)
    mask = (torch.arange(width) >= width - torch.tensor(lengths)[:, None]).long().to(args.device)
    call: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": new, "do_sample": False,
                            "pad_token_id": 0, "logits_processor": LogitsProcessorList([Nudge()])}
    medians = {}
    for name in ("stock", "lockstep"):
        if name == "lockstep":
            hf_paged.enable(model, strict=True)
        times = [timed(lambda: model.generate(**call), args.device) for _ in range(args.runs + 1)]
        medians[name] = statistics.median(times[1:])
        print(f"{name}: {count * new / medians[name]:,.0f} tok/s", flush=True)
    hf_paged.disable(model)
    print(f"lockstep is {medians['stock'] / medians['lockstep']:.2f} times as fast as stock", flush=True)
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(QWEN3_SHAPES), default="0.6B")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = qwen3(args.model, torch.bfloat16 if args.device == "cuda" else torch.float32, args.device)
    figures = {"lockstep": lockstep(model, args), "options": options(model, args)}
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
