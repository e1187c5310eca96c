# mypy: disallow-untyped-defs=False
"""Copies of many tensors in another dtype, renewed together: one launch for each pair of dtypes, or dtype of copies of
4-bit weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hf_paged.device.cuda import upload
from hf_paged.kernels._triton import jit, on_device_of, require_triton, tl
from hf_paged.kernels.dequantize_4bit import (
    Packed4Bit,
    check_packed,
    dequantized_reference,
    launch_packed,
    packed_signature,
    packed_tables,
)

# Elements that a program copies: some hundred thousand programs for 8B weights.
CHUNK = 1 << 15
TILE, REST = 4096, 512  # elements at a time, where memory is contiguous and where it is not
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
# What a row of the table holds: addresses, elements, and, where rows are strided, elements of a row and of its strides.
_COLUMNS = 6


class CopyPlan:
    """Writes sources, tensors of other dtypes or 4-bit weights, to targets of the same shapes, and keeps its pointer
    tables while nothing moves.

    Args:
        targets: of float32, float16 or bfloat16, on one device, where they stay. No two overlap. Those of 4-bit weights
            are contiguous, at multiples of 16 bytes, and of a multiple of 32 values.
    """

    def __init__(self, targets: Sequence[torch.Tensor]) -> None:
        self._targets = list(targets)
        self._signature: tuple | None = None
        self._tables: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # and of both dtypes a tensor
        self._packed_tables: list[tuple[torch.Tensor, torch.Tensor, bool, bool]] = []

    def __call__(self, sources: Sequence[torch.Tensor | Packed4Bit],
                 now: torch.Tensor | None = None, before: torch.Tensor | None = None) -> None:
        """``target.copy_(source)`` for all pairs, enqueued without waiting; nothing where ``now`` equals ``before``.

        Args:
            sources: one for each target, of its shape and on its device: float32, float16, bfloat16 or a `Packed4Bit`.
            now, before: ``[1]`` int64 on that device, compared there; both or neither.

        Raises:
            ValueError: shapes or dtypes that are not as above.
        """
        if not sources:
            return
        if sources[0].device.type == "cuda":
            self.launch(sources, now, before)
            return
        self._check(sources)
        if now is None or before is None or int(now) != int(before):
            copies_reference(sources, self._targets)

    def launch(self, sources: Sequence[torch.Tensor | Packed4Bit],
               now: torch.Tensor | None = None, before: torch.Tensor | None = None) -> None:
        """The Triton kernels."""
        require_triton()
        are_packed = [isinstance(source, Packed4Bit) for source in sources]
        tensors, packed = _split(sources, are_packed)
        # Column by column: rows of a few hundred tensors take longer to make than to launch a kernel over.
        signature = ([t.data_ptr() for t in tensors], [t.dtype for t in tensors], [t.shape for t in tensors],
                     [t.stride() for t in tensors], are_packed, packed_signature(packed))
        if signature != self._signature:
            self._check(sources)
            targets, targets_of_packed = _split(self._targets, are_packed)
            self._tables = _tables(tensors, targets)
            self._packed_tables = packed_tables(packed, targets_of_packed)
            self._signature = signature
        for table, source, target in self._tables:
            with on_device_of(table):
                _cast_copies_kernel[(len(table),)](
                    table, source, target, table if now is None else now, table if before is None else before,
                    CONDITIONAL=now is not None and before is not None, TILE=TILE, REST=REST, num_warps=4,
                )
        for arguments in self._packed_tables:
            launch_packed(*arguments, now, before)

    def _check(self, sources: Sequence[torch.Tensor | Packed4Bit]) -> None:
        are_packed = [isinstance(source, Packed4Bit) for source in sources]
        (tensors, packed), (targets, of_packed) = _split(sources, are_packed), _split(self._targets, are_packed)
        _check_tensors(tensors, targets)
        check_packed(packed, of_packed)


def _split(values: Sequence[Any], are_packed: list[bool]) -> tuple[list[Any], list[Any]]:
    """Return the values of tensors, and those of 4-bit weights."""
    pairs = list(zip(values, are_packed, strict=True))
    return [value for value, is_packed in pairs if not is_packed], [value for value, is_packed in pairs if is_packed]


def copies_reference(sources: Sequence[torch.Tensor | Packed4Bit], targets: Sequence[torch.Tensor]) -> None:
    """:class:`CopyPlan` in plain torch, unconditionally."""
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(dequantized_reference(source) if isinstance(source, Packed4Bit) else source)


def _check_tensors(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source.shape != target.shape or not {source.dtype, target.dtype} <= _DTYPES.keys():
            raise ValueError(f"source {source.dtype} {list(source.shape)}, target {target.dtype} "
                             f"{list(target.shape)}: expected equal shapes, and fp32, fp16 or bf16")


def _tables(sources: Sequence[torch.Tensor],
            targets: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each pair of dtypes the chunks ``[chunks, 6]`` int64, and a tensor of each of the two."""
    by_dtypes: dict[tuple[torch.dtype, torch.dtype], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for source, target in zip(sources, targets, strict=True):
        if source.numel():
            by_dtypes.setdefault((source.dtype, target.dtype), []).append((source, target))
    found = []
    for pairs in by_dtypes.values():
        table = upload(np.concatenate([_chunks(*pair) for pair in pairs]), pairs[0][0].device)
        # Only their dtypes matter: a source itself would be kept alive.
        source, target = (tensor.detach().new_empty(1) for tensor in pairs[0])
        found.append((table, source, target))
    return found


def _chunks(source: torch.Tensor, target: torch.Tensor) -> np.ndarray:
    """Rows ``(source, target, elements, width, source stride, target stride)`` of the table for one pair.

    A row copies elements i at ``i // width * stride + i % width`` on either side.
    """
    if source.is_contiguous() and target.is_contiguous():
        width, strides, count = source.numel(), (0, 0), source.numel()
        starts = np.arange(0, count, CHUNK)
        offsets, elements = (starts, starts), np.minimum(count - starts, CHUNK)
    else:
        source, target = _rows(source), _rows(target)
        width, count = source.shape[1], source.shape[0]
        strides = source.stride(0), target.stride(0)
        at_once = max(1, CHUNK // width)
        starts = np.arange(0, count, at_once)
        offsets = starts * strides[0], starts * strides[1]
        elements = np.minimum(count - starts, at_once) * width
    table = np.empty((len(starts), _COLUMNS), dtype=np.int64)
    table[:, 0] = source.data_ptr() + offsets[0] * source.element_size()
    table[:, 1] = target.data_ptr() + offsets[1] * target.element_size()
    table[:, 2], table[:, 3], table[:, 4], table[:, 5] = elements, width, *strides
    return table


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as rows that are contiguous, their distance being any."""
    rows = tensor.detach().flatten(0, -2) if tensor.dim() > 2 else tensor.detach()
    if rows.dim() != 2 or rows.stride(1) != 1 or rows.data_ptr() != tensor.data_ptr():
        raise ValueError(f"{list(tensor.shape)}, strides {list(tensor.stride())}: expected rows that are contiguous")
    return rows


@jit()
def _cast_copies_kernel(table, source_like, target_like, now, before, CONDITIONAL: tl.constexpr, TILE: tl.constexpr,
                        REST: tl.constexpr):
    entry = table + tl.program_id(0).to(tl.int64) * 6
    source_address = tl.load(entry)
    target_address = tl.load(entry + 1)
    count = tl.load(entry + 2).to(tl.int32)
    if CONDITIONAL:
        count = tl.where(tl.load(now) == tl.load(before), 0, count)
    width = tl.load(entry + 3)
    lane = tl.arange(0, TILE)
    source = source_address.to(tl.pointer_type(source_like.dtype.element_ty))
    target = target_address.to(tl.pointer_type(target_like.dtype.element_ty))
    # Whole tiles of contiguous memory at aligned addresses are copied 16 bytes a thread.
    aligned = (source_address % 16 == 0) & (target_address % 16 == 0) & (width >= count)
    wide = tl.where(aligned, count // TILE * TILE, 0)
    wide_source, wide_target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
    for start in range(0, wide, TILE):
        value = tl.load(wide_source + start + lane)
        tl.store(wide_target + start + lane, value.to(target_like.dtype.element_ty))
    source_stride = tl.load(entry + 4)
    target_stride = tl.load(entry + 5)
    width = tl.minimum(width, count).to(tl.int32)
    few = tl.arange(0, REST)
    for start in range(wide, count, REST):
        index = start + few
        inside = index < count
        row, column = (index // width).to(tl.int64), index % width
        value = tl.load(source + row * source_stride + column, mask=inside)
        tl.store(target + row * target_stride + column, value.to(target_like.dtype.element_ty), mask=inside)
