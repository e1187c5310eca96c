# ruff: noqa
# mypy: ignore-errors
"""Words of a value and a tag, in which programs of one launch hand results to each other through L2.

The tag says in which layer of which launch the value was made. Who reads a word reads until its tag is right.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Weights stream through L2; words that are used in every layer would be gone with them.
_KEEP = "createpolicy.fractional.L2::evict_last.b64 keep, 1.0;"


def _reading(count: int) -> str:
    """PTX: `count` loads of four words each, again until the upper halves of all words are the tag."""
    registers = [f"${i}" for i in range(4 * count)]
    loads = "".join(
        f"ld.relaxed.gpu.global.L2::cache_hint.v4.b32 {{{', '.join(registers[4 * i : 4 * i + 4])}}}, "
        f"[${4 * count + i}], keep;\n"
        for i in range(count)
    )
    checks = "".join(
        f"prmt.b32 t, {registers[2 * i]}, {registers[2 * i + 1]}, 0x7632; xor.b32 t, t, ${5 * count};\n"
        f"or.b32 all, all, t;\n"
        for i in range(2 * count)
    )
    return f"{{ .reg .pred p; .reg .b32 t, all; .reg .b64 keep;\n{_KEEP}\nagain:\nmov.b32 all, 0;\n{loads}{checks}" \
           "setp.ne.b32 p, all, 0;\n@p bra again;\n}"


def _operands(count: int) -> str:
    return ",".join(["=&r"] * (4 * count) + ["l"] * count + ["r"])


_READ_1, _READ_2, _READ_3, _READ_4 = (gl.constexpr(_reading(count)) for count in range(1, 5))
_OF_1, _OF_2, _OF_3, _OF_4 = (gl.constexpr(_operands(count)) for count in range(1, 5))
READ_PARTS = gl.constexpr(
    "{ .reg .pred p; .reg .b32 v, w, all; .reg .b64 a, b, c, d, keep; " + _KEEP + """
again:
ld.relaxed.gpu.global.L2::cache_hint.v2.b64 {a, b}, [$4], keep;
ld.relaxed.gpu.global.L2::cache_hint.v2.b64 {c, d}, [$5], keep;
mov.b64 {$0, v}, a; xor.b32 all, v, $6;
mov.b64 {$1, w}, b; xor.b32 w, w, $6; or.b32 all, all, w;
mov.b64 {$2, v}, c; xor.b32 v, v, $6; or.b32 all, all, v;
mov.b64 {$3, w}, d; xor.b32 w, w, $6; or.b32 all, all, w;
setp.ne.b32 p, all, 0;
@p bra again;
}"""
)


@gluon.jit
def as_float(word):
    """The bf16 in a word's lower half."""
    return (word << 16).to(gl.float32, bitcast=True)


@gluon.jit
def take(pointer, step, tag, COUNT: gl.constexpr):
    """Four words from each pointer on, and so often `step` words further, once all of them are there."""
    at = pointer.to(gl.int64)
    far = step * 4
    gl.static_assert(COUNT >= 1 and COUNT <= 4)
    if COUNT == 1:
        return gl.inline_asm_elementwise(_READ_1, _OF_1, [at, tag], dtype=(gl.int32,) * 4, is_pure=False, pack=1)
    elif COUNT == 2:
        return gl.inline_asm_elementwise(_READ_2, _OF_2, [at, at + far, tag], dtype=(gl.int32,) * 8, is_pure=False,
                                         pack=1)
    elif COUNT == 3:
        return gl.inline_asm_elementwise(_READ_3, _OF_3, [at, at + far, at + 2 * far, tag], dtype=(gl.int32,) * 12,
                                         is_pure=False, pack=1)
    else:
        return gl.inline_asm_elementwise(_READ_4, _OF_4, [at, at + far, at + 2 * far, at + 3 * far, tag],
                                         dtype=(gl.int32,) * 16, is_pure=False, pack=1)


