"""Kernels in Gluon for Hopper GPUs alone, and the devices on which they run; each kernel adds its own conditions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hf_paged.device.cuda import compute_capability
from hf_paged.kernels._triton import triton

# Gluon may change with any version of Triton: with these the kernels were tested on a GPU.
TESTED_TRITON = ("3.6",)


def why_not_on(device: torch.device, refusal: Callable[[int, int], str | None]) -> str | None:
    """Return why a kernel cannot run on `device`, or None. ``refusal`` returns why not on a compute capability."""
    if triton is None:
        return "needs triton, which is not installed"
    compiles = torch.cuda.is_available() and not triton.knobs.runtime.interpret
    capability = compute_capability(device) if compiles else None
    if capability is None:
        return f"needs an NVIDIA GPU, not {str(device)!r}"
    if (reason := refusal(*capability)) is not None:
        return reason
    version: str = triton.__version__
    if not version.startswith(tuple(f"{tested}." for tested in TESTED_TRITON)):
        return f"was tested with triton {' and '.join(TESTED_TRITON)}, not {version}"
    return None
