"""`qk_norm_rope_store` on a CPU, where calls of torch cost more than what they compute for a few tokens."""

from __future__ import annotations

import torch

from hf_paged.kernels.layer.add_rms_norm import rms_norm_host
from hf_paged.kernels.layer.heads_to_cache import HeadsToCache


def rope_rows(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the tables ``[P, D]`` at ``positions`` [T], for all layers of a step: cos and signed sin ``[T, 1, D]``.

    Signed: the first half is negated, so that no layer has to negate what it rotates.
    """
    signed = sin.index_select(0, positions)
    signed[:, : signed.shape[1] // 2].neg_()
    return cos.index_select(0, positions)[:, None], signed[:, None]


def qk_norm_rope_store_host(qkv: torch.Tensor, heads: HeadsToCache) -> torch.Tensor:
    """:func:`qk_norm_rope_store`; without positions ``cos`` and ``sin`` are :func:`rope_rows`."""
    q_weight, k_weight, eps, cos, sin, positions, slot_mapping, k_cache, v_cache = heads
    if positions is not None:
        cos, sin = rope_rows(cos, sin, positions)
    kv_heads, head_dim = k_cache.shape[2:]
    tokens, width = qkv.shape
    packed = qkv.view(tokens, width // head_dim, head_dim)
    num_query = width // head_dim - 2 * kv_heads
    query, key, value = packed.split_with_sizes((num_query, kv_heads, kv_heads), 1)
    if q_weight is not None and k_weight is not None:
        both = torch.cat((rms_norm_host(query, q_weight, eps), rms_norm_host(key, k_weight, eps)), 1)
    else:
        both = packed[:, : num_query + kv_heads]
    # transformers' apply_rotary_pos_emb: (-b) * sin is b * (-sin) to the bit.
    turned = both.roll(head_dim // 2, -1)
    if both.dtype == sin.dtype:
        both = (both * cos).add_(turned.mul_(sin))
    else:
        both = (both * cos).add_(turned * sin)
    if both.dtype != k_cache.dtype:
        both = both.to(k_cache.dtype)
    key = both[:, num_query:]
    if min(slot_mapping.tolist(), default=0) < 0:
        kept = (slot_mapping >= 0).nonzero().view(-1)
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    k_cache.view(-1, kv_heads, head_dim).index_copy_(0, slot_mapping, key)
    v_cache.view(-1, kv_heads, head_dim).index_copy_(0, slot_mapping, value)
    return both[:, :num_query].contiguous()
