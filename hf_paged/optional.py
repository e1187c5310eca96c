"""Optional packages: the extra of the distribution that installs each, and the error if one is missing."""

from __future__ import annotations

import importlib

# Modules that each extra of pyproject.toml has to provide, the package to name in errors first.
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
        use: the feature that needs the modules, as the subject of a sentence.

    Raises:
        ImportError: a module cannot be imported; the message names the module, the cause and what to install.
    """
    for module in EXTRAS[extra]:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise ImportError(f"{lacking(extra, use, module)} ({error})", name=module) from error


def lacking(extra: str, use: str, module: str | None = None) -> str:
    """Return the message about a use whose extra is not installed; names `module`, or the extra's first module."""
    return f"{use} needs the package {module or EXTRAS[extra][0]}: {install(extra)}"


def install(extra: str) -> str:
    return f"pip install 'hf-paged[{extra}]'"
