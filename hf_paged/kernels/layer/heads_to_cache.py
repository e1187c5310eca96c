"""What the q, k and v heads of a step's tokens meet between their projection and attention."""

from __future__ import annotations

from typing import NamedTuple

import torch


class HeadsToCache(NamedTuple):
    """Norms and rotation of the heads of q and k, and where keys and values go in the caches.

    Attributes:
        q_weight, k_weight: ``[D]``, the weights of the per-head RMSNorms; both None: no norms.
        eps: of both norms.
        cos, sin: ``[P, D]``, a row per position; rows may be strided. They and the weights are of the caches' dtype,
            or of float32, float16 or bfloat16: then values are rounded to what torch's promotion gives, and at last to
            the caches' dtype, as attention under autocast rounds its inputs.
        positions: ``[T]`` int64, row of the tables of each token, also of tokens that are not written. None: the tables
            have a row per token, see `step_tables`.
        slot_mapping: ``[T]`` int64, as in :func:`~hf_paged.kernels.layer.store_kv.store_kv`; -1 writes nothing.
        k_cache, v_cache: ``[num_blocks, block_size, Hkv, D]``, contiguous.
    """

    q_weight: torch.Tensor | None
    k_weight: torch.Tensor | None
    eps: float
    cos: torch.Tensor
    sin: torch.Tensor
    positions: torch.Tensor | None
    slot_mapping: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
