"""Argument checks: a table of what each tensor has to be."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Expected(NamedTuple):
    """A tensor argument, and what it has to be; a size or dtype of None: any."""

    name: str
    tensor: torch.Tensor
    shape: tuple[int | None, ...]
    dtype: torch.dtype | None
    contiguous: bool = False  # as a whole; else its last dim
    strided: bool = False  # not even that

    def holds(self) -> bool:
        found = self.tensor
        if self.dtype not in (None, found.dtype) or found.dim() != len(self.shape):
            return False
        fits = all(want in (None, got) for want, got in zip(self.shape, found.shape, strict=True))
        return fits and (self.strided or (found.is_contiguous() if self.contiguous else found.stride(-1) == 1))

    def __str__(self) -> str:
        shape = ", ".join("any" if size is None else str(size) for size in self.shape)
        layout = "any strides" if self.strided else "contiguous" if self.contiguous else "the last dim contiguous"
        found = f"{self.tensor.dtype} {list(self.tensor.shape)} with strides {list(self.tensor.stride())}"
        return f"{self.name}: {found}; expected {self.dtype or 'any dtype'} [{shape}], {layout}"


def check_tensors(*table: Expected) -> None:
    """Raise ValueError for the first tensor that is not as expected."""
    for row in table:
        if not row.holds():
            raise ValueError(str(row))


def check_logits(logits: torch.Tensor) -> None:
    """Raise ValueError unless the logits are ``[R, V]``, V > 0, bf16, fp16 or fp32, with contiguous rows."""
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"logits must be [R, V], V > 0, bf16, fp16 or fp32, got {tuple(logits.shape)} {logits.dtype}")
    if logits.stride(1) != 1:
        raise ValueError(f"the last dim of logits must be contiguous: strides {logits.stride()}")


def position_dtype(position: torch.Tensor) -> torch.dtype:
    """The dtype that positions are to have: int64 or int32."""
    return torch.int32 if position.dtype == torch.int32 else torch.int64
