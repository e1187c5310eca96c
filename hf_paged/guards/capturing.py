"""Hooks by which transformers collects hidden states, attentions and router logits: inert without a collector.

transformers installs the hooks at the first forward that requests one of these outputs, and leaves them on the modules.
They do nothing unless a collector is set for the context, which each forward of a decoder does anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from transformers.utils import output_capturing

HOOK_NAME = "output_capturing_hook"


def _code_of_hook() -> CodeType | None:
    """Return the code of the hook that transformers' installer defines; None if there is no such installer."""
    installer = getattr(output_capturing, "install_output_capuring_hook", None)  # transformers' own spelling
    if not isinstance(installer, FunctionType) or installer.__code__.co_filename != output_capturing.__file__:
        return None
    nested = (c for c in installer.__code__.co_consts if isinstance(c, CodeType) and c.co_name == HOOK_NAME)
    return next(nested, None)


_CODE = _code_of_hook()
_COLLECTOR: Any = getattr(output_capturing, "_active_collector", None)


def only_captures(hook: Any) -> bool:
    """Return whether `hook` is transformers' own capturing hook, which does nothing if no collector is set."""
    return (
        _CODE is not None
        and isinstance(hook, FunctionType)
        and hook.__code__ is _CODE
        and hook.__globals__ is vars(output_capturing)
    )


@contextmanager
def no_capturing() -> Iterator[None]:
    """Unset the collector in a ``with`` block, so that hooks collect nothing; without a collector costs a look-up."""
    if _COLLECTOR is None or _COLLECTOR.get() is None:
        yield
        return
    token = _COLLECTOR.set(None)
    try:
        yield
    finally:
        _COLLECTOR.reset(token)
