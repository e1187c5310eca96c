"""Weights of 4 bits, dequantised by the reference and by the kernel: a stand-in's numbers, bit by bit."""

from __future__ import annotations

import pytest
import torch
from packed_models import Linear4bit
from torch import nn

from hf_paged.kernels import dequantize_4bit
from hf_paged.kernels.cast_copies import CopyPlan
from hf_paged.kernels.dequantize_4bit import NestedScales, Packed4Bit

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SHAPES = (300, 64), (3, 32), (1, 128)  # with more than 256 scales, so that nested ones are of several blocks


def packed(layer, device="cpu"):
    state = layer.weight.quant_state
    nested = None
    if state.nested:
        nested = NestedScales(state.state2.code.to(device), state.state2.absmax.to(device), state.offset.to(device),
                              state.state2.blocksize)
    data = layer.weight.data.as_subclass(torch.Tensor).flatten().to(device)
    return Packed4Bit(data, state.shape, state.code.to(device), state.absmax.to(device), state.blocksize, nested)


def layers(dtype, nested):
    torch.manual_seed(0)
    return [Linear4bit(nn.Linear(k, n, bias=False), nested, dtype) for n, k in SHAPES]


def run(way, sources, targets, *sums):
    plan = CopyPlan(targets)
    (plan.launch if way == "interpreted" else plan)(sources, *sums)


WAYS = ["on_cpu", pytest.param("interpreted", marks=pytest.mark.interpreted)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values(way, nested, dtype, monkeypatch):
    if way == "interpreted" and dtype is torch.bfloat16:
        pytest.skip("the interpreter truncates to bfloat16")
    monkeypatch.setattr(dequantize_4bit, "CHUNK", 1 << 13)
    of = layers(dtype, nested)
    targets = [torch.empty(shape, dtype=dtype) for shape in SHAPES]
    run(way, list(map(packed, of)), targets)
    for layer, target in zip(of, targets, strict=True):
        assert torch.equal(target, layer.dequantized())


@pytest.mark.gpu
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_on_a_gpu(nested, dtype):
    of = layers(dtype, nested)
    targets = [torch.empty(shape, dtype=dtype, device="cuda") for shape in SHAPES]
    run("gpu", [packed(layer, "cuda") for layer in of], targets)
    for layer, target in zip(of, targets, strict=True):
        assert torch.equal(target.cpu(), layer.dequantized())


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_written_where_the_checksum_is_the_same(way):
    (layer,) = layers(torch.float32, True)[1:2]
    target = torch.zeros(SHAPES[1])
    run(way, [packed(layer)], [target], torch.tensor([3]), torch.tensor([3]))
    assert not target.any()
    run(way, [packed(layer)], [target], torch.tensor([3]), torch.tensor([4]))
    assert torch.equal(target, layer.dequantized())


@pytest.mark.parametrize("way", WAYS)
def test_one_plan_takes_weights_of_4_bits_between_tensors_in_any_order(way):
    (layer,), other = layers(torch.float32, True)[1:2], torch.arange(6.0).half()
    targets = [torch.empty(SHAPES[1]), torch.empty(6), torch.empty(SHAPES[1])]
    plan = CopyPlan(targets)
    tensor = torch.arange(96.0).view(SHAPES[1]).half()
    for first, last in ((packed(layer), tensor), (tensor, packed(layer))):
        (plan.launch if way == "interpreted" else plan)([first, other, last])
        expected = [layer.dequantized() if isinstance(one, Packed4Bit) else one.float() for one in (first, other, last)]
        assert all(map(torch.equal, targets, expected))


@pytest.mark.parametrize("change", [
    {"shape": torch.Size([32, 3])}, {"block_size": 64}, {"absmax": torch.ones(3, dtype=torch.float64)},
    {"code": torch.ones(15)}, {"data": torch.zeros(47, dtype=torch.uint8)},
], ids=str)
def test_what_is_not_of_the_format(change):
    (layer,) = layers(torch.float32, False)[1:2]
    with pytest.raises(ValueError, match="expected"):
        run("on_cpu", [packed(layer)._replace(**change)], [torch.empty(SHAPES[1])])
    with pytest.raises(ValueError, match="contiguous"):
        run("on_cpu", [packed(layer)], [torch.empty(32, 3).t()])
