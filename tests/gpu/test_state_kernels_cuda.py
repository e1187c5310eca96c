"""On a GPU: the kernels of gated delta nets and Mamba-2 beside their references, at sizes of models, and engines that
run decode steps and prompts by them."""

from __future__ import annotations

import packed_mamba2_cases
import pytest
import torch
from packed_cases import assert_as_near, computed, mixed_of, packed, same
from recurrent_models import PUBLISHED_HEADS, outlined, recurrent_model, with_idiom
from support import assert_native_parity, batch, stock_generate

import hf_paged
from hf_paged.kernels.recurrent._convolution import LayerStates
from hf_paged.kernels.recurrent.delta_net import (
    DeltaNetInputs,
    DeltaNetWeights,
    delta_net,
    delta_net_reference,
    delta_net_triton,
)
from hf_paged.kernels.recurrent.gated_rms_norm import gated_rms_norm_reference, gated_rms_norm_triton
from hf_paged.kernels.recurrent.grouped_rms_norm import grouped_rms_norm_reference, grouped_rms_norm_triton
from hf_paged.kernels.recurrent.mamba2 import MAX_GROUPS, Mamba2Weights, mamba2_reference, mamba2_triton
from hf_paged.kernels.recurrent.packed_convolution import packed_convolution_reference, packed_convolution_triton
from hf_paged.kernels.recurrent.packed_delta_rule import fits, packed_delta_rule_triton
from hf_paged.kernels.recurrent.packed_mamba2 import limits_in, packed_mamba2_triton
from hf_paged.models.recurrent import delta_net as delta_net_layers
from hf_paged.models.recurrent import mamba2 as mamba2_layers

pytestmark = pytest.mark.gpu
SIZES = [(16, 1, 128, 128), (16, 2, 128, 128), (2, 2, 16, 32), (3, 3, 64, 32)]  # heads of keys, of values each, K, V


def make_delta_net(rows, heads, group, key_dim, value_dim, dtype, taps=4):
    g = torch.Generator("cuda").manual_seed(rows)

    def rand(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(shape, generator=g, device="cuda") * scale).to(dtype)

    sizes = [key_dim, key_dim, group * value_dim, group * value_dim, group, group]
    query, key, value, gate, alpha, beta = rand(rows, heads, sum(sizes)).split(sizes, 2)
    value, gate = value.unflatten(2, (group, value_dim)), gate.unflatten(2, (group, value_dim))
    channels, num_heads = heads * (2 * key_dim + group * value_dim), heads * group
    weights = DeltaNetWeights(rand(channels, 1, taps, scale=0.5), rand(num_heads, scale=0.5), rand(num_heads),
                              1 + rand(value_dim, scale=0.2), 1e-6)
    states = LayerStates(rand(rows + 3, channels, taps),
                            rand(rows + 3, num_heads, key_dim, value_dim, scale=0.3, dtype=torch.float32))
    slots = torch.randperm(rows + 3, generator=g, device="cuda")[:rows].int()
    return DeltaNetInputs(query, key, value, gate, alpha, beta), weights, states, slots


def make_mamba2(rows, heads, groups, dim, size, dtype, taps=4):
    g = torch.Generator("cuda").manual_seed(rows)

    def rand(*shape, scale=1.0, dtype=dtype):
        return (torch.randn(shape, generator=g, device="cuda") * scale).to(dtype)

    channels = heads * dim + 2 * groups * size
    _, mixed, dt = rand(rows, 8 + channels + heads).split([8, channels, heads], 1)
    weights = Mamba2Weights(rand(channels, 1, taps, scale=0.5), rand(channels), rand(heads, scale=0.5), rand(heads),
                            rand(heads))
    states = LayerStates(rand(rows + 3, channels, taps), rand(rows + 3, heads, dim, size, scale=0.3,
                                                              dtype=torch.float32))
    arrivals = torch.zeros(rows + 3, MAX_GROUPS, dtype=torch.int32, device="cuda")
    slots = torch.randperm(rows + 3, generator=g, device="cuda")[:rows].int()
    return mixed, dt, weights, states, arrivals, slots


def copied(states):
    return LayerStates(*(state.clone() for state in states))


