"""Time decode steps of few rows behind long contexts, with all layers in one launch and layer by layer.

    python benchmarks/few_rows_speed.py [--model 0.6B] [--cases 1x384 2x384 4x384 8x384 1x8000 1x30000 8x4000
                                        8x384+1500] [--new 128] [--device cuda]
    python benchmarks/few_rows_speed.py --model tiny --cases 1x20 2x20+40 --new 8 --device cpu     # does it run?

Random weights of Qwen3's shapes in bf16, greedy. 8x384+1500: the last of eight rows follows 1,500 tokens, which the
others wait for. The prompts are in the prefix cache; a step's time is the difference of a call that makes `--new`
tokens more to one that makes eight, the best of three of each. "By one launch" says whether the kernel took the step,
which it does once it is compiled. "Equal" is the share of equal tokens: the two round in different ways, and random
weights leave the tokens close to each other.
"""

from __future__ import annotations

import argparse
import re
import time

import numpy as np
import torch
from workloads import QWEN3_SHAPES, qwen3

from hf_paged import PagedGenerator
from hf_paged.kernels.hopper.decoder_layers.shape import ROWS

FIRST = 8
CASES = "1x384", "2x384", "4x384", "8x384", "1x8000", "1x30000", "8x4000", "8x384+1500"
PATIENCE_S = 100.0


def case_of(text: str) -> tuple[int, ...]:
    """The lengths of the rows' prompts."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)(?:\+([1-9]\d*))?", text)
    if found is None or (rows := int(found[1])) not in ROWS or (rows == 1 and found[3]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected ROWSxLENGTH, or ROWSxLENGTH+LONGEST from two rows on, "
                                         f"and as rows one of {ROWS}")
    return *[int(found[2])] * (rows - 1), int(found[3] or found[2])


def named(lengths: tuple[int, ...]) -> str:
    """As `case_of` reads it."""
    return f"{len(lengths)}x{lengths[0]}" + (f"+{lengths[-1]}" if lengths[-1] != lengths[0] else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(QWEN3_SHAPES), default="0.6B")
    parser.add_argument("--cases", nargs="+", type=case_of, metavar="ROWSxLENGTH[+LONGEST]",
                        default=list(map(case_of, CASES)))
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    model = qwen3(args.model, torch.bfloat16, args.device).eval()
    torch.manual_seed(0)
    pool = {} if args.device == "cuda" else {"num_blocks": 1_000}
    for case in args.cases:
        rows, found = len(case), {}
        prompts = [torch.randint(0, 10_000, (length,)).tolist() for length in case]
        for one_launch in (True, False):
            with PagedGenerator(model, max_num_seqs=ROWS[-1], one_launch=one_launch, **pool) as generator:
                found[one_launch] = measured(generator, prompts, args.new)
        (at_once, seconds, tokens), (_, layered, others) = found[True], found[False]
        equal = [a == b for ours, theirs in zip(tokens, others, strict=True) for a, b in zip(ours, theirs, strict=True)]
        print(f"{args.model}, {named(case)}: {1e3 * seconds:.3f} ms a step ({rows / seconds:,.0f} tok/s; by one "
              f"launch: {at_once}), layer by layer {1e3 * layered:.3f} ({rows / layered:,.0f} tok/s); equal "
              f"{sum(equal) / len(equal):.2f}", flush=True)


def measured(generator: PagedGenerator, prompts: list[list[int]], new: int) -> tuple[bool, float, list[list[int]]]:
    """Was the last step one launch, seconds of a step, and the tokens."""
    def call(count: int) -> tuple[float, list[list[int]]]:
        began = time.perf_counter()
        made = generator.generate(prompts, max_new_tokens=count, do_sample=False, use_tqdm=False)
        return time.perf_counter() - began, [one.token_ids for one in made]

    call(FIRST)
    executor = generator.engine._core.pool.runner.executor
    deadline = time.monotonic() + PATIENCE_S
    while executor.may_use_one_launch(len(prompts), np.array([len(prompt) for prompt in prompts])):
        call(FIRST)  # a kernel that has come is taken once no request runs
        if executor.uses_one_launch(len(prompts)) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    short, long = [], []
    for _ in range(3):
        short.append(call(FIRST)[0])
        seconds, tokens = call(FIRST + new)
        long.append(seconds)
    return executor.uses_one_launch(len(prompts)), (min(long) - min(short)) / new, tokens


if __name__ == "__main__":
    main()
