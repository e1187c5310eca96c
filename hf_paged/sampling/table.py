"""Sampling settings of the slots on the device, with one definition of the columns for host and kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from hf_paged.kernels._triton import column_numbers, jit, tl


class FloatSettings(NamedTuple):
    """Columns of `SamplingTable.floats`: numbers of one slot on the host, or tensors of many slots."""

    temperature: Any  # 0 for greedy
    one_minus_top_p: Any  # rounded once, as transformers compares it; 0 for off
    min_p: Any  # 0 for off


class IntSettings(NamedTuple):
    """Columns of `SamplingTable.ints`."""

    seed: Any
    top_k: Any  # 0 for off
    min_length: Any  # EOS is barred while position < min_length


class SamplingTable(NamedTuple):
    """Settings of S slots on the logits' device; a greedy slot (temperature 0) ignores the filters."""

    floats: torch.Tensor  # [S, 3] float32, see `FloatSettings`
    ints: torch.Tensor  # [S, 3] int64, see `IntSettings`
    eos: torch.Tensor  # [S, E] int64, padded with -1

    def float_settings(self, slots: torch.Tensor) -> FloatSettings:
        return FloatSettings(*self.floats[slots].unbind(1))

    def int_settings(self, slots: torch.Tensor) -> IntSettings:
        return IntSettings(*self.ints[slots].unbind(1))


TEMPERATURE, ONE_MINUS_TOP_P, MIN_P = column_numbers(FloatSettings)
SEED, TOP_K, MIN_LENGTH = column_numbers(IntSettings)
_WIDTH = 3 if tl is None else tl.constexpr(3)
assert len(FloatSettings._fields) == len(IntSettings._fields) == 3


@jit()
def setting(table, slot, COLUMN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a slot's number in a column of ``floats`` or ``ints``."""
    return tl.load(table + slot * _WIDTH + COLUMN)
