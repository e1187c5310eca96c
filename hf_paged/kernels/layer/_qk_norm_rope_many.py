# mypy: disallow-untyped-defs=False, disable-error-code="assignment"
"""`qk_norm_rope_store` of many tokens, where what has to be read and written decides how long it takes."""

from __future__ import annotations

import torch

from hf_paged.kernels._triton import after_previous_kernel, cdiv, jit, next_power_of_2, on_device_of, pdl_options, tl
from hf_paged.kernels.layer._qk_norm_rope_tile import normed_and_rotated
from hf_paged.kernels.layer.heads_to_cache import HeadsToCache

# Heads of a token that a program takes side by side, how often it does so, and its warps.
_SIDE, _TURNS, _WARPS = 4, 4, 4


@jit()
def _loaded_heads(start, lane, inside, left, SIDE: tl.constexpr, TURNS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Halves of every SIDE-th head from `start` on, of which there are `left`: all are asked for before one is used."""
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
    source,
    target,
    weight,
    cos,
    sin,
    lane,
    inside,
    written,
    left,
    eps,
    SIDE: tl.constexpr,
    TURNS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
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
    num_tokens,
    qkv_stride,
    cos_stride,
    sin_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    SIDE: tl.constexpr,
    TURNS: tl.constexpr,
    HAS_NORMS: tl.constexpr,
    PDL: tl.constexpr,
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


def qk_norm_rope_store_many(qkv: torch.Tensor, heads: HeadsToCache) -> torch.Tensor:
    """The operation of :mod:`~hf_paged.kernels.layer.qk_norm_rope_store` as one Triton launch for one token or more."""
    q_weight, k_weight, eps, cos, sin, positions, slot_mapping, k_cache, v_cache = heads
    kv_heads, head_dim = k_cache.shape[2:]
    num_tokens, num_heads = len(qkv), qkv.shape[1] // head_dim - 2 * kv_heads
    query = torch.empty(num_tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    half_pad = next_power_of_2(head_dim // 2)
    # One 16-byte load a thread and half: no more heads at a time, or each would have cos and sin once more.
    tokens = max(1, _WARPS * 32 * 16 // qkv.element_size() // (_SIDE * half_pad))
    tile_heads = _SIDE * _TURNS
    tiles = cdiv(num_heads, tile_heads) + 2 * cdiv(kv_heads, tile_heads)
    with on_device_of(qkv):
        _many_tokens_kernel[(cdiv(num_tokens, tokens), tiles)](
            qkv, q_weight, k_weight, cos, sin, positions, slot_mapping, k_cache, v_cache, query, eps,
            num_tokens,
            qkv.stride(0),
            cos.stride(0),
            sin.stride(0),
            HEADS=num_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HALF_PAD=half_pad,
            TOKENS=tokens,
            SIDE=_SIDE,
            TURNS=_TURNS,
            HAS_NORMS=q_weight is not None,
            num_warps=_WARPS,
            enable_fp_fusion=False,
            **pdl_options(qkv),
        )
    return query
