# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""The protocol by which kernels on several GPUs exchange data through memory that every rank can read and write.

A *call* is one launch of the same kernel with the same shapes on every rank; all ranks make the same calls in the same
order, each on one stream. A *peer* is another rank of the same host.

* Epochs. Every program of a call knows the call's number. ``epochs`` holds one counter per possible program; the
  programs of a grid of G advance the counters b, b + G, b + 2G, ... together, so that all counters are equal between
  calls whatever the grids were. The counters are on the device: a CUDA graph may hold any number of calls and be
  replayed. They have 64 bits, since a slot that is rarely used must never look as if it were ahead.
* Signals, for long inputs. Program b signals a peer by storing the epoch into its own slot of the peer's buffer, and
  waits until the peer's slot in its own buffer holds at least that epoch. No slot is ever reset. A signal is stored
  after all earlier stores have arrived, which takes some microseconds.
* Posts, for short inputs. A *mailbox* is full of a value that is never posted (all bits set, a NaN), so that each value
  shows by itself that it has arrived. The program that reads a value overwrites it with the empty value. There is no
  signal to wait for: this is the protocol of NCCL's LL and of TensorRT-LLM's "Lamport" all-reduce.
* Reuse of memory. There are two stages and two mailboxes, for even and odd calls. When a rank is in call k, its call
  k - 1 has ended, in which it received data of every peer's call k - 1, by signal or by post, directly or through
  another rank; and a peer enters k - 1 when its own call k - 2 has ended. So no rank still reads, or empties, in its
  call k - 2 what call k overwrites. `gathered` needs no second copy: a rank stores into a peer's `gathered` only after
  the peer's signal of the same call, and at that signal the peer's previous call, the last one that read `gathered`,
  has ended.
* One call ends before the next begins, on which all of this relies: a kernel waits for its predecessor on the stream
  (`after_previous_kernel`) before it reads its epoch, signals or stores. The stores of a finished kernel are in its
  GPU's memory, where stores of a peer's later call come after them.
* No deadlock by programs that cannot start: where a grid may be larger than the machine, program b only waits for the
  programs b of its peers.
* A peer that never comes: a waiting program reads `abort` every 1024 polls, and stops waiting when it is not zero. The
  result of that call, and of every later call, is garbage: the host that sets `abort` has to report it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels._triton import jit, tl

# Programs of a grid at most: nearly the 132 multiprocessors of an H100, and a power of two for tl.arange.
MAX_PROGRAMS = 128
MAX_RANKS = 8
# One slot of 8 bytes for each of two waits in a call, each program, each rank.
SIGNAL_BYTES = 2 * MAX_PROGRAMS * MAX_RANKS * 8
# Values to which parts of a program's share are rounded up: whole 16-byte vectors of every dtype.
_PART = 16
# Bytes that this rounding adds to a stage at most.
_PADDING = MAX_PROGRAMS * MAX_RANKS * _PART * 4
# Bytes of the longest input that is posted in two shots.
_POST_BYTES = 8 << 20


