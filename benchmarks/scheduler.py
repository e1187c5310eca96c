"""Host cost of a decode step: schedule() + commit() with every sequence running and nobody to admit.

    python benchmarks/scheduler.py [--steps 400] [--block-size 16]

Prompt lengths differ, so that block boundaries are spread over the steps as in real life; the tokens come from a
random generator in place of a GPU. `overlap` schedules a step before the one before it is committed.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time

import numpy as np

from hf_paged.scheduler import Scheduler, SchedulerConfig, Sequence

LIMITS_MS = {256: 0.25, 1024: 1.0}


def measure(num_seqs: int, steps: int, block_size: int, overlap: bool) -> list[float]:
    """Milliseconds of each decode step."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(100, 400, num_seqs)
    max_model_len = 512 + 2 * steps
    config = SchedulerConfig(
        block_size=block_size,
        num_blocks=num_seqs * (max_model_len // block_size + 1) + 1,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(8192, num_seqs),
        max_model_len=max_model_len,
    )
    scheduler = Scheduler(config)
    for i, length in enumerate(lengths.tolist()):
        prompt = rng.integers(0, 150_000, length).tolist()
        scheduler.add(Sequence(str(i), prompt, max_new_tokens=2 * steps, eos_token_ids=(150_001, 150_002)))
    num_decodes = 0
    while num_decodes < num_seqs:
        plan = scheduler.schedule()
        assert plan is not None
        num_decodes = plan.num_decode_rows
        scheduler.commit(plan, rng.integers(0, 150_000, len(plan.sequences)))

    pending = scheduler.schedule() if overlap else None
    times = []
    for _ in range(steps):
        tokens = rng.integers(0, 150_000, num_seqs)
        begin = time.perf_counter()
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(pending or plan, tokens)
        times.append((time.perf_counter() - begin) * 1e3)
        assert plan.num_decode_rows == num_seqs
        if overlap:
            pending = plan
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--block-size", type=int, default=16)
    args = parser.parse_args()
    print(f"{platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}, {args.steps} steps")
    print(f"{'sequences':>9} {'overlap':>8} {'median ms':>10} {'mean ms':>8} {'p99 ms':>8} {'limit ms':>9}")
    for num_seqs, limit in LIMITS_MS.items():
        for overlap in (False, True):
            times = measure(num_seqs, args.steps, args.block_size, overlap)
            print(
                f"{num_seqs:>9} {overlap!s:>8} {statistics.median(times):>10.3f} {statistics.mean(times):>8.3f} "
                f"{np.percentile(times, 99):>8.3f} {limit:>9.2f}"
            )


if __name__ == "__main__":
    main()
