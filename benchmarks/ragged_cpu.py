"""Compare stock generate, transformers' generate_batch and hf_paged on 32 ragged requests, in one run on a CPU.

    python benchmarks/ragged_cpu.py [--rounds 3] [--out results.json]

A random Qwen3 of about 50 M parameters in fp32; prompts of 16 to 256 tokens, outputs of 16 to 128, greedy, EOS unset.
Stock runs one left-padded batch; it and generate_batch know one output length a call, so both run to the longest, and
only the wanted tokens count. Figures of a shared machine are noisy: the three run in turn, round by round, and the
ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from hf_paged import PagedGenerator

NUM_REQUESTS = 32
Request = tuple[list[int], int]  # prompt, output tokens


def make_model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=24576, hidden_size=512, intermediate_size=1536, num_hidden_layers=12,
                         num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=1024,
                         tie_word_embeddings=True)
    return Qwen3ForCausalLM(config).eval()


def make_requests() -> list[Request]:
    random.seed(0)
    requests = []
    for _ in range(NUM_REQUESTS):
        length = random.randint(16, 256)
        requests.append(([random.randint(0, 10000) for _ in range(length)], random.randint(16, 128)))
    return requests


def stock_generate(model: Qwen3ForCausalLM, requests: list[Request]) -> list[list[int]]:
    longest = max(len(prompt) for prompt, _ in requests)
    ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in requests])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in requests])
    most = max(count for _, count in requests)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0)
    return [row[longest : longest + count].tolist() for row, (_, count) in zip(out, requests, strict=True)]


def generate_batch(model: Qwen3ForCausalLM, requests: list[Request]) -> list[list[int]]:
    # One output length a call is all that generate_batch takes, so it too runs to the longest.
    most = max(count for _, count in requests)
    config = GenerationConfig(max_new_tokens=most, do_sample=False, eos_token_id=-1, pad_token_id=0)
    outputs = model.generate_batch([p for p, _ in requests], generation_config=config)
    return [outputs[f"req_{i}"].generated_tokens[:count] for i, (_, count) in enumerate(requests)]


def hf_paged_generate(model: Qwen3ForCausalLM, requests: list[Request]) -> list[list[int]]:
    configs = [GenerationConfig(max_new_tokens=n, do_sample=False) for _, n in requests]
    with PagedGenerator(model, enable_prefix_caching=False) as generator:
        return [c.token_ids for c in generator.generate([p for p, _ in requests], configs, use_tqdm=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=None, help="names of runners, all by default")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    args = parser.parse_args()
    runners: dict[str, Callable] = {
        "stock generate": stock_generate,
        "generate_batch": generate_batch,
        "hf_paged": hf_paged_generate,
    }
    runners = {name: run for name, run in runners.items() if args.only is None or name in args.only}
    model, requests = make_model(), make_requests()
    wanted = sum(count for _, count in requests)
    times: dict[str, list[float]] = {name: [] for name in runners}
    tokens: dict[str, list[list[int]]] = {}
    for _ in range(args.rounds):
        for name, run in runners.items():
            start = time.perf_counter()
            tokens[name] = run(model, requests)
            times[name].append(time.perf_counter() - start)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"Qwen3 {millions:.0f} M fp32, {NUM_REQUESTS} requests, {wanted} output tokens, {torch.get_num_threads()} "
          f"threads, torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}")
    rates = {name: wanted / statistics.median(seconds) for name, seconds in times.items()}
    ours = rates.get("hf_paged")
    for name, rate in rates.items():
        ratio = f"   hf_paged is {ours / rate:4.2f}x" if ours else ""
        same = sum(a == b for a, b in zip(tokens[name], tokens[next(iter(tokens))], strict=True))
        print(f"{name:16} {rate:8.1f} tok/s  (median of {args.rounds}: {statistics.median(times[name]):.2f} s){ratio}"
              f"   same tokens: {same}/{NUM_REQUESTS}")
    if args.out:
        args.out.write_text(json.dumps({"rates": rates, "seconds": times, "torch": torch.__version__}, indent=1))


if __name__ == "__main__":
    main()
