"""Calls that go to stock generate: the warning, and the contexts in which they run there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

from hf_paged.engine.engine import Engine
from hf_paged.errors import FallbackError, FallbackWarning
from hf_paged.integration.call_context import within
from hf_paged.integration.same_draws import same_draws
from hf_paged.parallel.intact import broken_part

_IN_FALLBACK: ContextVar[tuple] = ContextVar("hf_paged_in_fallback", default=())  # engines whose call runs in stock


def announce_fallback(engine: Engine, reason: str) -> None:
    """Warn that a call goes to stock generate; raise where the config is ``strict`` or stock could not do it either."""
    if in_fallback(engine):
        return
    if engine.group.driven:
        raise FallbackError(f"tensor_parallel_size={engine.group.size}, where rank 0 cannot run stock generate alone, "
                            f"and this call would go there: {reason}")
    if (broken := broken_part(engine.model)) is not None:
        raise FallbackError(f"this call would go to stock generate, which would be wrong as well: {broken}")
    if engine.config.strict:
        raise FallbackError(f"strict=True, and this call would go to stock generate: {reason}")
    warnings.warn(f"hf_paged: this call goes to stock generate: {reason}", FallbackWarning, stacklevel=2)


def in_fallback(engine: Engine) -> bool:
    """True inside a call of this engine's model that runs in stock."""
    return engine in _IN_FALLBACK.get()


def fallback_engines() -> tuple:
    """Engines whose calls run in stock right now, in this context (see `quiet_fallbacks`)."""
    return _IN_FALLBACK.get()


@contextmanager
def quiet_fallbacks(engine: Engine | None) -> Iterator[None]:
    """Calls that stock makes in here (assisted decoding generates every draft) go to stock without a warning."""
    inside = engine is None or in_fallback(engine)
    draws = nullcontext() if engine is None or inside else same_draws(engine)
    with within(_IN_FALLBACK, (*_IN_FALLBACK.get(), engine)), draws:
        yield
