"""delta_net: the reference is a layer of stock, and the kernel the reference, on the states of its rows alone."""

from __future__ import annotations

import pytest
import torch
from recurrent_models import recurrent_model, with_idiom
from state_cases import close, copied
from torch import nn

from hf_paged.kernels.recurrent._convolution import LayerStates
from hf_paged.kernels.recurrent.delta_net import (
    DeltaNetInputs,
    DeltaNetWeights,
    delta_net,
    delta_net_reference,
    delta_net_triton,
    takes_sizes,
)

KERNEL = [pytest.mark.interpreted, pytest.mark.usefixtures("guarded_outputs")]
SLOTS = 6


def make(dtype, rows=4, heads=2, group=2, key_dim=16, value_dim=32, taps=4, device="cpu"):
    """Inputs as a product of one projection has them, in another order than its heads; states of six slots."""
    g = torch.Generator().manual_seed(rows * heads + group)

    def rand(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(shape, generator=g) * scale).to(device, dtype)

    sizes = [key_dim, key_dim, group * value_dim, group * value_dim, group, group]
    query, key, value, gate, alpha, beta = rand(rows, heads, sum(sizes)).split(sizes, 2)
    value, gate = value.unflatten(2, (group, value_dim)), gate.unflatten(2, (group, value_dim))
    channels, num_heads = heads * (2 * key_dim + group * value_dim), heads * group
    weights = DeltaNetWeights(rand(channels, 1, taps, scale=0.5), rand(num_heads, scale=0.5, dtype=torch.float32),
                              rand(num_heads), 1 + rand(value_dim, scale=0.2), 1e-6)
    states = LayerStates(rand(SLOTS, channels, taps),
                            rand(SLOTS, num_heads, key_dim, value_dim, dtype=torch.float32))
    slots = torch.tensor([4, 0, 3, 5, 1, 2][:rows], dtype=torch.int32, device=device)
    return DeltaNetInputs(query, key, value, gate, alpha, beta), weights, states, slots


@pytest.mark.interpreted
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter cuts bfloat16 off
@pytest.mark.parametrize("sizes", [{}, {"heads": 3, "group": 1, "key_dim": 32, "value_dim": 16, "taps": 2},
                                   {"rows": 2, "group": 3, "value_dim": 64}], ids=str)
def test_the_kernel_is_the_reference(sizes, dtype, padding):
    inputs, weights, states, slots = make(dtype, **sizes)
    lengths = None
    if padding:  # of which one has the slot of a row, and NaN: it touches nothing
        lengths = torch.tensor([5] * (len(slots) - 1) + [0], dtype=torch.int32)
        slots[-1] = slots[0]
        inputs[0][-1] = torch.nan
    expected, found = copied(states), copied(states)
    known = delta_net_reference(inputs, weights, expected, slots, lengths)
    for block in (16, 32):
        found = copied(states)
        made = delta_net_triton(inputs, weights, found, slots, lengths, block=block)
        close(made, known, dtype)
        assert torch.equal(found.conv, expected.conv)
        close(found.recurrent, expected.recurrent, torch.float32 if dtype == torch.float32 else dtype)
    real = slots[: len(slots) - bool(padding)].tolist()
    for slot in range(SLOTS):
        same = [torch.equal(one[slot], before[slot]) for one, before in zip(found, states, strict=True)]
        assert same == [slot not in real] * 2
    assert not padding or not made[-1].any()


@with_idiom
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Qwen3Next", "Qwen3_5"])
def test_the_reference_is_stocks_layer(name, dtype):
    """In bf16 to the bit: the functions of the layer's own file, behind its projections."""
    layer = recurrent_model(name).model.layers[0].linear_attn.to(dtype)
    functions = vars(__import__(type(layer).__module__, fromlist=["x"]))
    inputs, weights, states, slots = make(dtype, heads=2, group=2, key_dim=16, value_dim=16)
    mixed = torch.cat([x.flatten(1) for x in inputs[:3]], 1)[:, :, None]
    before = copied(states)
    conv = states.conv[slots.long()]
    with torch.no_grad():
        mixed = functions["causal_conv1d_update"](mixed, conv, weights.conv[:, 0], None, "silu").transpose(1, 2)
        query, key, value = mixed.split([32, 32, 64], -1)
        decay = -weights.a_log.float().exp() * nn.functional.softplus(inputs.alpha.flatten(1).float() + weights.dt_bias)
        attended, state = functions["torch_recurrent_gated_delta_rule"](
            query.unflatten(2, (2, 16)), key.unflatten(2, (2, 16)), value.unflatten(2, (4, 16)), g=decay[:, None],
            beta=inputs.beta.flatten(1).sigmoid()[:, None], initial_state=states.recurrent[slots.long()],
            output_final_state=True, use_qk_l2norm_in_kernel=True)
        layer.norm.weight = nn.Parameter(weights.norm)
        expected = layer.norm(attended.reshape(-1, 16), inputs.gate.reshape(-1, 16)).view(4, -1)
        found = delta_net(inputs, weights, before, slots)
    assert torch.equal(before.conv[slots.long()], conv)
    for made, known in ((found, expected), (before.recurrent[slots.long()], state)):
        bound = 1e-5 if dtype == torch.float32 else 0.0
        torch.testing.assert_close(made, known, rtol=bound, atol=bound)


@pytest.mark.parametrize(("sizes", "are_taken"), [
    ((16, 32, 4), True), ((16, 24, 4), False), ((8, 32, 4), False), ((512, 32, 4), False), ((16, 32, 3), False),
], ids=str)
def test_sizes(sizes, are_taken):
    assert takes_sizes(*sizes) == are_taken


def test_without_rows():
    inputs, weights, states, slots = make(torch.bfloat16)
    none = DeltaNetInputs(*(tensor[:0] for tensor in inputs))
    assert delta_net(none, weights, states, slots[:0]).shape == (0, 128)
