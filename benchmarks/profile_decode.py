"""Profile a steady decode step: wall, GPU-busy and host time per step, and the kernels that fill it.

    python benchmarks/profile_decode.py [--model 0.6B] [--batch 256] [--length 600] [--steps 60] [--out f.txt]
    python benchmarks/profile_decode.py --checkpoint /dev/shm/qwen3-8B --size 2      # rank 0's part of it
"""

from __future__ import annotations

import argparse
import time
from itertools import islice
from pathlib import Path

import torch
from gpu_trace import gpu_trace
from model_arguments import add_model_arguments, open_generator
from torch.profiler import ProfilerActivity, profile
from transformers import GenerationConfig

from hf_paged.integration.requests import Call, runnable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_arguments(parser)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--length", type=int, default=600)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with open_generator(args, max_num_seqs=args.batch, enable_prefix_caching=False) as generator:
        config = GenerationConfig(max_new_tokens=4 * args.steps, do_sample=True, temperature=0.6, top_k=0)
        prompts = torch.randint(0, 10000, (args.batch, args.length)).tolist()
        engine = generator.engine
        with engine.session() as session:
            engine.add_all(session, runnable(generator._reader.read(Call.of(prompts, config, seed=0))))
            while engine.stats().num_generated_tokens < args.batch:
                engine.advance([session])[0]
            for _ in range(args.steps):  # the rest of the prompts, and what is compiled or captured
                engine.advance([session])[0]
            torch.cuda.synchronize()
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(args.steps):
                engine.advance([session])[0]
            torch.cuda.synchronize()
            wall, host = time.perf_counter() - start, time.process_time() - cpu
            with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as trace:
                for _ in range(args.steps):
                    engine.advance([session])[0]
                torch.cuda.synchronize()
    seen = gpu_trace(trace)
    lines = [
        f"{args.checkpoint or f'Qwen3-{args.model}'} over {args.size}, batch {args.batch}, length {args.length}+: "
        f"{wall / args.steps * 1e3:.3f} ms a step "
        f"({args.batch * args.steps / wall:,.0f} tok/s), host CPU {host / args.steps * 1e3:.3f} ms a step; under the "
        f"profiler GPU busy {seen.busy_us / args.steps / 1e3:.3f} ms a step, idle "
        f"{100 * (1 - seen.busy_us / seen.whole_us):.1f} %"
    ]
    for name, (count, us) in islice(seen.kernels.items(), 25):
        lines.append(f"{us / args.steps:9.1f} us a step  {count / args.steps:6.1f} calls  {name[:100]}")
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
