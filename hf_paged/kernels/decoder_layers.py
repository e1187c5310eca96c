# ruff: noqa
# mypy: ignore-errors
"""All layers of a decoder for one row in one launch on Hopper, in Gluon: programs that stay and hand each other values.

What bounds a step of one row launch by launch is that each kernel loads, waits, computes and ends, one after the other.
Here one warp of each program streams the program's share of all weights, and of keys and values, through shared memory
(TMA), however far its other warps are. These compute a layer in six stages. A value passes from one stage to the next
by way of L2 as a word with a tag that says in which layer of which launch it was made; who reads it reads until the tag
is right, so that no stage waits for more than it needs. The idea of one launch for a whole forward pass is Spector et
al.'s (2025, "Look Ma, No Bubbles").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import libdevice

from hf_paged.kernels._triton import on_device_of, triton
from hf_paged.kernels.attention._tile import LOG2_E
from hf_paged.kernels.compiling import noted

# Names that differ between versions of Triton.
_load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

PROGRAMS = 128  # of which a multiprocessor each
HEAD_DIM = 128
_LANES = gl.constexpr(64)  # of a line of shared memory, the widest that TMA swizzles: 128 bytes
_PAGE = gl.constexpr(16)  # positions that one TMA copy brings
_OUTSIDE = gl.constexpr(-(2**20))  # a slot outside of all memory, of which TMA makes zeros
_LOWEST = gl.constexpr(-3.0e38)  # finite: -inf would compute -inf - -inf
MOST = 2**31 - 1  # lines from the first: a descriptor then says nothing of what lies where


class LayerFields(NamedTuple):
    """Columns of the table of layers, int64: places in lines or slots from the descriptors' beginnings, or addresses."""

    qkv: int  # line
    o: int
    gate_up: int
    down: int
    keys: int  # slot
    values: int
    input_norm: int  # address
    post_norm: int
    q_norm: int
    k_norm: int
    k_cache: int
    v_cache: int