@gluon.jit
def _take_some(at, far, tag, COUNT: gl.constexpr, S: gl.constexpr):
    """As many values as a chunk has columns from each of some places, `far` words from one another: each fp32."""
    COLUMNS: gl.constexpr = S.columns
    vector: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
    taken = take(at, far, tag, COUNT)
    pieces = ()
    for i in gl.static_range(COUNT):
        evens = gl.join(as_float(taken[4 * i]), as_float(taken[4 * i + 2]))
        odds = gl.join(as_float(taken[4 * i + 1]), as_float(taken[4 * i + 3]))
        pieces += (gl.convert_layout(gl.reshape(gl.join(evens, odds), [COLUMNS]), vector),)
    return pieces


@gluon.jit
def _beside(rows, S: gl.constexpr):
    """Rows' values [columns] as [columns, rows]."""
    COLUMNS: gl.constexpr = S.columns
    ROWS: gl.constexpr = S.rows
    layout: gl.constexpr = gl.BlockedLayout([4, ROWS], [32, 1], [8, 1], [1, 0])
    gl.static_assert(ROWS == 1 or ROWS == 2 or ROWS == 4 or ROWS == 8)
    if ROWS == 1:
        joined = gl.convert_layout(rows[0], gl.SliceLayout(1, layout))[:, None]
    elif ROWS == 2:
        joined = gl.join(rows[0], rows[1])
    elif ROWS == 4:
        joined = gl.join(gl.join(rows[0], rows[2]), gl.join(rows[1], rows[3]))
    else:
        joined = gl.join(gl.join(gl.join(rows[0], rows[4]), gl.join(rows[2], rows[6])),
                         gl.join(gl.join(rows[1], rows[5]), gl.join(rows[3], rows[7])))
    return gl.convert_layout(gl.reshape(joined, [COLUMNS, ROWS]), layout)


@gluon.jit
def places(words, S: gl.constexpr):
    """Where a thread's four words of a piece are."""
    COLUMNS: gl.constexpr = S.columns
    return words + gl.arange(0, COLUMNS // 4, gl.BlockedLayout([1], [32], [8], [0])) * 4


@gluon.jit
def take_row(words, tag, WIDTH: gl.constexpr, S: gl.constexpr):
    """One row of this width in pieces of as many columns as a chunk has, each [columns, 1] fp32."""
    COLUMNS: gl.constexpr = S.columns
    COUNT: gl.constexpr = WIDTH // S.columns
    REST: gl.constexpr = COUNT % 4
    at = places(words, S)
    taken = ()
    for group in gl.static_range(COUNT // 4):
        taken += _take_some(at + group * (4 * COLUMNS), COLUMNS, tag, 4, S)
    if REST > 0:
        taken += _take_some(at + (COUNT - REST) * COLUMNS, COLUMNS, tag, REST, S)
    pieces = ()
    for piece in gl.static_range(COUNT):
        pieces += (_beside((taken[piece],), S),)
    return pieces


@gluon.jit
def take_hidden(words, tag, S: gl.constexpr):
    """Rows of a hidden state in pieces [columns, rows] fp32."""
    COLUMNS: gl.constexpr = S.columns
    HIDDEN: gl.constexpr = S.hidden
    ROWS: gl.constexpr = S.rows
    if ROWS == 1:
        pieces = take_row(words, tag, HIDDEN, S)
    else:
        pieces = ()
        for piece in gl.static_range(HIDDEN // COLUMNS):
            pieces += (take_piece(places(words, S) + piece * COLUMNS, tag, HIDDEN, S),)
    return pieces


@gluon.jit
def take_piece(at, tag, WIDTH: gl.constexpr, S: gl.constexpr):
    """The same columns of several rows."""
    ROWS: gl.constexpr = S.rows
    SOME: gl.constexpr = 4 if ROWS > 4 else ROWS
    rows = ()
    for group in gl.static_range(ROWS // SOME):
        rows += _take_some(at + group * (SOME * WIDTH), WIDTH, tag, SOME, S)
    return _beside(rows, S)


@gluon.jit
def word(value, tag):
    """A value as a word of bf16 and tag."""
    bits = value.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (tag << 16)


@gluon.jit
def wide_word(value, tag):
    """An fp32 value as a word of 64 bits with a tag."""
    bits = value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    return bits | (tag.to(gl.int64) << 32)
