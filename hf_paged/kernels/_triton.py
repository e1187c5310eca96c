"""Triton where it is installed; without it the kernel files still import and only a launch fails.

With ``TRITON_INTERPRET=1`` in the environment before the first import, every kernel here runs on CPU tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from hf_paged.device.cuda import compute_capability
from hf_paged.kernels.build.compiling import Kernel

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None

# Larger weights are not prefetched, whose beginning might be out of L2 (50 MB on Hopper) again before it is read: one
# of 32 MiB a layer costs 1 to 2 % of a step on an H200.
_PREFETCH_BYTES = 16 << 20

__all__ = [
    "after_previous_kernel", "cdiv", "column_numbers", "constants", "jit", "next_power_of_2", "on_device_of",
    "pdl_options", "pdl_supported", "prefetch_options", "prefetch_rows", "prefetch_vector", "require_triton",
    "row_of_tile", "tl", "triton", "why_not_on",
]


def jit(
    *, varying_ints: tuple[str, ...] = (), varying_pointers: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """``triton.jit``, whose kernels are a `Kernel` each, or the bare function where Triton is missing.

    Values of ``varying_ints`` and alignments of ``varying_pointers`` change from step to step and compile nothing.
    """
    if triton is None:
        return lambda fn: fn
    ints, pointers = list(varying_ints), list(varying_pointers)
    options: dict[str, Any] = {"do_not_specialize": ints, "do_not_specialize_on_alignment": pointers}
    return triton.jit(**options) if triton.knobs.runtime.interpret else partial(Kernel, **options)


@lru_cache(maxsize=1024, typed=True)
def constants(shape: Any) -> Any:
    """Return a NamedTuple whose fields are constants to a kernel that takes it as one argument, for the kernel alone.

    Triton 3.6 hands out plain numbers otherwise, which it takes for no size of a tensor and no `tl.static_range`; its
    interpreter takes nothing else.
    """
    if tl is None or triton.knobs.runtime.interpret:
        return shape
    return _class_of_constants(shape.__class__)(*shape)


@lru_cache(maxsize=16)
def _class_of_constants(kind: Any) -> Any:
    def field(at: int) -> property:
        return property(lambda self: tl.constexpr(self[at]))

    return type(kind.__name__, (kind,), {
        "__slots__": (), "__reduce__": lambda self: (constants, (kind(*self),)),
        **{name: field(at) for at, name in enumerate(kind._fields)}})


def column_numbers(columns: Any) -> list[Any]:
    """A number for each field of a NamedTuple class, in order, and how many there are; kernels see them as globals."""
    return [i if tl is None else tl.constexpr(i) for i in range(len(columns._fields) + 1)]


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context in which the tensor's device is the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def require_triton() -> None:
    """Raise ``RuntimeError`` if Triton, which a kernel needs, is not installed."""
    if triton is None:
        raise RuntimeError("this kernel needs triton, which is not installed: install triton or use the torch backend")


def why_not_on(device: torch.device) -> str | None:
    """Return why a device does not run the kernels, or None."""
    is_known = triton is not None and (compute_capability(device) or (0, 0)) >= (8, 0)
    return None if is_known else "the kernels need Triton and an NVIDIA GPU of compute capability 8.0 or more"


def cdiv(count: int, size: int) -> int:
    """Return how many tiles of a size cover a count, faster than ``triton.cdiv``, which takes 2 us on the host."""
    return -(-count // size)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not less than a number above 0; like `cdiv`, for the host alone."""
    return 1 << (number - 1).bit_length()


# Programmatic dependent launch (Hopper and later): a kernel is put on the machine while the one before it still runs.
# The rule for every kernel launched with `pdl_options`: each program calls `after_previous_kernel` before its first
# read of what another such kernel writes, before its first global write, and before any early return. Then a
# finished kernel means that all kernels before it have finished, and a program may rely on everything that was written
# earlier on the stream, as without PDL. Ahead of the call only prefetches into L2 are allowed: L2 is coherent, so it
# does not matter whether an earlier kernel (an optimizer's step) still writes what is prefetched; registers and shared
# memory are not, so no load of weights goes there.


@lru_cache(maxsize=64)
def pdl_supported(device: torch.device) -> bool:
    """Return whether kernels on `device` can start before their predecessor ends: from Hopper on, not interpreted."""
    if triton is None or triton.knobs.runtime.interpret:
        return False
    return (compute_capability(device) or (0, 0)) >= (9, 0) and hasattr(tl.extra.cuda, "gdc_wait")


def pdl_options(tensor: torch.Tensor) -> dict[str, bool]:
    """Launch arguments of a kernel with a ``PDL`` constexpr."""
    # A launch option that old Tritons do not know is only named where it is wanted.
    return {"PDL": True, "launch_pdl": True} if pdl_supported(tensor.device) else {"PDL": False}


def prefetch_options(weight: torch.Tensor, fits_threads: bool = True) -> dict[str, bool]:
    """Return `pdl_options` and whether ``prefetch_rows`` takes this matrix: aligned, and small enough to stay in L2."""
    options, size = pdl_options(weight), weight.element_size()
    aligned = not (weight.data_ptr() | weight.stride(0) * size | weight.shape[1] * size) % 16
    fits = weight.numel() * size <= _PREFETCH_BYTES and fits_threads
    return {**options, "PREFETCH": options["PDL"] and aligned and fits}


@jit()
def after_previous_kernel(PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel be put on the machine, and wait until the previous one has finished and written."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@jit()
def prefetch_rows(pointer, count, row_bytes, stride_bytes):  # type: ignore[no-untyped-def]
    """Into L2: `count` rows (at most one a thread) of `row_bytes`; all sizes and the address are multiples of 16."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 t; .reg .u64 a;
        mov.u32 t, %tid.x;
        setp.lt.s32 p, t, $2;
        mad.wide.u32 a, t, $4, $1;
        @p cp.async.bulk.prefetch.L2.global [a], $3;
        mov.u32 $0, 0;
        }""",
        "=r,l,r,r,r", [pointer.to(tl.int64), count, row_bytes, stride_bytes], tl.int32, is_pure=False, pack=1,
    )


@jit()
def prefetch_vector(pointer, num_bytes):  # type: ignore[no-untyped-def]
    """Into L2: `num_bytes` from `pointer`, 32 a thread."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 t; .reg .u64 a;
        mov.u32 t, %tid.x;
        mul.lo.u32 t, t, 32;
        setp.lt.s32 p, t, $2;
        cvt.u64.u32 a, t;
        add.u64 a, a, $1;
        @p prefetch.global.L2 [a];
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [pointer.to(tl.int64), num_bytes], tl.int32, is_pure=False, pack=1,
    )


@jit()
def row_of_tile(starts, tile, num_rows, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of rows of packed tokens in tiles of SIZE, the largest whose first tile, ``starts[row] // SIZE + row``, is not
    after ``tile``; T tokens of R rows have at most ``T // SIZE + R`` tiles, some of them behind their row's end."""
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // SIZE + middle <= tile:
            low = middle
        else:
            high = middle
    return low
