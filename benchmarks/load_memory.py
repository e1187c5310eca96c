"""Measure how a rank loads its share of a checkpoint: seconds, GB/s, and peak memory on host and device.

    torchrun --standalone --nproc_per_node 2 benchmarks/load_memory.py /dev/shm/qwen3-32B

Host: growth of the process's own peak (VmHWM, file pages that are mapped at the time included). Device: torch's peak.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hf_paged.parallel.group import join
from hf_paged.parallel.loading import load


def peak_host_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def main() -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = join(rank, size, device)
    group.smallest(0)
    before = peak_host_bytes()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    model = load(sys.argv[1], group, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    shard = sum(p.numel() * p.element_size() for p in set(model.parameters()))
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    for turn in range(size):
        group.smallest(turn)
        if turn == rank:
            print(f"rank {rank} of {size}: shard {shard / 2**30:.2f} GiB in {seconds:.1f} s "
                  f"({shard / seconds / 1e9:.1f} GB/s); host peak +{(peak_host_bytes() - before) / 2**30:.2f} GiB; "
                  f"device peak {peak / 2**30:.2f} GiB ({peak / shard:.3f} x shard)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
