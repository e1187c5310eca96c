"""The engine: requests in, tokens out; one thread at a time runs its steps."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_paged.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    # At first use: a worker comes by here before it may spend the seconds that torch and transformers take.
    if name == "Engine":
        from hf_paged.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
