"""Compare a greedy `model.generate` of 64 new tokens with stock's on a CPU, one row at a time.

    python benchmarks/single_cpu.py [--models tiny 26M 0.6B] [--prompts 16 256] [--pairs 20] [--threads 1] [--out FILE]

tiny is examples/models/tiny-qwen3; 26M (millions of parameters) and 0.6B are Qwen3 shapes with random weights; all are
fp32. Stock runs on a model of its own over the same weights. The two take turns in one process, each first every other
time; both calls of a pair get the same prompt, which no other pair has, so that the prefix cache finds nothing. Each
figure is the median over the pairs of stock's time over hf_paged's (above 1: hf_paged is faster), for the clock on the
wall and for the CPU time of the process; where others use the machine, the ratio of the fastest calls' CPU times is
the steadiest. Tokens have to agree.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from workloads import qwen3

import hf_paged

NEW = 64
TINY = Path(__file__).parent.parent / "examples/models/tiny-qwen3"


def make_model(name: str) -> Any:
    if name == "tiny":
        return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    return qwen3(name, torch.float32, "cpu")


def twin_of(model: Any) -> Any:
    """A stock model over the very same tensors."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def measure(models: dict[str, Any], prompt: int, pairs: int) -> dict[str, float]:
    """Ratios of a prompt of this length, and milliseconds a call."""
    times: dict[str, list[tuple[float, ...]]] = {name: [] for name in models}
    vocab = models["stock"].config.vocab_size
    for turn in range(-1, pairs):
        ids, tokens = torch.randint(1, vocab, (1, prompt)), []
        for name in sorted(models, reverse=bool(turn % 2)):
            start = clocks()
            tokens.append(models[name].generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW,
                eos_token_id=2, pad_token_id=0,
            ))
            if turn >= 0:
                times[name].append(tuple(b - a for a, b in zip(start, clocks(), strict=True)))
        if not torch.equal(*tokens):
            print(f"tokens differ after {int((tokens[0] == tokens[1]).long().cumprod(1).sum()) - prompt}")
    ratios = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(times["stock"], times["paged"], strict=True)]
    wall, cpu = (statistics.median(column) for column in zip(*ratios, strict=True))
    least = {name: min(cpu for _, cpu in taken) for name, taken in times.items()}
    found = {"wall ratio": wall, "cpu ratio": cpu, "ratio of the fastest": least["stock"] / least["paged"]}
    for name, taken in times.items():
        found[f"{name} ms"] = statistics.median(seconds for seconds, _ in taken) * 1e3
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["tiny", "26M", "0.6B"])
    parser.add_argument("--prompts", nargs="+", type=int, default=[16, 256])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, fp32, {args.threads} threads")
    results = {}
    for name in args.models:
        model = make_model(name)
        models = {"stock": twin_of(model), "paged": hf_paged.enable(model, strict=True)}
        for prompt in args.prompts:
            key = f"{name}, {prompt} tokens"
            results[key] = measure(models, prompt, args.pairs)
            print(key + ": " + ", ".join(f"{what} {value:.3f}" for what, value in results[key].items()), flush=True)
        hf_paged.disable(model)
    if args.out:
        args.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
