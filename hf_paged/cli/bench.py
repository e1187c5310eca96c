"""`hf-paged bench`: throughput and latency of a model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """Add the arguments of ``bench`` and of its kinds."""
    bench = commands.add_parser("bench", help="throughput and latency of a model")
    kinds = bench.add_subparsers(metavar="KIND", required=True)

    throughput = kinds.add_parser("throughput", help="many prompts at once through a PagedGenerator")
    _of_model(throughput)
    throughput.add_argument("--num-prompts", type=_positive, default=256)
    throughput.set_defaults(run=_throughput)

    latency = kinds.add_parser("latency", help="one batch after the other through a PagedGenerator")
    _of_model(latency)
    latency.add_argument("--batch-size", type=_positive, default=1)
    latency.add_argument("--rounds", type=_positive, default=10, help="those that count; two more come first")
    latency.set_defaults(run=_latency)


def _of_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a checkpoint's folder, or a model id")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", help="left out: CUDA where there is a GPU")
    parser.add_argument("--tensor-parallel-size", type=_positive, default=1)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of PagedConfig")
    _of_requests(parser)


def _of_requests(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=_positive, default=512, help="of each prompt")
    parser.add_argument("--output-tokens", type=_positive, default=128, help="of each answer")
    parser.add_argument("--seed", type=int, default=0, help="of prompts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def _throughput(arguments: argparse.Namespace) -> int:
    from hf_paged.cli import offline

    return _written(arguments, offline.throughput(arguments))


def _latency(arguments: argparse.Namespace) -> int:
    from hf_paged.cli import offline

    return _written(arguments, offline.latency(arguments))


def _written(arguments: argparse.Namespace, report: dict[str, Any]) -> int:
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return value
