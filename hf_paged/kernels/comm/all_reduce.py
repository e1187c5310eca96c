# mypy: disallow-untyped-defs=False
"""All-reduce over the GPUs of one host through peers' memory, alone or with residual add and RMSNorm.

In one shot every rank sums all inputs. In two shots every rank sums one N-th of the values and stores the sums into all
buffers, so that 2 (N - 1) / N inputs go over the links and not N - 1. Short inputs are posted, long inputs are
signalled (`_peers.py` explains both); in one signalled shot, ranks read the inputs over the links. All results are
bitwise equal to `all_reduce_reference`, and so equal on all ranks. No kernel uses multicast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hf_paged.kernels._triton import (
    after_previous_kernel,
    cdiv,
    constants,
    jit,
    next_power_of_2,
    on_device_of,
    pdl_options,
    prefetch_vector,
    require_triton,
    tl,
)
from hf_paged.kernels.comm._peers import (
    MAX_PROGRAMS,
    SIGNAL_BYTES,
    CallShape,
    Peers,
    begin_call,
    buffer_of,
    copy_flat,
    end_call,
    gathered_at,
    post_whole,
    push_parts,
    region,
    sum_and_push_parts,
    sum_of_posted,
    sum_of_stages,
    wait_for_peers,
)
from hf_paged.kernels.layer.add_rms_norm import normed_row


class Algorithm(NamedTuple):
    """How to all-reduce: in 1 or 2 shots, posted or signalled."""

    shots: int
    posted: bool


ALGORITHMS = tuple(Algorithm(shots, posted) for shots in (1, 2) for posted in (True, False))
# By number of ranks: the algorithm up to that many bytes of an input; beyond the last, NCCL is the faster one. Measured
# on H200s for two, four and eight ranks (benchmarks/all_reduce_speed.py); between two, NCCL never is, of the 80 MiB
# that were tried. Others lie between their neighbours.
FASTEST = {
    2: ((1536 << 10, Algorithm(1, True)), (96 << 20, Algorithm(1, False))),
    **{size: ((8 << 20, Algorithm(2, True)), (48 << 20, Algorithm(2, False))) for size in (3, 4)},
    **{size: ((8 << 20, Algorithm(2, True)), (28 << 20, Algorithm(2, False))) for size in (5, 6, 7, 8)},
}
# Programs that post the values of one row, where there are few rows, and the most programs in all. The program that
# norms the row waits for the others, so the grid has to fit on the multiprocessors at once.
_SPREAD, _MAX_SPREAD = 4, 64

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def choose_algorithm(size: int, num_bytes: int) -> Algorithm | None:
    """Return the fastest algorithm for `num_bytes` over `size` ranks; None if NCCL is faster."""
    return next((found for limit, found in FASTEST.get(size, ()) if num_bytes <= limit), None)


def choose_algorithm_for(x: torch.Tensor, peers: Peers) -> Algorithm | None:
    """Return :func:`choose_algorithm` for a tensor; None also if it is not in rows of whole 16-byte vectors."""
    if x.dtype not in _DTYPES or not x.is_cuda or not x.is_contiguous():
        return None
    aligned = x.data_ptr() % 16 == 0 and x.shape[-1] * x.element_size() % 16 == 0
    return _fastest(x, peers) if aligned else None


def _fastest(x: torch.Tensor, peers: Peers) -> Algorithm | None:
    found = choose_algorithm(peers.size, x.nbytes)
    return found if found and peers.takes(x.nbytes, *found) else None


def all_reduce_reference(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the ranks' equally shaped tensors: added in rank order in float32, rounded once to their dtype.
    """
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


def all_reduce(x: torch.Tensor, peers: Peers, algorithm: Algorithm | None = None) -> torch.Tensor:
    """Return the sum over ranks of `x` as a new tensor; all ranks call this with the same shape, on one stream each.

    Args:
        x: contiguous, 16-byte aligned, bfloat16, float16 or float32, at most ``peers.capacity`` bytes.
        peers: this rank's view of the others.
        algorithm: one of `ALGORITHMS` for which ``peers.takes`` the input; None: what
            :func:`choose_algorithm` says, and signals where that prefers NCCL.

    Raises:
        ValueError: an x that is not as above, or too large for the algorithm.
    """
    algorithm = _check(x, peers, algorithm)
    require_triton()
    out = torch.empty_like(x)
    numel = x.numel()
    if numel == 0:
        return out
    # Two 16-byte vectors a thread and rank in flight for long inputs, one and more programs for short ones.
    vector = 16 // x.element_size()
    tile = min(max(next_power_of_2(cdiv(numel, MAX_PROGRAMS)), 512 * vector), 1024 * vector)
    num_programs = min(MAX_PROGRAMS, cdiv(numel, tile))
    with on_device_of(x):
        _all_reduce_kernel[(num_programs,)](
            x, out, peers.buffers, peers.epochs, peers.abort, peers.rank, numel,
            cdiv(cdiv(numel, num_programs), 64) * 64, num_warps=16, **_options(x, peers, algorithm, tile),
        )
    return out


