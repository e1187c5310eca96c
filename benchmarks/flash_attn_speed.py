"""Compare installed FlashAttention packages with hf_paged's kernels on prefill shapes: results, then TFLOP/s.

    PYTHONPATH=.:<folder with the packages> python benchmarks/flash_attn_speed.py [--out flash.json]

Every importable package of `hf_paged/attention/flash_attn_backend.py` is compared with float64 on ragged, poisoned
cases, then timed beside our kernels and FlashAttention-2 as torch ships it. Times are medians of CUDA-graph replays, or
of events where a call cannot be captured. A step that fails is printed and skipped.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kernel_speed import HEAD_DIM, KV_HEADS, L2_BYTES, PREFILL, Inputs, graph_time

from hf_paged.attention import flash_attn_backend as flash_backend
from hf_paged.attention.registry import BACKENDS
from hf_paged.kernels.attention.prefill import paged_attention_prefill
from hf_paged.kernels.attention.types import AttentionOptions, PagedMetadata
from hf_paged.kernels.hopper import prefill_support

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from paged_cases import expected, make_case, worst_error

SCALE = HEAD_DIM**-0.5
OPTIONS = AttentionOptions(SCALE)
PACKAGES = ("torch", "triton", "flash-attn", "flash-attn-3", "cuda-bindings")
ROWS = [(5, 5), (1, 40), (300, 1100), (129, 129), (7, 260), (64, 64), (2, 513), (1024, 2048)]
report: dict[str, Any] = {"steps": {}}


def attempt(name: str, step: Callable[[], Any]) -> Any:
    """Run a step; one that fails is printed, and the next one has its turn."""
    begin = time.perf_counter()
    try:
        result = step()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        result, shown = None, f"FAILED {type(error).__name__}: {' / '.join(lines[:4])[:500]}"
    else:
        shown = result if isinstance(result, str) else f"{result:.1f}" if isinstance(result, float) else "ok"
    print(f"{name}: {shown} ({time.perf_counter() - begin:.1f} s)", flush=True)
    report["steps"][name] = shown
    return result


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def prefill_inputs(rows: int, length: int, heads: int, page: int) -> Inputs:
    """Rows of new tokens only, pages scattered; as many caches as L2 could not hold together."""
    per_row = -(-length // page)
    shape = (rows * per_row + 1, page, KV_HEADS, HEAD_DIM)
    count = max(2, -(-L2_BYTES // (4 * shape[0] * page * KV_HEADS * HEAD_DIM)))
    kwargs: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    caches = [(torch.randn(shape, **kwargs), torch.randn(shape, **kwargs)) for _ in range(count)]
    meta = PagedMetadata(
        query_start=(torch.arange(rows + 1, device="cuda") * length).int(),
        seq_lens=torch.full((rows,), length, dtype=torch.int32, device="cuda"),
        block_table=(torch.randperm(rows * per_row, device="cuda") + 1).int().view(rows, per_row),
        slots=torch.arange(rows, dtype=torch.int32, device="cuda"),
        slot_mapping=torch.full((rows * length,), -1, device="cuda"),
        max_query_len=length,
        max_seq_len=length,
    )
    return Inputs(torch.randn(rows * length, heads, HEAD_DIM, **kwargs), caches, meta)


def seconds(calls: list[Callable[[], object]]) -> tuple[float, str]:
    """Time of a call, and how it was taken."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    try:
        return graph_time(calls), "graph"
    except Exception as error:
        print(f"  not capturable ({type(error).__name__}: {str(error)[:200]})")
        torch.cuda.synchronize()
    times = []
    for i in range(40):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        calls[i % len(calls)]()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return statistics.median(times[5:]), "events"


def rate(calls: list[Callable[[], object]], rows: int, length: int, heads: int) -> str:
    took, how = seconds(calls)
    flops = 4 * heads * HEAD_DIM * rows * length * (length + 1) / 2
    return f"{flops / took / 1e12:.0f} TFLOP/s by {how}"


def check(package: flash_backend.FlashPackage, page: int, **options: Any) -> str:
    """Worst relative error of a token and head against float64, NaN in every slot past a row's end."""
    window = options.pop("window", None)
    case = make_case(ROWS, seed=1, dtype=torch.bfloat16, device="cuda", block_size=page, **options)
    case = case._replace(options=replace(case.options, window=window))
    begin = time.perf_counter()
    out = flash_backend.run_package(package, *case[:5])
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    error = worst_error(out, expected(case))
    triton = worst_error(paged_attention_prefill(*case[:5]), expected(case))
    verdict = "ok" if error < 2 * triton + 1e-3 else "WRONG"
    return f"{verdict}, worst error {error:.4f} (Triton {triton:.4f}), first call {first:.1f} s"


