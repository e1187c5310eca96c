# mypy: disallow-untyped-defs=False, disable-error-code="assignment"
"""From a packed qkv projection: q and k normed per head (or not) and rotated, k and v written to the paged cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

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
from hf_paged.kernels.layer.add_rms_norm import rms_norm_host
from hf_paged.kernels.layer.linear import joined, joined_reference
from hf_paged.kernels.layer.rms_norm import rms_norm_reference
from hf_paged.kernels.layer.rotary import rotated
from hf_paged.kernels.layer.store_kv import store_kv_reference

_TILE_ELEMENTS, _MANY_TOKENS = 1024, 512
# Of many tokens: heads of a token that a program takes side by side, how often it does so, and its warps.
_SIDE, _TURNS, _WARPS = 4, 4, 4


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


def qk_norm_rope_store(qkv: torch.Tensor, heads: HeadsToCache) -> torch.Tensor:
    """Return queries ready for attention, and write the tokens' keys and values to the caches.

    Args:
        qkv: ``[T, (Hq + 2 * Hkv) * D]``, per token its query heads, key heads, value heads, with D even; rows may be
            strided, the last dim is contiguous. It has the caches' dtype. Or float32 ``[S, T, (Hq + 2 * Hkv) * D]``,
            contiguous, S at least 1, see :func:`~hf_paged.kernels.layer.linear.linear_parts`: parts are added up in
            order and rounded once.

    Returns:
        ``[T, Hq, D]``, contiguous, the caches' dtype.
    """
    if heads.positions is None or not qkv.is_cuda:
        return qk_norm_rope_store_host(joined(qkv, heads.k_cache.dtype), heads)
    return qk_norm_rope_store_triton(qkv, heads)


def step_tables(
    cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return ``cos``, ``sin`` and ``positions`` for all layers of a step; on a CPU the rows are looked up here."""
    return (cos, sin, positions) if positions.is_cuda else (*rope_rows(cos, sin, positions), None)


