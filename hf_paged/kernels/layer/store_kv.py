# mypy: disallow-untyped-defs=False
"""Write the new tokens' keys and values into the paged cache."""

from __future__ import annotations

import torch

from hf_paged.kernels._triton import cdiv, jit, next_power_of_2, on_device_of, require_triton, tl


def check_tokens(key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                 slot_mapping: torch.Tensor) -> None:
    """Raise ValueError for tensors that are not as :func:`store_kv` says; slots are not looked at (that would wait)."""
    num_tokens, alike = slot_mapping.numel(), k_cache.shape[:3] == v_cache.shape[:3]
    fit = (key.shape, value.shape) == ((num_tokens, *k_cache.shape[2:]), (num_tokens, *v_cache.shape[2:]))
    if not (fit and alike):
        raise ValueError(
            f"key {tuple(key.shape)} and value {tuple(value.shape)} must be [T, Hkv, D or Dv] for {num_tokens} "
            "slots and caches [num_blocks, block_size, Hkv, D or Dv], got "
            f"{tuple(k_cache.shape)} and {tuple(v_cache.shape)}"
        )
    if not key.dtype == value.dtype == k_cache.dtype == v_cache.dtype:
        dtypes = (key.dtype, value.dtype, k_cache.dtype, v_cache.dtype)
        raise ValueError(f"key, value, k_cache and v_cache must share a dtype, got {dtypes}")
    if slot_mapping.dtype != torch.int64 or slot_mapping.dim() != 1:
        raise ValueError(f"slot_mapping must be [T] int64, got {tuple(slot_mapping.shape)} {slot_mapping.dtype}")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous")
    if key.stride(-1) != 1 or value.stride(-1) != 1:
        raise ValueError(f"the last dim of key and value must be contiguous: strides {key.stride()}, {value.stride()}")


def store_kv(key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
             slot_mapping: torch.Tensor) -> None:
    """Copy token t's key and value to slot ``slot_mapping[t]`` of the caches, in place.

    Args:
        key, value: ``[T, Hkv, D or Dv]``, the caches' dtype; the first two dims may be strided, the last is contiguous.
        k_cache, v_cache: ``[num_blocks, block_size, Hkv, D or Dv]``, contiguous; slot s is block
            ``s // block_size``, offset ``s % block_size``.
        slot_mapping: ``[T]`` int64; -1 writes nothing. Two tokens with one slot: either may win.
    """
    if key.is_cuda:
        store_kv_triton(key, value, k_cache, v_cache, slot_mapping)
    else:
        store_kv_reference(key, value, k_cache, v_cache, slot_mapping)


def store_kv_reference(key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                       slot_mapping: torch.Tensor) -> None:
    """:func:`store_kv` in plain torch."""
    if bool((slot_mapping < 0).any()):
        kept = (slot_mapping >= 0).nonzero().view(-1)
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    k_cache.view(-1, *k_cache.shape[2:]).index_copy_(0, slot_mapping, key)
    v_cache.view(-1, *v_cache.shape[2:]).index_copy_(0, slot_mapping, value)


@jit(varying_pointers=("slot_mapping",))
def _store_kv_kernel(
    key, value, k_cache, v_cache, slot_mapping, k_stride_t, k_stride_h, v_stride_t, v_stride_h, KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, TILE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        column = tl.program_id(1) * TILE + tl.arange(0, TILE)
        of_key, of_value = column < KV_HEADS * HEAD_DIM, column < KV_HEADS * VALUE_DIM
        k = tl.load(key + token * k_stride_t + column // HEAD_DIM * k_stride_h + column % HEAD_DIM, mask=of_key)
        v = tl.load(value + token * v_stride_t + column // VALUE_DIM * v_stride_h + column % VALUE_DIM, mask=of_value)
        # slot is int64: a cache may hold more than 2**31 elements.
        tl.store(k_cache + slot * (KV_HEADS * HEAD_DIM) + column, k, mask=of_key)
        tl.store(v_cache + slot * (KV_HEADS * VALUE_DIM) + column, v, mask=of_value)


def store_kv_triton(key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
                    slot_mapping: torch.Tensor) -> None:
    """:func:`store_kv` as one Triton launch, a program per token and up to 1,024 elements of its key and value."""
    require_triton()
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    value_dim = value.shape[2]
    width = num_kv_heads * max(head_dim, value_dim)
    tile = min(1024, next_power_of_2(width))
    with on_device_of(key):
        _store_kv_kernel[(num_tokens, cdiv(width, tile))](
            key, value, k_cache, v_cache, slot_mapping, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
            KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, VALUE_DIM=value_dim, TILE=tile, num_warps=4,
        )
