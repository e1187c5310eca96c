"""Time the KV pool's memory: taking it from the driver, release and return, growth, and steps over it.

    python benchmarks/kv_memory.py rates engine growth speed --gib 60 --out kv_memory.json

`rates`: the driver's calls by the size of a piece, for that many GiB. `engine`: release and return of a
`PagedGenerator`, and what stays on the device. `growth`: of an enabled model in one call, in reserved addresses and in
torch's memory. `speed`: output tokens per second of both.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from workloads import Workload, generation_configs, qwen3, uniform

import hf_paged
from hf_paged.device import virtual_memory
from hf_paged.device.virtual_memory import CudaDriver, find_driver
from hf_paged.runner.kv_cache import KVCache

MIB, GIB = 1 << 20, 1 << 30
DEVICE = torch.device("cuda", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "rates": rates, "engine": engine, "growth": growth, "speed": speed,
    }
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=list(parts))
    parser.add_argument("--gib", type=int, default=60)
    parser.add_argument("--model", default="0.6B")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.cuda.set_device(DEVICE)
    torch.empty(1, device=DEVICE)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    found = {name: parts[name](args) for name in args.parts}
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


def driver() -> CudaDriver:
    found = find_driver(DEVICE)
    if found is None:
        raise SystemExit("no virtual memory management on this device")
    return found


class Taken(NamedTuple):
    """MiB of the device: in torch's tensors, in its segments (holes between tensors included), and outside of torch."""

    tensors: float
    segments: float
    outside: float

    @classmethod
    def now(cls) -> Taken:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        segments = torch.cuda.memory_reserved()
        return cls(torch.cuda.memory_allocated() / MIB, segments / MIB, (total - free - segments) / MIB)

    def since(self, before: Taken) -> Taken:
        return Taken(*(now - then for now, then in zip(self, before, strict=True)))

    def __str__(self) -> str:
        return f"tensors {self.tensors:.1f}, segments {self.segments:.1f}, outside of torch {self.outside:.1f} MiB"


def clock(action: Callable[[], Any]) -> float:
    """Milliseconds."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


# -- the driver ------------------------------------------


def rates(args: argparse.Namespace) -> dict[str, Any]:
    print("ms for all:  piece threads   GiB |   create      map    allow    unmap  release", flush=True)
    rows = []
    layer = args.gib * GIB // 56 // (2 * MIB) * 2 * MIB  # as one of 56 tensors of Qwen3-0.6B
    for piece, threads, whole in [
        (2 * MIB, 1, 4), (32 * MIB, 1, args.gib), (256 * MIB, 1, args.gib), (layer, 1, args.gib), (layer, 1, args.gib),
        (layer, 4, args.gib), (layer, 16, args.gib), (4 * GIB, 1, args.gib), (args.gib * GIB, 1, args.gib),
    ]:
        row = rate(driver(), piece, whole * GIB // piece, threads)
        rows.append(row | {"piece_mib": piece / MIB, "threads": threads, "gib": whole})
        print(f"{piece / MIB:14.0f} MiB {threads:7} {whole:5} | " + " ".join(
            f"{row[name]:8.2f}" for name in ("create", "map", "allow", "unmap", "release")), flush=True)
    first = clock(lambda: torch.empty(args.gib * GIB, dtype=torch.uint8, device=DEVICE))
    again = clock(torch.cuda.empty_cache)
    print(f"torch.empty of {args.gib} GiB {first:.1f} ms, empty_cache {again:.1f} ms", flush=True)
    return {"rows": rows, "torch_empty_ms": first, "torch_empty_cache_ms": again}


def rate(driver: CudaDriver, piece: int, count: int, threads: int) -> dict[str, float]:
    """Milliseconds of each of the driver's calls for `count` pieces."""
    address = driver.reserve(piece * count)
    places = [address + i * piece for i in range(count)]
    found: dict[str, float] = {}
    with ThreadPoolExecutor(threads, initializer=torch.cuda.set_device, initargs=(DEVICE,)) as pool:

        def each(name: str, call: Callable, *columns: list) -> list:
            made: list = []
            run = map if threads == 1 else pool.map
            found[name] = clock(lambda: made.extend(run(call, *columns)))
            return made

        sizes = [piece] * count
        list(pool.map(abs, range(threads)))
        handles = each("create", driver.create, sizes)
        each("map", driver.map, places, sizes, handles)
        each("allow", driver.allow, places, sizes)
        each("unmap", driver.unmap, places, sizes)
        each("release", driver.release, handles)
    driver.unreserve(address, piece * count)
    return found


# -- an engine ------------------------------------------


