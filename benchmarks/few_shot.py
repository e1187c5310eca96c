"""Measure a few-shot evaluation as lm-eval runs it: `generate_until`, 5 shots, hundreds of requests on one prefix.

    python benchmarks/few_shot.py [--model 0.6B] [--requests 384] [--batch 128] [--runs 2] [--engines stock ours]

Random weights of Qwen3's shapes and a tokenizer of one token a word; 5 shots of 200 tokens, questions of 24 to 64,
128 new ones, greedy. lm-eval's `hf` model with its own stop criterion, which no random answer meets, over the model as
it is (`stock`), enabled (`ours`) and enabled with `group_prefixes=False` (`ungrouped`). Requests a second, medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks.manager import TaskManager
from random_checkpoint import word_tokenizer
from workloads import QWEN3_SHAPES, qwen3, qwen3_config

import hf_paged

SHOTS, SHOT_TOKENS, NEW_TOKENS = 5, 200, 128
ENGINES: dict[str, dict[str, Any] | None] = {"stock": None, "ours": {}, "ungrouped": {"group_prefixes": False}}


def task(requests: int, max_word: int) -> dict[str, Any]:
    """A task of lm-eval whose shots are the same for all requests."""
    random.seed(0)

    def words(count: int) -> str:
        return " ".join(f"t{random.randrange(2, max_word)}" for _ in range(count))

    shots = [{"question": words(SHOT_TOKENS // 2), "answer": words(SHOT_TOKENS // 2)} for _ in range(SHOTS)]
    asked = [{"question": words(random.randint(24, 64)), "answer": "t2"} for _ in range(requests)]
    return {
        "task": "few_shot", "output_type": "generate_until", "num_fewshot": SHOTS, "test_split": "test",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(asked)}, "target_delimiter": " ",
        "fewshot_config": {"sampler": "first_n", "samples": shots}, "fewshot_delimiter": " ",
        "doc_to_text": "{{question}}", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["<never>"], "max_gen_toks": NEW_TOKENS, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }


def evaluate(lm: Any, asked: dict[str, Any], tasks: TaskManager) -> list[Any]:
    """Responses of all requests."""
    result = evaluator.simple_evaluate(lm, tasks=[dict(asked)], bootstrap_iters=0, task_manager=tasks)
    return [sample["resps"] for sample in result["samples"]["few_shot"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(QWEN3_SHAPES), default="0.6B")
    parser.add_argument("--requests", type=int, default=384)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    evaluator.add_env_info = lambda storage: None  # it runs pip and git
    model = qwen3(args.model, torch.bfloat16 if args.device == "cuda" else torch.float32, args.device)
    tokenizer, tasks = word_tokenizer(args.model), TaskManager(include_defaults=False)
    asked = task(args.requests, qwen3_config(args.model).vocab_size)
    rates: dict[str, float] = {}
    figures: dict[str, Any] = {"model": args.model, "requests_s": rates}
    for name in args.engines:
        if (config := ENGINES[name]) is not None:
            hf_paged.enable(model, **config)
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=args.batch, max_length=4096)
        seconds = []
        for _ in range(args.runs + 1):
            start = time.perf_counter()
            responses = evaluate(lm, asked, tasks)
            seconds.append(time.perf_counter() - start)
        assert len(responses) == args.requests
        rates[name] = args.requests / statistics.median(seconds[1:])
        print(f"{args.model} {name}: {rates[name]:.1f} requests/s, first {seconds[0]:.1f} s", flush=True)
        if config is not None:
            stats = hf_paged.get_engine(model).stats()
            figures[name] = {"calls": {path: counted.num_calls for path, counted in stats.calls.items()},
                             "prefix_cache_hits": stats.prefix_cache_hits}
            print(f"  {figures[name]}", flush=True)
            hf_paged.disable(model)
    for other in set(rates) - {"ours"}:
        if "ours" in rates:
            print(f"{args.model}: ours is {rates['ours'] / rates[other]:.2f} times as fast as {other}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
