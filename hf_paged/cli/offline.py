"""Measurements of throughput and latency of a `PagedGenerator`: random token ids as prompts, outputs of one length."""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import numpy as np

from hf_paged import PagedGenerator
from hf_paged.config import read_pairs

_WARM_UPS = 2


def throughput(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time one call with all prompts, after a smaller call that compiles kernels and captures graphs; prints a line."""
    with _generator(arguments) as generator:
        _generate(generator, arguments, min(8, arguments.num_prompts), 0)
        seconds = _generate(generator, arguments, arguments.num_prompts, 1)
    total_in = arguments.num_prompts * arguments.prompt_tokens
    total_out = arguments.num_prompts * arguments.output_tokens
    report = {"kind": "throughput", "model": arguments.model, "num_prompts": arguments.num_prompts,
              "prompt_tokens": arguments.prompt_tokens, "output_tokens": arguments.output_tokens, "seconds": seconds,
              "requests_per_second": arguments.num_prompts / seconds, "output_tokens_per_second": total_out / seconds,
              "total_tokens_per_second": (total_in + total_out) / seconds}
    print(f"{seconds:.2f} s: {report['requests_per_second']:.2f} requests/s, "
          f"{report['output_tokens_per_second']:,.0f} output tokens/s, "
          f"{report['total_tokens_per_second']:,.0f} tokens/s with the prompts'")
    return report


def latency(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time calls of one batch each, with new prompts in each call; prints a line."""
    with _generator(arguments) as generator:
        taken = [_generate(generator, arguments, arguments.batch_size, i) for i in range(arguments.rounds + _WARM_UPS)]
    counted = taken[_WARM_UPS:]
    p50, p90, p99 = np.percentile(counted, [50, 90, 99]).tolist()
    found = {"mean": sum(counted) / len(counted), "p50": p50, "p90": p90, "p99": p99}
    report = {"kind": "latency", "model": arguments.model, "batch_size": arguments.batch_size,
              "prompt_tokens": arguments.prompt_tokens, "output_tokens": arguments.output_tokens,
              "rounds": arguments.rounds, "seconds": found}
    print(f"batches of {arguments.batch_size}: median {found['p50']:.3f} s, 90 % within {found['p90']:.3f} s, "
          f"99 % within {found['p99']:.3f} s; {1000 * found['p50'] / arguments.output_tokens:.2f} ms a token")
    return report


def _generator(arguments: argparse.Namespace) -> PagedGenerator:
    return PagedGenerator.from_pretrained(arguments.model, dtype=arguments.dtype, device=arguments.device,
                                          tensor_parallel_size=arguments.tensor_parallel_size,
                                          **read_pairs(arguments.set))


def _generate(generator: PagedGenerator, arguments: argparse.Namespace, count: int, number: int) -> float:
    """Return the seconds of one call with prompts of its own, which the prefix cache cannot hold yet."""
    rng = random.Random(f"{arguments.seed} {number} {count}")
    vocabulary = generator.engine.vocab_size
    prompts = [[rng.randrange(vocabulary) for _ in range(arguments.prompt_tokens)] for _ in range(count)]
    started = time.perf_counter()
    made = generator.generate(prompts, max_new_tokens=arguments.output_tokens, eos_token_id=None, do_sample=False,
                              min_new_tokens=arguments.output_tokens, use_tqdm=False)
    seconds = time.perf_counter() - started
    if any(len(completion.token_ids) != arguments.output_tokens for completion in made):
        ends = sorted({f"{one.finish_reason}: {one.error}" for one in made})
        raise RuntimeError(f"answers shorter than {arguments.output_tokens} tokens: {'; '.join(ends)}")
    return seconds
