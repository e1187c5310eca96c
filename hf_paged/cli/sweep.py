"""Runs of one list of requests at several rates against a server: what it makes, and how long answers take."""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hf_paged.cli.figures import pareto, percentiles
from hf_paged.cli.openai_client import Answer, Client

_WORDS = ("time", "people", "water", "city", "light", "music", "river", "paper", "stone", "garden", "winter", "market",
          "window", "letter", "forest", "number", "island", "bridge", "silver", "morning", "table", "road", "history")
_LINE = "{:>8} {:>9} {:>9} {:>10} {:>10} {:>9} {:>9} {:>9} {:>7}"
_HEAD = ("rate/s", "done/s", "tokens/s", "first p50", "first p99", "ms/token", "p99", "total p50", "failed")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every rate, print a table, and return all figures.

    Raises:
        OSError, RuntimeError: the server cannot be asked for its models.
        ValueError: a line of the prompts is none.
    """
    client = Client(arguments.url, arguments.api_key, arguments.timeout)
    model = arguments.model or client.first_model()
    settings = {"model": model, "max_tokens": arguments.output_tokens, "temperature": 0, "stream": True,
                "stream_options": {"include_usage": True}, **({"ignore_eos": True} if arguments.ignore_eos else {})}
    given = None if arguments.prompts is None else read_prompts(arguments.prompts)
    rng = random.Random(arguments.seed)
    print(_LINE.format(*_HEAD))
    client.ask({**settings, **_made(arguments, rng)})  # what the first request of a server compiles does not count
    points = []
    for rate in arguments.rates:
        prompts = [_made(arguments, rng) if given is None else given[i % len(given)]
                   for i in range(arguments.num_prompts)]
        started = time.perf_counter()
        answers = send([{**settings, **prompt} for prompt in prompts], rate, client, arguments.concurrency,
                       random.Random(arguments.seed))
        points.append(summary(rate, answers, time.perf_counter() - started))
        print(_LINE.format(*_row(points[-1])), flush=True)
        for error in dict.fromkeys(points[-1]["errors"]):
            print(f"         {error}", flush=True)
    costs = [(point["per_token"].get("p50", math.inf), point["output_tokens_per_second"]) for point in points]
    for point, is_best in zip(points, pareto(costs), strict=True):
        point["is_pareto"] = is_best
    return {"kind": "server", "url": arguments.url, "model": model, "num_prompts": arguments.num_prompts,
            "prompt_tokens": arguments.prompt_tokens, "output_tokens": arguments.output_tokens,
            "concurrency": arguments.concurrency, "seed": arguments.seed, "points": points}


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """JSON lines, each with ``prompt`` or ``messages``; other fields of a line go into its request.

    Raises:
        ValueError: a line that holds neither, or none at all.
    """
    found = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    for number, one in enumerate(found, 1):
        if not isinstance(one, dict) or not {"prompt", "messages"} & one.keys():
            raise ValueError(f"{path}, line {number}: expected an object with `prompt` or `messages`")
    if not found:
        raise ValueError(f"{path}: expected a line with `prompt` or `messages`")
    return found


def send(bodies: Sequence[dict[str, Any]], rate: float, client: Client, concurrency: int,
         rng: random.Random) -> list[Answer]:
    """Send requests at random times, ``rate`` a second on average (inf: at once), and wait for all answers."""
    with ThreadPoolExecutor(min(concurrency, len(bodies))) as pool:
        futures, due = [], time.perf_counter()
        for body in bodies:
            time.sleep(max(0.0, due - time.perf_counter()))
            futures.append(pool.submit(client.ask, body))
            due += rng.expovariate(rate) if math.isfinite(rate) else 0.0
        return [future.result() for future in futures]


def summary(rate: float, answers: Sequence[Answer], seconds: float) -> dict[str, Any]:
    """Figures of one run, in seconds; ``rate`` is None where all came at once."""
    good = [answer for answer in answers if answer.error is None]
    tokens = sum(answer.num_tokens for answer in good)
    return {
        "rate": rate if math.isfinite(rate) else None, "seconds": seconds, "num_done": len(good),
        "num_failed": len(answers) - len(good), "errors": [a.error for a in answers if a.error is not None],
        "num_prompt_tokens": sum(answer.num_prompt_tokens for answer in good), "num_output_tokens": tokens,
        "requests_per_second": len(good) / seconds, "output_tokens_per_second": tokens / seconds,
        "first": percentiles([answer.first for answer in good if answer.first is not None]),
        "per_token": percentiles([answer.per_token for answer in good if answer.per_token is not None]),
        "gap": percentiles([gap for answer in good for gap in answer.gaps]),
        "total": percentiles([answer.seconds for answer in good]),
    }


def _made(arguments: argparse.Namespace, rng: random.Random) -> dict[str, Any]:
    text = " ".join(rng.choices(_WORDS, k=arguments.prompt_tokens))
    return {"messages": [{"role": "user", "content": text}]} if arguments.chat else {"prompt": text}


def _row(point: dict[str, Any]) -> list[str]:
    def shown(name: str, share: str, scale: float) -> str:
        return f"{point[name][share] * scale:.1f}" if point[name] else "-"

    rate = "inf" if point["rate"] is None else f"{point['rate']:g}"
    return [rate, f"{point['requests_per_second']:.2f}", f"{point['output_tokens_per_second']:,.0f}",
            shown("first", "p50", 1000), shown("first", "p99", 1000), shown("per_token", "p50", 1000),
            shown("per_token", "p99", 1000), shown("total", "p50", 1), str(point["num_failed"])]
