"""Decode attention on the ragged batches of the nano workload: TB/s by tile shape and number of splits.

    python benchmarks/ragged_decode.py [--heads 16] [--batches 16 32 48 64 96 128 192 256]

A row of the table is the workload's moment when that many requests still run. Times come from CUDA-graph replays.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from kernel_speed import graph_time
from workloads import nano

from hf_paged.kernels.metadata import PagedMetadata
from hf_paged.kernels.paged_attention_decode import DecodeConfig, paged_attention_decode

KV_HEADS, HEAD_DIM, BLOCK = 8, 128, 16
CONFIGS = (DecodeConfig(32, 2, 2), DecodeConfig(32, 2, 3), DecodeConfig(64, 2, 3), DecodeConfig(64, 4, 3),
           DecodeConfig(64, 4, 4))  # fmt: skip
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24)


def lengths_when(count: int) -> list[int]:
    """Lengths of the nano workload's sequences when `count` of them are left."""
    workload = nano()
    step = sorted(workload.output_lengths, reverse=True)[count - 1] - 1
    prompts = zip(workload.prompts, workload.output_lengths, strict=True)
    return [len(prompt) + step for prompt, output in prompts if output > step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 16, 32, 48, 64, 96, 128, 160, 192, 256])
    args = parser.parse_args()
    for batch in args.batches:
        lengths = torch.tensor(lengths_when(batch), dtype=torch.int32)
        rows = len(lengths)
        blocks = [-(-int(n) // BLOCK) for n in lengths]
        table = torch.zeros(rows, 2560, dtype=torch.int32)
        order = torch.randperm(sum(blocks)) + 1
        for row, end in enumerate(torch.tensor(blocks).cumsum(0).tolist()):
            table[row, : blocks[row]] = order[end - blocks[row] : end]
        # Several layers' caches in turn, so that none stays in the L2.
        caches = [torch.randn(2, sum(blocks) + 1, BLOCK, KV_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
                  for _ in range(4)]  # fmt: skip
        query = torch.randn(rows, args.heads, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        meta = PagedMetadata(torch.arange(rows + 1, dtype=torch.int32, device="cuda"), lengths.cuda(), table.cuda(),
                             torch.arange(rows, dtype=torch.int32, device="cuda"),
                             torch.zeros(rows, dtype=torch.int64, device="cuda"), 1, 40960)  # fmt: skip
        nbytes = int(lengths.sum()) * KV_HEADS * HEAD_DIM * 2 * 2

        run = partial(paged_attention_decode, meta=meta, scale=HEAD_DIM**-0.5)

        def rate(calls: list = caches, run: partial = run, q: torch.Tensor = query, size: int = nbytes,
                 **options: Any) -> float:  # fmt: skip
            return size / graph_time([partial(run, q, k, v, **options) for k, v in calls], 7) / 1e12

        found = sorted(((rate(config=c, num_splits=s), s, tuple(c)) for c in CONFIGS for s in SPLITS), reverse=True)
        best = ", ".join(f"{r:.2f} ({s} splits, {c})" for r, s, c in found[:3])
        by_splits = " ".join(f"{s}:{max(r for r, t, _ in found if t == s):.2f}" for s in SPLITS)
        mean = int(lengths.sum()) // rows
        print(f"{rows:4} rows, mean {mean}: default {rate():.2f} TB/s; {best}; {by_splits}", flush=True)


if __name__ == "__main__":
    main()
