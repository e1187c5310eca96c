"""Start a chat server and clients of it: OpenAI's own package against `hf_paged.serve`, in one batch.

    python examples/chat_server.py                                    # starts the server with a tiny model, on a CPU
    python examples/chat_server.py --url http://127.0.0.1:8000/v1     # clients of a server that runs already

One chat is streamed, then several run at once, and one client leaves before its answer is done. `/metrics` then shows
what the server did. See docs/server.md and docs/metrics.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from openai import AsyncOpenAI, OpenAI

MODEL = str(Path(__file__).parent / "models" / "tiny-qwen3")  # trained by tools/train_tiny_qwen3.py to look facts up
FACTS = {"red-fox": 4821, "bold-owl": 1937, "gold-hare": 7604, "wild-goat": 5518, "icy-seal": 2046, "calm-bear": 9182}
TABLE = "Codes:\n" + "\n".join(f"{name}: {code}" for name, code in FACTS.items())


def chat(name: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": TABLE}, {"role": "user", "content": f"What is the code of {name}?"}]


@contextlib.contextmanager
def running_server(model: str) -> Iterator[str]:
    """The URL of a server in a process of its own, which ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen([sys.executable, "-m", "hf_paged.serve", model, "--host",
                               "127.0.0.1", "--port", str(port), "--log-level", "warning"])
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                break
            if server.poll() is not None:
                raise RuntimeError(f"the server ended with status {server.returncode}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait()


def stream_one(url: str, model: str) -> str:
    """An answer as it comes."""
    client, answer = OpenAI(base_url=url, api_key="none"), ""
    for piece in client.chat.completions.create(model=model, messages=chat("red-fox"), temperature=0, stream=True):
        text = piece.choices[0].delta.content or "" if piece.choices else ""
        print(text, end="", flush=True)
        answer += text
    print()
    return answer


async def ask_all(url: str, model: str) -> list[str]:
    """Every question at once: the server runs them in one batch over the cached blocks of their common prefix."""
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        answers = await asyncio.gather(*[
            client.chat.completions.create(model=model, messages=chat(name), temperature=0) for name in FACTS
        ])
        leaving = asyncio.create_task(client.chat.completions.create(  # no end of its own for a long time
            model=model, messages=chat("red-fox"), max_tokens=3000, extra_body={"ignore_eos": True}))
        await asyncio.sleep(0.5)
        leaving.cancel()  # the connection is closed, and the server ends the request
        with contextlib.suppress(asyncio.CancelledError):
            await leaving
    return [answer.choices[0].message.content or "" for answer in answers]


def metric_lines(url: str, *names: str) -> list[str]:
    """The samples of these metrics."""
    with urllib.request.urlopen(url.removesuffix("/v1") + "/metrics") as reply:
        lines = reply.read().decode().splitlines()
    return [line for line in lines if line.startswith(tuple(f"hf_paged:{name}" for name in names))]


def main(arguments: list[str] | None = None) -> tuple[str, list[str], list[str]]:
    """The streamed answer, the answers of all, and lines of metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--model", default=MODEL)
    args = parser.parse_args(arguments)
    with contextlib.nullcontext(args.url) if args.url else running_server(args.model) as url:
        streamed = stream_one(url, args.model)
        answers = asyncio.run(ask_all(url, args.model))
        for name, answer in zip(FACTS, answers, strict=True):
            print(f"{name}: {answer}")
        time.sleep(1.0)  # by now the server knows that the last client has left
        lines = metric_lines(url, "request_success_total", "generation_tokens_total", "prefix_cache_hits_total",
                             "num_requests_running")
        print("\n".join(lines))
    return streamed, answers, lines


if __name__ == "__main__":
    main()
