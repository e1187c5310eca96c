# ruff: noqa
# mypy: ignore-errors
"""All layers of a decoder for a few rows in one launch on Hopper, in Gluon: programs that stay and hand on values.

What bounds a step of few rows launch by launch is that each kernel loads, waits, computes and ends, one after the other.
Here one warp of each program streams the program's share of all weights, and of keys and values, through shared memory
(TMA), however far its other warps are. These compute a layer in six stages. A value passes from one stage to the next
by way of L2 as a word with a tag that says in which layer of which launch it was made; who reads it reads until the tag
is right, so that no stage waits for more than it needs. The idea of one launch for a whole forward pass is Spector et
al.'s (2025, "Look Ma, No Bubbles").
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from hf_paged.kernels.hopper._gluon import barrier, reinterpret
from hf_paged.kernels.build.compiling import noted
from hf_paged.kernels.hopper.decoder_layers._attention import attend, join, rope_of, take_heads
from hf_paged.kernels.hopper.decoder_layers._loading import load
from hf_paged.kernels.hopper.decoder_layers._products import first_norm, multiply, norm, take_x
from hf_paged.kernels.hopper.decoder_layers._shares import LANES, PAGE, row_of



class _Ring(NamedTuple):
    """Chunks in shared memory, in several views, and their barriers."""

    weights: Any  # [stages, lines, 8, 64]
    boxes: Any  # the same as TMA brings it, [stages, 1, lines, 8, 64]
    pages: Any  # [stages * 2 * positions / 16, 1, 16, 1, 64]
    halves: Any  # of keys or values, [stages * 2, positions, 64]
    full: Any
    empty: Any


class _Words(NamedTuple):
    """Where stages leave their results for the next, int32 words of 16 bits and a tag (parts: int64 with 32 bits)."""

    qkv: Any  # [rows, width], as all but the parts
    parts: Any  # [rows, heads, splits, 128]
    sums: Any  # [rows, heads, splits, 2]: maximum and sum of the weights
    mixed: Any
    o: Any
    inner: Any
    down: Any


class _Memory(NamedTuple):
    """Of a program, in shared memory."""

    x: Any  # [pieces, lines, rows, 64] bf16: what the next product takes
    residual: Any  # [pieces, columns, rows] bf16
    heads: Any  # [2, 16, 64] bf16: halves of the group's query heads, then of the new key and value
    rows: Any  # [2, 8, 64] fp32: the same
    new: Any  # the same as [16, 64]
    sums: tuple[Any, Any]  # [4, 8, rows * 8] fp32, warps' parts of products; of a pair's second half


@gluon.jit
def _pointer(address):
    return address.to(gl.pointer_type(gl.bfloat16))


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
    rope = rope_of(cos, sin)
    new_at = (slot * KV_HEADS + program % KV_HEADS) * 128
    step = 0
    input_norm = gl.load(table + 6)
    for layer in range(LAYERS):
        fields = table + layer * FIELDS
        if layer == 0:
            first_norm(hidden, memory, _pointer(input_norm), eps, S)
        else:
            norm(words.down, tag & 0xFFFF | (tag << 16), memory, _pointer(input_norm), eps, S)
        tag += 1
        short = tag & 0xFFFF
        both = short | (short << 16)
        post_norm = gl.load(fields + 7)
        q_norm = gl.load(fields + 8)
        k_norm = gl.load(fields + 9)
        k_new = _pointer(gl.load(fields + 10)) + new_at
        v_new = _pointer(gl.load(fields + 11)) + new_at
        input_norm = gl.load(fields + (FIELDS + 6))  # of the next layer
        step = multiply(words.qkv, short, ring, step, memory, QKV_ROWS, S.hidden, False, S)
        take_heads(words.qkv, both, memory, rope, _pointer(q_norm), _pointer(k_norm), k_new, v_new, slot >= 0, eps, S)
        step = attend(ring, step, length, words, memory, scale_log2, tag, S)
        join(words, tag, short, S)
        take_x(words.mixed, both, memory, S.mixed, S)
        step = multiply(words.o, short, ring, step, memory, HIDDEN_ROWS, S.mixed, False, S)
        norm(words.o, both, memory, _pointer(post_norm), eps, S)
        step = multiply(words.inner, short, ring, step, memory, INNER_ROWS, S.hidden, True, S)
        take_x(words.inner, both, memory, S.inner, S)
        step = multiply(words.down, short, ring, step, memory, HIDDEN_ROWS, S.inner, False, S)

    if program == 0:
        norm(words.down, tag & 0xFFFF | (tag << 16), memory, final_norm, eps, S)
        COLUMNS: gl.constexpr = S.columns
        LINES: gl.constexpr = S.lines
        ROWS: gl.constexpr = S.rows
        HIDDEN: gl.constexpr = S.hidden
        PIECES: gl.constexpr = S.hidden // COLUMNS
        layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [4, 1, 8], [8, 1, 1], [2, 1, 0])
        line = gl.arange(0, LINES, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
        row = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
        lane = gl.arange(0, 64, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
        for piece in gl.static_range(PIECES):
            gl.store(out + row * HIDDEN + piece * COLUMNS + line * 64 + lane, memory.x.index(piece).load(layout))
        # All programs have read it, or no value could have been put.
        gl.store(epoch, launch + 1)


@gluon.jit
def _barriers(COUNT: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@noted
@gluon.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["slots", "positions", "slot_mapping"])
def layers_kernel(
    qkv, o, gate_up, down, cache, hidden, out, table, words32, words64, epoch, cos, sin, final_norm, slots,
    positions, slot_mapping, block_table, table_stride, eps, scale_log2, FIELDS: gl.constexpr, S: gl.constexpr,
):
    STAGES: gl.constexpr = S.stages
    LINES: gl.constexpr = S.lines
    COLUMNS: gl.constexpr = S.columns
    POSITIONS: gl.constexpr = S.positions
    WIDE: gl.constexpr = S.widest // COLUMNS
    PIECES: gl.constexpr = S.hidden // COLUMNS
    ROWS: gl.constexpr = S.rows
    box: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, LINES, 8, LANES], gl.NVMMASharedLayout(128, 16, 3))
    ring = _Ring(
        weights,
        reinterpret(weights, gl.bfloat16, [STAGES, 1, LINES, 8, LANES], box),
        reinterpret(weights, gl.bfloat16, [STAGES * POSITIONS // 8, 1, PAGE, 1, LANES], box),
        reinterpret(weights, gl.bfloat16, [STAGES * 2, POSITIONS, LANES], gl.NVMMASharedLayout(128, 16, 2)),
        _barriers(STAGES),
        _barriers(STAGES),
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    deep: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = gl.allocate_shared_memory(gl.float32, [2, 8, LANES], plain)
    firsts = gl.allocate_shared_memory(gl.float32, [4, 8, ROWS * 8], deep)
    seconds = gl.allocate_shared_memory(gl.float32, [4, 8, ROWS * 8], deep)
    memory = _Memory(
        gl.allocate_shared_memory(gl.bfloat16, [WIDE, LINES, ROWS, LANES],
                                  gl.SwizzledSharedLayout(8, 1, ROWS, [2, 1, 0])),
        gl.allocate_shared_memory(gl.bfloat16, [PIECES, COLUMNS, ROWS], plain),
        gl.allocate_shared_memory(gl.bfloat16, [2, 16, LANES], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])),
        rows,
        reinterpret(rows, gl.float32, [16, LANES], flat),
        (firsts, seconds),
    )
    # Rows of query heads that no group has stay zero.
    nothing = gl.zeros([16, LANES], gl.bfloat16, gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
    memory.heads.index(0).store(nothing)
    memory.heads.index(1).store(nothing)
    PARTS: gl.constexpr = ROWS * S.mixed * S.splits
    QKV: gl.constexpr = ROWS * S.qkv
    MIXED: gl.constexpr = QKV + ROWS * S.mixed
    O: gl.constexpr = MIXED + ROWS * S.hidden
    INNER: gl.constexpr = O + ROWS * S.inner
    words = _Words(words32, words64, words64 + PARTS, words32 + QKV, words32 + MIXED, words32 + O, words32 + INNER)
    row = row_of(gl.program_id(0), S)
    length = gl.load(positions + row).to(gl.int32)  # of a row that is padding -1
    at = gl.maximum(length, 0)
    table_row = block_table + gl.load(slots + row).to(gl.int64) * table_stride
    slot = gl.load(slot_mapping + row)
    fence_async_shared()
    barrier()
    gl.warp_specialize([
        (_compute, (hidden, out, table, words, epoch, cos + at * 128, sin + at * 128, slot, length, final_norm, eps,
                    scale_log2, ring, memory, FIELDS, S)),
        (load, (qkv, o, gate_up, down, cache, table, table_row, length, ring, FIELDS, S)),
    ], [1], [40])
