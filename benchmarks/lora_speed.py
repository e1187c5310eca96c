"""Measure what LoRA costs: the linear layers of a step with and without adapters, and whole workloads.

    python benchmarks/lora_speed.py layers [--models 0.6B 8B] [--rows 1 16 64 256 8192] [--ways ...] [--tune]
    python benchmarks/lora_speed.py workload [--model 0.6B] [--kinds base fp32 bf16 mixed] [--out f.json]

On a GPU. `layers`: microseconds a decoder layer of all that it does besides attention, over all layers of the model in
one CUDA graph, without adapters, and what rank-16 adapters of all linear layers add: float32 or bfloat16, one or 8
mixed row by row; in other ways, too. `floor` is the time to read the adapters at the speed of a copy. `--tune` tries
tiles and ways of multiplying. `workload`: tokens a second of nano, as run_all.py measures them, with PEFT's adapters;
mixed: each prompt names one of 8.
"""

from __future__ import annotations

import argparse
import json
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
from hf_paged.kernels.layer.add_rms_norm import add_rms_norm
from hf_paged.kernels.layer.linear import linear, linear_silu_mul
from hf_paged.kernels.layer.qk_norm_rope_store import HeadsToCache, qk_norm_rope_store
from hf_paged.kernels.lora import _lora_tile
from hf_paged.kernels.lora import lora_expand as expand_module
from hf_paged.kernels.lora import lora_qk_norm_rope_store as rope_module
from hf_paged.kernels.lora import lora_shrink as shrink_module
from hf_paged.kernels.lora.lora_expand import Delta, ExpandConfig, lora_expand, lora_expand_silu_mul
from hf_paged.kernels.lora.lora_order import RowOrder, order_rows
from hf_paged.kernels.lora.lora_qk_norm_rope_store import lora_qk_norm_rope_store
from hf_paged.kernels.lora.lora_shrink import ShrinkConfig, lora_shrink
from hf_paged.kernels.lora.lora_table import Adapter, LoraTable, Members, make_tables

RANK, NUM_MIXED = 16, 8
BF16, FP32 = torch.bfloat16, torch.float32
KINDS = {"fp32": (FP32, False), "bf16": (BF16, False), "fp32 mixed": (FP32, True), "bf16 mixed": (BF16, True)}


class Product(NamedTuple):
    """A merged product of a layer: its weight, its adapters, and whether silu(gate) * up comes behind it."""

    weight: torch.Tensor
    tables: dict[str, LoraTable]
    silu: bool


def products(model: str, kinds: list[str], most: int | None = None) -> list[dict[str, Product]]:
    """Of every layer of the model, or of so many."""
    hidden, heads, kv_heads, inner, layers = MODELS[model]
    layers = most or layers
    q, kv = heads * HEAD_DIM, kv_heads * HEAD_DIM
    shapes = {"qkv": ([q, kv, kv], hidden), "o": ([hidden], q), "gate_up": ([inner, inner], hidden),
              "down": ([hidden], inner)}
    device = torch.device("cuda", torch.cuda.current_device())
    members: dict[tuple[torch.dtype, bool], list[Members]] = {KINDS[kind]: [] for kind in kinds}
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
    tables = {name: iter(make_tables(members[kind], device)) for name, kind in KINDS.items() if name in kinds}
    return [
        {name: Product(torch.randn(sum(sizes), width, dtype=BF16, device=device) * width**-0.5,
                       {kind: next(of) for kind, of in tables.items()}, name == "gate_up")
         for name, (sizes, width) in shapes.items()}
        for _ in range(layers)
    ]


