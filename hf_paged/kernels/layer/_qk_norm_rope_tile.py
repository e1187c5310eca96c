# mypy: disallow-untyped-defs=False
"""Heads' norm and RoPE inside of a kernel, rounded where transformers' modules round."""

from __future__ import annotations

from hf_paged.kernels._triton import jit, tl


@jit()
def halves(row, lane, live, HALF: tl.constexpr):
    """A row of HEAD_DIM values as two of ``[1, HALF padded]``."""
    first = tl.load(row + lane, mask=live, other=0.0)
    second = tl.load(row + HALF + lane, mask=live, other=0.0)
    return first[None, :], second[None, :]


@jit()
def normed_and_rotated(
    first, second, w1, w2, cos1, cos2, sin1, sin2, eps, HAS_NORMS: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """The two halves of some heads, ``[heads, HEAD_DIM / 2 padded]``; the others are halves for one of them or each.

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
