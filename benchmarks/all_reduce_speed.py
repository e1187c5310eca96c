"""Time an all-reduce inside a CUDA graph: NCCL and hf_paged's algorithms, alone and with add + RMSNorm.

    python benchmarks/all_reduce_speed.py --size N [--out all_reduce.json] [--seconds 120]

Starts its own N processes, a GPU each, and kills them after the time limit. First every kernel is compared with the
reference, to the bit; a difference ends the run. Then: many calls in one graph, the median of its replays, the slowest
rank's figure. The floor is the bytes over the links per rank (one shot: N - 1 inputs, two: 2 (N - 1) / N) at the rate
at which all ranks write to their neighbours' memory at once, measured in the same run. NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rank_processes import wait_or_kill

ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
os.environ.update(ENVIRONMENT)

ROWS, WIDTHS = (1, 8, 64, 256, 512, 2048, 4096, 8192), (4096, 5120)
CALLS, REPLAYS = 20, 15
EPS = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, required=True, help="number of GPUs, 2 to 8")
    parser.add_argument("--out", type=Path, help="all figures as JSON")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit of the whole run")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is None:
        sys.exit(run_ranks(options))
    measure_rank(options)


def run_ranks(options: argparse.Namespace) -> int:
    """The exit status: 0 where all ranks ended well, 124 past the limit."""
    until = time.monotonic() + options.seconds
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--store", f"{folder}/store", "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, start_new_session=True)
            for rank in range(options.size)
        ]
        return wait_or_kill(ranks, until)


def measure_rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    from hf_paged.parallel.group import join
    from hf_paged.parallel.peers import open_peers

    device = torch.device("cuda", options.rank)
    torch.cuda.set_device(device)
    store = dist.FileStore(options.store, options.size)
    group = join(options.rank, options.size, device, store=store)
    capacity = 2 * max(ROWS) * max(WIDTHS)
    buffers = open_peers(group.hosts, device, capacity)
    bench = Bench(group, buffers.peers)
    rates = bench.link_rates()
    rows = [bench.measure(count, width) for width in WIDTHS for count in ROWS]
    if options.rank == 0:
        report(options, torch.cuda.get_device_name(device), rates, rows)
    dist.barrier(group=group._hosts)
    dist.destroy_process_group()


class Bench:
    def __init__(self, group: Any, peers: Any) -> None:
        import torch

        self.group, self.peers, self.size = group, peers, group.size
        self.generator = torch.Generator("cuda").manual_seed(group.rank)
        self.stream = torch.cuda.Stream()

    def link_rates(self) -> dict[str, float]:
        """GB/s at which every rank reads or writes its neighbour's memory at once, by a kernel and by torch's copy."""
        import torch

        num_bytes = 2 * self.peers.capacity
        neighbour = self.peers.buffers[(self.peers.rank + 1) % self.size][-num_bytes:].view(torch.bfloat16)
        local = torch.empty_like(neighbour)
        calls: dict[str, Callable[[], Any]] = {
            "read": lambda: torch.neg(neighbour, out=local),
            "written": lambda: torch.neg(local, out=neighbour),
            "copied": lambda: local.copy_(neighbour),
        }
        return {kind: num_bytes / self.time([call] * 8) / 1e3 for kind, call in calls.items()}

    def time(self, calls: list[Callable[[], Any]], before: Callable[[], Any] | None = None) -> float:
        """Microseconds a call: the median of graph replays, of the slowest rank."""
        import torch
        import torch.distributed as dist

        with torch.cuda.stream(self.stream):
            if before:
                before()
            for call in calls[:2]:
                call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
                for call in calls:
                    call()
            times = []
            for _ in range(REPLAYS):
                if before:
                    before()
                # The ranks' streams start together; the host's own way to the launch is not counted.
                self.group.all_reduce(torch.ones(1, device="cuda"))
                torch.cuda._sleep(200_000)
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(start.elapsed_time(end) * 1e3 / len(calls))
        median = torch.tensor([statistics.median(times[3:])])
        dist.all_reduce(median, op=dist.ReduceOp.MAX, group=self.group._hosts)
        return float(median)

    def measure(self, rows: int, width: int) -> dict[str, Any]:
        import torch
        import torch.distributed as dist

        from hf_paged.kernels.comm.all_reduce import (
            ALGORITHMS,
            all_reduce,
            all_reduce_add_rms_norm,
            all_reduce_reference,
        )
        from hf_paged.kernels.layer.add_rms_norm import add_rms_norm

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=self.generator, device="cuda").bfloat16()

        x, residual, weight = randn(rows, width), randn(rows, width), randn(width)
        for same in (residual, weight):
            dist.broadcast(same, src=0, group=self.group._devices)
        expected = all_reduce_reference(list(self.group.all_gather(x)))
        normed, summed = add_rms_norm(expected, residual, weight, EPS)
        algorithms = {name_of(how): how for how in ALGORITHMS if self.peers.takes(x.nbytes, *how)}
        for how in algorithms.values():
            fused = all_reduce_add_rms_norm(x, residual, weight, EPS, self.peers, how)
            for name, actual, right in (
                ("all_reduce", all_reduce(x, self.peers, how), expected),
                ("normed", fused[0], normed),
                ("summed", fused[1], summed),
            ):
                if not torch.equal(actual, right):
                    raise AssertionError(f"{name} of {rows} x {width}, {how}, is not the reference's")
        # NCCL adds in place: from the same input at every replay, or the values would grow without end.
        y = x.clone()
        reset = partial(y.copy_, x)

        def nccl_and_norm() -> None:
            add_rms_norm(self.group.all_reduce(y), residual, weight, EPS)

        figures: dict[str, Any] = {"rows": rows, "width": width, "bytes": x.numel() * x.element_size()}
        figures["nccl"] = self.time([partial(self.group.all_reduce, y)] * CALLS, reset)
        figures["nccl + norm"] = self.time([nccl_and_norm] * CALLS, reset)
        for name, how in algorithms.items():
            figures[name] = self.time([partial(all_reduce, x, self.peers, how)] * CALLS)
            call = partial(all_reduce_add_rms_norm, x, residual, weight, EPS, self.peers, how)
            figures[f"{name} + norm"] = self.time([call] * CALLS)
        return figures


def name_of(how: Any) -> str:
    return f"{how.shots} {'post' if how.posted else 'signal'}"


def report(options: argparse.Namespace, device: str, link_rates: dict[str, float], rows: list[dict[str, Any]]) -> None:
    size = options.size
    if options.out:
        everything = {"device": device, "size": size, "link GB/s": link_rates, "rows": rows}
        options.out.write_text(json.dumps(everything, indent=1))
    rates = ", ".join(f"{kind} at {rate:.0f} GB/s" for kind, rate in link_rates.items())
    print(f"{size} x {device}; a neighbour's memory is {rates}")
    print("us a call; floor: the fewer bytes of one-shot and two-shot at the rate at which they are written")
    kinds = ["nccl", "1 post", "1 signal", "2 post", "2 signal"]
    heads = " | ".join(f"{kind:>8}" for kind in kinds)
    print(f" width  rows    KiB  floor     {heads}   and the same with add + RMSNorm")
    for row in rows:
        one, two = (size - 1) * row["bytes"], 2 * (size - 1) * row["bytes"] / size
        floor = min(one, two) / link_rates["written"] / 1e3
        times = [row.get(kind) for kind in (*kinds, *(f"{kind} + norm" for kind in kinds))]
        cells = " | ".join(f"{time:8.1f}" if time else " " * 8 for time in times)
        print(f"{row['width']:6}{row['rows']:6}{row['bytes'] / 1024:7.0f}{floor:7.1f}     {cells}", flush=True)


if __name__ == "__main__":
    main()
