"""Programs of others over an enabled model: how their calls were carried out, and that others went on meanwhile."""

from __future__ import annotations

import faulthandler
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support import assert_idle, assert_same_tensor, random_prompts, stock_generate
from transformers import PreTrainedModel

import hf_paged
from hf_paged.engine.engine import Engine
from hf_paged.integration import fallback, generate
from hf_paged.integration.fallback import in_fallback

SECONDS = 120.0


@dataclass
class Calls:
    """Calls of `generate` that got going.

    Attributes:
        paths: "native", "lockstep", or "stock: " and the reason, in the order in which that was known.
        under_way: one object for each call that is in the engine's hands.
    """

    paths: list[str] = field(default_factory=list)
    under_way: list[object] = field(default_factory=list)

    @contextmanager
    def one(self, path: str) -> Iterator[None]:
        call = object()
        self.paths.append(path)
        self.under_way.append(call)
        try:
            yield
        finally:
            self.under_way.remove(call)


@contextmanager
def watched_calls() -> Iterator[Calls]:
    """What became of each call of `generate`, of whichever thread, of models that are enabled."""
    calls = Calls()
    run, lockstep, announce = generate._run, Engine.lockstep, fallback.announce_fallback

    def watched_run(*args: Any) -> str | None:
        with calls.one("native"):
            return run(*args)

    @contextmanager
    def watched_lockstep(*args: Any, **kwargs: Any) -> Iterator[Any]:
        with calls.one("lockstep"), lockstep(*args, **kwargs) as batch:
            yield batch

    def watched_announcement(engine: Engine, reason: str) -> None:
        if not in_fallback(engine):
            calls.paths.append(f"stock: {reason}")
        announce(engine, reason)

    with patch.object(generate, "_run", watched_run), patch.object(Engine, "lockstep", watched_lockstep), \
            patch.object(fallback, "announce_fallback", watched_announcement):
        yield calls


def assert_program(model: PreTrainedModel, program: Callable[[], Any], paths: list[str], *,
                   expected: Any = None) -> Any:
    """`program()`, whose calls are long, returns over `model` what it does where the model is not enabled.

    Each of its calls takes its path of `paths`, none goes to stock, and while the first of them is in its steps a short
    native call of another thread comes, gets stock's tokens and goes.

    Args:
        model: is enabled here, and is not before.
        expected: what the program returns over a model that is not enabled; None: it is run for that.
    """
    if expected is None:
        expected = _seeded(program)
    short = {"input_ids": torch.tensor(random_prompts([9])), "max_new_tokens": 3, "do_sample": False}
    short_expected = stock_generate(model, **short)
    hf_paged.enable(model, strict=True)
    model.generate(**short)  # the first call of an engine is slow
    found: dict[str, Any] = {}
    with watched_calls() as calls:
        before = hf_paged.get_engine(model).stats().num_generated_tokens
        long = _thread(lambda: found.update(long=_seeded(program)))
        end = time.monotonic() + SECONDS
        while long.is_alive() and hf_paged.get_engine(model).stats().num_generated_tokens < before + 3:
            assert time.monotonic() < end, "the program's call makes no tokens"
            time.sleep(0.0005)
        first = next(iter(calls.under_way), None)
        assert first is not None, f"the program's calls took other ways, or were too short: {calls.paths}"
        _join(_thread(lambda: found.update(short=model.generate(**short))))
        assert first in calls.under_way, "the short call came after the program's long one"
        _join(long)
        while calls.under_way:  # a stream ends before the call behind it does
            assert time.monotonic() < end, "a call of the program does not end"
            time.sleep(0.0005)
    assert_same_tensor(found["short"], short_expected)
    calls.paths.remove("native")  # the short call's
    assert calls.paths == paths, f"the calls took the paths {calls.paths}"
    assert found["long"] == expected, f"\n{found['long']}\n{expected}"
    assert_idle(model)
    return found["long"]


def _seeded(program: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    return program()


def _thread(action: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def _join(thread: threading.Thread) -> None:
    thread.join(SECONDS)
    if thread.is_alive():
        faulthandler.dump_traceback(all_threads=True)
        pytest.fail("callers wait for each other for ever")
