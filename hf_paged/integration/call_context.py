"""What a call of `model.generate` has besides its arguments: a seed and a cache salt, set around the call."""

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
