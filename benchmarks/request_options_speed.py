"""Time decoding with options that requests may add, in turn with the plain call, on a GPU.

    python benchmarks/request_options_speed.py [--model 0.6B] [--scale 0.25] [--runs 2] [--device cuda] [--out f.json]

The nano workload: temperature alone; with presence and frequency penalties; with the sampled token's log-probability;
with the 8 and the 32 likeliest tokens, raw and processed, without and with filters. Medians after a warm-up run each.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from options_speed import timed
from transformers import GenerationConfig
from workloads import QWEN3_SHAPES, make_workload, qwen3

from hf_paged import PagedGenerator

FILTERS: dict[str, Any] = {"top_p": 0.9, "top_k": 50}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"top_k": 0}, {}),
    "penalties": ({"top_k": 0}, {"presence_penalty": 0.5, "frequency_penalty": 0.2}),
    "logprobs": ({"top_k": 0}, {"logprobs": True}),
    "8 raw": ({"top_k": 0}, {"logprobs": "raw", "top_logprobs": 8}),
    "32 raw": ({"top_k": 0}, {"logprobs": "raw", "top_logprobs": 32}),
    "8 processed": ({"top_k": 0}, {"logprobs": 8}),
    "filters": (FILTERS, {}),
    "8 processed, filters": (FILTERS, {"logprobs": 8}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=QWEN3_SHAPES, default="0.6B")
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    work = make_workload("nano", args.scale)
    model = qwen3(args.model, torch.bfloat16 if args.device == "cuda" else torch.float32, args.device)
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with PagedGenerator(model, max_num_seqs=256, enable_prefix_caching=False) as generator:
        for turn in range(args.runs + 1):
            for name, (sampling, asked) in VARIANTS.items():
                configs = [GenerationConfig(max_new_tokens=n, do_sample=True, temperature=0.7, eos_token_id=-1,
                                            **sampling) for n in work.output_lengths]
                seconds = timed(lambda c=configs, a=asked: generator.generate(  # type: ignore[misc]
                    work.prompts, c, seed=0, use_tqdm=False, **a), args.device)
                if turn:
                    rates[name].append(sum(work.output_lengths) / seconds)
    found = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in found.items():
        print(f"{name:24} {rate:10.0f} tok/s  {rate / found['plain']:.2f}")
    if args.out:
        args.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