def all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float, peers: Peers,
    algorithm: Algorithm | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``summed = residual + all_reduce(x)`` and ``normed = RMSNorm(summed)``, as (normed, summed), in one launch.

    Bitwise what `add_rms_norm` gives for :func:`all_reduce`'s result.

    Args:
        x: ``[T, H]`` as for :func:`all_reduce`; rows of whole 16-byte vectors.
        residual: ``[T, H]`` of x's dtype, rows may be strided; None: nothing is added. The same on all ranks.
        weight: ``[H]``, x's dtype, contiguous.
        eps: added to the mean square.
        peers, algorithm: as for :func:`all_reduce`.

    Raises:
        ValueError: tensors that are not as above.
    """
    algorithm = _check(x, peers, algorithm)
    _check_norm(x, residual, weight)
    require_triton()
    num_rows, width = x.shape
    normed, summed = torch.empty_like(x), torch.empty_like(x)
    if num_rows == 0:
        return normed, summed
    width_pad = next_power_of_2(width)
    # As in add_rms_norm: the order in which a row's squares are added depends on it.
    num_warps = max(1, min(16, width_pad // 256))
    rows = cdiv(num_rows, MAX_PROGRAMS)
    num_programs, vectors = cdiv(num_rows, rows), rows * width * x.element_size() // 16
    if algorithm.posted and num_programs * _SPREAD <= _MAX_SPREAD:
        num_programs *= _SPREAD
        vectors = cdiv(x.nbytes // 16, num_programs)
    with on_device_of(x):
        _all_reduce_add_rms_norm_kernel[(num_programs,)](
            x, x if residual is None else residual, weight, normed, summed, peers.buffers, peers.epochs, peers.abort,
            peers.rank, num_rows, rows, vectors, 0 if residual is None else residual.stride(0), eps,
            HAS_RESIDUAL=residual is not None, WIDTH=width, WIDTH_PAD=width_pad, num_warps=num_warps,
            **_options(x, peers, algorithm, num_warps * 32 * 16 // x.element_size()),
        )
    return normed, summed


def _options(x: torch.Tensor, peers: Peers, algorithm: Algorithm, tile: int) -> dict[str, Any]:
    shape = CallShape(peers.size, *algorithm, tile, SIGNAL_BYTES, peers.mailbox_bytes, peers.stage_bytes, MAX_PROGRAMS,
                      x.is_cuda)
    return {"C": constants(shape), "enable_fp_fusion": False, **pdl_options(x)}


@jit(varying_ints=("rank",))
def _all_reduce_kernel(
    x, out, buffers, epochs, abort, rank, numel, share, C: tl.constexpr, PDL: tl.constexpr,
):
    after_previous_kernel(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    epoch = begin_call(epochs)
    stage, gathered = _memory(epoch, C)
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, numel)
    own = buffer_of(buffers, rank, C)
    _push(x, buffers, own, stage, rank, begin, end, numel, C)
    _exchange(buffers, own, stage, gathered, abort, rank, epoch, begin, end, dtype, C)
    for start in range(begin, end, C.tile):
        index = start + tl.arange(0, C.tile)
        inside = index < end
        total = _sum_at(buffers, own, stage, gathered, abort, index, inside, numel, dtype, C)
        tl.store(out + index, total, mask=inside)
    end_call(epochs, epoch, C)


@jit(varying_ints=("rank", "num_rows", "rows", "vectors"))
def _all_reduce_add_rms_norm_kernel(
    x, residual, weight, normed, summed, buffers, epochs, abort, rank, num_rows, rows, vectors, residual_stride, eps,
    HAS_RESIDUAL: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PAD: tl.constexpr, C: tl.constexpr, PDL: tl.constexpr,
):
    if PDL:
        prefetch_vector(weight, WIDTH * weight.dtype.element_ty.primitive_bitwidth // 8)
    after_previous_kernel(PDL)
    dtype: tl.constexpr = x.dtype.element_ty
    epoch = begin_call(epochs)
    stage, gathered = _memory(epoch, C)
    numel = num_rows * WIDTH
    share = vectors * (128 // dtype.primitive_bitwidth)
    begin = tl.program_id(0) * share
    end = tl.minimum(begin + share, numel)
    own = buffer_of(buffers, rank, C)
    _push(x, buffers, own, stage, rank, begin, end, numel, C)
    column = tl.arange(0, WIDTH_PAD)
    inside = column < WIDTH
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    _exchange(buffers, own, stage, gathered, abort, rank, epoch, begin, end, dtype, C)
    first = tl.program_id(0) * rows
    residual += first.to(tl.int64) * residual_stride
    for row in range(first, tl.minimum(first + rows, num_rows)):
        index = row * WIDTH + column
        if HAS_RESIDUAL:
            before = tl.load(residual + column, mask=inside, other=0.0).to(tl.float32)
            residual += residual_stride
        rounded = _sum_at(buffers, own, stage, gathered, abort, index, inside, numel, dtype, C)
        hidden = rounded.to(tl.float32)
        if HAS_RESIDUAL:
            hidden += before
            rounded = hidden.to(dtype)
            hidden = rounded.to(tl.float32)
        tl.store(summed + index, rounded, mask=inside)
        tl.store(normed + index, normed_row(hidden, scale, eps, dtype, dtype, WIDTH), mask=inside)
    end_call(epochs, epoch, C)


@jit()
def _memory(epoch, C: tl.constexpr):
    """Return the offsets in a buffer at which this call stores inputs, and sums."""
    if C.posted:
        stage = C.data + (epoch % 2) * C.mailbox
        gathered = stage + C.mailbox // 2
    else:
        stage = C.data + 2 * C.mailbox + (epoch % 2) * C.stage
        gathered = epoch * 0 + (C.data + 2 * C.mailbox + 2 * C.stage)
    return stage, gathered


@jit()
def _push(x, buffers, own, stage, rank, begin, end, numel, C: tl.constexpr):
    """Store ``x[begin:end]`` into the memory from which other ranks read it."""
    if C.shots == 2:
        push_parts(x, buffers, stage, rank, begin, end, C)
    elif C.posted:
        post_whole(x, buffers, stage, rank, begin, end, numel, C)
    else:
        copy_flat(x, region(own, stage, x.dtype.element_ty), begin, end, C.tile)


@jit()
def _exchange(buffers, own, stage, gathered, abort, rank, epoch, begin, end, dtype: tl.constexpr, C: tl.constexpr):
    """Wait for the peers' inputs of ``[begin, end)``, in two shots also for their sums; then `_sum_at` may read."""
    if C.compiled and not C.posted:
        wait_for_peers(buffers, abort, rank, epoch, 0, C)
    if C.shots == 2:
        sum_and_push_parts(buffers, own, stage, gathered, rank, begin, end, abort, dtype, C)
        if C.compiled and not C.posted:
            wait_for_peers(buffers, abort, rank, epoch, 1, C)