@pytest.mark.parametrize("block", [None, (16, 2), (64, 8)])
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_of_delta_nets_is_the_reference(size, dtype, rows, block):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    inputs, weights, states, slots = make_delta_net(rows, *size, dtype)
    lengths = torch.full_like(slots, 7)
    if rows > 1:  # of which one has the slot of a row
        lengths[-1], slots[-1] = 0, slots[0]
    expected, found = copied(states), copied(states)
    known = delta_net_reference(inputs, weights, expected, slots, lengths)
    options = {} if block is None else {"block": block[0], "num_warps": block[1], "max_registers": None}
    made = delta_net_triton(inputs, weights, found, slots, lengths, **options)
    bound = 2e-5 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(made, known, rtol=bound, atol=bound)
    assert torch.equal(found.conv, expected.conv)
    torch.testing.assert_close(found.recurrent, expected.recurrent, rtol=bound, atol=bound)
    untouched = torch.ones(rows + 3, dtype=torch.bool, device="cuda")
    untouched[slots.long()] = False
    assert torch.equal(found.recurrent[untouched], states.recurrent[untouched])
    assert rows == 1 or not made[-1].any()


@pytest.mark.parametrize("block", [16, None])  # None: all channels of a head
@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(128, 8, 64, 128), (128, 1, 64, 128), (24, 1, 64, 256), (8, 2, 16, 16)])
def test_the_kernel_of_mamba2_is_the_reference(size, dtype, rows, block):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    mixed, dt, weights, states, arrivals, slots = make_mamba2(rows, *size, dtype)
    lengths = torch.full_like(slots, 7)
    if rows > 1:
        lengths[-1], slots[-1] = 0, slots[0]
    expected, found = copied(states), copied(states)
    known = mamba2_reference(mixed, dt, weights, expected, arrivals, slots, lengths)
    made = mamba2_triton(mixed, dt, weights, found, arrivals, slots, lengths, block=block or size[2])
    # Sums of N products, in which the last bit of one state may turn with the sum of its convolution.
    bound = 1e-4 if dtype == torch.float32 else 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(made, known, rtol=bound, atol=bound * 8)
    assert torch.equal(found.conv, expected.conv) and not arrivals.any()
    torch.testing.assert_close(found.recurrent, expected.recurrent, rtol=bound, atol=bound)
    assert rows == 1 or not made[-1].any()


def test_many_tokens_one_after_another():
    """Errors do not add up, and nothing of one launch is in the way of the next."""
    inputs, weights, states, slots = make_delta_net(40, 16, 2, 128, 128, torch.bfloat16)
    expected, found = copied(states), copied(states)
    g = torch.Generator("cuda").manual_seed(1)
    for _ in range(50):
        for tensor in inputs:
            tensor.copy_(torch.randn(tensor.shape, generator=g, device="cuda"))
        made, known = (op(inputs, weights, of, slots) for op, of in ((delta_net, found),
                                                                     (delta_net_reference, expected)))
    bound = 16 * torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(made, known, rtol=bound, atol=bound)
    torch.testing.assert_close(found.recurrent, expected.recurrent, rtol=bound, atol=bound)


PACKED = [(size, dtype) for size in (*SIZES, (2, 1, 256, 64))
          for dtype in (torch.bfloat16, torch.float16, torch.float32)]


@pytest.mark.parametrize(("size", "dtype"), PACKED)
def test_packed_prompts_are_convolved_and_normed_as_by_the_references(size, dtype):
    case = packed(dtype, **of_size(size))
    expected, found = case.conv.clone(), case.conv.clone()
    known = packed_convolution_reference(case.parts, case.weight, None, expected, case.rows)
    made = packed_convolution_triton(case.parts, case.weight, None, found, case.rows)
    bound = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(made, known, rtol=bound, atol=bound)
    assert same(found, expected) and same(found[case.others], case.conv[case.others])
    given = torch.randn_like(case.gate).flatten(1, 2), case.gate, case.weight.flatten()[: size[3]].contiguous(), 1e-6
    torch.testing.assert_close(gated_rms_norm_triton(*given), gated_rms_norm_reference(*given), rtol=bound, atol=bound)


def of_size(size):
    return dict(zip(("heads", "group", "key_dim", "value_dim"), size, strict=True), device="cuda")