class Layers:
    """All that the layers of a model do with some rows besides attention, launched as the executor does."""

    def __init__(self, layers: list[dict[str, Product]], rows: int) -> None:
        self._layers = layers
        first = layers[0]["qkv"]
        hidden, q = layers[0]["o"].weight.shape
        kv_heads = (len(first.weight) - q) // (2 * HEAD_DIM)
        self._x, self._norm, self._head_norm, self._rope = (
            torch.randn(*shape, dtype=BF16, device="cuda")
            for shape in ((rows, hidden), (hidden,), (HEAD_DIM,), (4096, HEAD_DIM)))
        self._caches = torch.zeros(2, rows, 16, kv_heads, HEAD_DIM, dtype=BF16, device="cuda")
        every = torch.arange(rows, device="cuda")
        self._slots, self._positions = every * 16, every % 4096
        # Decode rows stand in any order, a prompt's tokens together.
        entries = (every % NUM_MIXED if rows <= 512 else every * NUM_MIXED // rows).int() + 1
        self._order = order_rows(entries, 1 + NUM_MIXED)  # once a step

    def __call__(self, kind: str | None = None) -> None:
        """`kind` None: without adapters."""
        order = self._order if kind is not None and "mixed" in kind else None
        delta, lora, residual = self._x, None, None
        for layer in self._layers:
            of = {name: None if kind is None else product.tables[kind] for name, product in layer.items()}
            normed, residual = self._add_norm(delta, lora, residual)
            lora = _delta(normed, of["qkv"], order)
            heads = HeadsToCache(self._head_norm, self._head_norm, 1e-6, self._rope, self._rope, self._positions,
                                 self._slots, *self._caches)
            product = linear(normed, layer["qkv"].weight)
            query = (qk_norm_rope_store(product, heads) if lora is None
                     else lora_qk_norm_rope_store(product, lora, heads)).flatten(1)
            lora = _delta(query, of["o"], order)
            delta = linear(query, layer["o"].weight)
            normed, residual = self._add_norm(delta, lora, residual)
            if (lora := _delta(normed, of["gate_up"], order)) is None:
                x, shrunk = linear_silu_mul(normed, layer["gate_up"].weight), None
            else:
                product = linear(normed, layer["gate_up"].weight)
                x, shrunk = lora_expand_silu_mul(product, *lora, of["down"])
            lora = _delta(x, of["down"], order, shrunk)
            delta = linear(x, layer["down"].weight)
        self._add_norm(delta, lora, residual)

    def _add_norm(self, delta: torch.Tensor, lora: Delta | None,
                  residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if lora is not None:
            lora_expand(delta, *lora)
        return add_rms_norm(delta, residual, self._norm, 1e-6)

    def __len__(self) -> int:
        return len(self._layers)

    def microseconds(self, kind: str | None = None) -> float:
        """A layer."""
        return step_time(partial(self, kind)) * 1e3 / len(self)


def _delta(x: torch.Tensor, table: LoraTable | None, order: RowOrder | None,
           shrunk: torch.Tensor | None = None) -> Delta | None:
    if table is None:
        return None
    return Delta(lora_shrink(x, table, order) if shrunk is None else shrunk, table, order)


# What can be done in other ways: where, what is there, and what is put in its place.
_NEVER, _ALWAYS, _shrink_config = 0, 1 << 30, shrink_module.shrink_config
WAYS: dict[str, list[tuple[Any, str, Any]]] = {
    "as it is": [],
    "rope apart": [(rope_module, "_MOST_ROWS", _NEVER)],
    "rope together": [(rope_module, "_MOST_ROWS", _ALWAYS)],
    "down's sums apart": [(expand_module, "_MOST_FOLLOWED_ROWS", _NEVER)],
    "down's sums together": [(expand_module, "_MOST_FOLLOWED_ROWS", _ALWAYS)],
    "shrinking 16 rows": [(shrink_module, "shrink_config", lambda *args: _shrink_config(*args)._replace(block_m=16))],
    "no prefetch": [(module, "prefetches", lambda *_: False) for module in (expand_module, shrink_module)],
    "early start": [(_lora_tile, "_EARLY_ROWS", _ALWAYS)],
    "no early start": [(_lora_tile, "_EARLY_ROWS", _NEVER)],
}
WAYS["all apart"] = WAYS["rope apart"] + WAYS["down's sums apart"]
WAYS["all together"] = WAYS["rope together"] + WAYS["down's sums together"]


@contextmanager
def in_way(way: str) -> Iterator[None]:
    """In here every launch is made so."""
    with ExitStack() as stack:
        for module, name, value in WAYS[way]:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


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


def compile_all(model: str, rows: int, kind: str, ways: list[str], with_tuning: bool) -> None:
    """Everything once, so that a later run finds it on the disk; several at a time in processes of their own."""
    layers, low = Layers(products(model, [kind], 1), rows), kind.startswith("bf16")
    for way in (None, *ways):
        with in_way(way or "as it is"):
            layers(None if way is None else kind)
    if not with_tuning:
        return
    for shrink in shrink_candidates(rows, low, "mixed" in kind):
        with suppress(Exception), configured(shrink, None):
            layers(kind)
    splits = sorted({config.split_k for config in shrink_candidates(rows, low, "mixed" in kind)})
    for split, expand in product(splits, expand_candidates(rows, low)):
        shrink = next(config for config in shrink_candidates(rows, low, "mixed" in kind) if config.split_k == split)
        with suppress(Exception), configured(shrink, expand):
            layers(kind)


def layer_rows(model: str, rows_list: list[int], kinds: list[str], ways: list[str], with_tuning: bool,
               deadline: float) -> Iterator[dict[str, Any]]:
    made = products(model, kinds)
    source = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    copied = 2 * source.numel() / (step_time(lambda: source.clone()) * 1e-3)
    for rows in rows_list:
        layers = Layers(made, rows)
        base = layers.microseconds()
        for kind in kinds:
            if with_tuning and time.perf_counter() < deadline:
                yield from tune(layers, rows, kind, deadline)
            table_bytes = sum(adapter.a.nbytes + adapter.b.nbytes for of in made[0].values()
                              for adapter in of.tables[kind].adapters())
            for way in ways:
                if time.perf_counter() < deadline:
                    with in_way(way):
                        added = layers.microseconds(kind) - base
                    yield {"model": model, "rows": rows, "base_us": base, "kind": kind, "way": way, "added_us": added,
                           "floor_us": table_bytes / copied * 1e6}


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
            for _ in range(3 + runs):
                start = time.perf_counter()
                generator.generate(workload.prompts, generation_configs(workload), use_tqdm=False, **options)
                seconds.append(time.perf_counter() - start)
            graphs = generator.engine.stats().num_graphs_captured
        rate = workload.output_tokens / min(seconds[3:])
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
    of_layers.add_argument("--ways", nargs="+", choices=list(WAYS), default=["as it is"])
    of_layers.add_argument("--compile", action="store_true", help="nothing but that")
    of_layers.add_argument("--seconds", type=float, default=60.0)
    whole = commands.add_parser("workload")
    whole.add_argument("--model", default="0.6B")
    whole.add_argument("--workload", default="nano")
    whole.add_argument("--kinds", nargs="+", default=["base", "fp32", "bf16", "fp32 mixed"])
    whole.add_argument("--runs", type=int, default=2, help="behind three to warm up; the fastest counts")
    for command in (of_layers, whole):
        command.add_argument("--out", type=Path)
    args = parser.parse_args()
    figures = []
    if args.command == "layers" and args.compile:
        for kind, rows in product(args.kinds, args.rows):
            compile_all(args.models[0], rows, kind, args.ways, args.tune)
        return
    if args.command == "layers":
        deadline = time.perf_counter() + args.seconds
        how = args.kinds, args.ways, args.tune, deadline
        found = (row for model in args.models for row in layer_rows(model, args.rows, *how))
    else:
        found = workload_rows(args.model, args.workload, args.kinds, args.runs)
    for row in found:
        figures.append(row)
        print(json.dumps(row, default=lambda value: round(value, 2)), flush=True)
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
