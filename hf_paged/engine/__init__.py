"""The engine: requests in, tokens out; one thread at a time runs its steps."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_paged.engine.engine import Engine

__all__ = ["Engine"]


def __getattr__(name: str) -> Any:
    # Imported at first use: a worker process imports this package before torch and transformers, which take seconds.
    if name == "Engine":
        from hf_paged.engine.engine import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
