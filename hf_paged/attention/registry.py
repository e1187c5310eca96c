"""The registry of attention backends by name, the choice of one for a device, and `paged_attention` by name.

A backend is a module `NAME_backend` of this folder, which holds an instance as `BACKEND`, and its name in
`ATTENTION_BACKENDS` of `hf_paged/config.py`.
"""

from __future__ import annotations

from importlib import import_module

import torch

from hf_paged.attention.backend import AttentionBackend
from hf_paged.attention.hopper_backend import HopperBackend
from hf_paged.config import ATTENTION_BACKENDS
from hf_paged.kernels.attention.types import AttentionOptions, AttentionSpec, PagedMetadata
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
    """Raise ValueError if the backend of a config cannot run such a model."""
    backend = resolve_backend(name, spec.device)
    reason = None if name == "auto" else backend.why_not(spec)
    if reason is not None:
        raise ValueError(f"attention_backend={name!r}: {reason}")


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, meta: PagedMetadata, options: AttentionOptions, *,
    backend: str = "auto", out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the packed new tokens over their rows' cached and new tokens (already stored in the cache).

    New token i of row r sits at position ``p = seq_lens[r] - n_r + i`` and sees positions ``0..p``, with a window
    ``max(0, p - window + 1)..p``, with a chunk ``p - p % chunk..p``, as in transformers. Positions that none of a row's
    tokens sees are never read, whatever they hold. A row with ``seq_lens[r] == 0`` (padding of a CUDA graph) gives
    zeros.

    Args:
        q: ``[T, Hq, D]``; query head h reads KV head ``h // (Hq // Hkv)``; the last dim is contiguous.
        k_cache, v_cache: ``[num_blocks, block_size, Hkv, D or Dv]``, contiguous, q's dtype.
        meta: the step's layout, on q's device.
        options: how scores become weights.
        backend: ``"auto"`` or one of `BACKENDS`.
        out: ``[T, Hq, Dv]`` contiguous, q's dtype, to be filled and returned; None: a new tensor.

    Returns:
        ``[T, Hq, Dv]``, q's dtype, contiguous.

    Raises:
        ValueError: an unknown backend, or shapes, dtypes or numbers that are not as above.
    """
    found = resolve_backend(backend, q.device)
    check_attention(q, k_cache, v_cache, options)
    return found.run(q, k_cache, v_cache, meta, options, out)


def check_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, options: AttentionOptions
) -> None:
    """Raise ValueError for arguments that are not as :func:`paged_attention` says."""
    alike = k_cache.dim() == v_cache.dim() == 4 and k_cache.shape[:3] == v_cache.shape[:3]
    if q.dim() != 3 or not alike or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            "q must be [T, Hq, D] and the caches [num_blocks, block_size, Hkv, D or Dv], got "
            f"{tuple(q.shape)}, {tuple(k_cache.shape)}, {tuple(v_cache.shape)}"
        )
    if q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"{q.shape[1]} query heads are not a multiple of {k_cache.shape[2]} KV heads")
    if not q.dtype == k_cache.dtype == v_cache.dtype:
        raise ValueError(f"q and caches must share a dtype, got {q.dtype}, {k_cache.dtype}, {v_cache.dtype}")
    if q.stride(2) != 1 or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the last dim of q, and k_cache and v_cache as a whole, must be contiguous")
    window, softcap, sinks = options.window, options.softcap, options.sinks
    if window is not None and window < 1:
        raise ValueError(f"window={window!r}: expected None or at least 1")
    if options.chunk is not None and (options.chunk < 1 or window is not None):
        raise ValueError(f"chunk={options.chunk!r} beside window={window!r}: expected one of them, at least 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap!r}: expected None or a positive number")
    if sinks is not None and not (sinks.shape == q.shape[1:2] and sinks.is_floating_point() and sinks.is_contiguous()):
        found = f"{sinks.dtype} {tuple(sinks.shape)}"
        raise ValueError(f"sinks must be [{q.shape[1]}] contiguous floats or None, got {found}")
