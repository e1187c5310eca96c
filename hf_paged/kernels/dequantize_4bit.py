# mypy: disallow-untyped-defs=False
"""Weights of 4 bits in bitsandbytes' format, dequantised together by a `CopyPlan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from hf_paged.device.cuda import upload
from hf_paged.kernels._triton import jit, on_device_of, tl

CHUNK = 1 << 15  # values that a program makes
TILE = 2048  # bytes at a time, of two values each
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_COLUMNS = 11


class NestedScales(NamedTuple):
    """How scales of 8 bits are read: ``code[scale] * absmax[index // block_size]``, rounded, plus ``offset``.

    ``code`` [256], ``absmax`` and ``offset`` (one element) are float32.
    """

    code: torch.Tensor
    absmax: torch.Tensor
    offset: torch.Tensor
    block_size: int


class Packed4Bit(NamedTuple):
    """A weight of 4-bit numbers, two a byte, the high half first, row by row.

    A value is ``code[number] * scale`` in float32, rounded once. Value i of the flat weight has the scale
    ``absmax[i // block_size]``: float32, or uint8 with ``nested``. ``code`` [16] is float32.
    """

    data: torch.Tensor  # [bytes] uint8
    shape: torch.Size  # of the weight, [n, k]
    code: torch.Tensor
    absmax: torch.Tensor
    block_size: int
    nested: NestedScales | None = None

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the bytes."""
        return self.data.dtype

    def numel(self) -> int:
        """Return the number of values."""
        return math.prod(self.shape)

    def _tensors(self) -> list[torch.Tensor]:
        return [self.data, self.code, self.absmax, *(self.nested[:3] if self.nested else ())]


def dequantized_reference(source: Packed4Bit) -> torch.Tensor:
    """Return a weight's values [n, k] in float32, by plain torch."""
    scales = source.absmax
    if (nested := source.nested) is not None:
        scales = nested.code[scales.int()] * nested.absmax.repeat_interleave(nested.block_size)[: len(scales)]
        scales = scales + nested.offset
    numbers = torch.stack([source.data >> 4, source.data & 15], dim=-1).flatten().int()
    return (source.code[numbers] * scales.repeat_interleave(source.block_size)[: len(numbers)]).view(source.shape)


def packed_error(source: Packed4Bit) -> str:
    """Return what of a weight is not as `Packed4Bit` says; "" if all is."""
    scales, nested, tensors = -(-source.numel() // source.block_size), source.nested, source._tensors()
    dtypes, sizes = [t.dtype for t in tensors], [t.numel() for t in tensors]
    wanted = [torch.uint8, torch.float32, torch.uint8 if nested else torch.float32, *[torch.float32] * 3]
    expected = [source.numel() // 2, 16, scales, 256, -(-scales // (nested.block_size if nested else 1)), 1]
    even = source.numel() % 32 == 0 and source.block_size % 2 == 0 and all(t.is_contiguous() for t in tensors)
    if dtypes == wanted[: len(dtypes)] and sizes == expected[: len(sizes)] and even:
        return ""
    return (f"bytes, code, scales of {dtypes} and sizes {sizes} for blocks of {source.block_size} of "
            f"{list(source.shape)}: expected {wanted[: len(dtypes)]} and {expected[: len(sizes)]}")


def check_packed(sources: Sequence[Packed4Bit], targets: Sequence[torch.Tensor]) -> None:
    """Raise ValueError for weights and targets that are not as `CopyPlan` says."""
    for source, target in zip(sources, targets, strict=True):
        fits = target.is_contiguous() and target.data_ptr() % 16 == 0
        if source.shape != target.shape or target.dtype not in _DTYPES or not fits:
            raise ValueError(f"source {list(source.shape)}, target {target.dtype} {list(target.shape)} with strides "
                             f"{target.stride()}: expected equal shapes, and contiguous fp32, fp16 or bf16")
        if error := packed_error(source):
            raise ValueError(error)


def packed_signature(sources: Sequence[Packed4Bit]) -> list[Any]:
    """Return what `packed_tables` are made for."""
    return [(s.shape, s.block_size, [(t.data_ptr(), t.numel()) for t in s._tensors()]) for s in sources]


def packed_tables(sources: Sequence[Packed4Bit],
                  targets: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor, bool, bool]]:
    """The chunks ``[chunks, 11]`` int64 and a tensor of the targets' dtype, for each dtype, and whether scales are
    nested, and bytes lie at multiples of 16."""
    kinds: dict[tuple[torch.dtype, bool, bool], list[tuple[Packed4Bit, torch.Tensor]]] = {}
    for source, target in zip(sources, targets, strict=True):
        if target.numel():
            key = target.dtype, source.nested is not None, source.data.data_ptr() % 16 == 0
            kinds.setdefault(key, []).append((source, target))
    return [(upload(np.concatenate([_chunks(*pair) for pair in pairs]), pairs[0][1].device),
             pairs[0][1].new_empty(1), is_nested, is_aligned) for (_, is_nested, is_aligned), pairs in kinds.items()]


def _chunks(source: Packed4Bit, target: torch.Tensor) -> np.ndarray:
    """Rows of a table: addresses of bytes, target, code, scales, and of the nested scales' code, absmax and offset (0:
    none); the chunk's first byte, its bytes, bytes with one scale, scales with one nested scale."""
    total = source.numel() // 2
    starts = np.arange(0, total, CHUNK // 2)
    table = np.zeros((len(starts), _COLUMNS), dtype=np.int64)
    addresses = [source.data, target, source.code, source.absmax, *(source.nested[:3] if source.nested else ())]
    for column, tensor in enumerate(addresses):
        table[:, column] = tensor.data_ptr()
    table[:, 7], table[:, 8] = starts, np.minimum(total - starts, CHUNK // 2)
    table[:, 9] = source.block_size // 2
    table[:, 10] = source.nested.block_size if source.nested else 1
    return table


def launch_packed(table: torch.Tensor, target: torch.Tensor, is_nested: bool, is_aligned: bool,
                  now: torch.Tensor | None, before: torch.Tensor | None) -> None:
    """Launch the kernel over one of `packed_tables`; it writes nothing where ``now`` equals ``before``."""
    with on_device_of(table):
        # Without fusion: the scale is rounded before the offset is added.
        _dequantize_4bit_kernel[(len(table),)](
            table, target, table if now is None else now, table if before is None else before,
            CONDITIONAL=now is not None and before is not None, NESTED=is_nested, ALIGNED=is_aligned,
            TILE=TILE, num_warps=4, enable_fp_fusion=False,
        )


@jit()
def _dequantize_4bit_kernel(table, target_like, now, before, CONDITIONAL: tl.constexpr, NESTED: tl.constexpr,
                            ALIGNED: tl.constexpr, TILE: tl.constexpr):
    entry = table + tl.program_id(0).to(tl.int64) * 11
    data = tl.load(entry).to(tl.pointer_type(tl.uint8))
    if ALIGNED:
        data = tl.multiple_of(data, 16)
    target = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(target_like.dtype.element_ty)), 16)
    code = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
    begin = tl.multiple_of(tl.load(entry + 7), 16)
    count = tl.load(entry + 8).to(tl.int32)
    of_scale = tl.load(entry + 9)
    of_nested = tl.load(entry + 10)
    if CONDITIONAL:
        count = tl.where(tl.load(now) == tl.load(before), 0, count)
    count = tl.multiple_of(count, 16)
    lane = tl.arange(0, TILE)
    for start in range(0, count, TILE):
        inside = start + lane < count
        at = begin + start + lane  # of bytes
        packed = tl.load(data + at, mask=inside, other=0).to(tl.int32)
        if NESTED:
            scales = tl.load(entry + 3).to(tl.pointer_type(tl.uint8))
            nested_code = tl.load(entry + 4).to(tl.pointer_type(tl.float32))
            nested_absmax = tl.load(entry + 5).to(tl.pointer_type(tl.float32))
            offset = tl.load(tl.load(entry + 6).to(tl.pointer_type(tl.float32)))
            block = at // of_scale
            number = tl.load(scales + block, mask=inside, other=0).to(tl.int32)
            nested = tl.load(nested_absmax + block // of_nested, mask=inside, other=0.0)
            scale = tl.load(nested_code + number) * nested + offset
        else:
            scales = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
            scale = tl.load(scales + at // of_scale, mask=inside, other=0.0)
        high = (tl.load(code + (packed >> 4)) * scale).to(target_like.dtype.element_ty)
        low = (tl.load(code + (packed & 15)) * scale).to(target_like.dtype.element_ty)
        both = tl.interleave(high, low)
        to = tl.arange(0, 2 * TILE)
        tl.store(target + (begin + start) * 2 + to, both, mask=2 * start + to < 2 * count)
