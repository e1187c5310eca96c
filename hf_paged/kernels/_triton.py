"""Triton where it is installed; without it the kernel files still import and only a launch fails.

With ``TRITON_INTERPRET=1`` in the environment before the first import, every kernel here runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None

__all__ = ["jit", "on_device_of", "require_triton", "tl", "triton"]


def jit(
    *, varying_ints: tuple[str, ...] = (), varying_pointers: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit``, or the bare function where Triton is missing.

    Values of ``varying_ints`` and alignments of ``varying_pointers`` change from step to step and compile nothing.
    """
    if triton is None:
        return lambda fn: fn
    return triton.jit(do_not_specialize=list(varying_ints), do_not_specialize_on_alignment=list(varying_pointers))


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's (nothing to do for CPU tensors)."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def require_triton() -> None:
    """Raise ``RuntimeError`` where a Triton kernel was asked for and Triton is not installed."""
    if triton is None:
        raise RuntimeError("this kernel needs triton, which is not installed: install triton or use the torch backend")
