"""Time many requests at once to the server, with stop texts and without.

    python benchmarks/serve_speed.py [--model PATH] [--device cuda] [--dtype bfloat16] [--requests 64] [--tokens 128]

The server runs in this process, as ``python -m hf_paged.serve MODEL`` would, and a thread for
each request waits for its answer. Every answer has as many tokens as were asked for: no stop text occurs. Stop texts
are new in every round, so that what the first request of a text costs counts. The kinds take turns; a line for each:
the median of the rounds, its ratio to the requests without stop texts, and the same of the process' CPU time, which
other work on the machine does not change. Exits with 1 where a ratio of the time is above 1.2.
"""

from __future__ import annotations

import argparse
import http.client
import json
import logging
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from local_server import LocalServer

TRAINED = Path(__file__).resolve().parent.parent / "examples/models/tiny-qwen3"
LIMIT = 1.2
KINDS = ("none", "one stop text", "four of each request's own")


def ask(server: LocalServer, body: dict[str, Any]) -> int:
    """The number of tokens of an answer, whole or streamed; RuntimeError: it is none."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    said = reply.read().decode()
    connection.close()
    if reply.status != 200:
        raise RuntimeError(f"status {reply.status}: {said}")
    last = said.strip().removesuffix("data: [DONE]").strip().rpartition("data: ")[2]
    return json.loads(last)["usage"]["completion_tokens"]


def stops(kind: str, request: int, number: int) -> dict[str, Any]:
    """Of one request in one round; no model says these."""
    if kind == KINDS[0]:
        return {}
    if kind == KINDS[1]:
        return {"stop": f"never said in round {number}"}
    return {"stop": [f"never said {i} by {request} in round {number}" for i in range(4)]}


def seconds(server: LocalServer, kind: str, number: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Of one round, all requests at once, until the last answer is there; and of the CPU meanwhile."""
    bodies = [{"prompt": f"{i} count from {i} to {i + 40}", "max_tokens": arguments.tokens, "ignore_eos": True,
               "temperature": 0, "stream": arguments.stream, **stops(kind, i, number)}
              for i in range(arguments.requests)]
    with ThreadPoolExecutor(arguments.requests) as pool:
        started, cpu = time.perf_counter(), time.process_time()
        made = list(pool.map(lambda body: ask(server, body), bodies))
        taken = time.perf_counter() - started, time.process_time() - cpu
    if wrong := [count for count in made if count != arguments.tokens]:
        raise RuntimeError(f"answers of {wrong} tokens: expected {arguments.tokens}")
    return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(TRAINED), help="folder of a checkpoint with its tokenizer")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of every answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stream", action="store_true")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    server = LocalServer(arguments.model, arguments.device, arguments.dtype)
    try:
        seconds(server, KINDS[0], -1, arguments)
        taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
        for number in range(arguments.rounds):
            for kind in KINDS:
                taken[kind].append(seconds(server, kind, number, arguments))
    finally:
        server.close()
    medians = {kind: [*map(statistics.median, zip(*times, strict=True))] for kind, times in taken.items()}
    ratios = {kind: [mine / plain for mine, plain in zip(times, medians[KINDS[0]], strict=True)]
              for kind, times in medians.items()}
    for kind, (time_taken, cpu) in medians.items():
        print(f"{arguments.requests} requests of {arguments.tokens} tokens, stop texts: {kind}: {time_taken:.2f} s, "
              f"ratio {ratios[kind][0]:.2f}; CPU {cpu:.2f} s, ratio {ratios[kind][1]:.2f}", flush=True)
    return int(max(ratio for ratio, _ in ratios.values()) > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
