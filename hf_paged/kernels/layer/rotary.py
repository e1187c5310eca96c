# mypy: disallow-untyped-defs=False
"""Rotary position embedding of queries and keys in one launch, each operation rounded as torch rounds it."""

from __future__ import annotations

import torch

from hf_paged.kernels._triton import (
    after_previous_kernel,
    jit,
    next_power_of_2,
    on_device_of,
    pdl_options,
    require_triton,
    tl,
)


def rotary(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first R of D values of each head, the first half of them against the second (transformers'
    ``apply_rotary_pos_emb``).

    Args:
        q: ``[B, Hq, T, D]``, the last dim contiguous.
        k: ``[B, Hk, T, D]``, likewise.
        cos, sin: ``[B, T, R]``; all of one dtype.

    Returns:
        q and k, rotated; of each token, heads lie beside one another.
    """
    return (rotary_triton if q.is_cuda else rotary_reference)(q, k, cos, sin)


def rotary_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`rotary` in plain torch."""
    cos, sin, size = cos[:, None], sin[:, None], cos.shape[-1]

    q, k = (torch.cat([rotated(x[..., :size], cos, sin), x[..., size:]], -1) for x in (q, k))
    return q, k


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first half of the last dim against the second, as ``apply_rotary_pos_emb`` does, in plain torch."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@jit()
def _rotate_heads(
    x, out, cos, sin, token, token_stride, head_stride, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, DIM: tl.constexpr,
    ROTARY: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
):
    """All heads of a token."""
    half: tl.constexpr = ROTARY // 2
    dtype: tl.constexpr = out.dtype.element_ty
    head, column = tl.arange(0, HEADS_PAD)[:, None], tl.arange(0, HALF_PAD)[None, :]
    inside, in_half = (head < HEADS) & (column < half), column < half
    of_token = x + token * token_stride + head * head_stride
    made = out + token * (HEADS * DIM) + head * DIM
    first = tl.load(of_token + column, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(of_token + half + column, mask=inside, other=0.0).to(tl.float32)
    at = token * ROTARY + column
    one = first * tl.load(cos + at, mask=in_half, other=0.0).to(tl.float32)
    two = second * tl.load(cos + half + at, mask=in_half, other=0.0).to(tl.float32)
    turned_one = second * tl.load(sin + at, mask=in_half, other=0.0).to(tl.float32)
    turned_two = first * tl.load(sin + half + at, mask=in_half, other=0.0).to(tl.float32)
    one = one.to(dtype).to(tl.float32) - turned_one.to(dtype).to(tl.float32)
    two = two.to(dtype).to(tl.float32) + turned_two.to(dtype).to(tl.float32)
    tl.store(made + column, one.to(dtype), mask=inside)
    tl.store(made + half + column, two.to(dtype), mask=inside)
    if REST_PAD > 0:
        rest = ROTARY + tl.arange(0, REST_PAD)[None, :]
        behind = (head < HEADS) & (rest < DIM)
        tl.store(made + rest, tl.load(of_token + rest, mask=behind, other=0.0), mask=behind)


@jit()
def _rotary_kernel(
    q, k, cos, sin, q_out, k_out, q_token, q_head, k_token, k_head, Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr,
    Q_PAD: tl.constexpr, K_PAD: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, PDL: tl.constexpr,
):
    """A program has the queries or the keys of a token."""
    after_previous_kernel(PDL)
    token = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        _rotate_heads(q, q_out, cos, sin, token, q_token, q_head, Q_HEADS, Q_PAD, DIM, ROTARY, HALF_PAD, REST_PAD)
    else:
        _rotate_heads(k, k_out, cos, sin, token, k_token, k_head, K_HEADS, K_PAD, DIM, ROTARY, HALF_PAD, REST_PAD)


def rotary_triton(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`rotary` as one Triton launch."""
    require_triton()
    (rows, q_heads, tokens, dim), k_heads, rotary = q.shape, k.shape[1], cos.shape[-1]
    made = [torch.empty(rows, tokens, heads, dim, dtype=q.dtype, device=q.device) for heads in (q_heads, k_heads)]
    if rows * tokens:
        # [N, H, D] without a copy of one row of many tokens, or of many rows of one.
        q, k = (x.transpose(1, 2).flatten(0, 1) for x in (q, k))
        with on_device_of(q):
            _rotary_kernel[(rows * tokens, 2)](
                q, k, cos.contiguous(), sin.contiguous(), *made, *_strides(q), *_strides(k), Q_HEADS=q_heads,
                K_HEADS=k_heads, Q_PAD=next_power_of_2(q_heads), K_PAD=next_power_of_2(k_heads), DIM=dim, ROTARY=rotary,
                HALF_PAD=next_power_of_2(rotary // 2), REST_PAD=0 if rotary == dim else next_power_of_2(dim - rotary),
                num_warps=4, enable_fp_fusion=False, **pdl_options(q),
            )
    q_made, k_made = made
    return q_made.transpose(1, 2), k_made.transpose(1, 2)


def _strides(x: torch.Tensor) -> tuple[int, int]:
    """Return the strides of tokens and heads; those of a full tensor where there is one of them."""
    num, heads, dim = x.shape
    return x.stride(0) if num > 1 else heads * dim, x.stride(1) if heads > 1 else dim
