"""Triton where it is installed; without it the kernel files still import and only a launch fails.

With ``TRITON_INTERPRET=1`` in the environment before the first import, every kernel here runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

try:
    import triton as _triton
    import triton.language as _tl
except ImportError:
    _triton = None
    _tl = None

triton: Any = _triton
tl: Any = _tl
HAS_TRITON = _triton is not None


def jit(fn: Callable[..., Any]) -> Any:
    """``triton.jit``, or the bare function where Triton is missing."""
    return fn if _triton is None else _triton.jit(fn)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Triton launches on the current device: make it the tensor's (nothing to do for CPU tensors)."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def require_triton() -> None:
    """Raise ``RuntimeError`` where a Triton kernel was asked for and Triton is not installed."""
    if not HAS_TRITON:
        raise RuntimeError("this kernel needs triton, which is not installed: install triton or use the torch backend")
