"""Time attention of rows that share prefixes: read once for several rows, row by row, and against the card.

    python benchmarks/shared_prefix_speed.py [--prompts] [--out shared_prefix.json] [--sweep [--seconds 60]]
        [--compile 8]

Of decode rows, or with ``--prompts`` of rows of several new tokens: row by row in an eager step, whose tiles are as
large as its rows fill, and in a captured one, whose tiles are those of any row.

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

from hf_paged.attention import plan_decode as grouped_work
from hf_paged.attention import plan_prompts as prompt_work
from hf_paged.attention.choose_groups import Kernel, choose_groups, group_kernel_of
from hf_paged.attention.plan_decode import plan_groups, plan_items
from hf_paged.attention.plan_prompts import PromptPlan, Prompts, plan_prompts, prompt_kernel_of
from hf_paged.device.cuda import num_multiprocessors
from hf_paged.kernels.attention.decode import config_of, cta_slots_of, paged_attention_decode
from hf_paged.kernels.attention.grouped import paged_attention_grouped, paged_attention_grouped_prefill
from hf_paged.kernels.attention.prefill import FULL_TILE, paged_attention_prefill
from hf_paged.kernels.attention.types import (
    AttentionOptions,
    AttentionSpec,
    DecodeWork,
    GroupedConfig,
    GroupedWork,
    PagedMetadata,
    PromptWork,
)
from hf_paged.scheduler.prefix_tree import PrefixGroups


class Shape(NamedTuple):
    """`groups` times `rows` rows, each behind `shared` tokens that its group's rows share, and `own` ones.

    `new`: 0: the last own token is new; else so many behind the shared ones, in place of own ones.
    """

    groups: int
    rows: int
    shared: int
    own: int
    heads: int = 16
    new: int = 0

    def __str__(self) -> str:
        own = f"{self.new} new" if self.new else self.own
        return f"{self.groups} x {self.rows} behind {self.shared} + {own}, {self.heads}/{KV_HEADS}"


SHAPES = [
    Shape(32, 16, 512, 256), Shape(1, 256, 4096, 256), Shape(1, 256, 16384, 64), Shape(32, 16, 2048, 256),
    Shape(1, 16, 2048, 64), Shape(1, 16, 512, 64), Shape(1, 2, 128, 64), Shape(8, 8, 1024, 256), Shape(8, 8, 256, 256),
    Shape(1, 8, 1024, 64), Shape(1, 2, 16384, 64), Shape(4, 4, 1024, 256), Shape(64, 4, 512, 256),
    Shape(32, 16, 512, 256, 32), Shape(1, 256, 4096, 256, 32), Shape(1, 256, 16384, 64, 32), Shape(1, 4, 2048, 64, 32),
    Shape(1, 16, 1024, 64, 32),
]
PROMPTS = [
    Shape(groups, rows, shared, 0, heads, new) for groups, rows, shared, new, heads in (
        (1, 256, 2048, 8, 16), (1, 128, 2048, 64, 16), (1, 256, 2048, 24, 16), (1, 32, 2048, 64, 16),
        (1, 32, 2048, 16, 16), (1, 16, 2048, 8, 16), (1, 4, 16384, 16, 16), (1, 64, 512, 8, 16), (8, 8, 1024, 16, 16),
        (1, 2, 1024, 8, 16), (1, 256, 2048, 8, 32), (1, 32, 2048, 64, 32), (1, 128, 1024, 40, 16),
        (1, 256, 512, 16, 16), (1, 16, 256, 8, 16), (64, 4, 512, 16, 16), (1, 8, 8192, 200, 16), (1, 64, 2048, 4, 32),
    )
]
_C = GroupedConfig
PROMPT_TILES = [_C(64, 32, 3, 64, 3, 4, 3, 168), _C(128, 64, 3, 64, 3, 8, 1), _C(128, 32, 3, 64, 3, 8, 2, 128)]
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


class PromptVariant(NamedTuple):
    """What `--prompts --sweep` tries: tiles, and into how many splits a group is cut."""

    config: GroupedConfig
    splits: int


PROMPT_VARIANTS = [*(PromptVariant(PROMPT_TILES[0], splits) for splits in (1, 2, 4, 8, 16)),
                   *(PromptVariant(config, splits) for config in PROMPT_TILES[1:] for splits in (1, 4))]


class Inputs(NamedTuple):
    q: torch.Tensor
    caches: list[tuple[torch.Tensor, torch.Tensor]]  # enough of them that a call finds nothing in L2
    meta: PagedMetadata  # without a plan
    lengths: np.ndarray
    groups: PrefixGroups


def make_inputs(shape: Shape) -> Inputs:
    """The blocks of a row are scattered over the pool."""
    rows, new, length = shape.groups * shape.rows, max(1, shape.new), shape.shared + max(shape.own, shape.new)
    prefix, own = shape.shared // BLOCK_SIZE, -(-max(shape.own, shape.new) // BLOCK_SIZE)
    blocks = shape.groups * prefix + rows * own
    kwargs: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    size = (blocks + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    count = min(200, max(2, -(-L2_BYTES // (4 * blocks * BLOCK_SIZE * KV_HEADS * HEAD_DIM))))
    caches = [(torch.randn(size, **kwargs), torch.randn(size, **kwargs)) for _ in range(count)]
    order = (torch.randperm(blocks, device="cuda") + 1).int()
    table = torch.zeros(rows, -(-(prefix + own) // 16) * 16, dtype=torch.int32, device="cuda")
    table[:, :prefix] = order[: shape.groups * prefix].view(shape.groups, prefix).repeat_interleave(shape.rows, 0)
    table[:, prefix : prefix + own] = order[shape.groups * prefix :].view(rows, own)
    lengths = np.full(rows, length)
    meta = PagedMetadata(
        torch.arange(rows + 1, dtype=torch.int32, device="cuda") * new, torch.from_numpy(lengths).int().cuda(), table,
        torch.arange(rows, dtype=torch.int32, device="cuda"), torch.zeros(rows * new, dtype=torch.int64, device="cuda"),
        new, length,
    )
    first = np.arange(0, rows, shape.rows, dtype=np.int32)
    same = [np.full(shape.groups, value, np.int32) for value in (shape.rows, 0, shape.shared)]
    groups = PrefixGroups(np.arange(rows, dtype=np.int32), first, *same)
    return Inputs(torch.randn(rows * new, shape.heads, HEAD_DIM, **kwargs), caches, meta, lengths, groups)


def seconds_of(kernel: Any, inputs: Inputs, work: DecodeWork | GroupedWork | PromptWork | None, replays: int = 9,
               max_query_len: int | None = None) -> float:
    meta = inputs.meta._replace(work=work, max_query_len=max_query_len or inputs.meta.max_query_len)
    run = partial(kernel, meta=meta, options=AttentionOptions(HEAD_DIM**-0.5))
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
    kernel = group_kernel_of(AttentionSpec(heads, KV_HEADS, HEAD_DIM, torch.bfloat16, device, BLOCK_SIZE))
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


def prompt_plan_of(inputs: Inputs, max_query_len: int, config: GroupedConfig | None = None) -> PromptPlan | None:
    """The plan of `config`, or the one that a step gets, None where that is not grouped."""
    heads, device, new = inputs.q.shape[1], inputs.q.device, inputs.meta.max_query_len
    spec = AttentionSpec(heads, KV_HEADS, HEAD_DIM, torch.bfloat16, device, BLOCK_SIZE)
    kernel = prompt_kernel_of(spec, max_query_len, inputs.meta.max_seq_len)
    if config is not None:
        slots = max(1, config.programs_per_sm * num_multiprocessors(device) // KV_HEADS)
        kernel = kernel._replace(shared=Kernel(config, config.block_m // (heads // KV_HEADS), slots, 1),
                                 rows=kernel.rows._replace(cost=1e9))
    num_new = np.full(len(inputs.lengths), new)
    slots = np.arange(len(num_new))
    prompts = Prompts(inputs.lengths - num_new, num_new, slots, max_query_len, inputs.meta.max_seq_len)
    return plan_prompts(inputs.groups, prompts, kernel)


def prompt_work_of(plan: PromptPlan) -> PromptWork:
    items, rows, begin = (torch.from_numpy(array).cuda() for array in plan[:3])
    return PromptWork(GroupedWork(items, rows, plan.num_parts, plan.kernel.config), begin)


def prompt_rows(rates: dict[str, float]) -> list[dict[str, Any]]:
    """Eager and captured steps of every shape."""
    found = []
    for shape in PROMPTS:
        inputs, floor = make_inputs(shape), floor_of(shape, rates)
        row: dict[str, Any] = {"shape": str(shape)}
        for name, longest in (("eager", shape.new), ("captured", max(FULL_TILE, len(inputs.q)))):
            plain = seconds_of(paged_attention_prefill, inputs, None, max_query_len=longest)
            row |= {f"{name}: row by row us": plain * 1e6, "of floor": floor / plain}
            plan = prompt_plan_of(inputs, longest)
            if plan is not None:
                grouped = seconds_of(paged_attention_grouped_prefill, inputs, prompt_work_of(plan),
                                     max_query_len=longest)
                row |= {f"{name}: grouped us": grouped * 1e6, f"{name}: times": plain / grouped,
                        f"{name}: of floor": floor / grouped}
        show(row)
        found.append(row)
    return found


def sweep_prompts(seconds: float) -> list[dict[str, Any]]:
    """Shape by shape, what each variant takes."""
    found, end = [], time.perf_counter() + seconds
    prompt_work.PIECE_COST = prompt_work.LAUNCH = prompt_work.ROW_START = 0
    for shape in PROMPTS:
        if time.perf_counter() > end:
            break
        inputs = make_inputs(shape)
        eager, captured = (seconds_of(paged_attention_prefill, inputs, None, 5, longest) * 1e6
                           for longest in (shape.new, max(FULL_TILE, len(inputs.q))))
        tried = []
        for variant in PROMPT_VARIANTS:
            prompt_work.SPLITS = variant.splits, variant.splits
            plan = prompt_plan_of(inputs, shape.new, variant.config)
            if plan is None or time.perf_counter() > end:
                continue
            taken = seconds_of(paged_attention_grouped_prefill, inputs, prompt_work_of(plan), 5) * 1e6
            tried.append((taken, variant.config.block_m, variant.config.block_n, variant.splits))
        found.append({"shape": str(shape), "eager us": eager, "captured us": captured, "tried": tried})
        cells = " ; ".join(f"{us:.1f} {rest}" for us, *rest in tried)
        print(f"{shape}: eager {eager:.1f} captured {captured:.1f} | {cells}", flush=True)
    return found


def floor_of(shape: Shape, rates: dict[str, float]) -> float:
    """Seconds."""
    rows = shape.groups * shape.rows
    own = max(shape.own, shape.new)
    nbytes = 4 * KV_HEADS * HEAD_DIM * (shape.groups * shape.shared + rows * own)
    seen = shape.new * (shape.shared + (shape.new + 1) / 2) if shape.new else shape.shared + own
    flops = 4 * shape.heads * HEAD_DIM * rows * seen
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


def compile_prompts(wanted: list[tuple[int, int, GroupedConfig]]) -> None:
    """Run, for query heads and new tokens, row by row and by these tiles."""
    for heads, new, config in wanted:
        inputs = make_inputs(Shape(1, 4, 128, 0, heads, new))
        plan = prompt_plan_of(inputs, new, config)
        assert plan is not None
        for longest, work in ((new, prompt_work_of(plan)), (new, None), (FULL_TILE, None)):
            kernel = paged_attention_prefill if work is None else paged_attention_grouped_prefill
            kernel(inputs.q, *inputs.caches[0], inputs.meta._replace(work=work, max_query_len=longest),
                   AttentionOptions(HEAD_DIM**-0.5))
            torch.cuda.synchronize()


def show(row: dict[str, Any]) -> None:
    cells = (f"{key} {value:.2f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items())
    print(" | ".join(cells).removeprefix("shape "), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--compile", type=int, default=0)
    args = parser.parse_args()
    if args.compile and args.prompts:
        news = sorted({(shape.heads, min(shape.new, 64)) for shape in PROMPTS})
        some = [(heads, new, config) for config in PROMPT_TILES for heads, new in news]
        with multiprocessing.get_context("spawn").Pool(args.compile) as pool:
            pool.map(compile_prompts, [some[i :: args.compile] for i in range(args.compile)])
        return
    if args.compile:
        wanted = [(Shape(1, 4, 128, 64, heads), config) for heads, config in itertools.product((16, 32), TILES)]
        wanted += [(shape._replace(shared=16, own=16), None) for shape in SHAPES]
        with multiprocessing.get_context("spawn").Pool(args.compile) as pool:
            pool.map(compile_some, [wanted[i :: args.compile] for i in range(args.compile)])
        return
    rates = ceilings()
    show(rates)
    if args.prompts:
        rows = sweep_prompts(args.seconds) if args.sweep else prompt_rows(rates)
    else:
        rows = sweep_rows(args.seconds) if args.sweep else table_rows(rates)
    if args.out:
        args.out.write_text(json.dumps({"rates": rates, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
