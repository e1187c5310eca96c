"""Packed prompts of Mamba-2 in tests of their kernels: rows of any lengths, whose slots hold states or NaN."""

from __future__ import annotations

from typing import NamedTuple

import torch
from packed_cases import COUNTS, EARLIER, SPARE, begun_slots, error, other_slots, rows_of, same

from hf_paged.kernels.recurrent.packed_convolution import PackedRows, packed_convolution
from hf_paged.kernels.recurrent.packed_mamba2 import Steps, packed_mamba2_reference


class Packed(NamedTuple):
    mixed: torch.Tensor  # behind the convolution
    steps: Steps
    states: torch.Tensor
    rows: PackedRows

    @property
    def begun(self):
        return begun_slots(self.rows)

    @property
    def others(self):
        return other_slots(self.rows, len(self.states))


def packed(dtype, counts=COUNTS, earlier=EARLIER, heads=4, groups=2, dim=16, size=32, low=0.0, high=float("inf"),
           device="cpu"):
    """Inputs as a product of one projection has them, behind the convolution of their channels."""
    g = torch.Generator(device).manual_seed(sum(counts) * heads + groups)

    def rand(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(shape, generator=g, device=device) * scale).to(dtype)

    tokens, slots, channels = sum(counts), len(counts) + SPARE, heads * dim + 2 * groups * size
    rows = rows_of(counts, earlier, slots, g)
    parts = rand(tokens, channels + heads).split([heads * dim, groups * size, groups * size, heads], 1)
    conv, states = rand(slots, channels, 4), rand(slots, heads, dim, size, scale=0.3, dtype=torch.float32)
    mixed = packed_convolution([part[:, None] for part in parts[:3]], rand(channels, 1, 4, scale=0.5), rand(channels),
                               conv, rows)
    for slot, before in zip(rows.slots.tolist(), earlier, strict=True):
        if not before:  # a sequence that begins reads nothing of an earlier one
            states[slot] = torch.nan
    steps = Steps(parts[3], rand(heads, scale=0.5, dtype=torch.float32), rand(heads), rand(heads), low, high)
    return Packed(mixed, steps, states, rows)


def computed(run, case, **options):
    """Outputs, and states of all slots."""
    states = case.states.clone()
    return run(case.mixed, case.steps, states, case.rows, **options), states


def exact(case):
    """Outputs and states in float64, of the same steps, which are rounded."""
    states = case.states.double()
    return packed_mamba2_reference(case.mixed.double(), case.steps, states, case.rows), states


def assert_as_near(case, made, states, times=2.0, least=1e-6):
    """The kernel's errors are at most a few times those of the reference, which computes in float32.

    ``least``: an error that is none.
    """
    (known, expected), begun = exact(case), case.begun
    reference, own = computed(packed_mamba2_reference, case)
    assert error(made, known) < times * max(error(reference, known), least)
    assert error(states[begun], expected[begun]) < times * max(error(own[begun], expected[begun]), least)
    assert same(states[case.others], case.states[case.others])
