"""Seed and cache salt of a `model.generate` call, set around the call instead of as arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
_CALL_SEED: ContextVar[int | None] = ContextVar("hf_paged_call_seed", default=None)
_CALL_SALT: ContextVar[bytes] = ContextVar("hf_paged_call_salt", default=b"")


@contextmanager
def within(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Set `variable` to `value` within the context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def call_seed(seed: int) -> AbstractContextManager[None]:
    """Use `seed` for calls in this context, in place of the config's or of one drawn from torch's generator."""
    return within(_CALL_SEED, seed)


def seed_of_call() -> int | None:
    """Return the seed of the innermost `call_seed`, or None."""
    return _CALL_SEED.get()


def call_salt(digest: bytes) -> AbstractContextManager[None]:
    """Let calls in this context share cached prefixes only with calls of the same digest (see `salt_digest`)."""
    return within(_CALL_SALT, digest)


def salt_of_call() -> bytes:
    """Return the digest of the innermost `call_salt`, or b""."""
    return _CALL_SALT.get()
