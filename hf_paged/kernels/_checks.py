"""Argument checks of public kernels: a table of what each tensor has to be."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def checked(check: Callable[Arguments, None], run: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The op `run` for callers from outside: `check` first raises ValueError for arguments that are not as it says."""

    @wraps(run)
    def checked_run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        check(*args, **kwargs)
        return run(*args, **kwargs)

    checked_run.__name__ = checked_run.__qualname__ = run.__name__.removesuffix("_unchecked")
    return checked_run


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
