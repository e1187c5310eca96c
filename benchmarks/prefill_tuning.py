"""Try configurations of the prefill kernels on a GPU: error, TFLOP/s and times FlashAttention-2, per shape.

    python benchmarks/prefill_tuning.py [--seconds 140] [--shapes 2x8192,nano]

Every configuration is checked against attention in fp32 (two heads of the first and of the last row) before it is
timed; one that fails to compile, to launch or to agree is reported and passed over. Times as in `kernel_speed.py`.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from kernel_speed import BLOCK_SIZE, KV_HEADS, L2_BYTES, Inputs, graph_time

from hf_paged.kernels.attention.prefill import PrefillConfig, paged_attention_prefill
from hf_paged.kernels.attention.types import AttentionOptions, PagedMetadata
from hf_paged.kernels.hopper import prefill_support

_RAGGED = random.Random(0)
# name: query heads, head_dim, rows of (new, length)
SHAPES = {
    "2x8192": (32, 128, [(8192, 8192)] * 2),
    "16x1024": (32, 128, [(1024, 1024)] * 16),
    "1x32768": (32, 128, [(32768, 32768)]),
    "chunked": (32, 128, [(2048, 8192)] * 4),
    "2048+30000": (32, 128, [(2048, 32048)]),
    "8192+30000": (32, 128, [(8192, 38192)]),
    "28x576": (16, 128, [(576, 576)] * 28),
    "nano": (16, 128, [(n, n) for n in (_RAGGED.randint(100, 1024) for _ in range(14))]),
    "d64": (32, 64, [(1024, 1024)] * 16),
    "d256": (16, 256, [(1024, 1024)] * 16),
}
PLAIN = {"branch": True}
CANDIDATES = {
    128: [
        PrefillConfig(128, 64, 8, 3, **PLAIN),
        PrefillConfig(128, 32, 8, 3, **PLAIN, max_registers=128),
        PrefillConfig(128, 32, 8, 4, **PLAIN, max_registers=128),
        PrefillConfig(128, 128, 8, 3, **PLAIN),
        PrefillConfig(64, 64, 4, 2, **PLAIN, max_registers=168),
        PrefillConfig(128, 32, 4, 3, **PLAIN),
        PrefillConfig(128, 64, 8, 2),
    ],
    64: [
        PrefillConfig(128, 64, 8, 3, **PLAIN),
        PrefillConfig(128, 128, 8, 3, **PLAIN),
        PrefillConfig(128, 64, 8, 4, **PLAIN),
        PrefillConfig(128, 64, 4, 2),
    ],
    256: [
        PrefillConfig(64, 32, 4, 2, **PLAIN),
        PrefillConfig(128, 32, 8, 2, **PLAIN),
    ],
}
# Positions of a tile and tiles in shared memory of the kernel for Hopper.
HOPPER = {64: [(128, 2), (128, 3), (64, 4)], 128: [(128, 2), (64, 3), (64, 4)], 256: [(64, 2), (32, 3)]}
MAX_ERROR = 2e-2  # bf16 results of the order of 1


def make_inputs(heads: int, head_dim: int, rows: list[tuple[int, int]]) -> Inputs:
    """Blocks scattered over pools that together exceed L2."""
    blocks = [-(-length // BLOCK_SIZE) for _, length in rows]
    shape = (sum(blocks) + 1, BLOCK_SIZE, KV_HEADS, head_dim)
    kwargs: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
    count = max(2, -(-L2_BYTES // (2 * 2 * sum(blocks) * BLOCK_SIZE * KV_HEADS * head_dim)))
    caches = [(torch.randn(shape, **kwargs), torch.randn(shape, **kwargs)) for _ in range(count)]
    ids = (torch.randperm(sum(blocks)) + 1).int()
    table = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
    for i, part in enumerate(ids.split(blocks)):
        table[i, : len(part)] = part
    new = [n for n, _ in rows]
    meta = PagedMetadata(
        query_start=torch.tensor([0, *itertools.accumulate(new)]).int().cuda(),
        seq_lens=torch.tensor([length for _, length in rows]).int().cuda(),
        block_table=table.cuda(),
        slots=torch.arange(len(rows)).int().cuda(),
        slot_mapping=torch.full((sum(new),), -1).cuda(),
        max_query_len=max(new),
        max_seq_len=max(length for _, length in rows),
    )
    return Inputs(torch.randn(sum(new), heads, head_dim, **kwargs), caches, meta)


def error(out: torch.Tensor, inputs: Inputs, rows: list[tuple[int, int]]) -> float:
    """Largest difference from fp32 attention in the first and last head of the first and last row."""
    worst = 0.0
    starts = inputs.meta.query_start.tolist()
    group = out.shape[1] // KV_HEADS
    for row, head in itertools.product((0, len(rows) - 1), (0, out.shape[1] - 1)):
        new, length = rows[row]
        table = inputs.meta.block_table[row, : -(-length // BLOCK_SIZE)].long()
        k, v = (cache[table, :, head // group].flatten(0, 1)[:length].float() for cache in inputs.caches[0])
        q = inputs.q[starts[row] : starts[row + 1], head].float()
        scores = q @ k.T * q.shape[1] ** -0.5
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(length - new + 1)
        right = scores.masked_fill_(hidden, float("-inf")).softmax(-1) @ v
        difference = (out[starts[row] : starts[row + 1], head].float() - right).abs().max()
        worst = max(worst, float(difference.nan_to_num(float("inf"))))
    return worst


def fa2_seconds(inputs: Inputs, rows: list[tuple[int, int]]) -> float:
    """torch's FlashAttention-2 over contiguous K and V of the same sizes (it takes no block table)."""
    starts = torch.tensor([0, *itertools.accumulate(length for _, length in rows)]).int().cuda()
    meta, scale = inputs.meta, inputs.q.shape[-1] ** -0.5

    def call(k: torch.Tensor, v: torch.Tensor) -> object:
        return torch.ops.aten._flash_attention_forward(
            inputs.q, k, v, meta.query_start, starts, meta.max_query_len, meta.max_seq_len, 0.0, True, False,
            scale=scale,
        )

    dense = [tuple(cache.flatten(0, 1)[: int(starts[-1])] for cache in pair) for pair in inputs.caches]
    return graph_time([partial(call, k, v) for k, v in dense], 5)


