"""What LoRA costs: the linear layers of a step with and without adapters, and whole workloads.

    python benchmarks/lora_speed.py layers [--models 0.6B 8B] [--rows 1 16 64 256 8192] [--tune] [--out f.json]
    python benchmarks/lora_speed.py workload [--model 0.6B] [--kinds base fp32 bf16 mixed] [--out f.json]

On a GPU. `layers`: microseconds a decoder layer of its four products (merged q, k, v; output; merged gate, up with
silu(gate) * up; down) over all layers of the model in one CUDA graph, without adapters, and what rank-16 adapters of
all of them add: float32 or bfloat16, one or 8 mixed row by row. `floor` is the time to read the adapters at the speed
of a copy. `--tune` tries tiles and ways of multiplying first. `workload`: tokens a second of nano, as run_all.py
measures them, with PEFT's adapters; mixed: each prompt names one of 8.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from linear_tuning import HEAD_DIM, MODELS, step_time
from workloads import generation_configs, make_workload, qwen3

from hf_paged import PagedGenerator
from hf_paged.kernels import _lora_tile
from hf_paged.kernels import lora_expand as expand_module
from hf_paged.kernels import lora_shrink as shrink_module
from hf_paged.kernels.linear import linear_silu_mul_unchecked, linear_unchecked
from hf_paged.kernels.lora_expand import ExpandConfig, lora_expand_silu_mul_unchecked, lora_expand_unchecked
from hf_paged.kernels.lora_order import order_rows
from hf_paged.kernels.lora_shrink import ShrinkConfig, lora_shrink_unchecked
from hf_paged.kernels.lora_table import Adapter, LoraTable, Members, make_tables
from hf_paged.kernels.silu_mul import silu_mul_unchecked

RANK, NUM_MIXED = 16, 8
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = {"fp32": (FP32, False), "bf16": (BF16, False), "fp32 mixed": (FP32, True), "bf16 mixed": (BF16, True)}


class Product(NamedTuple):
    """A merged product of a layer: its weight, its adapters, and whether silu(gate) * up comes behind it."""

    weight: torch.Tensor
    tables: dict[str, LoraTable]
    silu: bool


def products(model: str, most: int | None = None) -> list[dict[str, Product]]:
    """Of every layer of the model, or of so many."""
    hidden, heads, kv_heads, inner, layers = MODELS[model]
    layers = most or layers
    q, kv = heads * HEAD_DIM, kv_heads * HEAD_DIM
    shapes = {"qkv": ([q, kv, kv], hidden), "o": ([hidden], q), "gate_up": ([inner, inner], hidden),
              "down": ([hidden], inner)}
    device = torch.device("cuda", torch.cuda.current_device())
    members = {(dtype, mixed): [] for dtype, mixed in KINDS.values()}
    for (dtype, mixed), groups in members.items():
        for _ in range(layers):
            for sizes, width in shapes.values():
                entries = tuple(
                    (tuple(Adapter(torch.randn(RANK, width, dtype=dtype, device=device) * width**-0.5,
                                   torch.randn(n, RANK, dtype=dtype, device=device) * 0.1, None, 2.0)
                           for n in sizes),)
                    for _ in range(1 + NUM_MIXED if mixed else 1))
                columns = tuple((sum(sizes[:j]), n) for j, n in enumerate(sizes))
                groups.append(Members(entries, columns, dtype))
    tables = {name: iter(make_tables(members[kind], device)) for name, kind in KINDS.items()}
    return [
        {name: Product(torch.randn(sum(sizes), width, dtype=BF16, device=device) * width**-0.5,
                       {kind: next(of) for kind, of in tables.items()}, name == "gate_up")
         for name, (sizes, width) in shapes.items()}
        for _ in range(layers)
    ]


class Layers:
    """All layers' products on some rows, as the executor launches them."""

    def __init__(self, layers: list[dict[str, Product]], rows: int) -> None:
        self._layers, self._second = layers, torch.cuda.Stream()
        self._alive: list[Any] = []  # what two streams use
        self._x = {name: torch.randn(rows, p.weight.shape[1], dtype=BF16, device="cuda")
                   for name, p in layers[0].items()}
        every = torch.arange(rows, device="cuda")
        # Decode rows stand in any order, a prompt's tokens together.
        entries = (every % NUM_MIXED if rows <= 512 else every * NUM_MIXED // rows).int() + 1
        self._order = order_rows(entries, 1 + NUM_MIXED)  # once a step

    def beside(self, kind: str, *, all_of_it: bool) -> None:
        """What an overlap would give: the shrinking, or all that is added, on a second stream beside the product.

        With `all_of_it` something is added to another tensor, as if the kernel behind the product read both.
        """
        main = torch.cuda.current_stream()
        for layer in self._layers:
            for name, of in layer.items():
                table, order, x = of.tables[kind], self._order if "mixed" in kind else None, self._x[name]
                other = torch.empty(len(x), len(of.weight), dtype=BF16, device="cuda") if all_of_it else None
                self._second.wait_stream(main)
                with torch.cuda.stream(self._second):
                    shrunk = lora_shrink_unchecked(x, table, order)
                    if other is not None:
                        lora_expand_unchecked(other, shrunk, table, order)
                out = linear_unchecked(x, of.weight)
                main.wait_stream(self._second)
                if other is not None:
                    if of.silu:
                        silu_mul_unchecked(out)
                elif of.silu:
                    lora_expand_silu_mul_unchecked(out, shrunk, table, order, None)
                else:
                    lora_expand_unchecked(out, shrunk, table, order)
                self._alive += [shrunk, other]

    def __call__(self, kind: str | None = None, names: tuple[str, ...] = ("qkv", "o", "gate_up", "down")) -> None:
        """`kind` None: without adapters."""
        for layer in self._layers:
            following = None
            for name in names:
                of, x = layer[name], self._x[name]
                if kind is None:
                    (linear_silu_mul_unchecked if of.silu else linear_unchecked)(x, of.weight)
                    continue
                table, order = of.tables[kind], self._order if "mixed" in kind else None
                shrunk = lora_shrink_unchecked(x, table, order) if following is None else following
                out, following = linear_unchecked(x, of.weight), None
                if of.silu:
                    behind = layer["down"].tables[kind] if "down" in names else None
                    _, following = lora_expand_silu_mul_unchecked(out, shrunk, table, order, behind)
                else:
                    lora_expand_unchecked(out, shrunk, table, order)

    def __len__(self) -> int:
        return len(self._layers)

    def microseconds(self, *args: Any, **options: Any) -> float:
        """A layer."""
        return step_time(partial(self, *args, **options)) * 1e3 / len(self)


@contextmanager
def configured(shrink: ShrinkConfig | None, expand: ExpandConfig | None) -> Iterator[None]:
    """In here every launch takes these, where they are given."""
    with ExitStack() as stack:
        if shrink is not None:
            stack.enter_context(mock.patch.object(shrink_module, "shrink_config", return_value=shrink))
        if expand is not None:
            stack.enter_context(mock.patch.object(expand_module, "expand_config", return_value=expand))
        yield


def shrink_candidates(rows: int, low: bool, mixed: bool) -> Iterator[ShrinkConfig]:
    for precision in ("low",) if low else ("tf32x3", "bf16x3"):
        if rows >= 1024:
            yield from (ShrinkConfig(m, r, 64, 1, precision, w, 3) for m, r, w in
                        [(64, 16, 4), (64, 64, 4), (128, 64, 4), (128, 64, 8), (128, 16, 4)])
            continue
        block_m = [16] if rows <= 16 else [32, 64] if rows >= 64 else [32]
        yield from (ShrinkConfig(m, r, k, s, precision, 4, 3) for m in block_m for r in ((16, 64) if mixed else (16,))
                    for k in (64, 128) for s in (4, 8, 16))


def expand_candidates(rows: int, low: bool) -> Iterator[ExpandConfig]:
    for precision in ("low",) if low else ("tf32x3", "bf16x3"):
        block_m = [16] if rows <= 16 else [32, 64, 128] if rows >= 2048 else [16, 32, 64]
        yield from (ExpandConfig(m, n, precision, 4 if m * n <= 8192 else 8) for m in block_m for n in (64, 128, 256)
                    if m * n <= 16384)


def tune(layers: Layers, rows: int, kind: str, deadline: float) -> Iterator[dict[str, Any]]:
    """Each candidate with the best of the others so far, shrink first."""
    low, mixed = kind.startswith("bf16"), "mixed" in kind
    best: dict[str, Any] = {"shrink": None, "expand": None}
    for op, candidates in (("shrink", shrink_candidates(rows, low, mixed)), ("expand", expand_candidates(rows, low))):
        timed = []
        for config in candidates:
            if time.perf_counter() > deadline:
                break
            with configured(**(best | {op: config})):
                try:
                    timed.append((layers.microseconds(kind), config))
                except Exception as error:  # shared memory
                    print(f"  {config}: {type(error).__name__} {str(error)[:80]}")
        if not timed:
            return
        timed.sort(key=lambda pair: pair[0])
        best[op] = timed[0][1]
        for us, config in timed:
            print(f"  {rows} rows {kind} {op} {us:8.2f} us {tuple(config)}")
        yield {"rows": rows, "kind": kind, "op": op, "mixed": mixed, "best": tuple(best[op]), "us": timed[0][0],
               "worst_us": timed[-1][0]}


def compile_all(model: str, rows: int, kind: str) -> None:
    """Every candidate once, so that a later run finds them on the disk; several at a time in processes of their own."""
    layers, low = Layers(products(model, 1), rows), kind.startswith("bf16")
    for shrink in shrink_candidates(rows, low, "mixed" in kind):
        with suppress(Exception), configured(shrink, None):
            layers(kind)
    splits = sorted({config.split_k for config in shrink_candidates(rows, low, "mixed" in kind)})
    for split, expand in product(splits, expand_candidates(rows, low)):
        shrink = next(config for config in shrink_candidates(rows, low, "mixed" in kind) if config.split_k == split)
        with suppress(Exception), configured(shrink, expand):
            layers(kind)


def layer_rows(model: str, rows_list: list[int], kinds: list[str], with_tuning: bool,
               with_overlap: bool, deadline: float) -> Iterator[dict[str, Any]]:
    made = products(model)
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    copied = 2 * source.numel() / (step_time(lambda: source.clone()) * 1e-3)
    for rows in rows_list:
        layers = Layers(made, rows)
        base = layers.microseconds()
        found: dict[str, Any] = {"model": model, "rows": rows, "base_us": base}
        for kind in kinds:
            if with_tuning and time.perf_counter() < deadline:
                for tuned in tune(layers, rows, kind, deadline):
                    found[f"{kind} {tuned['op']}"] = tuned
            table_bytes = sum(adapter.a.nbytes + adapter.b.nbytes for of in made[0].values()
                              for adapter in of.tables[kind].adapters())
            found[kind] = {"added_us": layers.microseconds(kind) - base, "floor_us": table_bytes / copied * 1e6}
            if with_overlap:
                with mock.patch.object(_lora_tile, "pdl_options", return_value={"PDL": False}):
                    found[kind]["early launch off"] = layers.microseconds(kind) - base
                    for all_of_it in (False, True):
                        us = step_time(partial(layers.beside, kind, all_of_it=all_of_it)) * 1e3 / len(layers) - base
                        found[kind]["all beside" if all_of_it else "shrinking beside"] = us
            if rows <= 512:
                for name in made[0]:
                    found[kind][name] = layers.microseconds(kind, (name,)) - layers.microseconds(None, (name,))
        yield found


def adapted(model: Any, dtype: torch.dtype, count: int) -> Any:
    """PEFT around the model: `count` rank-16 adapters of all linear layers."""
    import peft

    config = peft.LoraConfig(r=RANK, lora_alpha=32, target_modules="all-linear", init_lora_weights=False,
                             task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(model, config, adapter_name="a0")
    for i in range(1, count):
        wrapped.add_adapter(f"a{i}", config)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.mul_(0.1)
                parameter.data = parameter.data.to(dtype)
    return wrapped.eval()


def workload_rows(size: str, name: str, kinds: list[str], runs: int) -> Iterator[dict[str, Any]]:
    workload = make_workload(name)
    base = None
    for kind in kinds:
        model = qwen3(size, BF16, "cuda")
        if kind != "base":
            model = adapted(model, BF16 if "bf16" in kind else FP32, NUM_MIXED if "mixed" in kind else 1)
        options = {}
        if "mixed" in kind:
            options["adapter_names"] = [f"a{i % NUM_MIXED}" for i in range(len(workload.prompts))]
        with PagedGenerator(model, enable_prefix_caching=False) as generator:
            seconds = []
            for _ in range(runs + 1):
                start = time.perf_counter()
                generator.generate(workload.prompts, generation_configs(workload), use_tqdm=False, **options)
                seconds.append(time.perf_counter() - start)
            graphs = generator.engine.stats().num_graphs_captured
        rate = workload.output_tokens / statistics.median(seconds[1:])
        base = rate if kind == "base" else base
        yield {"model": size, "workload": name, "kind": kind, "tok_s": rate, "first_s": seconds[0],
               "of_base": rate / base if base else None, "graphs": graphs}
        del model, generator
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    of_layers = commands.add_parser("layers")
    of_layers.add_argument("--models", nargs="+", choices=list(MODELS), default=["0.6B", "8B"])
    of_layers.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256, 8192])
    of_layers.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    of_layers.add_argument("--tune", action="store_true")
    of_layers.add_argument("--overlap", action="store_true", help="also on a second stream, which the package does not")
    of_layers.add_argument("--compile", action="store_true", help="nothing but `--tune`'s candidates")
    of_layers.add_argument("--seconds", type=float, default=60.0)
    whole = commands.add_parser("workload")
    whole.add_argument("--model", default="0.6B")
    whole.add_argument("--workload", default="nano")
    whole.add_argument("--kinds", nargs="+", default=["base", "fp32", "bf16", "fp32 mixed"])
    whole.add_argument("--runs", type=int, default=1)
    for command in (of_layers, whole):
        command.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures = []
    if args.command == "layers" and args.compile:
        for kind, rows in product(args.kinds, args.rows):
            compile_all(args.models[0], rows, kind)
        return
    if args.command == "layers":
        deadline = time.perf_counter() + args.seconds
        how = args.tune, args.overlap, deadline
        found = (row for model in args.models for row in layer_rows(model, args.rows, args.kinds, *how))
    else:
        found = workload_rows(args.model, args.workload, args.kinds, args.runs)
    for row in found:
        figures.append(row)
        print(json.dumps(row, default=lambda value: round(value, 2)), flush=True)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
