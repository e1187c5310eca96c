"""packed_mamba2: the reference is stock's function row by row, the kernel as near to float64 as stock's is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import COUNTS, error
from packed_mamba2_cases import assert_as_near, computed, exact, packed
from recurrent_models import with_idiom

from hf_paged.kernels.recurrent.packed_mamba2 import (
    fits,
    limits_in,
    packed_mamba2,
    packed_mamba2_reference,
    packed_mamba2_triton,
)

SIZES = [{}, {"heads": 3, "groups": 3, "dim": 32, "size": 16}, {"heads": 2, "groups": 1, "dim": 64, "size": 64},
         {"heads": 2, "groups": 1, "dim": 64, "size": 128, "counts": (67, 2), "earlier": (1, 0)}]
KERNEL = [pytest.mark.interpreted, pytest.mark.usefixtures("guarded_outputs")]


def interpreted(function):
    for mark in KERNEL:
        function = mark(function)
    return function


@interpreted
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_is_as_near_to_float64_as_the_reference(sizes, block):
    case = packed(torch.float32, **sizes)
    assert_as_near(case, *computed(packed_mamba2_triton, case, block=block))


@interpreted
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 4e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("size", [(16, 32), (64, 64), (64, 128)])
def test_sixteen_bits(size, dtype, bound):
    """The interpreter cuts bfloat16 off, factors of float16 among them."""
    case = packed(dtype, dim=size[0], size=size[1], counts=(70, 3), earlier=(2, 0))
    made, states = computed(packed_mamba2_triton, case)
    known, expected = exact(case)
    assert error(made, known) < bound and error(states[case.begun], expected[case.begun]) < bound


@interpreted
@pytest.mark.parametrize("a_log", [-9.0, 3.0, 7.0])
def test_decays(a_log):
    """States are kept for hundreds of tokens, or are forgotten within one; logs of decays are long sums."""
    case = packed(torch.float32, counts=(150, 3), earlier=(1, 2))
    case.steps.a_log.fill_(a_log)
    assert_as_near(case, *computed(packed_mamba2_triton, case))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_limits_of_steps(dtype):
    low, high = limits_in(dtype, 0.3001, 0.9001)
    case = packed(dtype, counts=(20, 3), earlier=(1, 0), low=low, high=high)
    made, _ = computed(packed_mamba2_triton, case)
    assert error(made, exact(case)[0]) < 4e-5
    free = case._replace(steps=case.steps._replace(low=0.0, high=float("inf")))
    assert error(made, exact(free)[0]) > 1e-2


@interpreted
def test_nan_stays_in_its_row():
    case = packed(torch.float32)
    case.mixed[1:71] = torch.nan
    made, states = computed(packed_mamba2_triton, case)
    assert made[1:71].isnan().all() and not made[:1].isnan().any() and not made[71:].isnan().any()
    begun = case.begun.tolist()
    assert [bool(states[slot].isnan().any()) for slot in begun] == [False, True, *[False] * (len(begun) - 2)]


@with_idiom
@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.3, 0.9)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bamba", "mamba2", "nemotron_h", "zamba2", "granitemoehybrid"])
def test_the_reference_is_stocks_function(name, dtype, limits):
    module = __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["x"])
    low, high = limits_in(dtype, *limits)
    case = packed(dtype, low=low, high=high)
    made, states = computed(packed_mamba2, case)
    starts, lengths, slots = (tensor.tolist() for tensor in case.rows)
    for first, count, length, slot in zip(starts, COUNTS, lengths, slots, strict=False):
        if not count:
            continue
        tokens = slice(first, first + count)
        x, b, c = case.mixed[None, tokens].split([64, 64, 64], 2)
        expected, state = module.mamba2_chunk_scan(
            x.unflatten(2, (4, 16)), case.steps.dt[None, tokens], -case.steps.a_log.float().exp(),
            b.unflatten(2, (2, 32)), c.unflatten(2, (2, 32)), chunk_size=16, D=case.steps.d, return_final_states=True,
            dt_bias=case.steps.dt_bias, dt_softplus=True, dt_limit=limits,
            initial_states=case.states[slot][None] if length > count else None)
        assert made.dtype == expected.dtype
        torch.testing.assert_close(made[tokens], expected[0], rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(states[slot], state[0], rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 150), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_rows_in_chunks_are_whole_prompts(lengths, random):
    """However prompts are cut, whatever lies beside them, and in whichever order: states go on in their slots."""
    case = packed(torch.float32, counts=lengths, earlier=[0] * len(lengths))
    made, expected = computed(packed_mamba2_reference, case)
    starts, _, slots = (tensor.tolist() for tensor in case.rows)
    states, found, done = case.states.clone(), torch.zeros_like(made), [0] * len(lengths)
    while any(done[row] < length for row, length in enumerate(lengths)):
        rows = random.sample(range(len(lengths)), random.randint(1, len(lengths)))
        counts = [min(random.randint(0, 90), lengths[row] - done[row]) for row in rows]
        places = [starts[row] + done[row] + i for row, count in zip(rows, counts, strict=True) for i in range(count)]
        for row, count in zip(rows, counts, strict=True):
            done[row] += count
        step = case.rows._replace(starts=torch.tensor([0, *counts]).cumsum(0).int(),
                                  lengths=torch.tensor([done[row] for row in rows]).int(),
                                  slots=torch.tensor([slots[row] for row in rows]).int())
        found[places] = packed_mamba2(case.mixed[places], case.steps._replace(dt=case.steps.dt[places]), states, step)
    torch.testing.assert_close(found, made, rtol=1e-5, atol=1e-4)
    begun = case.begun
    assert not len(begun) or error(states[begun], expected[begun].double()) < 1e-5
    assert states[case.others].isnan().all() or torch.equal(states[case.others].nan_to_num(),
                                                            case.states[case.others].nan_to_num())


def test_without_tokens():
    case = packed(torch.float32, counts=(0, 0), earlier=(1, 0))
    assert packed_mamba2(case.mixed, case.steps, case.states, case.rows).shape == (0, 4, 16)
    assert packed_mamba2_triton(case.mixed, case.steps, case.states, case.rows).shape == (0, 4, 16)


def test_limits_are_rounded_as_by_clamp():
    steps = torch.linspace(0, 1, 50).bfloat16()
    low, high = limits_in(torch.bfloat16, 0.3001, 0.9001)
    assert torch.equal(steps.clamp(low, high), steps.clamp(0.3001, 0.9001))
    assert limits_in(torch.float16, 0.0, float("inf")) == (0.0, float("inf"))


def test_sizes_that_fit_into_shared_memory():
    assert fits(128, torch.device("cpu")) and fits(256, torch.device("cpu")) and not fits(1024, torch.device("cpu"))
