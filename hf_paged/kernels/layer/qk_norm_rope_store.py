# mypy: disallow-untyped-defs=False
"""From a packed qkv projection: q and k normed per head (or not) and rotated, k and v written to the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from hf_paged.kernels._checks import Expected, check_tensors, checked
from hf_paged.kernels._triton import (
    after_previous_kernel,
    cdiv,
    jit,
    next_power_of_2,
    on_device_of,
    pdl_options,
    prefetch_vector,
    require_triton,
    tl,
)
from hf_paged.kernels.layer._qk_norm_rope_host import qk_norm_rope_store_host, rope_rows
from hf_paged.kernels.layer._qk_norm_rope_many import qk_norm_rope_store_many
from hf_paged.kernels.layer._qk_norm_rope_tile import halves, normed_and_rotated
from hf_paged.kernels.layer.add_rms_norm import rms_norm_reference
from hf_paged.kernels.layer.heads_to_cache import HeadsToCache
from hf_paged.kernels.layer.linear import joined, joined_reference
from hf_paged.kernels.layer.store_kv import store_kv_reference

_TILE_ELEMENTS, _MANY_TOKENS = 1024, 512
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


def _check(qkv: torch.Tensor, heads: HeadsToCache) -> None:
    q_weight, k_weight, _, cos, sin, positions, slot_mapping, k_cache, v_cache = heads
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight: expected two tensors or None twice")
    if positions is None:
        raise ValueError("positions: expected [T] int64, not None")
    dtype, in_parts = k_cache.dtype, qkv.dim() == 3
    check_tensors(
        Expected("k_cache", k_cache, (None, None, None, None), dtype, contiguous=True),
        Expected("qkv", qkv, (None,) * (2 + in_parts), torch.float32 if in_parts else dtype, contiguous=in_parts),
    )
    if in_parts and len(qkv) == 0:
        raise ValueError(f"qkv: {list(qkv.shape)}; expected [S, T, (Hq + 2 * Hkv) * D] with S at least 1, or no parts")
    (tokens, width), (kv_heads, head_dim) = qkv.shape[-2:], k_cache.shape[2:]
    if head_dim % 2 or width % head_dim or width <= 2 * kv_heads * head_dim:
        raise ValueError(
            f"qkv: [{tokens}, {width}]; expected [T, (Hq + 2 * Hkv) * D] with Hkv = {kv_heads} and D = {head_dim}, even"
        )
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    if (found := {cos.dtype, *(w.dtype for w in weights.values() if w is not None)}) - {dtype} and not found <= _FLOATS:
        raise ValueError(f"cos and the weights: {sorted(map(str, found))}; expected {dtype}, or fp32, fp16 or bf16")
    weight_dtype = dtype if q_weight is None else q_weight.dtype
    check_tensors(
        *(Expected(name, weight, (head_dim,), weight_dtype) for name, weight in weights.items() if weight is not None),
        Expected("cos", cos, (None, head_dim), cos.dtype),
        Expected("sin", sin, tuple(cos.shape), cos.dtype),
        Expected("positions", positions, (tokens,), torch.int64, contiguous=True),
        Expected("slot_mapping", slot_mapping, (tokens,), torch.int64, contiguous=True),
        Expected("v_cache", v_cache, tuple(k_cache.shape), dtype, contiguous=True),
    )


def qk_norm_rope_store_unchecked(qkv: torch.Tensor, heads: HeadsToCache) -> torch.Tensor:
    """Queries ready for attention; the tokens' keys and values go to the caches, in place.

    Args:
        qkv: ``[T, (Hq + 2 * Hkv) * D]``, per token its query heads, key heads, value heads, with D even; rows may be
            strided, the last dim is contiguous. It has the caches' dtype. Or float32 ``[S, T, (Hq + 2 * Hkv) * D]``,
            contiguous, S at least 1, see :func:`~hf_paged.kernels.layer.linear.linear_parts`: parts are added up in
            order and rounded once.

    Returns:
        ``[T, Hq, D]``, contiguous, the caches' dtype.

    Raises:
        ValueError: from the checked op, shapes, dtypes or strides that are not as above and in `HeadsToCache`.
            Positions and slots are not checked (that would wait).
    """
    if heads.positions is None or not qkv.is_cuda:
        return qk_norm_rope_store_host(joined(qkv, heads.k_cache.dtype), heads)
    return qk_norm_rope_store_triton(qkv, heads)


qk_norm_rope_store = checked(_check, qk_norm_rope_store_unchecked)


def step_tables(
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """``cos``, ``sin`` and ``positions`` for all layers of a step: what each would look up on a CPU is looked up."""
    return (cos, sin, positions) if positions.is_cuda else (*rope_rows(cos, sin, positions), None)


def qk_norm_rope_store_reference(qkv: torch.Tensor, heads: HeadsToCache,
                                 store: Callable[..., None] = store_kv_reference) -> torch.Tensor:
    """:func:`qk_norm_rope_store` in plain torch; `store` as :func:`~hf_paged.kernels.layer.store_kv.store_kv`."""
    q_weight, k_weight, eps, cos, sin, positions, slot_mapping, k_cache, v_cache = heads
    qkv = joined_reference(qkv, k_cache.dtype)
    kv_heads, head_dim = k_cache.shape[2:]
    packed = qkv.unflatten(1, (-1, head_dim))
    query, key, value = packed.tensor_split((packed.shape[1] - 2 * kv_heads, packed.shape[1] - kv_heads), dim=1)
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    key = _rotate(key if k_weight is None else rms_norm_reference(key, k_weight, eps), cos, sin)
    store(key.to(k_cache.dtype), value, k_cache, v_cache, slot_mapping)
    query = _rotate(query if q_weight is None else rms_norm_reference(query, q_weight, eps), cos, sin)
    return query.to(k_cache.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """transformers' ``apply_rotary_pos_emb``."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@jit()