def engine(args: argparse.Namespace) -> dict[str, Any]:
    model = qwen3(args.model, torch.bfloat16, "cuda")
    model(torch.zeros(1, 8, dtype=torch.int64, device=DEVICE))  # cuBLAS' workspace stays in the process
    before, found = Taken.now(), {}
    config = model.config
    block_bytes = 2 * config.num_hidden_layers * 16 * config.num_key_value_heads * config.head_dim * 2
    workload = uniform(64, output=32)._replace(temperature=0.0)
    with hf_paged.PagedGenerator(model, num_blocks=args.gib * GIB // block_bytes) as generator:
        core, release = generator.engine._core, generator.engine.release_memory
        run = partial(generator.generate, workload.prompts, generation_configs(workload), use_tqdm=False)
        for _ in range(3):  # behind two, all steps have their graphs
            generator.engine.reset_prefix_cache()
            expected = [completion.token_ids for completion in run()]
        captured = generator.engine.stats().num_graphs_captured
        found["pool_gib"] = generator.engine.stats().kv_cache_bytes / GIB
        print(f"pool of {found['pool_gib']:.2f} GiB, {captured} graphs", flush=True)
        for pause in (0.0, 0.0, 0.05, 0.1, 0.2, 0.5, 1.0):
            ms = [clock(release)]
            time.sleep(pause)
            ms += [clock(core.scheduler_or_build), clock(run)]
            print(f"release {ms[0]:.1f} ms, {pause * 1e3:.0f} ms later return {ms[1]:.1f} ms, call {ms[2]:.0f} ms",
                  flush=True)
            found[f"after {pause} s"] = {"release_ms": ms[0], "return_ms": ms[1]}
        release()
        found["tokens_equal"] = [completion.token_ids for completion in run()] == expected
        stats = generator.engine.stats()
        found["captured_anew"], found["dropped"] = stats.num_graphs_captured - captured, stats.num_graphs_dropped
        print({name: found[name] for name in ("tokens_equal", "captured_anew", "dropped")}, flush=True)
        release()
        runner = core.pool.runner
        assert runner is not None and runner.graphs is not None
        tables = {"token history": runner.state.tokens, "block table": runner.state.block_table,
                  "cosines": core._executor._rope.cos, "sines": core._executor._rope.sin}
        found["tables_mib"] = {name: tensor.nbytes / MIB for name, tensor in tables.items()}
        del tables, runner  # or they stay
        found["left"] = Taken.now().since(before)
        print(f"left after release_memory(): {found['left']}; of it tables", found["tables_mib"], flush=True)
        ms = [clock(partial(release, graphs=True))]
        found["left without graphs"] = Taken.now().since(before)
        print(f"left after release_memory(graphs=True), {ms[0]:.1f} ms: {found['left without graphs']}", flush=True)
    hf_paged.disable(model)
    found["left when disabled"] = Taken.now().since(before)
    print(f"left when disabled: {found['left when disabled']}", flush=True)
    return found


@contextmanager
def memory_of(name: str) -> Iterator[None]:
    """Pools that are made in here lie there."""
    own = virtual_memory.find_driver
    if name == "torch's memory":
        virtual_memory.find_driver = lambda device: None  # type: ignore[assignment]
    try:
        yield
    finally:
        virtual_memory.find_driver = own


def growth(args: argparse.Namespace) -> dict[str, Any]:
    """256 rows of 512 prompt tokens, twice: the second call finds the pool as large as it needs."""
    found: dict[str, Any] = {}
    ids = torch.tensor(uniform(256, 512).prompts, device=DEVICE)
    own_grow, times = KVCache.grow, []

    def grow(self: KVCache, num_blocks: int) -> None:
        times.append(clock(lambda: own_grow(self, num_blocks)))

    for name in ("reserved addresses", "torch's memory", "reserved addresses"):
        model, times[:] = qwen3(args.model, torch.bfloat16, "cuda"), []
        with memory_of(name):
            hf_paged.enable(model, strict=True)
            KVCache.grow = grow  # type: ignore[method-assign]
            call = partial(model.generate, ids, max_new_tokens=64, do_sample=False)
            calls = [clock(call) for _ in range(3)]
            KVCache.grow = own_grow  # type: ignore[method-assign]
            stats = hf_paged.get_engine(model).stats()
            hf_paged.disable(model)
        print(f"{name}: {len(times)} growths to {stats.kv_cache_bytes / GIB:.2f} GiB took {sum(times):.1f} ms, the "
              f"slowest {max(times):.1f}; calls {', '.join(f'{c:.0f}' for c in calls)} ms; graphs captured "
              f"{stats.num_graphs_captured}, dropped {stats.num_graphs_dropped}", flush=True)
        found[name] = {"growths_ms": list(times), "calls_ms": calls, "captured": stats.num_graphs_captured,
                       "dropped": stats.num_graphs_dropped}
        del model
        Taken.now()
    return found


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """In turns, so that a clock that drifts does not count."""
    model = qwen3(args.model, torch.bfloat16, "cuda")
    workload: Workload = uniform(256, 512, 128)
    found: dict[str, list[float]] = {"reserved addresses": [], "torch's memory": []}
    for name in [*found, *found, *found]:
        options = {"num_blocks": 11_000, "enable_prefix_caching": False}
        with memory_of(name), hf_paged.PagedGenerator(model, **options) as generator:
            run = partial(generator.generate, workload.prompts, generation_configs(workload), seed=1, use_tqdm=False)
            run()
            found[name] += [workload.output_tokens / clock(run) * 1e3 for _ in range(3)]
    for name, of in found.items():
        print(f"{name}: {statistics.median(of):.0f} tok/s (from {min(of):.0f} to {max(of):.0f})", flush=True)
    return found


if __name__ == "__main__":
    main()
