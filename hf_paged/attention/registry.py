"""The registry of attention backends by name, and the choice of a backend for a device.

A backend is a module `NAME_backend` of this folder, which holds an instance as `BACKEND`, and its name in
`ATTENTION_BACKENDS` of `hf_paged/config.py`.
"""

from __future__ import annotations

from importlib import import_module

import torch

from hf_paged.attention.backend import AttentionBackend
from hf_paged.attention.hopper_backend import HopperBackend
from hf_paged.attention.spec import AttentionSpec
from hf_paged.config import ATTENTION_BACKENDS
from hf_paged.kernels.hopper import prefill_support

BACKENDS: dict[str, AttentionBackend] = {
    name: import_module(f"hf_paged.attention.{name}_backend").BACKEND for name in ATTENTION_BACKENDS if name != "auto"
}


def resolve_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend that ``name`` stands for on ``device``.

    ``"auto"`` is torch off CUDA. On CUDA it is hopper where that runs, else triton.

    Raises:
        ValueError: an unknown name; the message lists the accepted ones.
    """
    if name == "auto":
        if device.type != "cuda":
            return BACKENDS["torch"]
        if prefill_support.why_not_on(device) is None:
            return HopperBackend(measured_only=True)
        return BACKENDS["triton"]
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is unknown; accepted: {', '.join(ATTENTION_BACKENDS)}")
    return BACKENDS[name]


def check_backend(name: str, spec: AttentionSpec) -> None:
    """Raise ValueError if a config names a backend that cannot run such a model; ``"auto"`` always can."""
    reason = None if name == "auto" else resolve_backend(name, spec.device).why_not(spec)
    if reason is not None:
        raise ValueError(f"attention_backend={name!r}: {reason}")
