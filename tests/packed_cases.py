"""Packed prompts in tests of their kernels: rows of any lengths, whose slots hold states or NaN."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hf_paged.kernels.recurrent.packed_convolution import PackedRows, packed_convolution
from hf_paged.kernels.recurrent.packed_delta_rule import DeltaGates, packed_delta_rule_reference

# New tokens of a row and earlier ones: single tokens, no token, less than the taps, ends of chunks, and across them.
COUNTS, EARLIER = (1, 70, 128, 0, 3, 65, 1), (5, 0, 64, 4, 2, 0, 0)
SPARE = 2  # slots of no row


def rows_of(counts, earlier, slots, generator):
    """Rows with so many new tokens and earlier ones, in any of the slots."""
    device = generator.device
    return PackedRows(
        torch.tensor([0, *counts], device=device).cumsum(0).int(),
        torch.tensor([new + before for new, before in zip(counts, earlier, strict=True)], device=device).int(),
        torch.randperm(slots, generator=generator, device=device)[: len(counts)].int())


def begun_slots(rows):
    """Slots of rows with new tokens."""
    return rows.slots[rows.starts.diff() > 0].long()


def other_slots(rows, slots):
    """[slots] bool, True for those that nothing changes."""
    kept = torch.ones(slots, dtype=torch.bool, device=rows.slots.device)
    kept[begun_slots(rows)] = False
    return kept


class Packed(NamedTuple):
    parts: tuple[torch.Tensor, ...]  # queries, keys, values
    gate: torch.Tensor
    gates: DeltaGates
    weight: torch.Tensor
    conv: torch.Tensor
    recurrent: torch.Tensor
    rows: PackedRows

    @property
    def begun(self):
        return begun_slots(self.rows)

    @property
    def others(self):
        return other_slots(self.rows, len(self.conv))


def packed(dtype, counts=COUNTS, earlier=EARLIER, heads=2, group=2, key_dim=16, value_dim=32, taps=4, device="cpu"):
    """Inputs as a product of one projection has them, in another order than its heads."""
    g = torch.Generator(device).manual_seed(sum(counts) * heads + group)

    def rand(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(shape, generator=g, device=device) * scale).to(dtype)

    tokens, slots = sum(counts), len(counts) + SPARE
    sizes = [key_dim, key_dim, group * value_dim, group * value_dim, group, group]
    query, key, value, gate, alpha, beta = rand(tokens, heads, sum(sizes)).split(sizes, 2)
    channels = heads * (2 * key_dim + group * value_dim)
    rows = rows_of(counts, earlier, slots, g)
    conv = rand(slots, channels, taps)
    states = rand(slots, heads * group, key_dim, value_dim, scale=0.3, dtype=torch.float32)
    for slot, before in zip(rows.slots.tolist(), earlier, strict=True):
        if not before:  # a sequence that begins reads nothing of an earlier one
            conv[slot] = states[slot] = torch.nan
    gates = DeltaGates(alpha, beta, rand(heads * group, scale=0.5, dtype=torch.float32), rand(heads * group))
    return Packed((query, key, value), gate.unflatten(2, (group, value_dim)), gates,
                  rand(channels, 1, taps, scale=0.5), conv, states, rows)


def same(one, other):
    """Whether tensors are the same bits, NaN included."""
    return torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) and torch.equal(one.isnan(), other.isnan())


def mixed_of(case: Packed) -> torch.Tensor:
    return packed_convolution(case.parts, case.weight, None, case.conv.clone(), case.rows)


def computed(run, case, mixed, **options):
    """Outputs, and states of all slots."""
    states = case.recurrent.clone()
    return run(mixed, case.gates, states, case.rows, **options), states


def exact(case, mixed):
    """Outputs and states in float64, of the same beta."""
    states, gates = case.recurrent.double(), case.gates
    beta = gates.beta.sigmoid().double().logit()  # whose sigmoid is rounded
    made = packed_delta_rule_reference(mixed.double(), gates._replace(alpha=gates.alpha.double(), beta=beta), states,
                                       case.rows)
    return made, states


def error(found, expected):
    return ((found.double() - expected).pow(2).mean() / expected.pow(2).mean()).sqrt().item()


def assert_as_near(case, mixed, made, states, times=2.0, least=1e-6):
    """The kernel's errors are at most a few times those of the reference, which computes in float32.

    ``least``: an error of states that is none.
    """
    (known, expected), begun = exact(case, mixed), case.begun
    reference, own = computed(packed_delta_rule_reference, case, mixed)
    assert error(made, known) < times * max(error(reference, known), 1e-6)
    assert error(states[begun], expected[begun]) < times * max(error(own[begun], expected[begun]), least)
    assert same(states[case.others], case.recurrent[case.others])
