# mypy: disallow-untyped-defs=False
"""The sum over the GPUs of one host, alone or with residual add and RMSNorm, by stores into peers' memory.

One-shot: every rank gives everybody its input, and sums all of it: one exchange of signals, (N - 1) inputs over the
links. Two-shot: every rank gets, sums and gives back one N-th: two exchanges, 2 (N - 1) / N inputs over the links.
Both are bitwise equal to `all_reduce_reference` and so on all ranks. See `_peers.py` for how ranks wait for each other.
Nothing here uses multicast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hf_paged.kernels._peers import (
    MAX_PROGRAMS,
    SIGNAL_BYTES,
    Peers,
    begin_call,
    buffer_of,
    copy_flat,
    end_call,
    push_parts,
    push_whole,
    region,
    sum_and_push_parts,
    sum_of_whole,
    wait_for_peers,
)
from hf_paged.kernels._triton import (
    after_previous_kernel,
    jit,
    on_device_of,
    pdl_options,
    prefetch_vector,
    require_triton,
    tl,
    triton,
)
from hf_paged.kernels.add_rms_norm import add_rms_norm_reference, check_norm, normed_row

# Bytes of an input up to which one shot is taken, by number of ranks, and beyond which (up to PEER_BYTES) two.
# Two and four ranks: measured on H200s (benchmarks/all_reduce_speed.py). Others: from what these say of the second
# exchange, 2 us or 600 KB over the links.
ONE_SHOT_BYTES = {2: 12 << 20, 3: 896 << 10, 4: 384 << 10, 5: 256 << 10, 6: 176 << 10, 7: 144 << 10, 8: 112 << 10}
# Bytes of an input beyond which NCCL is the faster one; between two ranks it is never, of the 80 MiB that were tried.
PEER_BYTES = {2: 96 << 20, 4: 48 << 20, **dict.fromkeys((3, 5, 6, 7, 8), 16 << 20)}

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def shots(size: int, num_bytes: int) -> int:
    """How to all-reduce `num_bytes` over `size` ranks: 1 or 2 shots of :func:`all_reduce`, or 0: NCCL is faster."""
    if size not in PEER_BYTES or num_bytes > PEER_BYTES[size]:
        return 0
    return 1 if num_bytes <= ONE_SHOT_BYTES[size] else 2


def shots_for(x: torch.Tensor, peers: Peers) -> int:
    """:func:`shots` for a tensor, or 0 where the kernels here do not take it; in rows of whole 16-byte vectors."""
    fits = x.dtype in _DTYPES and x.is_cuda and x.is_contiguous() and x.nbytes <= peers.capacity
    aligned = x.data_ptr() % 16 == 0 and x.shape[-1] * x.element_size() % 16 == 0
    return shots(peers.size, x.nbytes) if fits and aligned else 0


def all_reduce_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the ranks' equally shaped tensors: added in rank order in float32, rounded once to their dtype."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def all_reduce_add_rms_norm_reference(
    parts: Sequence[torch.Tensor], residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` of :func:`all_reduce_reference` and residual, as (normed, summed)."""
    return add_rms_norm_reference(all_reduce_reference(parts), residual, weight, eps)


def all_reduce(x: torch.Tensor, peers: Peers, num_shots: int | None = None) -> torch.Tensor:
    """The sum over ranks of `x`, as a new tensor; all ranks call it with the same shape, on one stream each.

    Args:
        x: contiguous, 16-byte aligned, bfloat16, float16 or float32, at most ``peers.capacity`` bytes.
        peers: this rank's view of the others.
        num_shots: 1 (up to ``peers.one_shot_capacity`` bytes) or 2; None: what :func:`shots` says, and 2 where that
            prefers NCCL.

    Raises:
        ValueError: an x that is not as above, or another number of shots.
    """
    num_shots = _check(x, peers, num_shots)
    require_triton()
    out = torch.empty_like(x)
    numel = x.numel()
    if numel == 0:
        return out
    # Two 16-byte vectors a thread and rank in flight for long inputs, one and more programs for short ones.
    vector = 16 // x.element_size()
    tile = min(max(triton.next_power_of_2(triton.cdiv(numel, MAX_PROGRAMS)), 512 * vector), 1024 * vector)
    num_programs = min(MAX_PROGRAMS, triton.cdiv(numel, tile))
    with on_device_of(x):
        _all_reduce_kernel[(num_programs,)](
            x, out, peers.buffers, peers.epochs, peers.abort, peers.rank, numel,
            triton.cdiv(triton.cdiv(numel, num_programs), 64) * 64,
            SIZE=peers.size, SHOTS=num_shots, TILE=tile, DATA=SIGNAL_BYTES, STAGE=peers.stage_bytes,
            MAX_PROGRAMS=MAX_PROGRAMS, COMPILED=x.is_cuda, num_warps=16, enable_fp_fusion=False, **pdl_options(x),
        )  # fmt: skip
    return out


