"""Time attention of prompts on Hopper with tiles dealt to programs and with tiles from a queue.

    PYTHONPATH=.[:<folder with flash_attn_interface>] python benchmarks/tile_queue.py

"Wanted" says whether a step of the engine takes the queue (`HopperBackend.wants_queue`). Blocks of 16 tokens, scattered
over caches that L2 does not hold together; medians of CUDA-graph replays, each way twice, one after the other. Where
FlashAttention-3 can be imported it runs beside them.
"""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import torch
from flash_attn_speed import OPTIONS, seconds
from kernel_speed import BLOCK_SIZE, HEAD_DIM, KV_HEADS
from prefill_tuning import make_inputs

from hf_paged.attention import flash_attn_backend as flash_backend
from hf_paged.attention.registry import BACKENDS
from hf_paged.kernels.attention.types import AttentionSpec, TileQueue
from hf_paged.kernels.hopper import prefill_support

# New tokens and all tokens of each row, query heads.
CASES = {
    "4 x 2,112": ([(2112, 2112)] * 4, 16),
    "256 behind 1,856, 3 x 2,112, 1,600": ([(256, 2112), *[(2112, 2112)] * 3, (1600, 1600)], 16),
    "2 x 4,096": ([(4096, 4096)] * 2, 16),
    "4,500 and 3,692": ([(4500, 4500), (3692, 3692)], 16),
    "14 ragged rows": ([(int(n),) * 2 for n in np.random.default_rng(0).integers(100, 1024, 14)], 16),
    "28 x 576": ([(576, 576)] * 28, 16),
    "16 x 1,024": ([(1024, 1024)] * 16, 16),
    "16 x 1,024, 32 heads": ([(1024, 1024)] * 16, 32),
    "2 x 8,192, 32 heads": ([(8192, 8192)] * 2, 32),
}


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("tile_queue.py needs a GPU")
    torch.manual_seed(0)
    device, hopper = torch.device("cuda", torch.cuda.current_device()), BACKENDS["hopper"]
    if (reason := prefill_support.why_not_on(device)) is not None:  # another kernel would be timed twice
        sys.exit(f"the prefill kernel for Hopper {reason}")
    shape = flash_backend.AttentionShape(torch.bfloat16, HEAD_DIM, BLOCK_SIZE)
    packages = [package for package in flash_backend.PACKAGES
                if package.name == "flash-attn 3" and flash_backend.why_not(package, device, shape) is None]
    for name, (rows, heads) in CASES.items():
        new, lengths = np.array(rows).T
        inputs = make_inputs(heads, HEAD_DIM, rows)
        queue = TileQueue(torch.zeros(2, dtype=torch.int32, device=device))
        metas = {"dealt": inputs.meta, "queue": inputs.meta._replace(work=queue)}
        flops = 4 * heads * HEAD_DIM * float(((lengths - new) * new + new * (new + 1) / 2).sum())
        calls = {way: [partial(hopper.run, inputs.q, k, v, meta, OPTIONS) for k, v in inputs.caches]
                 for way, meta in metas.items()}
        assert torch.equal(calls["dealt"][0](), calls["queue"][0]()), "the order of tiles changes no bit"
        for package in packages:
            calls[package.name] = [partial(flash_backend.run_package, package, inputs.q, k, v, inputs.meta, OPTIONS)
                                   for k, v in inputs.caches]
        spec = AttentionSpec(heads, KV_HEADS, HEAD_DIM, torch.bfloat16, device, BLOCK_SIZE)
        wanted = hopper.wants_queue(new, lengths, spec)
        cells = []
        for way in (*calls, "dealt", "queue"):
            took, _ = seconds(calls[way])
            cells.append(f"{way} {1e6 * took:.1f} us {flops / took / 1e12:.0f} TFLOP/s")
        print(f"{name} (wanted: {wanted}): {' | '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
