"""Time one request of 128k prompt tokens: its chunks against their floors, decode behind it, its memory.

    python benchmarks/long_context.py [--model 8B] [--prompt 131072] [--new 128] [--chunk 8192] [--out long.json]
    python benchmarks/long_context.py --model tiny --prompt 2048 --chunk 256 --each 512 --device cpu     # does it run?
    python benchmarks/long_context.py --model tiny --device cpu --host       # the host's part, with layers of no work

Random weights of Qwen3's shapes in bf16, with YaRN as the model cards recommend it. A warm-up request of one chunk
compiles kernels. Seconds of a chunk are those of its work on the GPU, by events (on a CPU of the step, by the clock);
the wall time of all chunks stands below them. Floor of a chunk: FLOPs of its products and of its attention (which
counts the keys that each token sees) over the rate of a large GEMM; of a decode step: bytes of the weights and of the
context's keys and values over the copy rate; both rates are measured in the same run. Memory is what the device has in
use, looked at when a chunk is done. `--host`: CPU time of steps behind few tokens and behind the whole prompt, where
layers give zeros; sampling and the head are in it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from floors import Costs, costs_of, measure_ceilings
from transformers import GenerationConfig
from workloads import QWEN3_SHAPES, YARN, qwen3

from hf_paged import PagedGenerator
from hf_paged.engine.observer import Committed, Launched, Observer
from hf_paged.runner import device_times
from hf_paged.runner.device_times import TimedSection
from hf_paged.scheduler import StepPlan


class Step(NamedTuple):
    """One row's step: tokens that were cached before it, tokens that it computed, when it was begun and done."""

    cached: int
    new: int
    began: float
    done: float
    pieces: tuple[TimedSection, ...]
    in_use: int  # bytes of the device, of a step with prompt tokens

    @property
    def seconds(self) -> float:
        """On the device; on a CPU from its begin to its end."""
        if not self.pieces:
            return self.done - self.began
        return sum(begin.elapsed_time(end) for _, begin, end in self.pieces) / 1e3


