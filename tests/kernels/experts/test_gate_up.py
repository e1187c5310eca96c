"""gate_up, down and join: together stock's experts with its roundings, rows without experts left out."""

from __future__ import annotations

import pytest
import torch
from exactness import EPS, assert_equal
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hf_paged.kernels.experts import gate_up as gate_up_module
from hf_paged.kernels.experts.down import down, down_reference, down_triton
from hf_paged.kernels.experts.fold import ExpertUpdate
from hf_paged.kernels.experts.gate_up import (
    ExpertsConfig,
    ExpertWeights,
    Gating,
    gate_up,
    gate_up_reference,
    gate_up_triton,
)
from hf_paged.kernels.experts.join import (
    ExpertOutputs,
    join_experts,
    join_experts_add_rms_norm,
    join_experts_add_rms_norm_triton,
    join_experts_reference,
    join_experts_triton,
)
from hf_paged.kernels.experts.route import Routes, grouped

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of infinities
SIZES = [(1, 4, 2, 48, 32), (5, 6, 3, 64, 80), (20, 3, 2, 80, 48)]  # rows, experts, k, H, I
KERNEL = [pytest.mark.interpreted, pytest.mark.usefixtures("guarded_outputs")]


CLAMPED = Gating(is_interleaved=True, limit=1.5, alpha=1.702)


def make(rows, experts, k, width, inner, dtype, device="cpu", padding=0, scores=None, transposed=False):
    """Rows, weights and routes, of which the last rows are padding; one expert is chosen by every row."""
    g = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=g).to(device, dtype)
    weights = []
    for n, size in ((2 * inner, width), (width, inner)):
        weight = (torch.randn(experts, n, size, generator=g) * size**-0.5).to(device, dtype)
        bias = torch.randn(experts, n, generator=g).to(device, dtype) if transposed else None
        weights.append(ExpertWeights(weight.mT.contiguous() if transposed else weight, bias, transposed))
    others = torch.stack([torch.randperm(experts - 1, generator=g)[: k - 1] + 1 for _ in range(rows)])
    chosen = torch.cat([others, torch.zeros(rows, 1, dtype=torch.int64)], 1)
    chosen[rows - padding :] = -1
    weighing = torch.rand(rows, k, generator=g).to(device, scores or dtype)
    return x, *weights, Routes(weighing, chosen.int().to(device), *(t.to(device) for t in grouped(chosen, experts)))


def close(actual, expected, dtype, count=None):
    """Products whose sums are added up in another order, and rounded to `dtype`."""
    size = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    torch.testing.assert_close(actual[:count], expected[:count], **size)


@pytest.mark.parametrize("gating", [Gating(), CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.interpreted
@pytest.mark.usefixtures("guarded_outputs")
def test_products(dtype, size, padding, gating):
    """In rows with their gates ahead of ups, and in columns with gates and ups in turn, and a bias."""
    x, gate_ups, downs, routes = make(*size, dtype, padding=padding, transposed=gating.is_interleaved)
    count = int((routes.experts >= 0).sum())
    expected = gate_up_reference(x, gate_ups, routes, gating)
    for config in (None, ExpertsConfig(16, 2, 32, 32, 4, 2)):
        inner = gate_up_triton(x, gate_ups, routes, gating, config)
        close(inner, expected, dtype, count)
        found, known = down_triton(expected, downs, routes, config), down_reference(expected, downs, routes)
        real = routes.experts >= 0
        close(found[real], known[real], dtype)


@pytest.mark.interpreted
def test_a_gate_of_nan_and_values_beyond_the_limit():
    _, gate_ups, _, routes = make(5, 6, 3, 64, 80, torch.float16, transposed=True)
    x = 100.0 * torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(torch.float16)
    x[1] = torch.nan
    found, expected = (run(x, gate_ups, routes, CLAMPED) for run in (gate_up_triton, gate_up_reference))
    assert torch.equal(found.isnan(), expected.isnan())
    assert int(found.isnan().all(1).sum()) == 3
    close(found.nan_to_num(), expected.nan_to_num(), torch.float16)


@pytest.mark.parametrize("scores", [None, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.interpreted
@pytest.mark.usefixtures("guarded_outputs")
def test_sums_are_the_references(dtype, scores):
    """To the bit; rows without experts are zeros, whatever lies in the memory of their products."""
    *_, routes = make(5, 6, 3, 64, 80, dtype, padding=2, scores=scores)
    g = torch.Generator().manual_seed(1)
    products, residual = torch.randn(5, 3, 72, generator=g).to(dtype), torch.randn(5, 72, generator=g).to(dtype)
    weight = torch.randn(72, generator=g).to(dtype)
    outputs = ExpertOutputs(products, routes)
    expected = join_experts_reference(outputs)
    products[3:] = torch.nan
    assert_equal(join_experts_triton(outputs), expected)
    assert not expected[3:].any()
    normed, summed = join_experts_add_rms_norm_triton(outputs, residual, weight, EPS)
    assert_equal(summed, residual + expected)
    norm = Qwen3RMSNorm(72, EPS)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    torch.testing.assert_close(normed, norm(summed), rtol=2 * torch.finfo(dtype).eps, atol=0)


def test_on_a_cpu_the_references_run():
    x, gate_ups, downs, routes = make(5, 6, 3, 64, 80, torch.bfloat16)
    inner = gate_up(x, gate_ups, routes)
    assert_equal(inner, gate_up_reference(x, gate_ups, routes))
    outputs = ExpertOutputs(down(inner, downs, routes), routes)
    assert_equal(outputs.products, down_reference(inner, downs, routes))
    assert_equal(join_experts(outputs), join_experts_reference(outputs))
    weight, residual = torch.ones(64, dtype=torch.bfloat16), torch.ones(5, 64, dtype=torch.bfloat16)
    assert_equal(join_experts_add_rms_norm(outputs, residual, weight, EPS)[1], residual + join_experts(outputs))


@pytest.mark.parametrize("rows", [1, 8, 64, 256, 512, 8192])
@pytest.mark.parametrize("rank", [0, 8, 64])
def test_tiles_of_every_number_of_rows(rows, rank):
    update = ExpertUpdate(torch.empty(128 * rank, 1), torch.empty(1, 128 * rank), 1.0) if rank else None
    config = gate_up_module.fastest_config(rows, 8, ExpertWeights(torch.empty(128, 1, 1), update=update))
    assert config.tile * config.programs >= min(rows, config.tile)
    assert config.block_n % 2 == 0