class Peers(NamedTuple):
    """The memory through which one rank exchanges data with the others.

    Attributes:
        buffers: by rank, ``[buffer_bytes(capacity)]`` uint8 each: this rank's own memory and the others' as mapped
            into this process, 16-byte aligned, made by `empty_buffer` on every rank before any call.
        epochs: ``[MAX_PROGRAMS]`` int64 zeros on this rank's device.
        abort: ``[1]`` int64 zero, in pinned host memory; another value ends waits for peers that will not come.
        rank: this rank's place among `buffers`.
        capacity: bytes of the largest input, a multiple of 16.
    """

    buffers: tuple[torch.Tensor, ...]
    epochs: torch.Tensor
    abort: torch.Tensor
    rank: int
    capacity: int

    @property
    def size(self) -> int:
        return len(self.buffers)

    @property
    def stage_bytes(self) -> int:
        return stage_bytes(self.capacity)

    @property
    def mailbox_bytes(self) -> int:
        return mailbox_bytes(self.capacity)

    def takes(self, num_bytes: int, shots: int, posted: bool) -> bool:
        """Return whether the buffers have room for an input of `num_bytes`."""
        if num_bytes > self.capacity:
            return False
        if not posted:
            return True
        if shots == 1:
            return self.size * -(-num_bytes // (4 * _PART)) * (4 * _PART) <= self.mailbox_bytes
        return num_bytes + _PADDING <= self.mailbox_bytes // 2


def stage_bytes(capacity: int) -> int:
    """Return the bytes of a stage, which holds an input, whole or in parts."""
    return capacity + _PADDING


def mailbox_bytes(capacity: int) -> int:
    """Return the bytes of a mailbox: whole inputs of all ranks, or parts of one in a half and its sum in the other."""
    return 2 * (min(capacity, _POST_BYTES) + _PADDING)


def buffer_bytes(capacity: int) -> int:
    """Return the bytes of a rank's buffer: signals, two mailboxes, two stages, and `gathered` of two-shot calls."""
    return SIGNAL_BYTES + 2 * mailbox_bytes(capacity) + 2 * stage_bytes(capacity) + capacity


def empty_buffer(buffer: torch.Tensor, capacity: int) -> None:
    """Fill ``[buffer_bytes(capacity)]`` uint8, a rank's buffer, with what the first call expects: empty mailboxes."""
    buffer.zero_()
    buffer[SIGNAL_BYTES:][: 2 * mailbox_bytes(capacity)] = 0xFF


class CallShape(NamedTuple):
    """What a kernel is compiled for; its argument ``C``. Offsets and sizes in a buffer are bytes."""

    size: int  # ranks
    shots: int
    posted: bool
    tile: int  # values
    data: int  # offset of the first mailbox
    mailbox: int
    stage: int
    programs: int  # the most of a grid
    compiled: bool  # and not interpreted: waits are waited for


@jit()
def begin_call(epochs):
    """Return the number of this call; `end_call` advances the counters."""
    return tl.load(epochs + tl.program_id(0)) + 1


@jit()
def end_call(epochs, epoch, C: tl.constexpr):
    """Advance this program's counters."""
    tl.debug_barrier()  # every warp has read its own
    counter = tl.arange(0, C.programs)
    tl.store(epochs + counter, tl.zeros_like(counter) + epoch, mask=counter % tl.num_programs(0) == tl.program_id(0))


@jit()
def wait_for_peers(buffers, abort, rank, epoch, WAIT: tl.constexpr, C: tl.constexpr):
    """Signal this program's peers and wait for their signals: then all stores before the call are seen on all sides."""
    lane = tl.arange(0, 32)
    own = buffers[0].to(tl.int64)
    peer = own
    for other in tl.static_range(1, C.size):
        address = buffers[other].to(tl.int64)
        peer = tl.where(lane == other, address, peer)
        own = tl.where(rank == other, address, own)
    slots = ((WAIT * C.programs + tl.program_id(0)) * C.size * 8).to(tl.int64)
    # A lane of the first warp for each peer. bar.sync makes the stores of all threads part of the lane's release, and
    # its acquire part of what all threads see.
    tl.debug_barrier()
    tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 t; .reg .u64 v;
        mov.u32 t, %tid.x;
        setp.ge.u32 p, t, $5;
        @p bra MET;
        st.release.sys.global.u64 [$1], $3;
        mov.u32 t, 0;
        POLL:
        ld.acquire.sys.global.u64 v, [$2];
        setp.ge.u64 p, v, $3;
        @p bra MET;
        add.u32 t, t, 1;
        and.b32 t, t, 1023;
        setp.ne.u32 p, t, 0;
        @p bra POLL;
        ld.relaxed.sys.global.u64 v, [$4];
        setp.eq.u64 p, v, 0;
        @p bra POLL;
        MET:
        mov.u32 $0, 0;
        }""",
        "=r,l,l,l,l,r",
        [peer + slots + rank * 8, own + slots + lane * 8, epoch, abort.to(tl.int64), C.size],
        tl.int32, is_pure=False, pack=1,
    )
    tl.debug_barrier()


@jit()
def buffer_of(buffers, rank, C: tl.constexpr):
    """Return the buffer of a rank that is only known when the kernel runs."""
    found = buffers[0]
    for other in tl.static_range(1, C.size):
        found = tl.where(rank == other, buffers[other], found)
    return found


@jit()
def region(buffer, offset, dtype: tl.constexpr):
    """Return the address `offset` bytes into a buffer, a multiple of 16, as a pointer to `dtype`."""
    return tl.multiple_of((buffer + offset).to(tl.pointer_type(dtype)), 16)


@jit()
def copy_flat(source, target, begin, end, TILE: tl.constexpr):
    """Copy ``source[begin:end]`` to ``target[begin:end]``."""
    for start in range(begin, end, TILE):
        index = start + tl.arange(0, TILE)
        tl.store(target + index, tl.load(source + index, mask=index < end), mask=index < end)


@jit()
def _bits(values):
    """Return the bits of floating-point values as integers."""
    return values.to(tl.int32 if values.dtype.primitive_bitwidth == 32 else tl.int16, bitcast=True)


@jit()
def _posted(values):
    """Return the values, with another NaN in place of the one that marks an empty place."""
    bits = _bits(values)
    other_nan = 0x7FFFFFFF if values.dtype.primitive_bitwidth == 32 else 0x7FFF
    return tl.where(bits == -1, other_nan, bits).to(bits.dtype).to(values.dtype, bitcast=True)


@jit()
def _sum_of(values, dtype: tl.constexpr, SIZE: tl.constexpr):
    """Return the ranks' values added in rank order in float32, rounded once."""
    total = values[0].to(tl.float32)
    for other in tl.static_range(1, SIZE):
        total += values[other].to(tl.float32)
    return total.to(dtype)


