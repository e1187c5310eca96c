"""Show where the seconds of a workload go: before the first step, steps with prompts, decode steps by batch size.

    python benchmarks/timeline.py [--workload nano] [--model 0.6B] [--kernels 20]
    python benchmarks/timeline.py --checkpoint /dev/shm/qwen3-8B --size 2      # rank 0's part of it

With `--kernels` another run, under torch's profiler, says how long the GPU was busy, and with which kernels. Kernels
that run beside each other count both.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from itertools import islice, pairwise

import torch
from gpu_trace import gpu_trace
from model_arguments import add_model_arguments, open_generator
from torch.profiler import ProfilerActivity, profile
from workloads import WORKLOADS, Workload, generation_configs, limits

from hf_paged import PagedGenerator
from hf_paged.engine.loop import EngineCore
from hf_paged.scheduler import Scheduler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="nano")
    add_model_arguments(parser)
    parser.add_argument("--kernels", type=int, default=0, metavar="N", help="the N that take longest; on a GPU")
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]()
    events: list[tuple[float, float, str]] = []  # start, end, what
    own_step, own_schedule = EngineCore.step, Scheduler.schedule
    last: list = [None]

    def schedule(self: Scheduler) -> object:
        last[0] = own_schedule(self)
        return last[0]

    def step(self: EngineCore, **options: bool) -> None:
        start = time.perf_counter()
        own_step(self, **options)
        plan = last[0]
        kind = "no plan"
        if plan is not None:
            rows = len(plan.slots)
            kind = "with prompts" if plan.num_decode_rows < rows else f"decode <= {max(1, -(-rows // 32) * 32):4}"
        events.append((start, time.perf_counter(), kind))

    EngineCore.step, Scheduler.schedule = step, schedule  # type: ignore[method-assign, assignment]
    with open_generator(args, **limits(workload)) as generator:
        for _ in range(2):
            generator.engine.reset_prefix_cache()
            events.clear()
            begin = time.perf_counter()
            generator.generate(workload.prompts, generation_configs(workload), use_tqdm=False)
            torch.cuda.synchronize()
            end = time.perf_counter()
        timed = list(events)
        if args.kernels:
            generator.engine.reset_prefix_cache()
            print("\n".join(kernel_times(generator, workload, args.kernels)))
    total: dict[str, list[float]] = defaultdict(list)
    for a, b, kind in timed:
        total[kind].append(b - a)
    between = sum(b[0] - a[1] for a, b in pairwise(timed))
    before, after = timed[0][0] - begin, end - timed[-1][1]
    print(f"{end - begin:.3f} s: {before:.3f} before the first step, {after:.3f} after the last, {between:.3f} between")
    for kind, seconds in sorted(total.items()):
        each = 1e3 * sum(seconds) / len(seconds)
        print(f"{kind:16} {len(seconds):5} steps  {sum(seconds):7.3f} s  {each:7.3f} ms each")


def kernel_times(generator: PagedGenerator, workload: Workload, most: int) -> list[str]:
    """Of one run under the profiler."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        generator.generate(workload.prompts, generation_configs(workload), use_tqdm=False)
        torch.cuda.synchronize()
    seen = gpu_trace(trace)
    lines = [f"under the profiler: GPU busy {seen.busy_us / 1e6:.3f} of {seen.whole_us / 1e6:.3f} s"]
    for name, (count, us) in islice(seen.kernels.items(), most):
        lines.append(f"{us / 1e3:10.1f} ms  {count:7,} calls  {name[:100]}")
    return lines


if __name__ == "__main__":
    main()