def candidates(head_dim: int) -> dict[str, Callable[..., torch.Tensor]]:
    found: dict[str, Callable[..., torch.Tensor]] = {}
    if prefill_support.why_not_on(torch.device("cuda", torch.cuda.current_device())) is None:
        from hf_paged.kernels.hopper.prefill import HopperConfig, paged_attention_hopper

        for each in HOPPER[head_dim]:
            found[f"hopper {each}"] = partial(paged_attention_hopper, config=HopperConfig(*each))
    for config in CANDIDATES[head_dim]:
        label = f"{tuple(config[:4])} branch={config.branch:d} regs={config.max_registers}"
        found[label] = partial(paged_attention_prefill, config=config)
    return found


def tune(name: str, deadline: float) -> None:
    heads, head_dim, rows = SHAPES[name]
    inputs = make_inputs(heads, head_dim, rows)
    pairs = sum(new * (length - new) + new * (new + 1) / 2 for new, length in rows)
    flops = 4 * heads * head_dim * pairs
    fa2 = fa2_seconds(inputs, rows)
    print(f"\n{name}: {len(rows)} rows, {heads}/{KV_HEADS} heads of {head_dim}; FA2 {flops / fa2 / 1e12:.0f} TFLOP/s")
    done = []
    for label, kernel in candidates(head_dim).items():
        if time.monotonic() > deadline:
            print(f"  out of time before {label}")
            break
        run = partial(kernel, options=AttentionOptions(head_dim**-0.5))
        try:
            wrong = error(run(inputs.q, *inputs.caches[0], inputs.meta), inputs, rows)
            if wrong > MAX_ERROR:
                print(f"  {label}: WRONG, error {wrong:.3g}")
                continue
            seconds = graph_time([partial(run, inputs.q, k, v, inputs.meta) for k, v in inputs.caches], 5)
        except Exception as problem:  # too much shared memory, or a compiler that gives up
            print(f"  {label}: {type(problem).__name__}: {str(problem)[:100]}", flush=True)
            continue
        done.append((seconds, label, wrong))
    for seconds, label, wrong in sorted(done):
        rate = flops / seconds / 1e12
        print(f"  {rate:4.0f} TFLOP/s {fa2 / seconds:.2f}x FA2 {seconds * 1e6:6.0f} us error {wrong:.1e} {label}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=140.0, help="start no candidate after this long")
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"comma-separated, of {', '.join(SHAPES)}")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    for name in arguments.shapes.split(","):
        tune(name, deadline)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