@jit()
def _load_all(places, inside, SIZE: tl.constexpr, VOLATILE: tl.constexpr):
    """Load from each of SIZE places; all loads are issued before one is used, or each would wait for the one before it.
    """
    values = ()
    for i in tl.static_range(SIZE):
        values = values + (tl.load(places[i], mask=inside, other=0.0, volatile=VOLATILE),)  # type: ignore[assignment]
    return values


@jit()
def _look(places, inside, dtype: tl.constexpr, SIZE: tl.constexpr):
    """Return the sum of the values at the places now, and whether a place is still empty."""
    values = _load_all(places, inside, SIZE, VOLATILE=True)  # from L2, where peers' stores arrive
    empty = tl.zeros(inside.shape, tl.int32)
    for i in tl.static_range(SIZE):
        empty |= (_bits(values[i]) == -1).to(tl.int32)
    return _sum_of(values, dtype, SIZE), tl.max(empty, 0)


@jit()
def sum_of_post(places, inside, abort, dtype: tl.constexpr, SIZE: tl.constexpr, COMPILED: tl.constexpr):
    """Wait until a value is posted to each of SIZE places, empty the places, and return the sum."""
    total, waiting = _look(places, inside, dtype, SIZE)
    if COMPILED:
        polls = 0
        while waiting != 0:
            total, waiting = _look(places, inside, dtype, SIZE)
            polls += 1
            if polls % 1024 == 0:  # noqa: SIM102  (`and` would load every time)
                if tl.load(abort, volatile=True) != 0:
                    waiting = 0
    # All threads have read their places here: `_look` ends with a reduction over all of them.
    for i in tl.static_range(SIZE):
        tl.store(places[i], (_bits(total) * 0 - 1).to(dtype, bitcast=True), mask=inside)
    return total


# -- one shot ---------------------------------------------------------------------------------------------------------


@jit()
def _slot_of(sender, numel, PART: tl.constexpr = _PART):
    """Return the offset in a mailbox of the `numel` values that a sender posts whole."""
    return tl.cast(sender, tl.int64) * (tl.cdiv(numel, PART) * PART)


@jit()
def post_whole(x, buffers, mailbox, rank, begin, end, numel, C: tl.constexpr):
    """Post ``x[begin:end]`` to every rank, the next one first."""
    dtype: tl.constexpr = x.dtype.element_ty
    for start in range(begin, end, C.tile):
        index = start + tl.arange(0, C.tile)
        values = _posted(tl.load(x + index, mask=index < end))
        for turn in tl.static_range(1, C.size + 1):
            other = (rank + turn) % C.size
            slot = region(buffer_of(buffers, other, C), mailbox, dtype) + _slot_of(rank, numel)
            tl.store(slot + index, values, mask=index < end)