@pytest.mark.parametrize(("size", "dtype"), PACKED)
def test_packed_prompts_are_as_near_to_float64_as_the_reference(size, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    if not fits(size[2], dtype, torch.device("cuda")):
        pytest.skip("more shared memory than a block may have")
    case = packed(dtype, **of_size(size))
    mixed = mixed_of(case)
    made, states = computed(packed_delta_rule_triton, case, mixed)
    # Factors of 16 bits, of inputs of 8.
    assert_as_near(case, mixed, made, states, least=torch.finfo(dtype).eps / 256 if dtype == torch.bfloat16 else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_prompts_whose_states_hardly_decay(dtype):
    """And keys that are all alike for a while."""
    torch.backends.cuda.matmul.allow_tf32 = False
    case = packed(dtype, counts=(3000, 64), earlier=(1, 0), heads=4, group=2, key_dim=128, value_dim=128, device="cuda")
    case.gates.dt_bias.fill_(-7.0)
    mixed = mixed_of(case)
    mixed[500:700, 512:1024] = mixed[500:501, 512:1024]
    made, states = computed(packed_delta_rule_triton, case, mixed)
    assert_as_near(case, mixed, made, states, times=4.0, least=1e-4 if dtype == torch.bfloat16 else 5e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [(80, 1, 64, 128), (128, 8, 64, 128), (64, 2, 64, 64)])  # heads, groups, P, N
def test_packed_prompts_of_mamba2_are_as_near_to_float64_as_the_reference(size, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    low, high = limits_in(dtype, 0.001, 0.9)
    case = packed_mamba2_cases.packed(dtype, low=low, high=high, device="cuda", **dict(
        zip(("heads", "groups", "dim", "size"), size, strict=True)))
    made, states = packed_mamba2_cases.computed(packed_mamba2_triton, case)
    packed_mamba2_cases.assert_as_near(case, made, states, least=1e-6 if dtype == torch.float32 else 4e-6)
    gate = torch.randn(len(made), made[0].numel() + 16, device="cuda").to(dtype)[:, 16:]
    given = made.flatten(1), gate, gate[0].contiguous(), size[1], 1e-5
    bound = 1e-5 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(grouped_rms_norm_triton(*given), grouped_rms_norm_reference(*given), rtol=bound,
                               atol=bound)


@pytest.mark.parametrize("a_log", [-9.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_prompts_of_mamba2_whatever_their_states_decay(dtype, a_log):
    torch.backends.cuda.matmul.allow_tf32 = False
    case = packed_mamba2_cases.packed(dtype, counts=(3000, 64), earlier=(1, 0), heads=8, groups=1, dim=64, size=128,
                                      device="cuda")
    case.steps.a_log.fill_(a_log)
    made, states = packed_mamba2_cases.computed(packed_mamba2_triton, case)
    packed_mamba2_cases.assert_as_near(case, made, states, times=4.0, least=2e-6 if dtype == torch.float32 else 1e-5)


@with_idiom
@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", ["Qwen3_5", "Qwen3Next", "Qwen3_5Moe", "Mamba2", "NemotronH", "Bamba"])
def test_engines_run_by_them(name, enforce_eager, monkeypatch):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    seen = []

    def watch(module, op):
        own = getattr(module, op)
        monkeypatch.setattr(module, op, lambda *args: (seen.append(op), own(*args))[1])

    watch(delta_net_layers, "delta_net")
    watch(delta_net_layers, "packed_delta_rule")
    watch(mamba2_layers, "mamba2")
    watch(mamba2_layers, "packed_mamba2")
    settings = {"head_dim": 64, "hidden_size": 256, "intermediate_size": 256}
    if name.startswith("Qwen"):
        settings |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
    elif name == "Bamba":
        settings |= PUBLISHED_HEADS[name] | {"mamba_n_heads": 8}
    elif name == "Mamba2":
        settings = PUBLISHED_HEADS[name]
    else:
        settings |= PUBLISHED_HEADS[name]
    model = outlined(recurrent_model(name, **settings).to("cuda"))
    model = hf_paged.enable(model, strict=True, enforce_eager=enforce_eager)
    inputs = {key: tensor.cuda() for key, tensor in batch([30, 17, 70, 1]).items()}
    expected = stock_generate(model, **inputs, max_new_tokens=24)
    for _ in range(2):
        assert_native_parity(model, expected, **inputs, max_new_tokens=24)
    assert len(set(seen)) == 2
    assert hf_paged.get_engine(model)._executor.why_not_kernels(model.device) is None
