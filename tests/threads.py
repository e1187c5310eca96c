"""Calls at the same time, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from hf_paged.options.request_spec import RequestSpec


def together(*calls: Callable[[], Any], timeout: float = 120.0) -> list[Any]:
    """What each returned, or raised; they begin when all threads are there."""
    results: list[Any] = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def run(i: int) -> None:
        barrier.wait()
        try:
            results[i] = calls[i]()
        except BaseException as error:
            results[i] = error

    run_threads([threading.Thread(target=run, args=(i,)) for i in range(len(calls))], timeout)
    return results


def run_threads(threads: list[threading.Thread], timeout: float = 120.0) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
        assert not thread.is_alive()


def threads_of_engines() -> list[str]:
    """Names of hf_paged's threads, but for those that belong to the process as soon as a form was compiled in it."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("hf_paged") and not name.startswith("hf_paged forms")]


def rows_of(prompts: list[list[int]], count: int) -> list[RequestSpec]:
    """Rows for `Engine.lockstep` that get at most so many tokens."""
    return [RequestSpec(prompt, count) for prompt in prompts]


class RowsElsewhere:
    """Rows in lockstep of another thread's greedy call, which waits for its logits while this thread steps."""

    def __init__(self, engine: Any, prompts: list[list[int]], count: int) -> None:
        self.made: list[list[int]] = [[] for _ in prompts]
        self._engine, self._count = engine, count
        self._call = engine.lockstep(rows_of(prompts, count))
        self._batch = self._call.__enter__()
        self._batch._asked = torch.empty(len(prompts), 0, dtype=torch.int64)

    def take(self) -> None:
        """Do what the other thread does between two steps."""
        batch = self._batch
        if batch._answer is not None:
            tokens, batch._asked, batch._answer = batch._answer[:, -1].argmax(-1), None, None
            for row, token in zip(self.made, tokens.tolist(), strict=True):
                row.append(token)
            if len(self.made[0]) < self._count:
                batch._asked = tokens[:, None]

    def finish(self) -> list[list[int]]:
        while len(self.made[0]) < self._count:
            self._engine._core.step()
            self.take()
        self._call.__exit__(None, None, None)
        return self.made
