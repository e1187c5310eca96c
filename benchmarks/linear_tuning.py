"""Compare the linear kernels with cuBLAS for every projection of Qwen3 0.6B, 4B and 8B, and in whole layers.

    python benchmarks/linear_tuning.py [--out linear.json] [--models 0.6B 8B] [--rows 1 8] [--skip-sweep] [--skip-chain]
    python benchmarks/linear_tuning.py --skip-chain --models 32B/2 32B/4 --rows 64 96 128 192 256   # a rank's part

On a GPU. Times are medians of CUDA-graph replays over copies of the weight that are larger than L2 together, so they
hold the gap between two kernels too (shorter with PDL). Chain rows: all layers of a decode step after 512 tokens,
sampling left out, final norm and head included. `chosen` is what `linear` takes, `best` the fastest candidate; rows
named gate_up+silu are up to and with silu(gate) * up.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from kernel_speed import decode_work, graph_time

from hf_paged.kernels import _triton
from hf_paged.kernels._triton import pdl_supported
from hf_paged.kernels.attention.decode import config_of, paged_attention_decode
from hf_paged.kernels.attention.types import AttentionOptions, PagedMetadata
from hf_paged.kernels.layer._gemv import GemvConfig
from hf_paged.kernels.layer._splitk_linear import MAX_ROWS, DotConfig
from hf_paged.kernels.layer.add_rms_norm import add_rms_norm
from hf_paged.kernels.layer.linear import (
    fastest_config,
    linear,
    linear_parts,
    linear_silu_mul,
    linear_silu_mul_triton,
    linear_triton,
)
from hf_paged.kernels.layer.qk_norm_rope_store import HeadsToCache, qk_norm_rope_store
from hf_paged.kernels.layer.silu_mul import silu_mul

# hidden, q heads, KV heads, inner, layers; heads of 128 in all of them. 32B/2: what a rank of two has, but the head.
MODELS = {
    "0.6B": (1024, 16, 8, 3072, 28), "4B": (2560, 32, 8, 9728, 36), "8B": (4096, 32, 8, 12288, 36),
    "32B/2": (5120, 32, 4, 12800, 64), "32B/4": (5120, 16, 2, 6400, 64),
}
VOCAB, HEAD_DIM, EPS = 151936, 128, 1e-6
ROWS = [1, 2, 4, 8, 32, 64]
ROTATE_BYTES = 160 << 20

GEMV = [GemvConfig(*c) for c in [(1, 4, 2), (2, 4, 2), (4, 4, 2), (4, 4, 1), (4, 1, 2), (2, 2, 2)]]
DOT = [DotConfig(64, 128, 1, 4, 4), DotConfig(64, 128, 4, 4, 4), DotConfig(64, 64, 8, 4, 4)]


def shapes_of(model: str) -> dict[str, tuple[int, int]]:
    """(N, K) of each projection."""
    hidden, heads, kv_heads, inner, _ = MODELS[model]
    q, kv = heads * HEAD_DIM, kv_heads * HEAD_DIM
    return {
        "qkv": (q + 2 * kv, hidden), "o": (hidden, q), "gate_up": (2 * inner, hidden), "down": (hidden, inner),
        "head": (VOCAB, hidden),
    }


def sweep(models: list[str], rows_list: list[int], deadline: float) -> Iterable[dict[str, Any]]:
    """Per shape and rows: microseconds of cuBLAS and of every candidate, GB/s of the best."""
    seen: set[tuple[int, int]] = set()
    for model in models:
        for name, (n, k) in shapes_of(model).items():
            if (n, k) in seen:
                continue
            seen.add((n, k))
            copies = max(2, -(-ROTATE_BYTES // (2 * n * k)))
            weights = [torch.randn(n, k, dtype=torch.bfloat16, device="cuda") * k**-0.5 for _ in range(copies)]
            for rows in rows_list:
                if time.perf_counter() > deadline:
                    print("out of time: the rest of the sweep is left out")
                    return
                x = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda")
                configs = [*(GEMV if rows <= 4 else []), *(DOT if 2 <= rows <= MAX_ROWS else [])]
                calls = {_text(c): partial(linear_triton, x, bias=None, config=c) for c in configs}
                yield compare(f"{model} {name}", x, weights, partial(F.linear, x), calls)
                if name == "gate_up" and rows <= 2:
                    calls = {_text(c): partial(linear_silu_mul_triton, x, config=c) for c in GEMV if c.block_n > 1}
                    calls[_text(GEMV[0])] = partial(linear_silu_mul_triton, x, config=GEMV[0])
                    separate = partial(_then_silu_mul, F.linear, x)
                    yield compare(f"{model} gate_up+silu", x, weights, separate, calls)
            del weights


def compare(name: str, x: torch.Tensor, weights: list[torch.Tensor], cublas: Callable[..., torch.Tensor],
            calls: dict[str, Callable[..., torch.Tensor]]) -> dict[str, Any]:
    """Times of calls that lack the weight."""
    (n, k), rows = weights[0].shape, len(x)
    times = {}
    for text, call in {"cuBLAS": cublas, **calls}.items():
        try:
            times[text] = graph_time([partial(call, weight=w) for w in weights], 5) * 1e6
        except Exception as error:  # a configuration may ask for more shared memory than there is
            print(f"{name} {rows} {text}: {type(error).__name__} {str(error)[:80]}")
    best, chosen = min(times, key=lambda text: times[text]), _text(fastest_config(rows, n, k))
    us = times.get(chosen, float("nan"))
    return {
        "row": f"{name} {rows} x {n} x {k}", "T": rows, "N": n, "K": k, "cuBLAS us": times["cuBLAS"],
        "chosen": chosen, "us": us, "GB/s": 2 * n * k / us / 1e3, "x cuBLAS": times["cuBLAS"] / us,
        "best": best, "x best": us / times[best], "all": times,
    }


def _then_silu_mul(product: Callable[..., torch.Tensor], x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return silu_mul(product(x, weight))


def _text(config: GemvConfig | DotConfig | None) -> str:
    return "cuBLAS" if config is None else f"{type(config).__name__[:-6]}{tuple(config)}"


class Step:
    """All layers of a decode step of `rows` sequences of 512 tokens, random weights, and the head."""

    def __init__(self, model: str, rows: int) -> None:
        hidden, self.heads, kv_heads, _, layers = MODELS[model]
        kwargs: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.rows, self.x = rows, torch.randn(rows, hidden, **kwargs)
        shapes = shapes_of(model)
        # Random as bytes are: uniform, quick to make for 16 GB.
        self.weights = [
            {name: torch.rand(n, k, **kwargs).sub_(0.5).mul_(2 * k**-0.5) for name, (n, k) in shapes.items()
             if name != "head"} for _ in range(layers)
        ]
        self.head = torch.rand(*shapes["head"], **kwargs)
        self.norms = [torch.ones(hidden, **kwargs) for _ in range(2 * layers)]
        self.head_norm = torch.ones(HEAD_DIM, **kwargs)
        self.cos, self.sin = torch.randn(2, 1024, HEAD_DIM, **kwargs)
        blocks = 40 * rows
        self.caches = [torch.randn(2, blocks, 16, kv_heads, HEAD_DIM, **kwargs) for _ in range(layers)]
        self.positions = torch.full((rows,), 511, device="cuda")
        self.meta = PagedMetadata(
            query_start=torch.arange(rows + 1, device="cuda").int(), seq_lens=(self.positions + 1).int(),
            block_table=torch.arange(blocks, device="cuda").int().view(rows, 40),
            slots=torch.arange(rows, device="cuda").int(),
            slot_mapping=torch.arange(rows, device="cuda") * 640 + 511, max_query_len=1, max_seq_len=4096,
            work=decode_work(rows, 512, config_of(rows, kv_heads, HEAD_DIM, torch.bfloat16, self.x.device)),
        )

    def __call__(self, product: Callable[..., torch.Tensor], fuse_silu: bool, parts: bool) -> torch.Tensor:
        delta, residual = self.x, None
        row_product = linear_parts if parts else product
        for i, weights in enumerate(self.weights):
            normed, residual = _add_norm(delta, residual, self.norms[2 * i])
            k_cache, v_cache = self.caches[i]
            heads = HeadsToCache(self.head_norm, self.head_norm, EPS, self.cos, self.sin, self.positions,
                                 self.meta.slot_mapping, k_cache, v_cache)
            query = qk_norm_rope_store(row_product(normed, weights["qkv"]), heads)
            query = paged_attention_decode(query, k_cache, v_cache, self.meta, AttentionOptions(HEAD_DIM**-0.5))
            delta = row_product(query.flatten(1), weights["o"])
            normed, residual = _add_norm(delta, residual, self.norms[2 * i + 1])
            up = linear_silu_mul if fuse_silu else partial(_then_silu_mul, product)
            delta = row_product(up(normed, weights["gate_up"]), weights["down"])
        return product(_add_norm(delta, residual, self.norms[0])[0], self.head)


def _add_norm(delta: torch.Tensor, residual: torch.Tensor | None,
              weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return add_rms_norm(delta, residual, weight, EPS)


def no_pdl(device: torch.device) -> bool:
    return False


class Variant(NamedTuple):
    """What a chain runs with; `prefetch`: bytes of the largest weight that is put into L2 early."""

    name: str
    product: Callable[..., torch.Tensor]
    pdl: bool
    fuse_silu: bool = False
    parts: bool = False
    prefetch: int = _triton._PREFETCH_BYTES


VARIANTS = [
    Variant("cuBLAS", F.linear, False),
    Variant("cuBLAS + PDL", F.linear, True),
    Variant("linear", linear, False),
    Variant("linear + PDL", linear, True),
    Variant("linear + PDL, silu fused", linear, True, True),
    Variant("linear + PDL, silu fused, parts to who reads them", linear, True, True, True),
    Variant("linear + PDL, silu fused, parts to who reads them, no prefetch", linear, True, True, True, prefetch=0),
]


def step_time(call: Callable[[], object]) -> float:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            call()
    times = []
    for i in range(25):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 5:
            times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def chain(models: list[str], rows_list: list[int]) -> Iterable[dict[str, Any]]:
    """Milliseconds of a step by what is switched on."""
    for model in models:
        for rows in rows_list:
            step = Step(model, rows)
            for v in VARIANTS:
                supported: Any = pdl_supported if v.pdl else no_pdl
                with mock.patch.multiple(_triton, _PREFETCH_BYTES=v.prefetch, pdl_supported=supported):
                    ms = step_time(partial(step, v.product, v.fuse_silu, v.parts))
                yield {"row": f"chain {model} batch {rows}: {v.name}", "ms": ms, "tok/s": rows / ms * 1e3}
            del step


def show(row: dict[str, Any]) -> dict[str, Any]:
    cells = [f"{k} {v:.3f}" if k == "ms" else f"{k} {v:.1f}" if isinstance(v, float) else f"{k} {v}"
             for k, v in row.items() if k not in ("row", "all", "T", "N", "K")]
    print(row["row"], "|", " | ".join(cells), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--models", nargs="*", default=["0.6B", "4B", "8B"], choices=list(MODELS))
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    parser.add_argument("--chain-rows", nargs="*", type=int, default=[1, 2, 8])
    parser.add_argument("--skip-sweep", action="store_true")
    parser.add_argument("--skip-chain", action="store_true")
    parser.add_argument("--seconds", type=float, default=60, help="of the sweep; shapes left then are left out")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    begin = time.perf_counter()
    report: dict[str, Any] = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__}
    with torch.inference_mode():
        # The chain first: it decides, the sweep may run out of time.
        if not arguments.skip_chain:
            chains = [model for model in arguments.models if model != "4B"]
            report["chain"] = [show(row) for row in chain(chains, arguments.chain_rows)]
        if not arguments.skip_sweep:
            deadline = time.perf_counter() + arguments.seconds
            report["sweep"] = [show(row) for row in sweep(arguments.models, arguments.rows, deadline)]
    print(f"{time.perf_counter() - begin:.0f} s")
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