def rope_rows(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows of the tables ``[P, D]`` at ``positions`` [T] for a step's layers: cos, signed sin ``[T, 1, D]``.

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


def qk_norm_rope_store_reference(qkv: torch.Tensor, heads: HeadsToCache,
                                 store: Callable[..., None] = store_kv_reference) -> torch.Tensor:
    """:func:`qk_norm_rope_store` in plain torch; `store` as :func:`~hf_paged.kernels.layer.store_kv.store_kv`."""
    q_weight, k_weight, eps, cos, sin, positions, slot_mapping, k_cache, v_cache = heads
    qkv = joined_reference(qkv, k_cache.dtype)
    kv_heads, head_dim = k_cache.shape[2:]
    packed = qkv.unflatten(1, (-1, head_dim))
    query, key, value = packed.tensor_split((packed.shape[1] - 2 * kv_heads, packed.shape[1] - kv_heads), dim=1)
    cos, sin = cos[positions][:, None], sin[positions][:, None]
    key = rotated(key if k_weight is None else rms_norm_reference(key, k_weight, eps), cos, sin)
    store(key.to(k_cache.dtype), value, k_cache, v_cache, slot_mapping)
    query = rotated(query if q_weight is None else rms_norm_reference(query, q_weight, eps), cos, sin)
    return query.to(k_cache.dtype)


@jit()
def halves(row, lane, live, HALF: tl.constexpr):
    """Load a row of HEAD_DIM values as two of ``[1, HALF padded]``."""
    first = tl.load(row + lane, mask=live, other=0.0)
    second = tl.load(row + HALF + lane, mask=live, other=0.0)
    return first[None, :], second[None, :]


@jit()
def normed_and_rotated(
    first, second, w1, w2, cos1, cos2, sin1, sin2, eps, HAS_NORMS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Norm and rotate the halves of some heads, ``[heads, HEAD_DIM / 2 padded]``, by halves of one row or a row each.

    Every value is rounded to the dtype that torch's promotion gives it: one for all, or float32 where they differ.
    """
    dtype: tl.constexpr = first.dtype
    scaled: tl.constexpr = (dtype if w1.dtype == dtype else tl.float32) if HAS_NORMS else dtype
    rotated: tl.constexpr = scaled if cos1.dtype == scaled else tl.float32
    x1, x2 = first.to(tl.float32), second.to(tl.float32)
    cos1, cos2 = cos1.to(tl.float32), cos2.to(tl.float32)
    sin1, sin2 = sin1.to(tl.float32), sin2.to(tl.float32)

    if HAS_NORMS:
        # torch's mean on CUDA multiplies by the reciprocal.
        variance = tl.sum(x1 * x1 + x2 * x2, 1) * (1.0 / HEAD_DIM)
        scale = tl.rsqrt(variance + eps)[:, None]
        x1 = (x1 * scale).to(dtype).to(tl.float32)
        x2 = (x2 * scale).to(dtype).to(tl.float32)
        x1 = (w1.to(tl.float32) * x1).to(scaled).to(tl.float32)
        x2 = (w2.to(tl.float32) * x2).to(scaled).to(tl.float32)

    # rotate_half's minus as a subtraction: a - b is a + (-b) to the bit, also for zeros.
    straight1 = (x1 * cos1).to(rotated).to(tl.float32)
    straight2 = (x2 * cos2).to(rotated).to(tl.float32)
    crossed1 = (x2 * sin1).to(rotated).to(tl.float32)
    crossed2 = (x1 * sin2).to(rotated).to(tl.float32)
    # Attention takes them in the dtype of the linear layers' results.
    return (straight1 - crossed1).to(rotated).to(dtype), (straight2 + crossed2).to(rotated).to(dtype)


@jit()
def _normed_and_rotated_at(first, second, weight, cos, sin, position, cos_stride, sin_stride, lane, live, eps,
                           HAS_NORMS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """`normed_and_rotated` of some heads of one token, whose weights and row of the tables are loaded."""
    HALF: tl.constexpr = HEAD_DIM // 2
    w1, w2 = halves(weight, lane, live, HALF) if HAS_NORMS else (None, None)
    cos1, cos2 = halves(cos + position * cos_stride, lane, live, HALF)
    sin1, sin2 = halves(sin + position * sin_stride, lane, live, HALF)
    return normed_and_rotated(first, second, w1, w2, cos1, cos2, sin1, sin2, eps, HAS_NORMS, HEAD_DIM)


@jit()
def _load_half(at, inside, part_stride, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Load halves of heads of qkv, or the rounded sums of its parts."""
    if PARTS == 0:
        return tl.load(at, mask=inside, other=0.0)
    total = tl.zeros(at.shape, tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(at + part * part_stride.to(tl.int64), mask=inside, other=0.0)
    return total.to(dtype)


@jit()
def _load_heads(at, inside, part_stride, PARTS: tl.constexpr, HALF: tl.constexpr, dtype: tl.constexpr):
    """Load first and second halves of some heads of a token; `at` [heads, HALF padded]."""
    first = _load_half(at, inside, part_stride, PARTS, dtype)
    second = _load_half(at + HALF, inside, part_stride, PARTS, dtype)
    return first, second


@jit()
def store_heads(target, offset, first, second, inside, HALF: tl.constexpr):
    """Store first and second halves of heads; `offset` [heads, HALF padded]."""
    tl.store(target + offset, first, mask=inside)
    tl.store(target + HALF + offset, second, mask=inside)


@jit(varying_pointers=("positions", "slot_mapping"))
def _few_tokens_kernel(
    qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, query, eps, part_stride, qkv_stride,
    cos_stride, sin_stride, PARTS: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr, TILE_HEADS: tl.constexpr, HAS_NORMS: tl.constexpr, PDL: tl.constexpr,
):
    """A program has TILE_HEADS heads of q, k or v of one token. Tiles are ``[TILE_HEADS, HALF_PAD]``."""
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
        first, second = _load_heads(row + offset, inside, part_stride, PARTS, HALF, dtype)
        first, second = _normed_and_rotated_at(
            first, second, q_weight, cos, sin, position, cos_stride, sin_stride, lane, live, eps, HAS_NORMS,
            HEAD_DIM,
        )
        store_heads(query + token * (HEADS * HEAD_DIM), offset, first, second, inside, HALF)
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
                first, second = _load_heads(row + offset, inside, part_stride, PARTS, HALF, dtype)
                first, second = _normed_and_rotated_at(
                    first, second, k_weight, cos, sin, position, cos_stride, sin_stride, lane, live, eps, HAS_NORMS,
                    HEAD_DIM,
                )
                store_heads(k_cache, at, first, second, inside, HALF)
            else:
                row += (HEADS + KV_HEADS) * HEAD_DIM
                first, second = _load_heads(row + offset, inside, part_stride, PARTS, HALF, dtype)
                store_heads(v_cache, at, first, second, inside, HALF)


@jit()
def _loaded_heads(start, lane, inside, left, SIDE: tl.constexpr, TURNS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Load halves of every SIDE-th head from `start` on, `left` at most; all loads are issued before one is used."""
    heads = ()
    for turn in tl.static_range(TURNS):
        at = start + turn * SIDE * HEAD_DIM + lane
        mask = inside & (turn * SIDE < left)
        first = tl.load(at, mask=mask, other=0.0)
        second = tl.load(at + HEAD_DIM // 2, mask=mask, other=0.0)
        heads = heads + ((first, second),)
    return heads


@jit()
def _store_head(start, lane, inside, left, first, second, turn: tl.constexpr, SIDE: tl.constexpr,
                HEAD_DIM: tl.constexpr):
    at = start + turn * SIDE * HEAD_DIM + lane
    mask = inside & (turn * SIDE < left)
    tl.store(at, first, mask=mask)
    tl.store(at + HEAD_DIM // 2, second, mask=mask)


@jit()
def _norm_rotate_store(
    source, target, weight, cos, sin, lane, inside, written, left, eps, SIDE: tl.constexpr, TURNS: tl.constexpr,
    HAS_NORMS: tl.constexpr, HEAD_DIM: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    heads = _loaded_heads(source, lane, inside, left, SIDE, TURNS, HEAD_DIM)
    w1, w2 = None, None
    if HAS_NORMS:
        # A line a head, as what it is multiplied with: other shapes would go through shared memory.
        weight = tl.broadcast_to(weight + lane, inside.shape)
        w1, w2 = tl.load(weight, mask=inside), tl.load(weight + HALF, mask=inside)
    cos1, cos2 = tl.load(cos + lane, mask=inside), tl.load(cos + HALF + lane, mask=inside)
    sin1, sin2 = tl.load(sin + lane, mask=inside), tl.load(sin + HALF + lane, mask=inside)
    for turn in tl.static_range(TURNS):
        first, second = heads[turn]
        first, second = normed_and_rotated(first, second, w1, w2, cos1, cos2, sin1, sin2, eps, HAS_NORMS, HEAD_DIM)
        _store_head(target, lane, written, left, first, second, turn, SIDE, HEAD_DIM)


@jit(varying_ints=("num_tokens",), varying_pointers=("positions", "slot_mapping"))
def _many_tokens_kernel(
    qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, query, eps, num_tokens, qkv_stride,
    cos_stride, sin_stride, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF_PAD: tl.constexpr,
    TOKENS: tl.constexpr, SIDE: tl.constexpr, TURNS: tl.constexpr, HAS_NORMS: tl.constexpr, PDL: tl.constexpr,
):
    """A program has SIDE * TURNS heads of q, k or v of some tokens. Tiles are ``[TOKENS * SIDE, HALF_PAD]``."""
    after_previous_kernel(PDL)
    TILE: tl.constexpr = SIDE * TURNS
    Q_TILES: tl.constexpr = (HEADS + TILE - 1) // TILE
    KV_TILES: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    line = tl.arange(0, TOKENS * SIDE)[:, None]
    lane = tl.arange(0, HALF_PAD)[None, :]
    token = tl.program_id(0).to(tl.int64) * TOKENS + line // SIDE
    there = token < num_tokens
    inside = there & (lane < HEAD_DIM // 2)
    tile = tl.program_id(1)
    row = qkv + token * qkv_stride
    if tile < Q_TILES:
        head = tile * TILE + line % SIDE
        position = tl.load(positions + token, mask=there, other=0)
        _norm_rotate_store(
            row + head * HEAD_DIM, query + (token * HEADS + head) * HEAD_DIM, q_weight, cos + position * cos_stride,
            sin + position * sin_stride, lane, inside, inside, HEADS - head, eps, SIDE, TURNS, HAS_NORMS, HEAD_DIM,
        )
    else:
        head = (tile - Q_TILES) % KV_TILES * TILE + line % SIDE
        left = KV_HEADS - head
        # slot is int64: a cache may hold more than 2**31 elements.
        slot = tl.load(slot_mapping + token, mask=there, other=-1)
        written = inside & (slot >= 0)
        at = (slot * KV_HEADS + head) * HEAD_DIM
        if tile < Q_TILES + KV_TILES:
            position = tl.load(positions + token, mask=there, other=0)
            _norm_rotate_store(
                row + (HEADS + head) * HEAD_DIM, k_cache + at, k_weight, cos + position * cos_stride,
                sin + position * sin_stride, lane, inside, written, left, eps, SIDE, TURNS, HAS_NORMS, HEAD_DIM,
            )
        else:
            heads = _loaded_heads(row + (HEADS + KV_HEADS + head) * HEAD_DIM, lane, inside, left, SIDE, TURNS, HEAD_DIM)
            for turn in tl.static_range(TURNS):
                first, second = heads[turn]
                _store_head(v_cache + at, lane, written, left, first, second, turn, SIDE, HEAD_DIM)


@lru_cache(maxsize=64)
def _tiles_of(num_heads: int, kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Padded half of a head, heads of a tile, tiles of a token."""
    half_pad = next_power_of_2(head_dim // 2)
    tile_heads = min(max(1, _TILE_ELEMENTS // (2 * half_pad)), next_power_of_2(max(num_heads, kv_heads)))
    return half_pad, tile_heads, cdiv(num_heads, tile_heads) + 2 * cdiv(kv_heads, tile_heads)


def qk_norm_rope_store_triton(qkv: torch.Tensor, heads: HeadsToCache) -> torch.Tensor:
    """:func:`qk_norm_rope_store` as one Triton launch. Of few tokens a program has one, and some heads of q, k or v."""
    num_tokens, width = qkv.shape[-2:]
    if num_tokens >= _MANY_TOKENS:
        return qk_norm_rope_store_many(joined(qkv, heads.k_cache.dtype), heads)
    kv_heads, head_dim = heads.k_cache.shape[2:]
    half_pad, tile_heads, tiles = _tiles_of(width // head_dim - 2 * kv_heads, kv_heads, head_dim)
    num_parts = len(qkv) if qkv.dim() == 3 else 0
    return launch_over_heads(
        _few_tokens_kernel, (num_tokens, tiles), qkv, heads, qkv.stride(0) if num_parts else 0, num_warps=4,
        PARTS=num_parts, HALF_PAD=half_pad, TILE_HEADS=tile_heads, **pdl_options(qkv),
    )


def qk_norm_rope_store_many(qkv: torch.Tensor, heads: HeadsToCache) -> torch.Tensor:
    """:func:`qk_norm_rope_store` of many tokens, where what is read and written decides how long it takes; one launch.
    """
    kv_heads, head_dim = heads.k_cache.shape[2:]
    half_pad, tile_heads = next_power_of_2(head_dim // 2), _SIDE * _TURNS
    # One 16-byte load a thread and half: no more heads at a time, or each would have cos and sin once more.
    tokens = max(1, _WARPS * 32 * 16 // qkv.element_size() // (_SIDE * half_pad))
    tiles = cdiv(qkv.shape[1] // head_dim - 2 * kv_heads, tile_heads) + 2 * cdiv(kv_heads, tile_heads)
    return launch_over_heads(
        _many_tokens_kernel, (cdiv(len(qkv), tokens), tiles), qkv, heads, len(qkv), num_warps=_WARPS,
        HALF_PAD=half_pad, TOKENS=tokens, SIDE=_SIDE, TURNS=_TURNS, **pdl_options(qkv),
    )


def launch_over_heads(kernel: Any, grid: tuple[int, int], qkv: torch.Tensor, heads: HeadsToCache, *between: Any,
                      **options: Any) -> torch.Tensor:
    """Launch a kernel that has these arguments first, `between`, then strides; returns the queries that it fills.

    Args:
        options: further constants and launch options, among them those of PDL.
    """
    require_triton()
    q_weight, k_weight, eps, cos, sin, positions, slot_mapping, k_cache, v_cache = heads
    kv_heads, head_dim = k_cache.shape[2:]
    num_heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    query = torch.empty(qkv.shape[-2], num_heads, head_dim, dtype=k_cache.dtype, device=qkv.device)
    if query.numel():
        with on_device_of(qkv):
            kernel[grid](
                qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, query, eps, *between,
                qkv.stride(-2), cos.stride(0), sin.stride(0), HEADS=num_heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim,
                HAS_NORMS=q_weight is not None, enable_fp_fusion=False, **options,
            )
    return query
