"""What every way of carrying out a call shares: the warning that it goes to stock, its seed and its cache salt."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

import torch

from hf_paged.engine.engine import Engine
from hf_paged.errors import FallbackError, FallbackWarning
from hf_paged.parallel.intact import broken_part

T = TypeVar("T")
_CALL_SEED: ContextVar[int | None] = ContextVar("hf_paged_call_seed", default=None)
_CALL_SALT: ContextVar[bytes] = ContextVar("hf_paged_call_salt", default=b"")
_IN_FALLBACK: ContextVar[tuple] = ContextVar("hf_paged_in_fallback", default=())  # engines whose call runs in stock


def announce_fallback(engine: Engine, reason: str) -> None:
    """Warn that a call goes to stock generate; raise where the config is ``strict`` or stock could not do it either."""
    if in_fallback(engine):
        return
    if engine.group.driven:
        raise FallbackError(f"tensor_parallel_size={engine.group.size}, where rank 0 cannot run stock generate alone, "
                            f"and this call would go there: {reason}")  # fmt: skip
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
    """Calls that stock makes in here (assisted decoding calls generate for every draft) go to stock without a word."""
    inside = engine is None or in_fallback(engine)
    draws = nullcontext() if engine is None or inside else _same_draws(engine)
    with within(_IN_FALLBACK, (*_IN_FALLBACK.get(), engine)), draws:
        yield


@contextmanager
def _same_draws(engine: Engine) -> Iterator[None]:
    """Ranks that run the same script draw in here what rank 0 draws: other tokens would make other sums."""
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


@contextmanager
def within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """`variable` has this value in here."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def call_seed(seed: int) -> AbstractContextManager[None]:
    """Calls in here take `seed` in place of the config's or of one drawn from torch's generator."""
    return within(_CALL_SEED, seed)


def seed_of_call() -> int | None:
    """The seed of the innermost `call_seed`."""
    return _CALL_SEED.get()


def call_salt(digest: bytes) -> AbstractContextManager[None]:
    """Calls in here share cached prefixes with those under the same digest (see `salt_digest`) alone."""
    return within(_CALL_SALT, digest)


def salt_of_call() -> bytes:
    """The digest of the innermost `call_salt`."""
    return _CALL_SALT.get()
