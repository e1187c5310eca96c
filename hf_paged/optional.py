"""Packages that only some uses need: which extra of the distribution brings them, and the one error without them."""

from __future__ import annotations

import importlib

# By extra of pyproject.toml: the modules that its uses import, the package of its name first.
EXTRAS: dict[str, tuple[str, ...]] = {
    "flash-attn": ("flash_attn",),
    "metrics": ("prometheus_client",),
    "peft": ("peft",),
    "plot": ("matplotlib",),
    "ray": ("ray", "ray.data"),
    "serve": ("fastapi", "starlette", "uvicorn", "openai", "pydantic", "rich"),
    "structured": ("xgrammar",),
}


def require(extra: str, use: str) -> None:
    """Import the modules of an extra.

    Args:
        extra: one of `EXTRAS`.
        use: what needs them, as the subject of a sentence.

    Raises:
        ImportError: a module cannot be imported; the message says which one, why, and what to install.
    """
    for module in EXTRAS[extra]:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ImportError(f"{lacking(extra, use, module)} ({error})", name=module) from error


def lacking(extra: str, use: str, module: str | None = None) -> str:
    """The message about a use whose extra is not installed; it names the module, or the first one of the extra."""
    return f"{use} needs the package {module or EXTRAS[extra][0]}: {install(extra)}"


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'hf-paged[{extra}]'"
