"""Decode attention of rows that share prefixes: read once for several rows, against row by row, and against the card.

    python benchmarks/shared_prefix_speed.py [--out shared_prefix.json] [--sweep [--seconds 60]] [--compile 8]

Microseconds a call from CUDA-graph replays that rotate over caches larger than L2 together. "Of floor" divides the
least time that a call can take by the time it took: the greater of the bytes of every key and value, once, at the rate
of a copy, and of the operations at the rate of a GEMM, both measured in the same run. ``--sweep`` tries tiles and
plans; ``--compile N`` compiles beforehand what it will run, in N processes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from kernel_speed import BLOCK_SIZE, HEAD_DIM, KV_HEADS, L2_BYTES, ceilings, graph_time

from hf_paged.kernels._device import num_multiprocessors
from hf_paged.kernels.attention import grouped_work
from hf_paged.kernels.attention.decode import config_of, cta_slots_of, paged_attention_decode
from hf_paged.kernels.attention.decode_work import plan_items
from hf_paged.kernels.attention.grouped_decode import grouped_kernel_of, paged_attention_grouped
from hf_paged.kernels.attention.grouped_work import Kernel, choose_groups, plan_groups
from hf_paged.kernels.attention.metadata import AttentionOptions, DecodeWork, GroupedConfig, GroupedWork, PagedMetadata
from hf_paged.scheduler.prefix_groups import PrefixGroups


class Shape(NamedTuple):
    """`groups` times `rows` rows, each behind `shared` tokens that its group's rows share, and `own` ones."""

    groups: int
    rows: int
    shared: int
    own: int
    heads: int = 16

    def __str__(self) -> str:
        return f"{self.groups} x {self.rows} behind {self.shared} + {self.own}, {self.heads}/{KV_HEADS}"


SHAPES = [
    Shape(32, 16, 512, 256), Shape(1, 256, 4096, 256), Shape(1, 256, 16384, 64), Shape(32, 16, 2048, 256),
    Shape(1, 16, 2048, 64), Shape(1, 16, 512, 64), Shape(1, 2, 128, 64), Shape(8, 8, 1024, 256), Shape(8, 8, 256, 256),
    Shape(1, 8, 1024, 64), Shape(1, 2, 16384, 64), Shape(4, 4, 1024, 256), Shape(64, 4, 512, 256),
    Shape(32, 16, 512, 256, 32), Shape(1, 256, 4096, 256, 32), Shape(1, 256, 16384, 64, 32), Shape(1, 4, 2048, 64, 32),
    Shape(1, 16, 1024, 64, 32),
]
_C = GroupedConfig
TILES = [
    _C(64, 32, 3, 64, 3, 4, 3, 168), _C(64, 64, 3, 64, 3, 4, 2), _C(64, 32, 2, 64, 2, 4, 4, 128),
    _C(64, 32, 2, 64, 3, 4, 3, 168), _C(64, 64, 2, 64, 2, 4, 3, 168),
]


class Variant(NamedTuple):
    """What `--sweep` tries: tiles, and constants of the planning."""

    config: GroupedConfig
    min_long_split: int = grouped_work.MIN_LONG_SPLIT
    tile_cost: float = grouped_work.TILE_COST


VARIANTS = [
    *(Variant(TILES[0], *plan) for plan in itertools.product((128, 256, 512), (0.5, 1.0, 1.5))),
    *(Variant(config) for config in TILES[1:]),
]


class Inputs(NamedTuple):
    q: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]  # enough of them that a call finds nothing in L2
    meta: PagedMetadata  # without a plan
    lengths: np.ndarray
    groups: PrefixGroups