@jit()
def _sum_at(buffers, own, stage, gathered, abort, index, inside, numel, dtype: tl.constexpr, C: tl.constexpr):
    """Return the sum over ranks at `index`, rounded. Where values are posted it can be read once only."""
    if C.shots == 2:
        total = gathered_at(own, gathered, index, inside, abort, dtype, C)
    elif C.posted:
        total = sum_of_posted(own, stage, numel, index, inside, abort, dtype, C)
    else:
        total = sum_of_stages(buffers, stage, index, inside, dtype, C)
    return total


def _check(x: torch.Tensor, peers: Peers, algorithm: Algorithm | None) -> Algorithm:
    if x.dtype not in _DTYPES:
        raise ValueError(f"x must be one of {', '.join(map(str, _DTYPES))}, got {x.dtype}")
    if not x.is_contiguous() or x.data_ptr() % 16:
        raise ValueError(f"x must be contiguous and 16-byte aligned, got strides {x.stride()} at {x.data_ptr():#x}")
    if x.nbytes > peers.capacity:
        raise ValueError(f"x must have at most {peers.capacity} bytes (the peers' capacity), got {x.nbytes}")
    if algorithm is None:
        return _fastest(x, peers) or Algorithm(2, False)
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(map(str, ALGORITHMS))} or None, got {algorithm}")
    if not peers.takes(x.nbytes, *algorithm):
        raise ValueError(f"x is too long for {algorithm} over these peers: got {x.nbytes} bytes")
    return algorithm


def _check_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor) -> None:
    if x.dim() != 2 or weight.shape != x.shape[1:] or x.shape[1] == 0:
        raise ValueError(f"x must be [T, H] and weight [H], H > 0, got {tuple(x.shape)} and {tuple(weight.shape)}")
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")
    dtypes = {t.dtype for t in (x, residual, weight) if t is not None}
    if len(dtypes) > 1:
        raise ValueError(f"x, residual and weight must share a dtype, got {sorted(map(str, dtypes))}")
    if any(t is not None and t.stride(-1) != 1 for t in (x, residual, weight)):
        raise ValueError("the last dim of x, residual and weight must be contiguous")
    if x.shape[1] * x.element_size() % 16:
        raise ValueError(f"x's rows must be whole 16-byte vectors, got {x.shape[1]} columns of {x.dtype}")
