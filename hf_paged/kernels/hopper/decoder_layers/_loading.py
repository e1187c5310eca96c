# ruff: noqa
# mypy: ignore-errors
"""What the loading warp does: all that a program reads but once comes to shared memory, in the order of its use."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from hf_paged.kernels.hopper._gluon import load_box
from hf_paged.kernels.hopper.decoder_layers._shares import LANES, PAGE, together, span
from hf_paged.kernels.hopper.decoder_layers.shape import FAR_BITS

_OUTSIDE = gl.constexpr(-(2**20))  # a slot outside of all memory, of which TMA makes zeros
_FAR_LINES = gl.constexpr(1 << FAR_BITS - 7)
_FAR_HEADS = gl.constexpr(1 << FAR_BITS - 8)  # a slot's heads are 256 bytes each

@gluon.jit
def _room(ring, step, DEPTH: gl.constexpr, S: gl.constexpr):
    """Wait until a chunk may be loaded to its stage, and until no more than a few are on their way.

    More would fill the queues of L2, in which what programs hand each other would wait behind them.
    """
    STAGES: gl.constexpr = S.stages
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
    TOGETHER: gl.constexpr = together(ROWS, PAIRED)
    HALVES: gl.constexpr = 2 if PAIRED else 1
    ROW_LINES: gl.constexpr = WIDTH // 64
    far = (base // _FAR_LINES).to(gl.int32)
    first_line = (base % _FAR_LINES).to(gl.int32) + first_row * ROW_LINES
    for group in range((ROWS + 7) // 8 // TOGETHER):
        for piece in range(WIDTH // COLUMNS):
            for half in gl.static_range(HALVES):
                for i in gl.static_range(TOGETHER):
                    row = gl.minimum((group * TOGETHER + i) * 8, ROWS - 8)
                    line = first_line + half * (S.inner * ROW_LINES) + row * ROW_LINES + piece * LINES
                    stage = _room(ring, step, S.depth, S)
                    full = ring.full.index(stage)
                    mbarrier.expect(full, BYTES)
                    load_box(weight, [far, line, 0, 0], full, ring.boxes.index(stage))
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
    PAGES: gl.constexpr = S.positions // PAGE
    BYTES: gl.constexpr = S.columns * 16
    BLOCK_SIZE: gl.constexpr = S.block_size
    FAR_SLOTS: gl.constexpr = _FAR_HEADS // S.kv_heads  # exact, since it is a power of two
    far = (base // FAR_SLOTS).to(gl.int32)
    first_slot = (base % FAR_SLOTS).to(gl.int32)
    stage = _room(ring, step, S.kv_depth, S)
    full = ring.full.index(stage)
    mbarrier.expect(full, BYTES)
    for page in gl.static_range(PAGES):
        position = begin + page * PAGE
        block = gl.load(table_row + position // BLOCK_SIZE, mask=position < end, other=0)
        slot = gl.where(position < end, first_slot + block * BLOCK_SIZE + position % BLOCK_SIZE, _OUTSIDE)
        for half in gl.static_range(2):
            part = ring.pages.index(stage * (2 * PAGES) + half * PAGES + page)
            load_box(cache, [far, slot, kv_head, half * LANES], full, part)


@gluon.jit
def load(qkv, o, gate_up, down, cache, table, table_row, length, ring, FIELDS: gl.constexpr, S: gl.constexpr):
    """One warp: all that a program reads but once, in the order in which it is used."""
    program = gl.program_id(0)
    QKV_ROWS: gl.constexpr = S.qkv // 128
    HIDDEN_ROWS: gl.constexpr = S.hidden // 128
    INNER_ROWS: gl.constexpr = S.inner // 128
    LAYERS: gl.constexpr = S.layers
    POSITIONS: gl.constexpr = S.positions
    KV_HEADS: gl.constexpr = S.kv_heads
    NORM: gl.constexpr = 2 * S.hidden
    begin, end = span(length, program, S)
    kv_head = program % KV_HEADS
    step = 0
    for layer in range(LAYERS):
        fields = table + layer * FIELDS
        _prefetch(gl.load(fields + 6), program, NORM)
        _prefetch(gl.load(fields + 7), program, NORM)
        if S.has_head_norms:
            _prefetch(gl.load(fields + 8), program, 256)
            _prefetch(gl.load(fields + 9), program, 256)
        step = _load_rows(qkv, ring, step, gl.load(fields), program * QKV_ROWS, QKV_ROWS, S.hidden, False, S)
        keys = gl.load(fields + 4)
        values = gl.load(fields + 5)
        for at in range(begin, end, POSITIONS):
            _load_positions(cache, ring, step, keys, table_row, at, end, kv_head, S)
            _load_positions(cache, ring, step + 1, values, table_row, at, end, kv_head, S)
            step += 2
        o_at, gate_up_at, down_at = gl.load(fields + 1), gl.load(fields + 2), gl.load(fields + 3)
        step = _load_rows(o, ring, step, o_at, program * HIDDEN_ROWS, HIDDEN_ROWS, S.mixed, False, S)
        step = _load_rows(gate_up, ring, step, gate_up_at, program * INNER_ROWS, INNER_ROWS, S.hidden, True, S)
        step = _load_rows(down, ring, step, down_at, program * HIDDEN_ROWS, HIDDEN_ROWS, S.inner, False, S)
