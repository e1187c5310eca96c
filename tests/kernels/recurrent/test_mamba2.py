"""mamba2: the reference is stock's functions, and the kernel the reference, on the states of its rows alone."""

from __future__ import annotations

import pytest
import torch
from state_cases import close, copied
from transformers.models.bamba import modeling_bamba

from hf_paged.kernels.recurrent._convolution import LayerStates
from hf_paged.kernels.recurrent.mamba2 import (
    MAX_GROUPS,
    Mamba2Weights,
    mamba2,
    mamba2_reference,
    mamba2_triton,
    takes_sizes,
)
from hf_paged.models.recurrent.view import HAS_IDIOM

SLOTS = 6


def make(dtype, rows=4, heads=4, groups=2, dim=16, size=32, taps=4, bias=True):
    """Rows of one projection; states of six slots."""
    g = torch.Generator().manual_seed(rows * heads + groups)

    def rand(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(shape, generator=g) * scale).to(dtype)

    channels = heads * dim + 2 * groups * size
    _, mixed, dt = rand(rows, 8 + channels + heads).split([8, channels, heads], 1)
    weights = Mamba2Weights(rand(channels, 1, taps, scale=0.5), rand(channels) if bias else None,
                            rand(heads, scale=0.5, dtype=torch.float32), rand(heads), rand(heads))
    states = LayerStates(rand(SLOTS, channels, taps), rand(SLOTS, heads, dim, size, dtype=torch.float32))
    arrivals = torch.zeros(SLOTS, MAX_GROUPS, dtype=torch.int32)
    return mixed, dt, weights, states, arrivals, torch.tensor([4, 0, 3, 5, 1, 2][:rows], dtype=torch.int32)


@pytest.mark.interpreted
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter cuts bfloat16 off
@pytest.mark.parametrize("sizes", [{}, {"rows": 2, "groups": 1, "dim": 32, "bias": False, "taps": 2}], ids=str)
def test_the_kernel_is_the_reference(sizes, dtype, padding):
    mixed, dt, weights, states, arrivals, slots = make(dtype, **sizes)
    lengths = None
    if padding:  # which has the slot of a row, and NaN: it touches nothing
        lengths = torch.tensor([5] * (len(slots) - 1) + [0], dtype=torch.int32)
        slots[-1] = slots[0]
        mixed[-1] = torch.nan
    expected = copied(states)
    known = mamba2_reference(mixed, dt, weights, expected, arrivals, slots, lengths)
    for block in (16, states.recurrent.shape[2]):
        found = copied(states)
        made = mamba2_triton(mixed, dt, weights, found, arrivals, slots, lengths, block=block)
        close(made, known, dtype)
        assert torch.equal(found.conv, expected.conv) and not arrivals.any()
        close(found.recurrent, expected.recurrent, dtype)
    real = slots[: len(slots) - padding].tolist()
    for slot in range(SLOTS):
        same = [torch.equal(one[slot], before[slot]) for one, before in zip(found, states, strict=True)]
        assert same == [slot not in real] * 2
    assert not padding or not made[-1].any()


@pytest.mark.skipif(not HAS_IDIOM, reason="an older transformers has other functions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_is_stocks_functions(dtype):
    mixed, dt, weights, states, arrivals, slots = make(dtype)
    found, lines = copied(states), slots.long()
    conv, state = states.conv[lines], states.recurrent[lines]
    a = -torch.exp(weights.a_log.float())
    channels = modeling_bamba.causal_conv1d_update(mixed[:, :, None], conv, weights.conv[:, 0], weights.conv_bias,
                                                   "silu")
    x, b, c = channels[:, :, 0].split([64, 64, 64], 1)
    expected = modeling_bamba.mamba2_selective_state_update(
        state, x.view(4, 4, 16), dt[:, :, None].expand(-1, -1, 16), a[:, None, None].expand(-1, 16, 32),
        b.view(4, 2, 32), c.view(4, 2, 32), weights.d[:, None].expand(-1, 16), z=None,
        dt_bias=weights.dt_bias[:, None].expand(-1, 16), dt_softplus=True)
    made = mamba2(mixed, dt, weights, found, arrivals, slots)
    close(made, expected.flatten(1), dtype)
    assert torch.equal(found.conv[lines], conv)
    torch.testing.assert_close(found.recurrent[lines], state, rtol=1e-6, atol=1e-6)


def test_without_rows():
    mixed, dt, weights, states, arrivals, slots = make(torch.bfloat16)
    assert mamba2(mixed[:0], dt[:0], weights, states, arrivals, slots[:0]).shape == (0, 64)


@pytest.mark.parametrize("sizes", [{"dim": 24}, {"heads": 3}, {"size": 8}, {"heads": 32, "groups": 32}], ids=str)
def test_sizes(sizes):
    mixed, _, weights, states, *_ = make(torch.float32, **sizes)
    assert not takes_sizes(mixed.shape[1], *states.recurrent.shape[1:], weights.conv.shape[-1])