def _half_of_heads(at, inside, part_stride, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Values of qkv, or where it comes in parts their sums, rounded."""
    if PARTS == 0:
        return tl.load(at, mask=inside, other=0.0)
    total = tl.zeros(at.shape, tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(at + part * part_stride.to(tl.int64), mask=inside, other=0.0)
    return total.to(dtype)


@jit(varying_pointers=("positions", "slot_mapping"))
def _qk_norm_rope_store_kernel(
    qkv,
    q_weight,
    k_weight,
    cos,
    sin,
    positions,
    slot_mapping,
    k_cache,
    v_cache,
    query,
    eps,
    part_stride,
    qkv_stride,
    cos_stride,
    sin_stride,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and HAS_NORMS:
        prefetch_vector(q_weight, HEAD_DIM * q_weight.dtype.element_ty.primitive_bitwidth // 8)
        prefetch_vector(k_weight, HEAD_DIM * k_weight.dtype.element_ty.primitive_bitwidth // 8)
    after_previous_kernel(PDL)
    dtype: tl.constexpr = query.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_TILES: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    KV_TILES: tl.constexpr = (KV_HEADS + TILE_HEADS - 1) // TILE_HEADS
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    lane = tl.arange(0, HALF_PAD)
    live = lane < HALF
    position = tl.load(positions + token)
    row = qkv + token * qkv_stride
    if tile < Q_TILES:
        head = tile * TILE_HEADS + tl.arange(0, TILE_HEADS)
        inside = (head < HEADS)[:, None] & live[None, :]
        offset = head[:, None] * HEAD_DIM + lane[None, :]
        first = _half_of_heads(row + offset, inside, part_stride, PARTS, dtype)
        second = _half_of_heads(row + HALF + offset, inside, part_stride, PARTS, dtype)
        w1, w2 = halves(q_weight, lane, live, HALF) if HAS_NORMS else (None, None)
        cos1, cos2 = halves(cos + position * cos_stride, lane, live, HALF)
        sin1, sin2 = halves(sin + position * sin_stride, lane, live, HALF)
        first, second = normed_and_rotated(first, second, w1, w2, cos1, cos2, sin1, sin2, eps, HAS_NORMS, HEAD_DIM)
        tl.store(query + token * (HEADS * HEAD_DIM) + offset, first, mask=inside)
        tl.store(query + token * (HEADS * HEAD_DIM) + HALF + offset, second, mask=inside)
    else:
        # slot is int64: a cache may hold more than 2**31 elements.
        slot = tl.load(slot_mapping + token)
        if slot >= 0:
            head = (tile - Q_TILES) % KV_TILES * TILE_HEADS + tl.arange(0, TILE_HEADS)
            inside = (head < KV_HEADS)[:, None] & live[None, :]
            offset = head[:, None] * HEAD_DIM + lane[None, :]
            at = slot * (KV_HEADS * HEAD_DIM) + offset
            if tile < Q_TILES + KV_TILES:
                row += HEADS * HEAD_DIM
                first = _half_of_heads(row + offset, inside, part_stride, PARTS, dtype)
                second = _half_of_heads(row + HALF + offset, inside, part_stride, PARTS, dtype)
                w1, w2 = halves(k_weight, lane, live, HALF) if HAS_NORMS else (None, None)
                cos1, cos2 = halves(cos + position * cos_stride, lane, live, HALF)
                sin1, sin2 = halves(sin + position * sin_stride, lane, live, HALF)
                first, second = normed_and_rotated(first, second, w1, w2, cos1, cos2, sin1, sin2, eps, HAS_NORMS,
                                                   HEAD_DIM)
                tl.store(k_cache + at, first, mask=inside)
                tl.store(k_cache + HALF + at, second, mask=inside)
            else:
                row += (HEADS + KV_HEADS) * HEAD_DIM
                first = _half_of_heads(row + offset, inside, part_stride, PARTS, dtype)
                second = _half_of_heads(row + HALF + offset, inside, part_stride, PARTS, dtype)
                tl.store(v_cache + at, first, mask=inside)
                tl.store(v_cache + HALF + at, second, mask=inside)


@lru_cache(maxsize=64)
def _tiles_of(num_heads: int, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Padded half of a head, heads of a tile, tiles of a token."""
    half_pad = next_power_of_2(head_dim // 2)
    tile_heads = min(max(1, _TILE_ELEMENTS // (2 * half_pad)), next_power_of_2(max(num_heads, kv_heads)))
    return half_pad, tile_heads, cdiv(num_heads, tile_heads) + 2 * cdiv(kv_heads, tile_heads)


def qk_norm_rope_store_triton(qkv: torch.Tensor, heads: HeadsToCache) -> torch.Tensor:
    """:func:`qk_norm_rope_store` as one Triton launch. Of few tokens a program has one, and some heads of q, k or v."""
    require_triton()
    num_tokens, width = qkv.shape[-2:]
    q_weight, k_weight, eps, cos, sin, positions, slot_mapping, k_cache, v_cache = heads
    if num_tokens >= _MANY_TOKENS:
        return qk_norm_rope_store_many(joined(qkv, k_cache.dtype), heads)
    num_parts = len(qkv) if qkv.dim() == 3 else 0
    kv_heads, head_dim = k_cache.shape[2:]
    num_heads = width // head_dim - 2 * kv_heads
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=k_cache.dtype, device=qkv.device)
    if num_tokens == 0:
        return query
    half_pad, tile_heads, tiles = _tiles_of(num_heads, kv_heads, head_dim)
    with on_device_of(qkv):
        _qk_norm_rope_store_kernel[(num_tokens, tiles)](
            qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, query, eps,
            qkv.stride(0) if num_parts else 0,
            qkv.stride(-2),
            cos.stride(0),
            sin.stride(0),
            PARTS=num_parts,
            HEADS=num_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HALF_PAD=half_pad,
            TILE_HEADS=tile_heads,
            HAS_NORMS=q_weight is not None,
            num_warps=4,
            enable_fp_fusion=False,
            **pdl_options(qkv),
        )
    return query
