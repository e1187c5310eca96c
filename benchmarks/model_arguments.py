"""Make the model of a benchmark from its command line: random weights on one GPU, or a checkpoint over several."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from workloads import QWEN3_SHAPES, qwen3

from hf_paged import PagedGenerator


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(QWEN3_SHAPES), default="0.6B")
    parser.add_argument("--checkpoint", help="in place of --model with random weights")
    parser.add_argument("--size", type=int, default=1, help="tensor_parallel_size, with --checkpoint")


def open_generator(args: argparse.Namespace, **paged: Any) -> PagedGenerator:
    if args.checkpoint:
        return PagedGenerator.from_pretrained(args.checkpoint, tensor_parallel_size=args.size, **paged)
    if args.size != 1:
        raise SystemExit(f"--size {args.size}: expected --checkpoint beside it")
    return PagedGenerator(qwen3(args.model, torch.bfloat16, "cuda"), **paged)
