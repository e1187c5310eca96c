"""Time a decode step of the scheduler: schedule() + commit() with every sequence running and none to admit.

    python benchmarks/scheduler.py [--steps 400] [--block-size 16]

Prompt lengths differ, so that block boundaries are spread over the steps; the tokens come from a random generator in
place of a GPU. `overlap` schedules a step before the one before it is committed. What the sequences
share: nothing; the prompt of 8 samples; besides, a system prompt of 512 tokens over the prompts of all. In `turnover`
steps a sequence of these ends and another comes in each step (a prompt of that length costs what it costs to hash: the
same without sharing is shown), so that groups are made anew in each.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import statistics
import time
from collections import deque

import numpy as np

from hf_paged.scheduler import Scheduler, SchedulerConfig, Sequence

LIMITS_MS = {256: 0.25, 1024: 1.0}


SHARING = "nothing", "samples", "system"


def prompts_of(sharing: str, num_seqs: int, rng: np.random.Generator) -> list[list[int]]:
    """One for each sequence."""
    system = rng.integers(0, 150_000, 512).tolist() if sharing == "system" else []
    samples = 1 if sharing == "nothing" else 8
    lengths = rng.integers(100, 400, num_seqs).tolist()
    prompts = [system + rng.integers(0, 150_000, length).tolist() for length in lengths[::samples]]
    return [prompt for prompt in prompts for _ in range(samples)]


def measure(num_seqs: int, steps: int, block_size: int, overlap: bool, sharing: str, turnover: bool) -> list[float]:
    """Milliseconds of each decode step."""
    rng = np.random.default_rng(0)
    new_tokens = 200 + 2 * steps  # of which the first rows make some until the last one has its prompt
    max_model_len = 1024 + new_tokens
    config = SchedulerConfig(
        block_size=block_size,
        num_blocks=num_seqs * (max_model_len // block_size + 1) + 1,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(8192, num_seqs),
        max_model_len=max_model_len,
    )
    scheduler = Scheduler(config)
    prompts = prompts_of(sharing, num_seqs, rng)

    def add(name: str, prompt: list[int]) -> Sequence:
        seq = Sequence(name, prompt, max_new_tokens=new_tokens, eos_token_ids=(150_001, 150_002))
        scheduler.add(seq)
        return seq

    running = deque(add(str(i), prompt) for i, prompt in enumerate(prompts))
    num_decodes = 0
    while num_decodes < num_seqs:
        plan = scheduler.schedule()
        assert plan is not None
        num_decodes = plan.num_decode_rows
        scheduler.commit(plan, rng.integers(0, 150_000, len(plan.sequences)))

    pending = scheduler.schedule() if overlap else None
    times = []
    for i in range(steps):
        tokens = rng.integers(0, 150_000, num_seqs)
        if turnover:
            prompt = prompts[i % num_seqs] if sharing != "nothing" else prompts_of(sharing, 1, rng)[0]
            running.append(add(f"new {i}", prompt))
        begin = time.perf_counter()
        if turnover:
            scheduler.finish(running.popleft(), "stop")
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(pending or plan, tokens[: len((pending or plan).sequences)])
        times.append((time.perf_counter() - begin) * 1e3)
        assert turnover or plan.num_decode_rows == num_seqs
        assert (plan.groups is None) == (sharing == "nothing")
        if overlap:
            pending = plan
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, {args.steps} steps")
    print(f"{'sequences':>9} {'shared':>8} {'turnover':>8} {'overlap':>8} {'median ms':>10} {'mean ms':>8} "
          f"{'p99 ms':>8} {'limit ms':>9}")
    cases = itertools.product(LIMITS_MS.items(), (False, True), SHARING, (False, True))
    for (num_seqs, limit), turnover, sharing, overlap in cases:
        times = measure(num_seqs, args.steps, args.block_size, overlap, sharing, turnover)
        print(
            f"{num_seqs:>9} {sharing:>8} {turnover!s:>8} {overlap!s:>8} {statistics.median(times):>10.3f} "
            f"{statistics.mean(times):>8.3f} {np.percentile(times, 99):>8.3f} {limit:>9.2f}"
        )


if __name__ == "__main__":
    main()
