"""Sampling settings of the slots on the device, with one definition of the columns for host and kernels."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How the tokens of one request are drawn. Defaults: greedy search; and filters that are off."""

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def is_filtered(self) -> bool:
        """Whether top-k, top-p or min-p decide."""
        return self.do_sample and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    def floats(self) -> FloatSettings:
        """The request's line of `SamplingTable.floats`."""
        return FloatSettings(temperature=self.temperature * self.do_sample, one_minus_top_p=1.0 - self.top_p,
                             min_p=self.min_p)

    def ints(self, seed: int, min_length: int) -> IntSettings:
        """The request's line of `SamplingTable.ints`."""
        return IntSettings(seed=seed, top_k=self.top_k, min_length=min_length)


GREEDY = Drawing()


class SamplingTable(NamedTuple):
    """Settings of S slots on the logits' device; a greedy slot (temperature 0) ignores the filters."""

    floats: torch.Tensor  # [S, NUM_FLOATS] float32, see `FloatSettings`
    ints: torch.Tensor  # [S, NUM_INTS] int64, see `IntSettings`
    eos: torch.Tensor  # [S, E] int64, padded with -1

    def float_settings(self, slots: torch.Tensor) -> FloatSettings:
        return FloatSettings(*self.floats[slots].unbind(1))

    def int_settings(self, slots: torch.Tensor) -> IntSettings:
        return IntSettings(*self.ints[slots].unbind(1))


TEMPERATURE, ONE_MINUS_TOP_P, MIN_P, _NUM_FLOATS = column_numbers(FloatSettings)
SEED, TOP_K, MIN_LENGTH, _NUM_INTS = column_numbers(IntSettings)
FLOAT_NAMES, INT_NAMES = "temperature, 1 - top_p, min_p", "seed, top_k, min_new_tokens"  # as an error names columns
NUM_FLOATS, NUM_INTS = len(FloatSettings._fields), len(IntSettings._fields)


@jit()
def float_setting(floats, slot, COLUMN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A slot's number in a column of `SamplingTable.floats`."""
    return tl.load(floats + slot * _NUM_FLOATS + COLUMN)


@jit()
def int_setting(ints, slot, COLUMN: tl.constexpr):  # type: ignore[no-untyped-def]
    """A slot's number in a column of `SamplingTable.ints`."""
    return tl.load(ints + slot * _NUM_INTS + COLUMN)
