# mypy: disallow-untyped-defs=False, check-untyped-defs=False
"""What kernels on several GPUs share: buffers that peers can read and write, and the signals between their programs.

The protocol. A *call* is one launch on every rank of the same kernel with the same shapes; all ranks make the same
calls in the same order, each on one stream. Program b of a call only ever waits for the programs b of its peers, so a
grid needs no more of its programs on the machine at once than the hardware's order of starting them gives.

* Epochs. Every program of a call knows the call's number: `epochs` holds one counter per possible program, and the
  programs of a grid of G step the counters b, b + G, b + 2G, ... together, so that all counters are equal between
  calls whatever the grids were. They live on the device: a graph may hold any number of calls and be replayed. 64
  bits, since a slot that is rarely used must never look as if it were ahead.
* Signals. Program b tells a peer that it is ready by storing the epoch into its own slot of the peer's buffer, and
  waits until the peer's slot in its own buffer holds at least that epoch. Nothing is ever reset.
* Data are pushed: everybody only reads its own memory. A load from a peer's would take the way there and back.
* Reuse of buffers. A rank stores its input for call k into its peers' stages k % 2 before it signals. A peer reads its
  stage k % 2 in its calls k, k - 2 and so on. That a rank is in call k means that its call k - 1 has ended, in which
  it waited for every peer to enter k - 1; a peer enters k - 1 when its own call k - 2 has ended. So nobody reads what
  is overwritten. `gathered` needs no second copy: a rank stores into a peer's only after the peer's signal of the
  same call, at which the peer's previous call, the last that read it, has ended.
* All of this rests on one call ending before the next begins: a kernel waits for its predecessor on the stream
  (`after_previous_kernel`) before it reads its epoch, signals or stores.
* A peer that never comes: whoever waits looks at `abort` every 1024 polls and gives up when it is not zero. What the
  call returns then is garbage, and so is every later call: the host that set it has to say so.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels._triton import jit, tl

# Programs of a grid at most: fewer than the 132 multiprocessors of an H100, and a power of two for tl.arange.
MAX_PROGRAMS = 128
MAX_RANKS = 8
# One slot of 8 bytes for each of two waits in a call, each program, each rank.
SIGNAL_BYTES = 2 * MAX_PROGRAMS * MAX_RANKS * 8
# Values to which parts of a program's share are rounded up: whole 16-byte vectors of every dtype.
_PART = 16
# Bytes that this rounding adds to a stage at most.
_PADDING = MAX_PROGRAMS * MAX_RANKS * _PART * 4
# For one shot: bytes of an input, or the capacity where that is less, of which a stage has room for one of each peer.
_ONE_SHOT_BYTES = 2 << 20


class Peers(NamedTuple):
    """What one rank needs to exchange data with the others.

    Attributes:
        buffers: by rank, ``[buffer_bytes(capacity, size)]`` uint8 each: this rank's own memory and the others' as
            mapped into this process, 16-byte aligned. The first `SIGNAL_BYTES` have to be zero on all ranks before any
            call.
        epochs: ``[MAX_PROGRAMS]`` int64 zeros on this rank's device.
        abort: ``[1]`` int64 zero, in pinned host memory: set it to end waits for peers that will not come.
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
        return stage_bytes(self.capacity, self.size)

    @property
    def one_shot_capacity(self) -> int:
        """Bytes of the largest input that one shot can take: a stage holds the whole inputs of all peers then."""
        return min(self.capacity, (self.stage_bytes - _PADDING) // (self.size - 1))


def stage_bytes(capacity: int, size: int) -> int:
    """Bytes of what peers push before it is added up: an input in parts, or the whole inputs of all other ranks."""
    return max(capacity, (size - 1) * min(capacity, _ONE_SHOT_BYTES)) + _PADDING


def buffer_bytes(capacity: int, size: int) -> int:
    """Bytes of one rank's buffer: signals, two stages, and what two-shot calls gather."""
    return SIGNAL_BYTES + 2 * stage_bytes(capacity, size) + capacity


@jit()
def begin_call(epochs):
    """The number of this call; the counters are stepped by `end_call`."""
    return tl.load(epochs + tl.program_id(0)) + 1


@jit()
def end_call(epochs, epoch, MAX_PROGRAMS: tl.constexpr):
    """Step this program's counters; every warp has to have passed a wait since `begin_call`."""
    counter = tl.arange(0, MAX_PROGRAMS)
    tl.store(epochs + counter, tl.zeros_like(counter) + epoch, mask=counter % tl.num_programs(0) == tl.program_id(0))


@jit()
def wait_for_peers(
    buffers, abort, rank, epoch, WAIT: tl.constexpr, SIZE: tl.constexpr, MAX_PROGRAMS: tl.constexpr
):
    """What this program stored before is seen by its peers' programs after they wait, and the other way round."""
    lane = tl.arange(0, 32)
    own = buffers[0].to(tl.int64)
    peer = own
    for other in tl.static_range(1, SIZE):
        address = buffers[other].to(tl.int64)
        peer = tl.where(lane == other, address, peer)
        own = tl.where(rank == other, address, own)
    slots = ((WAIT * MAX_PROGRAMS + tl.program_id(0)) * SIZE * 8).to(tl.int64)
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
        [peer + slots + rank * 8, own + slots + lane * 8, epoch, abort.to(tl.int64), SIZE],
        tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.debug_barrier()


@jit()
def buffer_of(buffers, rank, SIZE: tl.constexpr):
    """The buffer of a rank that is not known when this is compiled."""
    found = buffers[0]
    for other in tl.static_range(1, SIZE):
        found = tl.where(rank == other, buffers[other], found)
    return found


@jit()
def region(buffer, offset, dtype: tl.constexpr):
    """A buffer from `offset` bytes on, a multiple of 16, as values of `dtype`."""
    return tl.multiple_of((buffer + offset).to(tl.pointer_type(dtype)), 16)


@jit()
def copy_flat(source, target, begin, end, TILE: tl.constexpr):
    """``target[begin:end] = source[begin:end]``"""
    for start in range(begin, end, TILE):
        index = start + tl.arange(0, TILE)
        tl.store(target + index, tl.load(source + index, mask=index < end), mask=index < end)


@jit()
def slot_of(sender, receiver, numel, PART: tl.constexpr = _PART):
    """Where in the receiver's stage an input of `numel` values is that the sender pushed whole."""
    return tl.where(sender < receiver, sender, sender - 1).to(tl.int64) * (tl.cdiv(numel, PART) * PART)


@jit()
def push_whole(x, buffers, stage, rank, begin, end, numel, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Store ``x[begin:end]`` into this rank's slot of every peer's stage; the next rank's first."""
    dtype: tl.constexpr = x.dtype.element_ty
    for start in range(begin, end, TILE):
        index = start + tl.arange(0, TILE)
        values = tl.load(x + index, mask=index < end)
        for turn in tl.static_range(1, SIZE):
            other = (rank + turn) % SIZE
            slot = region(buffer_of(buffers, other, SIZE), stage, dtype) + slot_of(rank, other, numel)
            tl.store(slot + index, values, mask=index < end)


@jit()
def sum_of_whole(x, own, stage, rank, numel, index, inside, SIZE: tl.constexpr):
    """``x[index]`` and what the peers pushed there, added in rank order in float32, rounded once."""
    dtype: tl.constexpr = x.dtype.element_ty
    staged = region(own, stage, dtype)
    total = tl.zeros(index.shape, tl.float32)
    for other in tl.static_range(SIZE):
        pushed = staged + slot_of(other, rank, numel)
        source = tl.multiple_of(tl.where(rank == other, x, pushed), 16)
        part = tl.load(source + index, mask=inside, other=0.0).to(tl.float32)
        total = part if other == 0 else total + part
    return total.to(dtype)


@jit()
def _parts_of(begin, end, SIZE: tl.constexpr, PART: tl.constexpr = _PART):
    """Values of a rank's part of a program's ``[begin, end)``, and where in a stage the program's parts begin."""
    part = tl.cdiv(tl.cdiv(end - begin, SIZE), PART) * PART
    return part, begin + tl.program_id(0) * (SIZE * PART)


@jit()
def push_parts(x, buffers, stage, rank, begin, end, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Store every rank's part of ``x[begin:end]`` into that rank's stage, the next rank's first."""
    dtype: tl.constexpr = x.dtype.element_ty
    part, base = _parts_of(begin, end, SIZE)
    for start in range(0, part, TILE):
        index = start + tl.arange(0, TILE)
        # All loads first, or each would wait for the store before it.
        values = ()
        for turn in tl.static_range(1, SIZE + 1):
            at = begin + (rank + turn) % SIZE * part + index
            values = values + (tl.load(x + at, mask=(index < part) & (at < end)),)  # type: ignore[assignment]
        for turn in tl.static_range(1, SIZE + 1):
            other = (rank + turn) % SIZE
            target = region(buffer_of(buffers, other, SIZE), stage, dtype) + base + rank * part
            inside = (index < part) & (begin + other * part + index < end)
            tl.store(target + index, values[turn - 1], mask=inside)


@jit()
def sum_and_push_parts(
    buffers, own, stage, gathered, rank, begin, end, dtype: tl.constexpr, SIZE: tl.constexpr, TILE: tl.constexpr
):
    """Sum this rank's part of ``[begin, end)``, as `sum_of_whole` does, and store it into everybody's `gathered`."""
    part, base = _parts_of(begin, end, SIZE)
    staged = region(own, stage, dtype) + base
    for start in range(0, part, TILE):
        index = start + tl.arange(0, TILE)
        at = begin + rank * part + index
        inside = (index < part) & (at < end)
        total = tl.zeros([TILE], tl.float32)
        for other in tl.static_range(SIZE):
            value = tl.load(staged + other * part + index, mask=inside, other=0.0).to(tl.float32)
            total = value if other == 0 else total + value
        for turn in tl.static_range(1, SIZE + 1):
            target = region(buffer_of(buffers, (rank + turn) % SIZE, SIZE), gathered, dtype)
            tl.store(target + at, total.to(dtype), mask=inside)