@jit()
def sum_of_posted(own, mailbox, numel, index, inside, abort, dtype: tl.constexpr, C: tl.constexpr):
    """Return the sum of the inputs that all ranks posted whole, at `index`."""
    places = ()
    for sender in tl.static_range(C.size):
        slot = region(own, mailbox, dtype) + _slot_of(sender, numel)
        places = places + (tl.multiple_of(slot, 16) + index,)  # type: ignore[assignment]
    return sum_of_post(places, inside, abort, dtype, C.size, C.compiled)


@jit()
def sum_of_stages(buffers, stage, index, inside, dtype: tl.constexpr, C: tl.constexpr):
    """Return the sum of the inputs in the ranks' own stages, at `index`."""
    places = ()
    for other in tl.static_range(C.size):
        places = places + (region(buffers[other], stage, dtype) + index,)  # type: ignore[assignment]
    return _sum_of(_load_all(places, inside, C.size, VOLATILE=False), dtype, C.size)


# -- two shots --------------------------------------------------------------------------------------------------------


@jit()
def _parts_of(begin, end, SIZE: tl.constexpr, PART: tl.constexpr = _PART):
    """Return the length of a rank's part of a program's ``[begin, end)``, and where in a stage its parts begin."""
    part = tl.cdiv(tl.cdiv(end - begin, SIZE), PART) * PART
    return part, begin + tl.program_id(0) * (SIZE * PART)


@jit()
def push_parts(x, buffers, stage, rank, begin, end, C: tl.constexpr):
    """Store every rank's part of ``x[begin:end]`` into that rank's stage or mailbox, the next rank's first."""
    dtype: tl.constexpr = x.dtype.element_ty
    part, base = _parts_of(begin, end, C.size)
    for start in range(0, part, C.tile):
        index = start + tl.arange(0, C.tile)
        # All loads first, or each would wait for the store before it.
        values = ()
        for turn in tl.static_range(1, C.size + 1):
            at = begin + (rank + turn) % C.size * part + index
            value = tl.load(x + at, mask=(index < part) & (at < end))
            values = values + (_posted(value) if C.posted else value,)  # type: ignore[assignment]
        for turn in tl.static_range(1, C.size + 1):
            other = (rank + turn) % C.size
            target = region(buffer_of(buffers, other, C), stage, dtype) + base + rank * part
            inside = (index < part) & (begin + other * part + index < end)
            tl.store(target + index, values[turn - 1], mask=inside)


@jit()
def sum_and_push_parts(buffers, own, stage, gathered, rank, begin, end, abort, dtype: tl.constexpr, C: tl.constexpr):
    """Sum this rank's part of ``[begin, end)`` over ranks and store it into the `gathered` of every rank."""
    part, base = _parts_of(begin, end, C.size)
    staged = region(own, stage, dtype) + base
    for start in range(0, part, C.tile):
        index = start + tl.arange(0, C.tile)
        at = begin + rank * part + index
        inside = (index < part) & (at < end)
        places = ()
        for other in tl.static_range(C.size):
            places = places + (staged + other * part + index,)  # type: ignore[assignment]
        if C.posted:
            total = _posted(sum_of_post(places, inside, abort, dtype, C.size, C.compiled))
        else:
            total = _sum_of(_load_all(places, inside, C.size, VOLATILE=False), dtype, C.size)
        for turn in tl.static_range(1, C.size + 1):
            target = region(buffer_of(buffers, (rank + turn) % C.size, C), gathered, dtype)
            tl.store(target + at, total, mask=inside)


@jit()
def gathered_at(own, gathered, index, inside, abort, dtype: tl.constexpr, C: tl.constexpr):
    """Return the sums of all parts, at `index`."""
    place = region(own, gathered, dtype) + index
    if C.posted:
        total = sum_of_post((place,), inside, abort, dtype, 1, C.compiled)
    else:
        total = tl.load(place, mask=inside, other=0.0)
    return total
