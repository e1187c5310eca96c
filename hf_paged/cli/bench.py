"""`hf-paged bench`: what a model or a server makes per second, and how long its requests take."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any


def add_parser(commands: Any) -> None:
    """The arguments of ``bench`` and of its kinds."""
    bench = commands.add_parser("bench", help="throughput, latency, and a sweep of request rates against a server")
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

    server = kinds.add_parser("server", help="a sweep of request rates against any server of the OpenAI API",
                              description="Each rate is a run of its own. Requests come at random (Poisson) and their "
                              "answers are streamed; `inf` sends all at once.")
    server.add_argument("url", help="of the API, as http://127.0.0.1:8000/v1")
    server.add_argument("--model", help="left out: the first that the server lists")
    server.add_argument("--rates", type=_rates, default=[1.0, 2.0, 4.0, 8.0, math.inf], metavar="R,R,...",
                        help="requests a second (1,2,4,8,inf)")
    server.add_argument("--num-prompts", type=_positive, default=100, help="of each run")
    server.add_argument("--prompts", type=Path, help="JSON lines with `prompt` or `messages`; left out: made of words")
    server.add_argument("--chat", action="store_true", help="words go to /chat/completions")
    server.add_argument("--ignore-eos", action="store_true", help="ask for exactly so many tokens (vLLM, hf_paged)")
    server.add_argument("--concurrency", type=_positive, default=512, help="requests under way at once, at most")
    server.add_argument("--timeout", type=float, default=600.0, help="seconds that a request may be silent")
    server.add_argument("--api-key", default="none", help="sent as a bearer token")
    server.add_argument("--plot", type=Path, help="picture of the sweep (needs matplotlib)")
    _of_requests(server)
    server.set_defaults(run=_server)


def _of_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a checkpoint's folder, or a model id")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", help="left out: CUDA where there is a GPU")
    parser.add_argument("--tensor-parallel-size", type=_positive, default=1)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of PagedConfig")
    _of_requests(parser)


def _of_requests(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-tokens", type=_positive, default=512, help="of each prompt (of a server: words)")
    parser.add_argument("--output-tokens", type=_positive, default=128, help="of each answer")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def _throughput(arguments: argparse.Namespace) -> int:
    from hf_paged.cli import offline

    return _written(arguments, offline.throughput(arguments))


def _latency(arguments: argparse.Namespace) -> int:
    from hf_paged.cli import offline

    return _written(arguments, offline.latency(arguments))


def _server(arguments: argparse.Namespace) -> int:
    from hf_paged.cli import sweep

    report = sweep.run(arguments)
    if arguments.plot is not None:
        from hf_paged.cli.sweep_plot import plot

        plot(report, arguments.plot)
    status = _written(arguments, report)
    return status or int(any(point["num_failed"] for point in report["points"]))


def _written(arguments: argparse.Namespace, report: dict[str, Any]) -> int:
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected at least 1")
    return value


def _rates(text: str) -> list[float]:
    rates = [float(part) for part in text.split(",")]
    if not all(rate > 0 for rate in rates):
        raise argparse.ArgumentTypeError(f"{text}: expected positive numbers or inf, with commas between them")
    return rates