def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    peers: Peers,
    num_shots: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``summed = residual + all_reduce(x)`` and ``normed = RMSNorm(summed)``, as (normed, summed), in one launch.

    Bitwise what `add_rms_norm` gives for :func:`all_reduce`'s result.

    Args:
        x: ``[T, H]`` as for :func:`all_reduce`; rows of whole 16-byte vectors.
        residual: ``[T, H]`` of x's dtype, rows may be strided; None: nothing is added. The same on all ranks.
        weight: ``[H]``, x's dtype, contiguous.
        eps: added to the mean square.
        peers, num_shots: as for :func:`all_reduce`.

    Raises:
        ValueError: tensors that are not as above.
    """
    num_shots = _check(x, peers, num_shots)
    _check_norm(x, residual, weight)
    require_triton()
    num_rows, width = x.shape
    normed, summed = torch.empty_like(x), torch.empty_like(x)
    if num_rows == 0:
        return normed, summed
    width_pad = triton.next_power_of_2(width)
    # As in add_rms_norm: the order in which a row's squares are added depends on it.
    num_warps = max(1, min(16, width_pad // 256))
    rows = triton.cdiv(num_rows, MAX_PROGRAMS)
    with on_device_of(x):
        _all_reduce_add_rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
            x, x if residual is None else residual, weight, normed, summed, peers.buffers, peers.epochs, peers.abort,
            peers.rank, num_rows, rows, 0 if residual is None else residual.stride(0), eps,
            HAS_RESIDUAL=residual is not None, WIDTH=width, WIDTH_PAD=width_pad, SIZE=peers.size, SHOTS=num_shots,
            TILE=num_warps * 32 * 16 // x.element_size(), DATA=SIGNAL_BYTES, STAGE=peers.stage_bytes,
            MAX_PROGRAMS=MAX_PROGRAMS, COMPILED=x.is_cuda, num_warps=num_warps, enable_fp_fusion=False,
            **pdl_options(x),
        )  # fmt: skip
    return normed, summed


@jit(varying_ints=("rank",))
def _all_reduce_kernel(
    x, out, buffers, epochs, abort, rank, numel, share,
    SIZE: tl.constexpr, SHOTS: tl.constexpr, TILE: tl.constexpr, DATA: tl.constexpr, STAGE: tl.constexpr,
    MAX_PROGRAMS: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous_kernel(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    epoch = begin_call(epochs)
    stage = DATA + (epoch % 2) * STAGE
    gathered: tl.constexpr = DATA + 2 * STAGE
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, numel)
    own = buffer_of(buffers, rank, SIZE)
    if SHOTS == 2:
        push_parts(x, buffers, stage, rank, begin, end, SIZE, TILE)
        if COMPILED:
            wait_for_peers(buffers, abort, rank, epoch, 0, SIZE, MAX_PROGRAMS)
        sum_and_push_parts(buffers, own, stage, gathered, rank, begin, end, dtype, SIZE, TILE)
        if COMPILED:
            wait_for_peers(buffers, abort, rank, epoch, 1, SIZE, MAX_PROGRAMS)
        copy_flat(region(own, gathered, dtype), out, begin, end, TILE)
    else:
        push_whole(x, buffers, stage, rank, begin, end, numel, SIZE, TILE)
        if COMPILED:
            wait_for_peers(buffers, abort, rank, epoch, 0, SIZE, MAX_PROGRAMS)
        for start in range(begin, end, TILE):
            index = start + tl.arange(0, TILE)
            total = sum_of_whole(x, own, stage, rank, numel, index, index < end, SIZE)
            tl.store(out + index, total, mask=index < end)
    end_call(epochs, epoch, MAX_PROGRAMS)


@jit(varying_ints=("rank", "num_rows", "rows"))
def _all_reduce_add_rms_norm_kernel(
    x, residual, weight, normed, summed, buffers, epochs, abort, rank, num_rows, rows, residual_stride, eps,
    HAS_RESIDUAL: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, SIZE: tl.constexpr, SHOTS: tl.constexpr,
    TILE: tl.constexpr, DATA: tl.constexpr, STAGE: tl.constexpr, MAX_PROGRAMS: tl.constexpr, COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        prefetch_vector(weight, WIDTH * weight.dtype.element_ty.primitive_bitwidth // 8)
    after_previous_kernel(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    epoch = begin_call(epochs)
    stage = DATA + (epoch % 2) * STAGE
    gathered: tl.constexpr = DATA + 2 * STAGE
    first = tl.program_id(0) * rows
    last = tl.minimum(first + rows, num_rows)
    numel = num_rows * WIDTH
    own = buffer_of(buffers, rank, SIZE)
    if SHOTS == 2:
        push_parts(x, buffers, stage, rank, first * WIDTH, last * WIDTH, SIZE, TILE)
    else:
        push_whole(x, buffers, stage, rank, first * WIDTH, last * WIDTH, numel, SIZE, TILE)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if COMPILED:
        wait_for_peers(buffers, abort, rank, epoch, 0, SIZE, MAX_PROGRAMS)
    if SHOTS == 2:
        sum_and_push_parts(buffers, own, stage, gathered, rank, first * WIDTH, last * WIDTH, dtype, SIZE, TILE)
        if COMPILED:
            wait_for_peers(buffers, abort, rank, epoch, 1, SIZE, MAX_PROGRAMS)
    residual += first.to(tl.int64) * residual_stride
    for row in range(first, last):
        index = row * WIDTH + column
        if HAS_RESIDUAL:
            before = tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
            residual += residual_stride
        if SHOTS == 2:
            rounded = tl.load(region(own, gathered, dtype) + index, mask=inside, other=0.0)
        else:
            rounded = sum_of_whole(x, own, stage, rank, numel, index, inside, SIZE)
        hidden = rounded.to(tl.float32)
        if HAS_RESIDUAL:
            hidden += before
            rounded = hidden.to(dtype)
            hidden = rounded.to(tl.float32)
        tl.store(summed + index, rounded, mask=inside)
        tl.store(normed + index, normed_row(hidden, scale, eps, dtype, WIDTH), mask=inside)
    end_call(epochs, epoch, MAX_PROGRAMS)


def _check(x: torch.Tensor, peers: Peers, num_shots: int | None) -> int:
    if x.dtype not in _DTYPES:
        raise ValueError(f"x must be one of {', '.join(map(str, _DTYPES))}, got {x.dtype}")
    if not x.is_contiguous() or x.data_ptr() % 16:
        raise ValueError(f"x must be contiguous and 16-byte aligned, got strides {x.stride()} at {x.data_ptr():#x}")
    if x.nbytes > peers.capacity:
        raise ValueError(f"x must have at most {peers.capacity} bytes (the peers' capacity), got {x.nbytes}")
    if num_shots is None:
        return shots(peers.size, x.nbytes) or 2
    if num_shots not in (1, 2):
        raise ValueError(f"num_shots must be 1, 2 or None, got {num_shots}")
    if num_shots == 1 and x.nbytes > peers.one_shot_capacity:
        raise ValueError(f"x must have at most {peers.one_shot_capacity} bytes for one shot, got {x.nbytes}")
    return num_shots


def _check_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> None:
    check_norm(x, residual, weight)
    if x.shape[1] * x.element_size() % 16:
        raise ValueError(f"x's rows must be whole 16-byte vectors, got {x.shape[1]} columns of {x.dtype}")