class Watch(Observer):
    """Collects the steps of one request."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._launched: dict[int, Launched] = {}

    def launched(self, step: Launched) -> None:
        self._launched[id(step.plan)] = step

    def committed(self, step: Committed) -> None:
        begun, plan = self._launched.pop(id(step.plan)), step.plan
        new = int(plan.num_new_tokens[0])
        in_use = _in_use() if new > 1 else 0
        self.steps.append(Step(int(plan.start[0]), new, begun.began, step.ready, begun.pieces, in_use))

    def delivered(self, plan: StepPlan) -> None:
        assert len(plan.slots) == 1, "one request runs"


def _in_use() -> int:
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def run(generator: PagedGenerator, prompt: list[int], new: int) -> tuple[list[Step], float]:
    """Steps of one request, and when it came."""
    watch = Watch()
    generator.engine.reset_prefix_cache()
    generator.engine.watch(watch)
    device_times.ask(watch)
    begin = time.perf_counter()
    try:
        [made] = generator.generate([prompt], GenerationConfig(max_new_tokens=new), use_tqdm=False)
    finally:
        device_times.stop(watch)
        generator.engine.unwatch(watch)
    assert len(made.token_ids) == new and sum(step.new for step in watch.steps) == len(prompt) + new - 1
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return watch.steps, begin


def chunk_figures(steps: list[Step], length: int, costs: Costs, ceilings: dict[str, float]) -> list[dict[str, Any]]:
    """Of each chunk of a prompt of that length."""
    found = []
    for cached, new, *_ in steps:
        flops = costs.flops(cached, cached + new, int(cached + new == length))
        found.append({"cached": cached, "new": new, "tflop": flops / 1e12,
                      "floor_s": flops / ceilings["gemm_tflop_s"] / 1e12})
    return [figures | {"seconds": step.seconds} for figures, step in zip(found, steps, strict=True)]


def decode_figures(steps: list[Step], costs: Costs, itemsize: int, ceilings: dict[str, float]) -> dict[str, float]:
    """Of the steps behind the first of these, by the wall; the first one, which may capture a graph, by itself."""
    first, *seconds = (after.done - before.done for before, after in pairwise(steps))
    context = statistics.mean(step.cached for step in steps[1:]) + 1
    nbytes = (costs.in_layers + costs.head) * itemsize + costs.kv_bytes * context
    median, least = statistics.median(seconds), nbytes / ceilings["copy_tb_s"] / 1e12
    return {"first_ms": 1e3 * first, "median_ms": 1e3 * median, "slowest_ms": 1e3 * max(seconds),
            "tok_s": 1 / median, "floor_ms": 1e3 * least, "of_floor": least / median, "gb": nbytes / 1e9}


def host_figures(generator: PagedGenerator, prompt: list[int], new: int) -> dict[str, float]:
    """Milliseconds of CPU time: of taking a request in, of its first step, of later chunks and of decode steps."""
    engine = generator.engine
    engine.reset_prefix_cache()
    start = time.thread_time()
    engine.add_request(prompt, GenerationConfig(max_new_tokens=new))
    times = [time.thread_time() - start]
    while engine.has_unfinished():
        start = time.thread_time()
        engine.step()
        times.append(time.thread_time() - start)
    arrival, first, *chunks = (1e3 * seconds for seconds in times)
    decode, end = chunks[-new + 1 : -1], chunks[-1]
    figures = {"arrival": arrival, "first step": first, "decode step": statistics.median(decode),
               "slowest decode step": max(decode), "last step": end}
    later = chunks[: -new + 1]
    return figures | ({"chunk": statistics.median(later)} if later else {})


def print_host(generator: PagedGenerator, prompt: list[int], new: int) -> None:
    engine = generator.engine
    zeros = torch.zeros(engine.config.max_num_batched_tokens, generator.model.config.hidden_size)
    engine._executor.hidden_states = lambda ids, step: (  # type: ignore[method-assign]
        zeros[: len(ids if step.wanted is None else step.wanted)])
    host_figures(generator, prompt[:1000], new)
    for length in (1000, len(prompt)):
        for _ in range(2):  # tables grow for the first one
            figures = host_figures(generator, prompt[:length], new)
            print(f"{length:>7} tokens: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in figures.items()))


def print_chunks(chunks: list[dict[str, Any]], each: int) -> None:
    print(f"{'context':>17} {'s':>8} {'TFLOP/s':>8} {'of floor':>8}")
    bins: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        bins.setdefault(chunk["cached"] // each, []).append(chunk)
    for some in [*bins.values(), chunks]:
        seconds, tflop, least = (sum(chunk[key] for chunk in some) for key in ("seconds", "tflop", "floor_s"))
        end = some[-1]["cached"] + some[-1]["new"]
        print(f"{some[0]['cached']:>7} - {end:>7} {seconds:8.3f} {tflop / seconds:8.1f} {least / seconds:8.2f}")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(QWEN3_SHAPES), default="8B")
    parser.add_argument("--prompt", type=int, default=131_072)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=8192, help="max_num_batched_tokens")
    parser.add_argument("--each", type=int, default=16_384, help="tokens of context of a line of the table")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    cuda, dtype = args.device == "cuda", torch.bfloat16 if args.device == "cuda" else torch.float32
    ceilings = measure_ceilings(args.device)
    torch.cuda.empty_cache()
    model = qwen3(args.model, dtype, args.device, rope=YARN)
    costs = costs_of(model.config, dtype.itemsize)
    random.seed(0)
    prompt = [random.randint(0, 10000) for _ in range(args.prompt)]
    with PagedGenerator(model, max_model_len=args.prompt + args.new, max_num_batched_tokens=args.chunk,
                        max_num_seqs=min(256, args.chunk)) as generator:
        if args.host:
            print_host(generator, prompt, args.new)
            return {}
        run(generator, prompt[: args.chunk], 16)
        steps, begin = run(generator, prompt, args.new)
        stats, budget = generator.engine.stats(), generator.engine.config.gpu_memory_utilization
    count = next(i for i, step in enumerate(steps, 1) if step.cached + step.new == args.prompt)
    chunks = chunk_figures(steps[:count], args.prompt, costs, ceilings)
    decode = decode_figures(steps[count - 1 :], costs, dtype.itemsize, ceilings)
    first = steps[count - 1].done - begin
    figures = {"model": args.model, "device": torch.cuda.get_device_name() if cuda else "CPU", "ceilings": ceilings,
               "first_token_s": first, "chunks": chunks, "decode": decode, "kv_cache_gib": stats.kv_cache_bytes / 2**30}
    print(f"{args.model} on {figures['device']}: copy {ceilings['copy_tb_s']:.2f} TB/s, GEMM "
          f"{ceilings['gemm_tflop_s']:.0f} TFLOP/s")
    print_chunks(chunks, args.each)
    print(f"first token after {first:.3f} s, {args.prompt / first:,.0f} prompt tokens/s")
    print(f"decode behind {args.prompt} tokens: {decode['tok_s']:.1f} tok/s, a step {decode['median_ms']:.2f} ms, "
          f"{decode['of_floor']:.2f} of floor ({decode['gb']:.2f} GB); the first {decode['first_ms']:.1f} ms, the "
          f"slowest {decode['slowest_ms']:.1f} ms")
    if cuda:
        total = torch.cuda.mem_get_info()[1]
        figures |= {"peak_gib": max(step.in_use for step in steps) / 2**30, "budget_gib": budget * total / 2**30}
        print(f"memory: {figures['peak_gib']:.2f} GiB in use at most, {figures['kv_cache_gib']:.2f} of them the KV "
              f"pool; the budget is {figures['budget_gib']:.2f}")
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1))
    return figures


if __name__ == "__main__":
    main()
