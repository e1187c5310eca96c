"""Calls that go to stock generate: their warning, and the contexts in which they run."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from hf_paged.engine.engine import Engine
from hf_paged.errors import FallbackError, FallbackWarning, Reason
from hf_paged.integration import paths, ranks
from hf_paged.integration.paths import within
from hf_paged.options.arguments import level_of_caller
from hf_paged.parallel.plan import broken_part

IN_FALLBACK: ContextVar[tuple] = ContextVar("hf_paged_in_fallback", default=())  # engines with a call in stock


def fall_back(engine: Engine, reason: Reason, call: Callable[[], Any], num_tokens: Callable[[Any], int]) -> Any:
    """Run `call()` in stock, with a warning (see `announce_fallback`), and count it."""
    announce_fallback(engine, reason)
    with quiet_fallbacks(engine):
        return paths.counted(engine, "stock", reason, call, num_tokens)


def announce_fallback(engine: Engine, reason: Reason) -> None:
    """Warn that a call goes to stock generate, once per reason; raises FallbackError if the config is ``strict`` or
    stock cannot run it either."""
    paths.answer(engine, "stock", reason)
    with ranks.refusing(engine):
        if engine.group.driven:
            raise FallbackError(f"tensor_parallel_size={engine.group.size}, where rank 0 cannot run stock generate "
                                f"alone, and this call would go there: {reason.with_remedy}")
        if (broken := broken_part(engine.model)) is not None:
            raise FallbackError("this call would go to stock generate, which would be wrong as well: "
                                f"{broken.with_remedy}")
        if engine.config.strict:
            raise FallbackError(f"strict=True, and this call would go to stock generate: {reason.with_remedy}")
        if engine.calls.is_first_warning(reason):
            try:
                text = f"hf_paged: this call goes to stock generate: {reason.with_remedy}"
                warnings.warn(text, FallbackWarning, stacklevel=level_of_caller())
            except FallbackWarning:
                engine.calls.take_warning_back(reason)
                raise
    ranks.go_to_stock(engine, reason)


def value_reason(error: Exception) -> Reason:
    """Make the reason for a value that the engine rejects, from the error's message."""
    return Reason("a value that the paged engine does not take: {}", _without_data(str(error)),
                  remedy="The value is one that stock refuses, too, or that the kernels' numbers do not hold. The text "
                         "says what is accepted.")


def unreadable(engine: Engine, error: Exception) -> Reason:
    """Make the reason for an argument that raised an error when the engine read it.

    An error that may be of this rank alone is raised: in stock this rank would wait for others, which wait in steps.
    """
    if engine.group.is_parallel and isinstance(error, torch.OutOfMemoryError):
        raise error
    return Reason("this call cannot be read: {}", _without_data(f"{error!r:.200}"),
                  remedy="Some argument raised the error that the text quotes. If stock carries the call out, please "
                         "report it.")


def _without_data(text: str) -> str:
    """Remove the content of tensors, which would make a warning unreadable."""
    return re.sub(r"tensor\(.*?(\)|$)", "a tensor", text, flags=re.DOTALL)


def in_fallback(engine: Engine | None = None) -> bool:
    """Return whether the code runs inside a call in stock (see `quiet_fallbacks`), of any model or of this engine's."""
    inside = IN_FALLBACK.get()
    return bool(inside) if engine is None else engine in inside


@contextmanager
def quiet_fallbacks(engine: Engine | None) -> Iterator[None]:
    """Send calls that stock makes in this context to stock without a warning, such as calls for drafts."""
    inside = engine is None or in_fallback(engine)
    draws = nullcontext() if engine is None or inside else same_draws(engine)
    with within(IN_FALLBACK, (*IN_FALLBACK.get(), engine)), draws:
        yield


@contextmanager
def same_draws(engine: Engine) -> Iterator[None]:
    """Give all ranks rank 0's random numbers within the context: different tokens would corrupt their sums."""
    group, device = engine.group, engine.model.device
    if not group.is_parallel:
        yield
        return
    on_gpu = device.type == "cuda"
    host, gpu = group.broadcast((torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None))
    with torch.random.fork_rng([device] if on_gpu else [], enabled=group.rank > 0):
        if group.rank > 0:
            torch.set_rng_state(host)
            if gpu is not None:
                torch.cuda.set_rng_state(gpu, device)
        yield