def check_clean(package: flash_backend.FlashPackage, page: int) -> str:
    """NaN left in shared memory by one call must not show in the next."""
    case = make_case([(3, n) for n in range(3, 131)], seed=1, heads=16, kv_heads=8, head_dim=128, block_size=page,
                     dtype=torch.bfloat16, device="cuda")
    nan = torch.full_like(case.k_cache, float("nan"))
    for _ in range(3):
        flash_backend.run_package(package, case.q, nan, nan, case.meta, case.options)
        error = worst_error(flash_backend.run_package(package, *case[:5]), expected(case))
    return f"worst error {error:.4f}"


def check_package(package: flash_backend.FlashPackage, page: int) -> None:
    for heads, kv_heads, head_dim in ((16, 8, 128), (32, 8, 128), (4, 4, 64), (4, 2, 256)):
        shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
        attempt(f"check {package.name}, page {page}, {heads}/{kv_heads} x {head_dim}",
                partial(check, package, page, **shape))
    shape = {"heads": 16, "kv_heads": 8, "head_dim": 128}
    attempt(f"check {package.name}, window 100", partial(check, package, page, window=100, **shape))
    attempt(f"check {package.name}, softcap 30", partial(check, package, page, softcap=30.0, **shape))
    attempt(f"check {package.name}, page 256", partial(check, package, 256, **shape))
    attempt(f"check {package.name}, NaN of an earlier call", partial(check_clean, package, page))


def packed(inputs: Inputs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = inputs.q.shape[0]
    return [tuple(c.view(-1, KV_HEADS, HEAD_DIM)[:tokens] for c in pair) for pair in inputs.caches]  # type: ignore


def torch_fa2(inputs: Inputs, length: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    starts = inputs.meta.query_start
    op = torch.ops.aten._flash_attention_forward
    return op(inputs.q, k, v, starts, starts, length, length, 0.0, True, False, scale=SCALE)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the steps as JSON")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda", 0)
    report["versions"] = {name: version(name) for name in PACKAGES} | {"python": platform.python_version()}
    print(torch.cuda.get_device_name(), report["versions"], flush=True)

    usable = []
    for package in flash_backend.PACKAGES:
        page = 256 if package.name == "flash-attn 2" else 16
        shape = flash_backend.AttentionShape(torch.bfloat16, HEAD_DIM, page)
        reason = attempt(f"import {package.name}", lambda a=package, s=shape: flash_backend.why_not(a, device, s))
        if reason is None and flash_backend.load(package)[0] is not None:
            usable.append((package, page))

    with torch.inference_mode():
        for rows, length, heads, _ in PREFILL:
            shape_name = f"{rows} x {length}, {heads}/{KV_HEADS}"
            inputs = prefill_inputs(rows, length, heads, 16)
            for name in ("triton", "hopper"):
                calls = [partial(BACKENDS[name].run, inputs.q, k, v, inputs.meta, OPTIONS) for k, v in inputs.caches]
                if name == "triton" or prefill_support.why_not_on(device) is None:
                    attempt(f"{shape_name}: {name}", partial(rate, calls, rows, length, heads))
            calls = [partial(torch_fa2, inputs, length, k, v) for k, v in packed(inputs)]
            attempt(f"{shape_name}: FA2 in torch", partial(rate, calls, rows, length, heads))
        for package, page in usable:
            check_package(package, page)
        for rows, length, heads, _ in PREFILL:
            for package, page in usable:
                for pages in (page, 128) if page == 16 else (page,):
                    # Uncut pages of 128 may go by TMA, which the backend avoids: what that costs.
                    chosen = replace(package, small_pages=False) if pages == 128 else package
                    inputs = prefill_inputs(rows, length, heads, pages)
                    calls = [partial(flash_backend.run_package, chosen, inputs.q, k, v, inputs.meta, OPTIONS)
                             for k, v in inputs.caches]
                    attempt(f"{rows} x {length}, {heads}/{KV_HEADS}: {package.name}, page {pages}",
                            partial(rate, calls, rows, length, heads))
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
