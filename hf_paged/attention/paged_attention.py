"""Attention of one step's new tokens over the paged KV cache, for callers from outside: arguments are checked."""

from __future__ import annotations

import torch

from hf_paged.attention.registry import resolve_backend
from hf_paged.kernels.attention.types import AttentionOptions, PagedMetadata


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: PagedMetadata,
    options: AttentionOptions,
    *,
    backend: str = "auto",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of the packed new tokens over their rows' cached and new tokens (already stored in the cache).

    New token i of row r sits at position ``p = seq_lens[r] - n_r + i`` and sees positions ``0..p``, or with a
    window ``max(0, p - window + 1)..p``, as in transformers. Positions that none of a row's tokens sees are
    never read, whatever they hold. A row with ``seq_lens[r] == 0`` (padding of a CUDA graph) gives zeros.

    Args:
        q: ``[T, Hq, D]``; query head h reads KV head ``h // (Hq // Hkv)``; the last dim is contiguous.
        k_cache, v_cache: ``[num_blocks, block_size, Hkv, D]``, contiguous, q's dtype.
        meta: the step's layout, on q's device.
        options: how scores become weights.
        backend: ``"auto"`` or one of `BACKENDS`.
        out: ``[T, Hq, D]`` contiguous, q's dtype, to be filled and returned; None: a new tensor.

    Returns:
        ``[T, Hq, D]``, q's dtype, contiguous.

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
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(
            "q must be [T, Hq, D] and the caches [num_blocks, block_size, Hkv, D], got "
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
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap!r}: expected None or a positive number")
    if sinks is not None and not (sinks.shape == q.shape[1:2] and sinks.is_floating_point() and sinks.is_contiguous()):
        found = f"{sinks.dtype} {tuple(sinks.shape)}"
        raise ValueError(f"sinks must be [{q.shape[1]}] contiguous floats or None, got {found}")
