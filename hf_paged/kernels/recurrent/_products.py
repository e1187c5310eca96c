# mypy: disallow-untyped-defs=False
"""Products of matrices in kernels of packed prompts, with sums in float32.

Inputs have few bits, and their products are exact. What is float32 beside inputs in bfloat16 is cut into two bfloat16,
which have 16 bits together: an error of 4e-6 in states, where outputs rounded to bfloat16 have one of 2e-3.
"""

from __future__ import annotations

from hf_paged.kernels._triton import jit, tl


@jit()
def dot(a, b, INTERPRETED: tl.constexpr):
    """The product of matrices; but for float32, products of two elements are exact."""
    if INTERPRETED or a.dtype == tl.float32 or b.dtype == tl.float32:  # the interpreter takes bfloat16 for integers
        made = tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")
    else:
        made = tl.dot(a, b)
    return made


@jit()
def cut(x):
    """The two bfloat16 whose sum is nearest to float32 values."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@jit()
def dot_wide(a, b, INTERPRETED: tl.constexpr):
    """The product of a matrix in the inputs' dtype and one in float32."""
    if a.dtype == tl.bfloat16:
        high, low = cut(b)
        made = dot(a, high, INTERPRETED) + dot(a, low, INTERPRETED)
    else:
        made = dot(a, b, INTERPRETED)
    return made


@jit()
def dot_both_wide(a, b, CUTS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The product of matrices in float32."""
    if CUTS:
        high, low = cut(a)
        made = dot_wide(high, b, INTERPRETED) + dot(low, b.to(tl.bfloat16), INTERPRETED)
    else:
        made = dot(a, b, INTERPRETED)
    return made