def make_inputs(shape: Shape) -> Inputs:
    """The blocks of a row are scattered over the pool."""
    rows = shape.groups * shape.rows
    prefix, own = shape.shared // BLOCK_SIZE, shape.own // BLOCK_SIZE
    blocks = shape.groups * prefix + rows * own
    kwargs: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    size = (blocks + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    count = min(200, max(2, -(-L2_BYTES // (4 * blocks * BLOCK_SIZE * KV_HEADS * HEAD_DIM))))
    caches = [(torch.randn(size, **kwargs), torch.randn(size, **kwargs)) for _ in range(count)]
    order = (torch.randperm(blocks, device="cuda") + 1).int()
    table = torch.zeros(rows, -(-(prefix + own) // 16) * 16, dtype=torch.int32, device="cuda")
    table[:, :prefix] = order[: shape.groups * prefix].view(shape.groups, prefix).repeat_interleave(shape.rows, 0)
    table[:, prefix : prefix + own] = order[shape.groups * prefix :].view(rows, own)
    lengths = np.full(rows, shape.shared + shape.own)
    meta = PagedMetadata(
        torch.arange(rows + 1, dtype=torch.int32, device="cuda"), torch.from_numpy(lengths).int().cuda(), table,
        torch.arange(rows, dtype=torch.int32, device="cuda"), torch.zeros(rows, dtype=torch.int64, device="cuda"), 1,
        int(lengths[0]),
    )
    first = np.arange(0, rows, shape.rows, dtype=np.int32)
    same = [np.full(shape.groups, value, np.int32) for value in (shape.rows, 0, shape.shared)]
    groups = PrefixGroups(np.arange(rows, dtype=np.int32), first, *same)
    return Inputs(torch.randn(rows, shape.heads, HEAD_DIM, **kwargs), caches, meta, lengths, groups)


def seconds_of(kernel: Any, inputs: Inputs, work: DecodeWork | GroupedWork, replays: int = 9) -> float:
    run = partial(kernel, meta=inputs.meta._replace(work=work), options=AttentionOptions(HEAD_DIM**-0.5))
    return graph_time([partial(run, inputs.q, k, v) for k, v in inputs.caches], replays)


def plain_work(inputs: Inputs) -> DecodeWork:
    """The plan of a step that is read row by row."""
    device, rows = inputs.q.device, len(inputs.lengths)
    slots = cta_slots_of(config_of(rows, KV_HEADS, HEAD_DIM, torch.bfloat16, device), KV_HEADS, device)
    items = plan_items(inputs.lengths, np.arange(rows), slots)
    arrivals = torch.zeros(rows * KV_HEADS, dtype=torch.int32, device=device)
    return DecodeWork(torch.from_numpy(items).to(device), arrivals)


def row_by_row(inputs: Inputs) -> float:
    return seconds_of(paged_attention_decode, inputs, plain_work(inputs))


def work_of(inputs: Inputs, config: GroupedConfig | None = None) -> GroupedWork | None:
    """The plan of `config`, or the one that a step gets, None where that is not grouped."""
    heads, device, rows = inputs.q.shape[1], inputs.q.device, np.arange(len(inputs.lengths))
    kernel = grouped_kernel_of(heads, KV_HEADS, HEAD_DIM, torch.bfloat16, device)
    if config is not None:
        slots = max(1, config.programs_per_sm * num_multiprocessors(device) // KV_HEADS)
        kernel = Kernel(config, config.block_m // (heads // KV_HEADS), slots, positions_worth_it=1)
    choice = choose_groups(inputs.groups, len(rows), kernel)
    if choice is None:
        return None
    plan = plan_groups(inputs.lengths, rows, choice)
    if plan is None:
        return None
    items, table = torch.from_numpy(plan.items).to(device), torch.from_numpy(plan.rows).to(device)
    return GroupedWork(items, table, plan.num_parts, plan.config)


def floor_of(shape: Shape, rates: dict[str, float]) -> float:
    """Seconds."""
    rows = shape.groups * shape.rows
    nbytes = 4 * KV_HEADS * HEAD_DIM * (shape.groups * shape.shared + rows * shape.own)
    flops = 4 * shape.heads * HEAD_DIM * rows * (shape.shared + shape.own)
    return max(nbytes / rates["copy_tb_s"], flops / rates["gemm_tflop_s"]) / 1e12


def table_rows(rates: dict[str, float]) -> list[dict[str, Any]]:
    found = []
    for shape in SHAPES:
        inputs = make_inputs(shape)
        work, floor = work_of(inputs), floor_of(shape, rates)
        plain = row_by_row(inputs)
        row: dict[str, Any] = {"shape": str(shape), "row by row us": plain * 1e6}
        if work is not None:
            grouped = seconds_of(paged_attention_grouped, inputs, work)
            row |= {"grouped us": grouped * 1e6, "times": plain / grouped, "of floor": floor / grouped,
                    "tiles": str(tuple(work.config))}
        show(row)
        found.append(row)
    return found


def sweep_rows(seconds: float) -> list[dict[str, Any]]:
    """Shape by shape, what each variant takes."""
    found, end = [], time.perf_counter() + seconds
    for shape in SHAPES:
        if time.perf_counter() > end:
            break
        inputs = make_inputs(shape)
        row: dict[str, Any] = {"shape": str(shape), "row by row us": row_by_row(inputs) * 1e6}
        tried = []
        for variant in VARIANTS:
            grouped_work.MIN_LONG_SPLIT, grouped_work.TILE_COST = variant[1:]
            grouped_work.MIN_SAVED_SHARE = 0.0  # to see where it should be
            work = work_of(inputs, variant.config)
            if work is None or time.perf_counter() > end:
                continue
            try:
                tried.append((seconds_of(paged_attention_grouped, inputs, work, 5) * 1e6, tuple(variant)))
            except Exception as error:  # too much shared memory, say: the others go on
                tried.append((float("inf"), (*variant, type(error).__name__)))
        tried.sort(key=lambda pair: pair[0])
        row["tried"] = tried
        found.append(row)
        best = " ; ".join(f"{us:.1f} {variant}" for us, variant in tried[:5])
        print(f"{row['shape']}: row by row {row['row by row us']:.1f} | {best}", flush=True)
    return found


def compile_some(wanted: list[tuple[Shape, GroupedConfig | None]]) -> None:
    """Run each once, row by row without tiles, so that the compiled kernel is on the disk."""
    for shape, config in wanted:
        inputs = make_inputs(shape)
        work = plain_work(inputs) if config is None else work_of(inputs, config)
        kernel = paged_attention_decode if config is None else paged_attention_grouped
        assert work is not None
        try:
            kernel(inputs.q, *inputs.caches[0], inputs.meta._replace(work=work), AttentionOptions(HEAD_DIM**-0.5))
        except Exception as error:
            print(config, type(error).__name__, flush=True)


def show(row: dict[str, Any]) -> None:
    cells = (f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    print(" | ".join(cells).removeprefix("shape "), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--compile", type=int, default=0)
    args = parser.parse_args()
    if args.compile:
        wanted = [(Shape(1, 4, 128, 64, heads), config) for heads, config in itertools.product((16, 32), TILES)]
        wanted += [(shape._replace(shared=16, own=16), None) for shape in SHAPES]
        with multiprocessing.get_context("spawn").Pool(args.compile) as pool:
            pool.map(compile_some, [wanted[i :: args.compile] for i in range(args.compile)])
        return
    rates = ceilings()
    show(rates)
    rows = sweep_rows(args.seconds) if args.sweep else table_rows(rates)
    if args.out:
        args.out.write_text(json.dumps({"rates": rates, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
