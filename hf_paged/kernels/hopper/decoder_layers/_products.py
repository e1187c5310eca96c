# ruff: noqa
# mypy: ignore-errors
"""Products of weights with rows, on tensor cores, and what comes between them: residual, RMSNorm, silu."""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra import libdevice

from hf_paged.kernels.hopper._gluon import constexpr_function
from hf_paged.kernels.hopper.decoder_layers._shares import LANES, together
from hf_paged.kernels.hopper.decoder_layers._words import places, take_hidden, take_piece, take_row, word


@gluon.jit
def rounded(x):
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def _store_x(memory, piece, values, S: gl.constexpr):
    """What the next product takes: a piece [columns, rows]."""
    LINES: gl.constexpr = S.lines
    ROWS: gl.constexpr = S.rows
    memory.x.index(piece).store(gl.permute(gl.reshape(values.to(gl.bfloat16), [LINES, LANES, ROWS]), [0, 2, 1]))


@gluon.jit
def _parts(totals, FIRST: gl.constexpr, COUNT: gl.constexpr, S: gl.constexpr):
    """The warps' parts of up to four chunks' products, [4, 8, rows * 8], the last chunk again where there are fewer."""
    LINES: gl.constexpr = S.lines
    ROWS: gl.constexpr = S.rows
    parts = ()
    for i in gl.static_range(4):
        total = gl.sum(gl.reshape(totals[FIRST + (i if i < COUNT else COUNT - 1)], [LINES // 8, 8, 16, 8]), 0)
        parts += (gl.max(gl.reshape(total, [8, 16 // ROWS, ROWS, 8]), 1),)  # the rows again and again: all the same
    pairs = gl.join(gl.join(parts[0], parts[2]), gl.join(parts[1], parts[3]))
    return gl.reshape(gl.permute(pairs, [3, 4, 0, 1, 2]), [4, 8, ROWS * 8])


def _x_layout_of(lines: int, rows: int) -> Any:
    """As tensor cores take x on the left, with the rows again and again up to 16: [lines, 16 / rows, rows, 64]."""
    def row(m: int) -> list[int]:
        return [0, m // rows, m % rows, 0]

    registers = [[0, 0, 0, 1], row(8), *([0, 0, 0, k] for k in (8, 16, 32))]
    registers += [[line, 0, 0, 0] for line in (8,) if line < lines]
    lanes = [[0, 0, 0, 2], [0, 0, 0, 4], row(1), row(2), row(4)]
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]], [],
                                      [lines, 16 // rows, rows, 64])


_x_layout = constexpr_function(_x_layout_of)


@gluon.jit
def multiply(words, tag, ring, step, memory, ROWS: gl.constexpr, WIDTH: gl.constexpr, PAIRED: gl.constexpr,
              S: gl.constexpr):
    """Products of a program's rows of a weight with x; paired silu(the first) * the second.

    Tensor cores compute them for sixteen rows, x again and again. A warp has some lines of a chunk; all are added up at
    last.
    """
    STAGES: gl.constexpr = S.stages
    PIECES: gl.constexpr = WIDTH // S.columns
    LINES: gl.constexpr = S.lines
    BATCH: gl.constexpr = S.rows
    OUT: gl.constexpr = ROWS * 128
    TOGETHER: gl.constexpr = together(ROWS, PAIRED)
    CHUNKS: gl.constexpr = 2 * TOGETHER if PAIRED else TOGETHER
    UNORDERED: gl.constexpr = CHUNKS - S.depth if CHUNKS > S.depth else 0
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    again: gl.constexpr = _x_layout(LINES, BATCH)
    layout: gl.constexpr = (gl.BlockedLayout([1, 2, 1], [1, 4, 8], [8, 1, 1], [2, 1, 0]) if BATCH == 1 else
                            gl.BlockedLayout([1, 8, 1], [1, 1, 32], [4, 1, 2], [2, 1, 0]))
    for group in range((ROWS + 7) // 8 // TOGETHER):
        totals = ()
        for i in gl.static_range(CHUNKS):
            totals += (gl.zeros([LINES, 16, 8], gl.float32, product),)
        for piece in gl.static_range(PIECES):
            x = memory.x.index(piece).load(gl.SliceLayout(1, again))[:, None]
            x = gl.convert_layout(gl.reshape(x.broadcast_to([LINES, 16 // BATCH, BATCH, LANES]), [LINES, 16, LANES]),
                                  left)
            # Loop by loop, since a barrier of all warps comes where waiting, loading and giving back meet. Chunks arrive
            # in order, but for the last `depth`.
            for i in gl.static_range(UNORDERED, CHUNKS):
                mbarrier.wait(ring.full.index((step + i) % STAGES), (step + i) // STAGES & 1)
            chunks = ()
            for i in gl.static_range(CHUNKS):
                chunks += (ring.weights.index((step + i) % STAGES).permute([0, 2, 1]).load(right),)
            for i in gl.static_range(CHUNKS):
                mbarrier.arrive(ring.empty.index((step + i) % STAGES), count=1)
            step += CHUNKS
            sums = ()
            for i in gl.static_range(CHUNKS):
                sums += (mma_v2(x, chunks[i], totals[i]),)
            totals = sums
        memory.sums[0].store(_parts(totals, 0, TOGETHER, S))
        if PAIRED:
            memory.sums[1].store(_parts(totals, TOGETHER, TOGETHER, S))
        result = gl.sum(memory.sums[0].load(layout), 1)
        if PAIRED:
            gate, up = rounded(result), rounded(gl.sum(memory.sums[1].load(layout), 1))
            # As torch computes it: libdevice's exp, a sum that is never contracted, and a division rounded once.
            result = rounded(gl.div_rn(gate, libdevice.add_rn(libdevice.exp(-gate), 1.0))) * up
        chunk = gl.arange(0, 4, gl.SliceLayout(1, result.type.layout))
        at = gl.arange(0, BATCH * 8, gl.SliceLayout(0, result.type.layout))[None, :]
        row = gl.minimum((group * TOGETHER + chunk) * 8, ROWS - 8)[:, None] + at % 8
        gl.store(words + gl.program_id(0) * ROWS + row + at // 8 * OUT, word(result, tag),
                 mask=(chunk < TOGETHER)[:, None], eviction_policy="evict_last")
    return step


@gluon.jit
def _leave_normed(hidden, scales, memory, eps, S: gl.constexpr):
    """The RMSNorm of rows in pieces, for the next product."""
    HIDDEN: gl.constexpr = S.hidden
    PIECES: gl.constexpr = HIDDEN // S.columns
    squares = hidden[0] * hidden[0]
    for piece in gl.static_range(1, PIECES):
        squares += hidden[piece] * hidden[piece]
    by = gl.rsqrt(gl.sum(squares, 0) * (1.0 / HIDDEN) + eps)[None, :]
    for piece in gl.static_range(PIECES):
        _store_x(memory, piece, scales[piece].to(gl.float32)[:, None] * rounded(hidden[piece] * by), S)


@gluon.jit
def _vector(pointer, LAYOUT: gl.constexpr, S: gl.constexpr):
    """As many values as a row has, in pieces."""
    COLUMNS: gl.constexpr = S.columns
    PIECES: gl.constexpr = S.hidden // COLUMNS
    column = gl.arange(0, COLUMNS, LAYOUT)
    pieces = ()
    for piece in gl.static_range(PIECES):
        pieces += (gl.load(pointer + piece * COLUMNS + column),)
    return pieces


@gluon.jit
def norm(words, tag, memory, weight, eps, S: gl.constexpr):
    """Add what was made to the residual, and leave its RMSNorm for the next product."""
    PIECES: gl.constexpr = S.hidden // S.columns
    ROWS: gl.constexpr = S.rows
    layout: gl.constexpr = gl.BlockedLayout([4, ROWS], [32, 1], [8, 1], [1, 0])
    scales = _vector(weight, gl.SliceLayout(1, layout), S)  # on its way while what was made is
    made = take_hidden(words, tag, S)
    hidden = ()
    for piece in gl.static_range(PIECES):
        residual = memory.residual.index(piece)
        rounded = (made[piece] + residual.load(layout).to(gl.float32)).to(gl.bfloat16)
        residual.store(rounded)
        hidden += (rounded.to(gl.float32),)
    _leave_normed(hidden, scales, memory, eps, S)


@gluon.jit
def first_norm(rows, memory, weight, eps, S: gl.constexpr):
    """The first layer's, whose residual is the embedding."""
    COLUMNS: gl.constexpr = S.columns
    HIDDEN: gl.constexpr = S.hidden
    PIECES: gl.constexpr = S.hidden // S.columns
    ROWS: gl.constexpr = S.rows
    layout: gl.constexpr = gl.BlockedLayout([4, ROWS], [32, 1], [8, 1], [1, 0])
    column = gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))[:, None]
    at = rows + column + gl.arange(0, ROWS, gl.SliceLayout(0, layout))[None, :] * HIDDEN
    hidden = ()
    for piece in gl.static_range(PIECES):
        embedded = gl.load(at + piece * COLUMNS)
        memory.residual.index(piece).store(embedded)
        hidden += (embedded.to(gl.float32),)
    _leave_normed(hidden, _vector(weight, gl.SliceLayout(1, layout), S), memory, eps, S)


@gluon.jit
def take_x(words, tag, memory, WIDTH: gl.constexpr, S: gl.constexpr):
    """What the next product takes, as it was made."""
    COLUMNS: gl.constexpr = S.columns
    PIECES: gl.constexpr = WIDTH // S.columns
    ROWS: gl.constexpr = S.rows
    if ROWS == 1:
        taken = take_row(words, tag, WIDTH, S)
        for piece in gl.static_range(PIECES):
            _store_x(memory, piece, taken[piece], S)
    else:
        for piece in range(PIECES):
            _store_x(memory, piece, take_piece(places(words, S) + piece * COLUMNS, tag, WIDTH, S), S)
