"""LoRA updates of experts' weights: PEFT's sums to the bit, and the same folded into tiles by the products' kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from peft.tuners.lora.layer import ParamWrapper
from test_gate_up import CLAMPED, SIZES, make
from torch import nn

import hf_paged
from hf_paged.kernels.experts.down import down, down_reference, down_triton
from hf_paged.kernels.experts.fold import ExpertUpdate, rank_block
from hf_paged.kernels.experts.gate_up import (
    SILU_GATING,
    ExpertsConfig,
    gate_up,
    gate_up_reference,
    gate_up_triton,
)
from hf_paged.kernels.experts.route import Routes, grouped


def updated(weights, rank, dtype, seed=0):
    """Weights with an update that is as large as they are."""
    (rows, columns), num_experts = weights.sizes, len(weights.weight)
    g = torch.Generator().manual_seed(seed + rank)
    a = torch.randn(num_experts * rank, columns, generator=g) * columns**-0.5
    b = torch.randn(rows, rank * num_experts, generator=g)
    return weights._replace(update=ExpertUpdate(a.to(dtype), b.to(dtype), 1.5 / rank))


def error_of(found, expected):
    """In units of the dtype's epsilon of the largest number."""
    error = (found.double() - expected.double()).abs().max() / expected.abs().max()
    return error.item() / torch.finfo(found.dtype).eps


class Stack(nn.Module):
    """Experts' weights as PEFT finds them."""

    def __init__(self, weights):
        super().__init__()
        self.weight, self.is_transposed = nn.Parameter(weights.weight), weights.is_transposed


@pytest.mark.parametrize("rank", [1, 5, 16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "adapters"), [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16),
                                                 (torch.float16, torch.float32), (torch.float32, torch.float32)])
@torch.no_grad()
def test_the_sum_is_pefts(dtype, adapters, transposed, rank):
    weights = updated(make(5, 6, 3, 64, 80, dtype, transposed=transposed)[1], rank, adapters)
    wrapper = ParamWrapper(Stack(weights), "one", "weight", r=rank, lora_alpha=rank,
                           config=peft.LoraConfig(r=rank, lora_alpha=rank))
    wrapper.lora_A["one"].weight.data, wrapper.lora_B["one"].weight.data = weights.update.a, weights.update.b
    wrapper.scaling["one"] = weights.update.scale
    with wrapper._activate_lora(["one"]):
        expected = wrapper.get_base_layer().weight
    assert torch.equal(weights.folded().weight, expected)
    assert not torch.equal(expected, weights.weight)


@pytest.mark.parametrize("gating", [SILU_GATING, CLAMPED], ids=["silu", "clamped"])
@pytest.mark.parametrize("rank", [1, 20])
@pytest.mark.parametrize(("dtype", "adapters"), [(torch.float32, torch.float32), (torch.float16, torch.float32),
                                                 (torch.float16, torch.float16)])
@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.interpreted
@pytest.mark.usefixtures("guarded_outputs")
def test_products_of_folded_tiles(size, dtype, adapters, rank, gating):
    """In rows and in columns, also where a tile or the rank is not full."""
    x, gate_ups, downs, routes = make(*size, dtype, transposed=gating.is_interleaved)
    expected = gate_up_reference(x, gate_ups, routes, gating)
    gate_ups, downs = updated(gate_ups, rank, adapters), updated(downs, rank, adapters, 7)
    assert not torch.equal(gate_up_reference(x, gate_ups, routes, gating), expected)
    expected = gate_up_reference(x, gate_ups, routes, gating)
    hidden = torch.randn(expected.shape, generator=torch.Generator().manual_seed(rank)).to(dtype)
    for config in (None, ExpertsConfig(16, 2, 32, 32, 4, 2)):
        assert error_of(gate_up_triton(x, gate_ups, routes, gating, config), expected) < 16
        assert error_of(down_triton(hidden, downs, routes, config), down_reference(hidden, downs, routes)) < 16


@pytest.mark.parametrize(("transposed", "rank", "is_rounded"), [(False, 16, True), (False, 20, False), (True, 16, True),
                                                                (True, 20, True)])
@pytest.mark.interpreted
def test_a_tile_is_rounded_before_and_behind_its_sum(transposed, rank, is_rounded):
    """As by cuBLAS. Rows of the unit matrix give each weight: where one differs, float32 sums lie about a tie."""
    columns, rows = 64, 48
    _, _, weights, _ = make(5, 6, 3, rows, columns, torch.float16, transposed=transposed)
    weights = updated(weights._replace(bias=None), rank, torch.float32)
    experts = torch.full((columns, 1), 4)
    routes = Routes(torch.ones(columns, 1), experts.int(), *grouped(experts, 6))
    found = down_triton(torch.eye(columns, dtype=torch.float16), weights, routes)[:, 0].T
    a, b = (t.half().float() for t in (weights.update.a.view(6, rank, columns)[4],
                                       weights.update.b.view(rows, rank, 6)[..., 4]))
    weight = weights.weight[4].T if transposed else weights.weight[4]
    update = weights.update.scale * (b @ a)
    right, wrong = weight + update.half(), (weight.float() + update).half()
    if not is_rounded:
        right, wrong = wrong, right
    assert (found != right).float().mean() < 0.005
    assert (found != wrong).float().mean() > 0.05
    torch.testing.assert_close(found, (weight.float() + update).half(), rtol=2**-9, atol=1e-3)


def test_columns_of_a_tile():
    assert [rank_block(rank) for rank in (1, 16, 17, 64)] == [16, 16, 32, 64]


def test_an_update_is_added_before_the_product():
    x, gate_ups, downs, routes = make(5, 6, 3, 64, 80, torch.bfloat16)
    inner = gate_up(x, updated(gate_ups, 4, torch.float32), routes)
    assert torch.equal(down(inner, updated(downs, 4, torch.float32), routes),
                       down_reference(inner, updated(downs, 4, torch.float32), routes))


CASES = [{"rows": 64, "rank": 16}, *(
    pytest.param(case, marks=pytest.mark.slow) for case in (
        {"rows": 1, "rank": 8, "adapters": "bfloat16"}, {"rows": 64, "rank": 64}, {"rows": 256, "rank": 64},
        {"rows": 2048, "rank": 64}, {"rows": 256, "rank": 32},
        {"rows": 64, "rank": 16, "transposed": True}))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_compiled_for_an_h100_several_programs_fit_an_sm(case):
    """Without registers that are spilled, and in the shared memory that smaller GPUs have."""
    script = Path(__file__).with_name("compile_experts.py")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [Path(hf_paged.__file__).parents[1], script.parents[2]]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    out = subprocess.run([sys.executable, str(script), json.dumps(case)], env=environment, text=True,
                         capture_output=True, check=True, timeout=240).stdout
    programs = 1 if case["rows"] > 256 else 2 if case["rank"] > 16 or "transposed" in case else 3
    for name, code in json.loads(out).items():
        assert code["stack"] == 0, name
        assert code["warps"] * 32 * code["reg"] * programs <= 65536, name
        assert code["shared"] * programs <= 227 << 10 and code["shared"] <= 99 << 10, name
