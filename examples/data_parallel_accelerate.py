"""Complete a list of prompts over several processes, each with the whole model on a device of its own.

    python examples/data_parallel_accelerate.py                                            # one process
    accelerate launch --num_processes 8 examples/data_parallel_accelerate.py --prompts in.jsonl --output out.jsonl
    torchrun --nproc_per_node 2 examples/data_parallel_accelerate.py                       # without a GPU, too

Prompts come as JSON lines with a "prompt" (text, token ids or a chat); the same lines come back in their order, with
"completion", "token_ids", "finish_reason" and "error". A prompt's random numbers follow from its line, not from the
process that has it. Without a GPU `accelerate launch --cpu` starts one process whatever `--num_processes` says, and
torchrun all of them. For models that need several GPUs each, and for more machines, see `examples/ray_batch.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object, parse_flag_from_env

from hf_paged import PagedGenerator

HERE = Path(__file__).parent


def deal(prompts: list[Any], num_processes: int) -> list[int]:
    """The prompts' indices so ordered that `split_between_processes` deals them out in turn, the longest first.

    Every process gets about as many prompt tokens as the others. How long the completions get is not known beforehand,
    and dealing by prompt length spreads them as well as chance does. A prefix that many prompts share is computed once
    in each process.
    """
    longest_first = sorted(range(len(prompts)), key=lambda index: -len(json.dumps(prompts[index])))
    return [index for process in range(num_processes) for index in longest_first[process::num_processes]]


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # one small gather at the end does not need NVLink multicast
    state = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available())
    rows = [json.loads(line) for line in args.prompts.read_text().split("\n") if line.strip()]
    prompts = [row["prompt"] for row in rows]
    settings: dict[str, Any] = {"max_new_tokens": args.max_new_tokens}
    if args.temperature > 0:
        settings |= {"do_sample": True, "temperature": args.temperature}

    with (
        PagedGenerator.from_pretrained(args.model, dtype=args.dtype, device=state.device) as generator,
        state.split_between_processes(deal(prompts, state.num_processes)) as share,
    ):
        completions = []
        if share:  # there may be fewer prompts than processes
            completions = generator.generate([prompts[i] for i in share], seed=[args.seed + i for i in share],
                                             use_tqdm=None if state.is_main_process else False, **settings)
    made = gather_object([
        (index, {"completion": c.text, "token_ids": c.token_ids, "finish_reason": c.finish_reason, "error": c.error})
        for index, c in zip(share, completions, strict=True)
    ])
    if state.is_main_process:
        lines = [json.dumps(rows[index] | result, ensure_ascii=False) for index, result in sorted(made)]
        if args.output is None:
            print("\n".join(lines))
        else:
            args.output.write_text("\n".join(lines) + "\n")
        print(f"{len(lines)} prompts over {state.num_processes} process(es)", file=sys.stderr)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate for a list of prompts on every device.")
    parser.add_argument("--model", default=str(HERE / "models" / "tiny-qwen3"), help="a checkpoint or a model id")
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl")
    parser.add_argument("--output", type=Path, help="JSON lines; not given: printed")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()
