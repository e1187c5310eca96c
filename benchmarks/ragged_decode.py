"""Time decode attention on the ragged lengths of the nano workload, by plan and tile shape.

    python benchmarks/ragged_decode.py [--heads 16] [--batches 8 32 64 128 192 256]

For each batch size the lengths are those of the moment when that many of the workload's sequences are left. Prints the
rate of the committed choice, the best ones, and the best of each number of programs a multiprocessor.
"""

from __future__ import annotations

import argparse
import itertools
from functools import partial
from typing import Any

import numpy as np
import torch
from kernel_speed import BLOCK_SIZE, HEAD_DIM, KV_HEADS, graph_time
from workloads import nano

from hf_paged.attention.plan_decode import plan_items
from hf_paged.kernels.attention.decode import DecodeConfig, config_of, cta_slots_of, paged_attention_decode
from hf_paged.kernels.attention.types import AttentionOptions, DecodeWork, PagedMetadata

CONFIGS = tuple(DecodeConfig(*c) for c in ((32, 2, 3, 5), (64, 4, 2, 4), (64, 4, 3, 3), (64, 4, 4, 2)))
PROGRAMS = (1, 2, 3, 4, 6, 8)


def lengths_when(count: int) -> list[int]:
    """Lengths of the workload's sequences when `count` of them are left."""
    workload = nano()
    step = sorted(workload.output_lengths, reverse=True)[count - 1] - 1
    prompts = zip(workload.prompts, workload.output_lengths, strict=True)
    return [len(prompt) + step for prompt, output in prompts if output > step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="*", default=[4, 16, 32, 64, 128, 256])
    args = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    for batch in args.batches:
        lengths = np.array(lengths_when(batch))
        rows = len(lengths)
        blocks = -(-lengths // BLOCK_SIZE)
        table = torch.zeros(rows, 2560, dtype=torch.int32)
        order = torch.randperm(int(blocks.sum())) + 1
        for row, end in enumerate(blocks.cumsum().tolist()):
            table[row, : blocks[row]] = order[end - int(blocks[row]) : end]
        # Several layers' caches in turn, so that none stays in the L2.
        caches = [torch.randn(2, int(blocks.sum()) + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device=device,
                              dtype=torch.bfloat16) for _ in range(max(4, 128 // batch))]
        query = torch.randn(rows, args.heads, HEAD_DIM, device=device, dtype=torch.bfloat16)
        plain = PagedMetadata(torch.arange(rows + 1, dtype=torch.int32, device=device),
                              torch.from_numpy(lengths).int().to(device), table.to(device),
                              torch.arange(rows, dtype=torch.int32, device=device),
                              torch.zeros(rows, dtype=torch.int64, device=device), 1, 40960)
        nbytes = int(lengths.sum()) * KV_HEADS * HEAD_DIM * 2 * 2

        def rate(work: DecodeWork, calls: list = caches, q: torch.Tensor = query, size: int = nbytes,
                 meta: PagedMetadata = plain, **options: Any) -> float:
            scaled = AttentionOptions(HEAD_DIM**-0.5)
            run = partial(paged_attention_decode, meta=meta._replace(work=work), options=scaled)
            return size / graph_time([partial(run, q, k, v, **options) for k, v in calls], 5) / 1e12

        def work(config: DecodeConfig, lengths: np.ndarray = lengths) -> DecodeWork:
            items = plan_items(lengths, np.arange(len(lengths)), cta_slots_of(config, KV_HEADS, device))
            arrivals = torch.zeros(len(lengths) * KV_HEADS, dtype=torch.int32, device=device)
            return DecodeWork(torch.from_numpy(items).to(device), arrivals)

        found = []
        for config, programs in itertools.product(CONFIGS, PROGRAMS):
            planned = work(config._replace(programs_per_sm=programs))
            found.append((rate(planned, config=config), programs, tuple(config[:3])))
        found.sort(reverse=True)
        best = ", ".join(f"{r:.2f} ({p}, {c})" for r, p, c in found[:4])
        by_programs = " ".join(f"{p}:{max(r for r, q, _ in found if p == q):.2f}" for p in PROGRAMS)
        by_config = " ".join(f"{c[:3]}:{max(r for r, _, d in found if c[:3] == d):.2f}" for c in CONFIGS)
        chosen = rate(work(config_of(rows, KV_HEADS, HEAD_DIM, torch.bfloat16, device)))
        print(f"{rows:4} rows, mean {int(lengths.mean())}: chosen {chosen:.2f} TB/s; {best}", flush=True)
        print(f"     {by_programs}; {by_config}", flush=True)


if __name__ == "__main__":
    main()
