# ruff: noqa
# mypy: ignore-errors
"""Which part of the work is whose, as kernel code."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from hf_paged.kernels.hopper._gluon import constexpr_function
from hf_paged.kernels.hopper.decoder_layers.shape import LINE, PAGE_POSITIONS, chunks_together

LANES = gl.constexpr(LINE)
PAGE = gl.constexpr(PAGE_POSITIONS)
together = constexpr_function(chunks_together)


@gluon.jit
def row_of(program, S: gl.constexpr):
    """The row whose attention a program computes a part of."""
    KV_HEADS: gl.constexpr = S.kv_heads
    ROWS: gl.constexpr = S.rows
    return program // KV_HEADS % ROWS


@gluon.jit
def split_of(program, S: gl.constexpr):
    """Its part."""
    SHARES: gl.constexpr = S.kv_heads * S.rows
    return program // SHARES


@gluon.jit
def span(length, program, S: gl.constexpr):
    """First position of a program's share of those in the cache, and its end."""
    SPLITS: gl.constexpr = S.splits
    pages = gl.cdiv(length, PAGE)
    each = gl.cdiv(pages, SPLITS) * PAGE
    begin = gl.minimum(split_of(program, S) * each, length)
    return begin, gl.minimum(begin + each, length)