def _together_of(rows: int, paired: bool) -> int:
    """Chunks of eight rows whose products are taken side by side."""
    chunks = -(-rows // 8)
    return max(n for n in range(1, 4 if paired else 5) if chunks % n == 0)


_together = gl.constexpr_function(_together_of) if hasattr(gl, "constexpr_function") else triton.constexpr_function(_together_of)


@dataclass(frozen=True)
class LayersShape:
    """What the kernel is compiled for."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    layers: int
    block_size: int
    columns: int  # of a chunk, which has eight rows of a weight
    stages: int  # chunks in shared memory
    depth: int  # chunks that are on their way at the same time
    has_head_norms: bool

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def splits(self) -> int:
        """Programs that share a KV head's positions."""
        return PROGRAMS // self.kv_heads

    @property
    def lines(self) -> int:
        """Of a chunk's row."""
        return self.columns // _LANES.value

    @property
    def positions(self) -> int:
        """Of a chunk of keys or values."""
        return self.columns * 8 // HEAD_DIM

    @property
    def qkv(self) -> int:
        return (self.heads + 2 * self.kv_heads) * HEAD_DIM

    @property
    def mixed(self) -> int:
        return self.heads * HEAD_DIM

    @property
    def widest(self) -> int:
        return max(self.hidden, self.mixed, self.inner)



class _Ring(NamedTuple):
    """Chunks in shared memory, in several views, and their barriers."""

    weights: Any  # [stages, lines, 8, 64]
    pages: Any  # [stages * 2 * positions / 16, 16, 1, 64]
    halves: Any  # of keys or values, [stages * 2, positions, 64]
    full: Any
    empty: Any


class _Words(NamedTuple):
    """Where stages leave their results for the next, int32 words of 16 bits and a tag (parts: int64 with 32 bits)."""

    qkv: Any
    parts: Any  # [heads, splits, 128]
    sums: Any  # [heads, splits, 2]: maximum and sum of the weights
    mixed: Any
    o: Any
    inner: Any
    down: Any


class _Memory(NamedTuple):
    """Of a program, in shared memory."""

    x: Any  # [pieces, lines, 64] bf16: what the next product takes
    residual: Any  # [pieces, columns] bf16
    heads: Any  # [2, 16, 64] bf16: halves of the group's query heads, then of the new key and value
    rows: Any  # [2, 8, 64] fp32: the same
    new: Any  # the same as [16, 64]
    sums: tuple[Any, Any]  # [4, 8, 8] fp32, warps' parts of products; of a pair's second half


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
_READ_PARTS = gl.constexpr(
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
def _float(word):
    """The bf16 in a word's lower half."""
    return (word << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _take(pointer, step, tag, COUNT: gl.constexpr):
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
def _take_some(at, tag, COUNT: gl.constexpr, S: gl.constexpr):
    COLUMNS: gl.constexpr = S.columns
    vector: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
    taken = _take(at, COLUMNS, tag, COUNT)
    pieces = ()
    for i in gl.static_range(COUNT):
        evens = gl.join(_float(taken[4 * i]), _float(taken[4 * i + 2]))
        odds = gl.join(_float(taken[4 * i + 1]), _float(taken[4 * i + 3]))
        pieces += (gl.convert_layout(gl.reshape(gl.join(evens, odds), [COLUMNS]), vector),)
    return pieces


@gluon.jit
def _take_pieces(words, tag, COUNT: gl.constexpr, S: gl.constexpr):
    """Pieces of as many values as a chunk has columns, each [columns] fp32."""
    COLUMNS: gl.constexpr = S.columns
    REST: gl.constexpr = COUNT % 4
    at = words + gl.arange(0, COLUMNS // 4, gl.BlockedLayout([1], [32], [8], [0])) * 4
    pieces = ()
    for group in gl.static_range(COUNT // 4):
        pieces += _take_some(at + group * (4 * COLUMNS), tag, 4, S)
    if REST > 0:
        pieces += _take_some(at + (COUNT - REST) * COLUMNS, tag, REST, S)
    return pieces


@gluon.jit
def _word(value, tag):
    """A value as a word of bf16 and tag."""
    bits = value.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | (tag << 16)


@gluon.jit
def _part(value, tag):
    """An fp32 value as a word of 64 bits with a tag."""
    bits = value.to(gl.int32, bitcast=True).to(gl.int64) & 0xFFFFFFFF
    return bits | (tag.to(gl.int64) << 32)


@gluon.jit
def _pointer(address):
    return address.to(gl.pointer_type(gl.bfloat16))


# What the loading warp does.


@gluon.jit
def _room(ring, step, S: gl.constexpr):
    """Wait until a chunk may be loaded to its stage, and until no more than a few are on their way.

    More would fill the queues of L2, in which what programs hand each other would wait behind them.
    """
    STAGES: gl.constexpr = S.stages
    DEPTH: gl.constexpr = S.depth
    if step >= DEPTH:
        before = step - DEPTH
        mbarrier.wait(ring.full.index(before % STAGES), before // STAGES & 1)
    stage = step % STAGES
    mbarrier.wait(ring.empty.index(stage), (step // STAGES & 1) ^ 1)
    return stage


@gluon.jit
def _load_rows(weight, ring, step, base, first_row, ROWS: gl.constexpr, WIDTH: gl.constexpr, PAIRED: gl.constexpr,
               S: gl.constexpr):
    """A program's rows of a weight, chunk by chunk, as `_multiply` wants them; paired with rows half a weight on."""
    COLUMNS: gl.constexpr = S.columns
    LINES: gl.constexpr = S.lines
    BYTES: gl.constexpr = S.columns * 16
    TOGETHER: gl.constexpr = _together(ROWS, PAIRED)
    HALVES: gl.constexpr = 2 if PAIRED else 1
    ROW_LINES: gl.constexpr = WIDTH // 64
    first_line = base.to(gl.int32) + first_row * ROW_LINES
    for group in range((ROWS + 7) // 8 // TOGETHER):
        for piece in range(WIDTH // COLUMNS):
            for half in gl.static_range(HALVES):
                for i in gl.static_range(TOGETHER):
                    row = gl.minimum((group * TOGETHER + i) * 8, ROWS - 8)
                    line = first_line + half * (S.inner * ROW_LINES) + row * ROW_LINES + piece * LINES
                    stage = _room(ring, step, S)
                    full = ring.full.index(stage)
                    mbarrier.expect(full, BYTES)
                    _load_box(weight, [line, 0, 0], full, ring.weights.index(stage))
                    step += 1
    return step


@gluon.jit
def _prefetch(address, program, BYTES: gl.constexpr):
    """Into L2: a program's 128 bytes of a vector."""
    if program * 128 < BYTES:
        gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address + program * 128],
                                  dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _load_positions(cache, ring, step, base, table_row, begin, end, kv_head, S: gl.constexpr):
    """A chunk of keys or values, page by page, as two halves of their lanes."""
    PAGES: gl.constexpr = S.positions // _PAGE
    BYTES: gl.constexpr = S.columns * 16
    BLOCK_SIZE: gl.constexpr = S.block_size
    stage = _room(ring, step, S)
    full = ring.full.index(stage)
    mbarrier.expect(full, BYTES)
    for page in gl.static_range(PAGES):
        position = begin + page * _PAGE
        block = gl.load(table_row + position // BLOCK_SIZE, mask=position < end, other=0)
        slot = gl.where(position < end, base.to(gl.int32) + block * BLOCK_SIZE + position % BLOCK_SIZE, _OUTSIDE)
        for half in gl.static_range(2):
            part = ring.pages.index(stage * (2 * PAGES) + half * PAGES + page)
            _load_box(cache, [slot, kv_head, half * _LANES], full, part)


@gluon.jit
def _load(by_hidden, by_mixed, by_inner, cache, table, table_row, length, ring, FIELDS: gl.constexpr, S: gl.constexpr):
    """One warp: all that a program reads but once, in the order in which it is used."""
    program = gl.program_id(0)
    QKV_ROWS: gl.constexpr = S.qkv // 128
    HIDDEN_ROWS: gl.constexpr = S.hidden // 128
    INNER_ROWS: gl.constexpr = S.inner // 128
    LAYERS: gl.constexpr = S.layers
    POSITIONS: gl.constexpr = S.positions
    KV_HEADS: gl.constexpr = S.kv_heads
    NORM: gl.constexpr = 2 * S.hidden
    begin, end = _span(length, program, S)
    kv_head = program % KV_HEADS
    step = 0
    for layer in range(LAYERS):
        fields = table + layer * FIELDS
        _prefetch(gl.load(fields + 6), program, NORM)
        _prefetch(gl.load(fields + 7), program, NORM)
        if S.has_head_norms:
            _prefetch(gl.load(fields + 8), program, 256)
            _prefetch(gl.load(fields + 9), program, 256)
        step = _load_rows(by_hidden, ring, step, gl.load(fields), program * QKV_ROWS, QKV_ROWS, S.hidden, False, S)
        keys = gl.load(fields + 4)
        values = gl.load(fields + 5)
        for at in range(begin, end, POSITIONS):
            _load_positions(cache, ring, step, keys, table_row, at, end, kv_head, S)
            _load_positions(cache, ring, step + 1, values, table_row, at, end, kv_head, S)
            step += 2
        o, gate_up, down = gl.load(fields + 1), gl.load(fields + 2), gl.load(fields + 3)
        step = _load_rows(by_mixed, ring, step, o, program * HIDDEN_ROWS, HIDDEN_ROWS, S.mixed, False, S)
        step = _load_rows(by_hidden, ring, step, gate_up, program * INNER_ROWS, INNER_ROWS, S.hidden, True, S)
        step = _load_rows(by_inner, ring, step, down, program * HIDDEN_ROWS, HIDDEN_ROWS, S.inner, False, S)


@gluon.jit
def _span(length, program, S: gl.constexpr):
    """First position of a program's share of those in the cache, and its end."""
    SPLITS: gl.constexpr = S.splits
    KV_HEADS: gl.constexpr = S.kv_heads
    split = program // KV_HEADS
    pages = gl.cdiv(length, _PAGE)
    each = gl.cdiv(pages, SPLITS) * _PAGE
    begin = gl.minimum(split * each, length)
    return begin, gl.minimum(begin + each, length)


# What the computing warps do.


@gluon.jit
def _parts(totals, FIRST: gl.constexpr, COUNT: gl.constexpr, LINES: gl.constexpr):
    """The warps' parts of up to four chunks' products, [4, 8, 8], the last chunk again where there are fewer."""
    parts = ()
    for i in gl.static_range(4):
        total = totals[FIRST + (i if i < COUNT else COUNT - 1)]
        parts += (gl.max(gl.sum(gl.reshape(total, [LINES // 8, 8, 16, 8]), 0), 1),)  # all sixteen are the same
    pairs = gl.join(gl.join(parts[0], parts[2]), gl.join(parts[1], parts[3]))
    return gl.reshape(gl.permute(pairs, [2, 3, 0, 1]), [4, 8, 8])


@gluon.jit
def _multiply(words, tag, ring, step, memory, ROWS: gl.constexpr, WIDTH: gl.constexpr, PAIRED: gl.constexpr,
              S: gl.constexpr):
    """Products of a program's rows of a weight with x; paired silu(the first) * the second.

    Tensor cores compute them for sixteen times the same x. A warp has some lines of a chunk; all are added up at last.
    """
    STAGES: gl.constexpr = S.stages
    PIECES: gl.constexpr = WIDTH // S.columns
    LINES: gl.constexpr = S.lines
    TOGETHER: gl.constexpr = _together(ROWS, PAIRED)
    CHUNKS: gl.constexpr = 2 * TOGETHER if PAIRED else TOGETHER
    UNORDERED: gl.constexpr = CHUNKS - S.depth if CHUNKS > S.depth else 0
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    layout: gl.constexpr = gl.BlockedLayout([1, 2, 1], [1, 4, 8], [8, 1, 1], [2, 1, 0])
    for group in range((ROWS + 7) // 8 // TOGETHER):
        totals = ()
        for i in gl.static_range(CHUNKS):
            totals += (gl.zeros([LINES, 16, 8], gl.float32, product),)
        for piece in gl.static_range(PIECES):
            x = memory.x.index(piece).load(gl.SliceLayout(1, left))[:, None, :].broadcast_to([LINES, 16, _LANES])
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
        memory.sums[0].store(_parts(totals, 0, TOGETHER, LINES))
        if PAIRED:
            memory.sums[1].store(_parts(totals, TOGETHER, TOGETHER, LINES))
        result = gl.sum(memory.sums[0].load(layout), 1)
        if PAIRED:
            gate, up = _rounded(result), _rounded(gl.sum(memory.sums[1].load(layout), 1))
            # As torch computes it: libdevice's exp, a sum that is never contracted, and a division rounded once.
            result = _rounded(gl.div_rn(gate, libdevice.add_rn(libdevice.exp(-gate), 1.0))) * up
        chunk = gl.arange(0, 4, gl.SliceLayout(1, result.type.layout))
        row = gl.minimum((group * TOGETHER + chunk) * 8, ROWS - 8)[:, None]
        row += gl.arange(0, 8, gl.SliceLayout(0, result.type.layout))[None, :]
        gl.store(words + gl.program_id(0) * ROWS + row, _word(result, tag), mask=(chunk < TOGETHER)[:, None],
                 eviction_policy="evict_last")
    return step


@gluon.jit
def _leave_normed(hidden, scales, memory, eps, S: gl.constexpr):
    """The RMSNorm of a row in pieces, for the next product."""
    COLUMNS: gl.constexpr = S.columns
    HIDDEN: gl.constexpr = S.hidden
    PIECES: gl.constexpr = HIDDEN // COLUMNS
    LINES: gl.constexpr = S.lines
    squares = hidden[0] * hidden[0]
    for piece in gl.static_range(1, PIECES):
        squares += hidden[piece] * hidden[piece]
    by = gl.rsqrt(gl.sum(squares, 0) * (1.0 / HIDDEN) + eps)
    for piece in gl.static_range(PIECES):
        normed = (scales[piece].to(gl.float32) * _rounded(hidden[piece] * by)).to(gl.bfloat16)
        memory.x.index(piece).store(gl.reshape(normed, [LINES, _LANES]))


@gluon.jit
def _vector(pointer, S: gl.constexpr):
    """As many values as a row has, in pieces."""
    COLUMNS: gl.constexpr = S.columns
    PIECES: gl.constexpr = S.hidden // COLUMNS
    lane = gl.arange(0, COLUMNS, gl.BlockedLayout([4], [32], [8], [0]))
    pieces = ()
    for piece in gl.static_range(PIECES):
        pieces += (gl.load(pointer + piece * COLUMNS + lane),)
    return pieces


@gluon.jit
def _norm(words, tag, memory, weight, eps, S: gl.constexpr):
    """Add what was made to the residual, and leave its RMSNorm for the next product."""
    PIECES: gl.constexpr = S.hidden // S.columns
    scales = _vector(weight, S)  # on its way while what was made is
    made = _take_pieces(words, tag, PIECES, S)
    hidden = ()
    for piece in gl.static_range(PIECES):
        residual = memory.residual.index(piece)
        rounded = (made[piece] + residual.load(made[piece].type.layout).to(gl.float32)).to(gl.bfloat16)
        residual.store(rounded)
        hidden += (rounded.to(gl.float32),)
    _leave_normed(hidden, scales, memory, eps, S)


@gluon.jit
def _first_norm(row, memory, weight, eps, S: gl.constexpr):
    """The first layer's, whose residual is the embedding."""
    PIECES: gl.constexpr = S.hidden // S.columns
    embedded = _vector(row, S)
    hidden = ()
    for piece in gl.static_range(PIECES):
        memory.residual.index(piece).store(embedded[piece])
        hidden += (embedded[piece].to(gl.float32),)
    _leave_normed(hidden, _vector(weight, S), memory, eps, S)


@gluon.jit
def _take_x(words, tag, memory, WIDTH: gl.constexpr, S: gl.constexpr):
    """What the next product takes, as it was made."""
    LINES: gl.constexpr = S.lines
    PIECES: gl.constexpr = WIDTH // S.columns
    taken = _take_pieces(words, tag, PIECES, S)
    for piece in gl.static_range(PIECES):
        memory.x.index(piece).store(gl.reshape(taken[piece].to(gl.bfloat16), [LINES, _LANES]))


@gluon.jit
def _rounded(x):
    return x.to(gl.bfloat16).to(gl.float32)


@gluon.jit
def _row_of_four(a, b, c, d):
    """Words [8, 16] that alternate, as fp32 [8, 64]."""
    return gl.reshape(gl.join(gl.join(_float(a), _float(c)), gl.join(_float(b), _float(d))), [8, 64])


@gluon.jit
def _rope(cos, sin):
    """Halves of the row of a position, cosines, then sines."""
    lane = gl.arange(0, 64, gl.SliceLayout(0, gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])))
    return (gl.load(cos + lane).to(gl.float32)[None, :], gl.load(cos + 64 + lane).to(gl.float32)[None, :],
            gl.load(sin + lane).to(gl.float32)[None, :], gl.load(sin + 64 + lane).to(gl.float32)[None, :])


@gluon.jit
def _take_heads(words, tag, memory, rope, q_norm, k_norm, k_new, v_new, stores, eps, S: gl.constexpr):
    """A group's query heads, and for the last split the new key and value: normed, rotated, left in shared memory.

    A warp has a head. The last split also writes the new key and value to the cache.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    unit: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0])
    GROUP: gl.constexpr = S.group
    HEADS: gl.constexpr = S.heads
    KV_HEADS: gl.constexpr = S.kv_heads
    SPLITS: gl.constexpr = S.splits
    program = gl.program_id(0)
    kv_head = program % KV_HEADS
    is_last = program // KV_HEADS == SPLITS - 1
    warp = gl.arange(0, 8, gl.SliceLayout(1, unit))
    # Heads that nobody needs are the group's first again.
    head = gl.where(warp < GROUP, kv_head * GROUP + warp, kv_head * GROUP)
    head = gl.where(is_last & (warp == GROUP), HEADS + kv_head, head)
    head = gl.where(is_last & (warp == GROUP + 1), HEADS + KV_HEADS + kv_head, head)
    at = head[:, None] * 128 + gl.arange(0, 16, gl.SliceLayout(0, unit))[None, :] * 4
    lane = gl.arange(0, 64, gl.SliceLayout(0, layout))
    row = gl.arange(0, 8, gl.SliceLayout(1, layout))[:, None]
    if S.has_head_norms:
        w1 = gl.where(row < GROUP, gl.load(q_norm + lane)[None, :], gl.load(k_norm + lane)[None, :]).to(gl.float32)
        w2 = gl.where(row < GROUP, gl.load(q_norm + 64 + lane)[None, :],
                      gl.load(k_norm + 64 + lane)[None, :]).to(gl.float32)
    taken = _take(words + at, 64, tag, 2)
    x1 = gl.convert_layout(_row_of_four(taken[0], taken[1], taken[2], taken[3]), layout)
    x2 = gl.convert_layout(_row_of_four(taken[4], taken[5], taken[6], taken[7]), layout)
    r1, r2 = x1, x2
    if S.has_head_norms:
        scale = gl.rsqrt(gl.sum(x1 * x1 + x2 * x2, 1) * (1.0 / 128) + eps)[:, None]
        r1 = _rounded(w1 * _rounded(x1 * scale))
        r2 = _rounded(w2 * _rounded(x2 * scale))
    cos1, cos2, sin1, sin2 = rope
    y1 = _rounded(_rounded(r1 * cos1) - _rounded(r2 * sin1))
    y2 = _rounded(_rounded(r2 * cos2) + _rounded(r1 * sin2))
    y1 = gl.where(row == GROUP + 1, x1, y1)
    y2 = gl.where(row == GROUP + 1, x2, y2)
    memory.rows.index(0).store(y1)
    memory.rows.index(1).store(y2)
    memory.heads.index(0).slice(0, 8).store(y1.to(gl.bfloat16))
    memory.heads.index(1).slice(0, 8).store(y2.to(gl.bfloat16))
    if stores & is_last:
        lanes = lane[None, :] + row * 0
        gl.store(k_new + lanes, y1.to(gl.bfloat16), mask=row == GROUP)
        gl.store(k_new + 64 + lanes, y2.to(gl.bfloat16), mask=row == GROUP)
        gl.store(v_new + lanes, y1.to(gl.bfloat16), mask=row == GROUP + 1)
        gl.store(v_new + 64 + lanes, y2.to(gl.bfloat16), mask=row == GROUP + 1)


@gluon.jit
def _attend(ring, step, length, words, memory, scale_log2, tag, S: gl.constexpr):
    """A program's positions for all query heads of its KV head, as rows of one tile."""
    GROUP: gl.constexpr = S.group
    STAGES: gl.constexpr = S.stages
    KV_HEADS: gl.constexpr = S.kv_heads
    SPLITS: gl.constexpr = S.splits
    POSITIONS: gl.constexpr = S.positions
    product: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 8], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 2)
    by_row: gl.constexpr = gl.SliceLayout(1, product)
    program = gl.program_id(0)
    kv_head = program % KV_HEADS
    split = program // KV_HEADS
    begin, end = _span(length, program, S)
    q1 = memory.heads.index(0).load(left)
    q2 = memory.heads.index(1).load(left)
    acc1 = gl.zeros([16, _LANES], gl.float32, product)
    acc2 = gl.zeros([16, _LANES], gl.float32, product)
    top = gl.full([16], _LOWEST, gl.float32, by_row)
    total = gl.zeros([16], gl.float32, by_row)
    place = gl.arange(0, POSITIONS, gl.SliceLayout(0, product))
    place_of_value = gl.arange(0, POSITIONS, gl.SliceLayout(1, right))
    for at in range(begin, end, POSITIONS):
        stage = step % STAGES
        mbarrier.wait(ring.full.index(stage), step // STAGES & 1)
        k1 = ring.halves.index(stage * 2).permute([1, 0]).load(right)
        k2 = ring.halves.index(stage * 2 + 1).permute([1, 0]).load(right)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        score = mma_v2(q2, k2, mma_v2(q1, k1, gl.zeros([16, POSITIONS], gl.float32, product)))
        score = gl.where((at + place < end)[None, :], score * scale_log2, float("-inf"))
        new_top = gl.maximum(top, gl.max(score, 1))
        weight = gl.exp2(score - new_top[:, None])
        rescale = gl.exp2(top - new_top)
        top = new_top
        total = total * rescale + gl.sum(weight, 1)
        weight = gl.convert_layout(weight.to(gl.bfloat16), left)
        stage = (step + 1) % STAGES
        mbarrier.wait(ring.full.index(stage), (step + 1) // STAGES & 1)
        v1 = ring.halves.index(stage * 2).load(right)
        v2 = ring.halves.index(stage * 2 + 1).load(right)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        seen = (at + place_of_value < end)[:, None]  # a weight of zero would not silence a NaN
        acc1 = mma_v2(weight, gl.where(seen, v1, gl.zeros_like(v1)), acc1 * rescale[:, None])
        acc2 = mma_v2(weight, gl.where(seen, v2, gl.zeros_like(v2)), acc2 * rescale[:, None])
        step += 2

    if split == SPLITS - 1:
        # The new token's key and value, which the cache does not hold yet.
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
        score = gl.zeros([16], gl.float32, gl.SliceLayout(1, rows))
        for half in gl.static_range(2):
            key = memory.new.index(half * 8 + GROUP).load(gl.SliceLayout(0, rows))
            score += gl.sum(memory.heads.index(half).load(rows).to(gl.float32) * key[None, :], 1)
        score = gl.convert_layout(score, by_row) * scale_log2
        new_top = gl.maximum(top, score)
        rescale = gl.exp2(top - new_top)
        weight = gl.exp2(score - new_top)
        top = new_top
        total = total * rescale + weight
        value1 = memory.new.index(GROUP + 1).load(gl.SliceLayout(0, product))
        value2 = memory.new.index(8 + GROUP + 1).load(gl.SliceLayout(0, product))
        acc1 = acc1 * rescale[:, None] + weight[:, None] * value1[None, :]
        acc2 = acc2 * rescale[:, None] + weight[:, None] * value2[None, :]

    row = gl.arange(0, 16, by_row)
    part = (kv_head * GROUP + row) * SPLITS + split
    lane = gl.arange(0, 64, gl.SliceLayout(0, product))
    at = words.parts + part[:, None] * 128 + lane[None, :]
    mine = row < GROUP
    gl.store(at, _part(acc1, tag), mask=mine[:, None], eviction_policy="evict_last")
    gl.store(at + 64, _part(acc2, tag), mask=mine[:, None], eviction_policy="evict_last")
    gl.store(words.sums + part * 2, _part(top, tag), mask=mine, eviction_policy="evict_last")
    gl.store(words.sums + part * 2 + 1, _part(total, tag), mask=mine, eviction_policy="evict_last")
    return step


@gluon.jit
def _join(words, tag, short_tag, S: gl.constexpr):
    """Some lanes of a head: the splits' parts added up."""
    LANES: gl.constexpr = S.heads  # heads * 128 over 128 programs
    SPLITS: gl.constexpr = S.splits
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [SPLITS, 32 // SPLITS], [1, 8], [0, 1])
    first = gl.program_id(0) * LANES
    head = first // 128
    split = gl.arange(0, SPLITS, gl.SliceLayout(1, layout))
    pair = gl.arange(0, LANES // 2, gl.SliceLayout(0, layout))
    part = head * SPLITS + split
    at = words.parts + part[:, None] * 128 + (first % 128 + pair * 2)[None, :]
    a, b, top, total = gl.inline_asm_elementwise(
        _READ_PARTS, "=&r,=&r,=&r,=&r,l,l,r",
        [at.to(gl.int64), (words.sums + part[:, None] * 2 + pair[None, :] * 0).to(gl.int64), tag],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )
    top = top.to(gl.float32, bitcast=True)
    weight = gl.exp2(top - gl.max(top, 0)[None, :])
    total = gl.sum(total.to(gl.float32, bitcast=True) * weight, 0)
    a = gl.sum(a.to(gl.float32, bitcast=True) * weight, 0) / total
    b = gl.sum(b.to(gl.float32, bitcast=True) * weight, 0) / total
    both = gl.join(_word(a, short_tag), _word(b, short_tag))
    side = gl.arange(0, 2, gl.SliceLayout(0, both.type.layout))
    pair = gl.arange(0, LANES // 2, gl.SliceLayout(1, both.type.layout))
    gl.store(words.mixed + first + pair[:, None] * 2 + side[None, :], both, eviction_policy="evict_last")


@gluon.jit
def _compute(hidden, out, table, words, epoch, cos, sin, slot, length, final_norm, eps, scale_log2, ring, memory,
             FIELDS: gl.constexpr, S: gl.constexpr):
    """Eight warps: the stages of all layers."""
    QKV_ROWS: gl.constexpr = S.qkv // 128
    HIDDEN_ROWS: gl.constexpr = S.hidden // 128
    INNER_ROWS: gl.constexpr = S.inner // 128
    LAYERS: gl.constexpr = S.layers
    KV_HEADS: gl.constexpr = S.kv_heads
    program = gl.program_id(0)
    launch = gl.load(epoch)
    tag = launch * LAYERS
    rope = _rope(cos, sin)
    new_at = (slot * KV_HEADS + program % KV_HEADS) * 128
    step = 0
    input_norm = gl.load(table + 6)
    for layer in range(LAYERS):
        fields = table + layer * FIELDS
        if layer == 0:
            _first_norm(hidden, memory, _pointer(input_norm), eps, S)
        else:
            _norm(words.down, tag & 0xFFFF | (tag << 16), memory, _pointer(input_norm), eps, S)
        tag += 1
        short = tag & 0xFFFF
        both = short | (short << 16)
        post_norm = gl.load(fields + 7)
        q_norm = gl.load(fields + 8)
        k_norm = gl.load(fields + 9)
        k_new = _pointer(gl.load(fields + 10)) + new_at
        v_new = _pointer(gl.load(fields + 11)) + new_at
        input_norm = gl.load(fields + (FIELDS + 6))  # of the next layer
        step = _multiply(words.qkv, short, ring, step, memory, QKV_ROWS, S.hidden, False, S)
        _take_heads(words.qkv, both, memory, rope, _pointer(q_norm), _pointer(k_norm), k_new, v_new, slot >= 0, eps, S)
        step = _attend(ring, step, length, words, memory, scale_log2, tag, S)
        _join(words, tag, short, S)
        _take_x(words.mixed, both, memory, S.mixed, S)
        step = _multiply(words.o, short, ring, step, memory, HIDDEN_ROWS, S.mixed, False, S)
        _norm(words.o, both, memory, _pointer(post_norm), eps, S)
        step = _multiply(words.inner, short, ring, step, memory, INNER_ROWS, S.hidden, True, S)
        _take_x(words.inner, both, memory, S.inner, S)
        step = _multiply(words.down, short, ring, step, memory, HIDDEN_ROWS, S.inner, False, S)

    if program == 0:
        _norm(words.down, tag & 0xFFFF | (tag << 16), memory, final_norm, eps, S)
        COLUMNS: gl.constexpr = S.columns
        LINES: gl.constexpr = S.lines
        PIECES: gl.constexpr = S.hidden // COLUMNS
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
        line = gl.arange(0, LINES, gl.SliceLayout(1, layout))[:, None]
        lane = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
        for piece in gl.static_range(PIECES):
            gl.store(out + piece * COLUMNS + line * 64 + lane, memory.x.index(piece).load(layout))
        # Everybody has read it: nobody could have put a value otherwise.
        gl.store(epoch, launch + 1)


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@noted
@gluon.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["slots", "positions", "slot_mapping"])
def _layers_kernel(
    by_hidden, by_mixed, by_inner, cache, hidden, out, table, words32, words64, epoch, cos, sin, final_norm, slots,
    positions, slot_mapping, block_table, table_stride, eps, scale_log2, FIELDS: gl.constexpr, S: gl.constexpr,
):
    STAGES: gl.constexpr = S.stages
    LINES: gl.constexpr = S.lines
    COLUMNS: gl.constexpr = S.columns
    POSITIONS: gl.constexpr = S.positions
    WIDE: gl.constexpr = S.widest // COLUMNS
    PIECES: gl.constexpr = S.hidden // COLUMNS
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, LINES, 8, _LANES], gl.NVMMASharedLayout(128, 16, 3))
    ring = _Ring(
        weights,
        _reinterpret(weights, gl.bfloat16, [STAGES * POSITIONS // 8, _PAGE, 1, _LANES], gl.NVMMASharedLayout(128, 16, 3)),
        _reinterpret(weights, gl.bfloat16, [STAGES * 2, POSITIONS, _LANES], gl.NVMMASharedLayout(128, 16, 2)),
        _barriers(STAGES),
        _barriers(STAGES),
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    deep: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = gl.allocate_shared_memory(gl.float32, [2, 8, _LANES], plain)
    firsts = gl.allocate_shared_memory(gl.float32, [4, 8, 8], deep)
    seconds = gl.allocate_shared_memory(gl.float32, [4, 8, 8], deep)
    memory = _Memory(
        gl.allocate_shared_memory(gl.bfloat16, [WIDE, LINES, _LANES], plain),
        gl.allocate_shared_memory(gl.bfloat16, [PIECES, COLUMNS], flat),
        gl.allocate_shared_memory(gl.bfloat16, [2, 16, _LANES], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])),
        rows,
        _reinterpret(rows, gl.float32, [16, _LANES], flat),
        (firsts, seconds),
    )
    # Rows of query heads that no group has stay zero.
    nothing = gl.zeros([16, _LANES], gl.bfloat16, gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
    memory.heads.index(0).store(nothing)
    memory.heads.index(1).store(nothing)
    PARTS: gl.constexpr = S.mixed * S.splits
    QKV: gl.constexpr = S.qkv
    MIXED: gl.constexpr = QKV + S.mixed
    O: gl.constexpr = MIXED + S.hidden
    INNER: gl.constexpr = O + S.inner
    words = _Words(words32, words64, words64 + PARTS, words32 + QKV, words32 + MIXED, words32 + O, words32 + INNER)
    length = gl.load(positions).to(gl.int32)  # of a row that is padding -1
    at = gl.maximum(length, 0)
    table_row = block_table + gl.load(slots).to(gl.int64) * table_stride
    slot = gl.load(slot_mapping)
    fence_async_shared()
    _barrier()
    gl.warp_specialize([
        (_compute, (hidden, out, table, words, epoch, cos + at * 128, sin + at * 128, slot, length, final_norm, eps,
                    scale_log2, ring, memory, FIELDS, S)),
        (_load, (by_hidden, by_mixed, by_inner, cache, table, table_row, length, ring, FIELDS, S)),
    ], [1], [40])


class LayerTensors(NamedTuple):
    """What a layer reads, each contiguous and bf16: weights [rows, columns] and caches [blocks, block size, Hkv, 128]."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None


def check_layers(layers: list[LayerTensors]) -> None:
    """Raise ValueError for layers that the kernel would read or write outside of, or compute wrongly."""
    if len(layers) < 2:
        raise ValueError(f"layers: {len(layers)}; expected at least two")
    (hidden, inner), (_, block_size, kv_heads, head_dim) = layers[0].down.shape, layers[0].keys.shape
    for name, width in (("hidden", hidden), ("inner", inner)):
        # A program has an equal share of the rows, and takes eight of them at a time.
        if width < 8 * PROGRAMS or width % 512:
            raise ValueError(f"{name}={width}: expected a multiple of 512 from {8 * PROGRAMS} on")
    if head_dim != HEAD_DIM:
        raise ValueError(f"head_dim={head_dim}: expected {HEAD_DIM}")
    if kv_heads not in (4, 8, 16, 32, 64, 128):
        raise ValueError(f"kv_heads={kv_heads}: expected a power of two from 4 to {PROGRAMS}")
    if block_size < 16 or block_size & block_size - 1:
        raise ValueError(f"block_size={block_size}: expected a power of two from 16 on")
    heads = layers[0].o.shape[1] // HEAD_DIM
    if heads not in (4, 8, 16, 32, 64, 128) or heads % kv_heads or heads // kv_heads > 6:
        raise ValueError(f"heads={heads}: expected a power of two up to {PROGRAMS}, at most six for a KV head")
    weights = [w for layer in layers for w in layer[:4]]
    caches = [c for layer in layers for c in layer[4:6]]
    if any(t is not None and (t.dtype != torch.bfloat16 or not t.is_contiguous()) for layer in layers for t in layer):
        raise ValueError("layers: expected contiguous bfloat16 tensors")
    for name, tensors, unit in (("weights", weights, 128), ("caches", caches, 2 * kv_heads * HEAD_DIM)):
        lowest = min(t.data_ptr() for t in tensors)
        if lowest % 16 or any((t.data_ptr() - lowest) % unit for t in tensors):
            raise ValueError(f"{name}: expected all at multiples of {unit} bytes from the lowest")


class LayersPlan:
    """Where everything lies, as the kernel wants it; what it keeps from launch to launch."""

    def __init__(self, layers: list[LayerTensors], final_norm: torch.Tensor, eps: float, scale: float,
                 depth: int = 2) -> None:
        check_layers(layers)
        first = layers[0]
        device = first.qkv.device
        _, block_size, kv_heads, _ = first.keys.shape
        hidden, inner = first.down.shape
        heads = first.o.shape[1] // HEAD_DIM
        columns = 1024 if not (hidden | inner | heads * HEAD_DIM) % 1024 else 512
        widest = max(hidden, inner, heads * HEAD_DIM)
        stages = (_SHARED_BYTES - 2 * (widest + hidden) - _OTHER_BYTES) // (16 * columns)
        self.shape = LayersShape(hidden, inner, heads, kv_heads, len(layers), block_size, columns, stages, depth,
                                 first.q_norm is not None)
        weights = [w for layer in layers for w in layer[:4]]
        caches = [c for layer in layers for c in layer[4:6]]
        lines, cache = (min(tensors, key=torch.Tensor.data_ptr) for tensors in (weights, caches))
        line, slot = 2 * _LANES.value, 2 * kv_heads * HEAD_DIM
        self.table = torch.tensor(
            [[*((w.data_ptr() - lines.data_ptr()) // line for w in layer[:4]),
              *((c.data_ptr() - cache.data_ptr()) // slot for c in layer[4:6]),
              *(0 if w is None else w.data_ptr() for w in layer[6:]),
              layer.keys.data_ptr(), layer.values.data_ptr()] for layer in (*layers, layers[-1])], dtype=torch.int64, device=device)
        shape = self.shape
        self.words = torch.zeros(shape.qkv + shape.mixed + 2 * shape.hidden + shape.inner, dtype=torch.int32,
                                 device=device)
        self.parts = torch.zeros(shape.heads * shape.splits * (HEAD_DIM + 2), dtype=torch.int64, device=device)
        self.epoch = torch.ones(1, dtype=torch.int32, device=device)
        self.final_norm, self.eps, self.scale = final_norm, eps, scale
        # Eight rows from any line on: the outer dimension counts lines from the lowest weight, the middle one rows.
        self.weights = [
            TensorDescriptor(lines, [MOST, 8, 64], [64, width, 1], [shape.lines, 8, 64], gl.NVMMASharedLayout(128, 16, 3))
            for width in (hidden, shape.mixed, inner)
        ]
        self.cache = TensorDescriptor(cache, [MOST, kv_heads, HEAD_DIM], [kv_heads * HEAD_DIM, HEAD_DIM, 1],
                                      [16, 1, 64], gl.NVMMASharedLayout(128, 16, 3))

    def run(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, slots: torch.Tensor,
            positions: torch.Tensor, slot_mapping: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(hidden)
        with on_device_of(hidden):
            _layers_kernel[(PROGRAMS,)](
                *self.weights, self.cache, hidden, out, self.table, self.words, self.parts, self.epoch, cos, sin,
                self.final_norm, slots, positions, slot_mapping, block_table, block_table.stride(0), self.eps,
                self.scale * LOG2_E, len(LayerFields._fields), self.shape, num_warps=8, launch_cooperative_grid=True,
            )
        return out


_SHARED_BYTES, _OTHER_BYTES = 227 << 10, 14 << 10
