"""A product and what LoRA adds to it in one launch: as in two, each rounded where those round."""

from __future__ import annotations

import pytest
import torch
from kernels.lora_cases import expected, make_case

from hf_paged.kernels.lora_expand import ExpandConfig, lora_expand_silu_mul_triton
from hf_paged.kernels.lora_linear import (
    LoraLinearConfig,
    choose_config,
    fastest_config,
    lora_linear_silu_mul_unchecked,
    lora_linear_triton,
    lora_linear_unchecked,
)
from hf_paged.kernels.lora_shrink import ShrinkConfig, lora_shrink, lora_shrink_reference, lora_shrink_triton
from hf_paged.kernels.silu_mul import silu_mul

pytestmark = pytest.mark.usefixtures("guarded_outputs")
SHRINK = ShrinkConfig(32, 16, 32, 2, "tf32x3", 4, 2)
TILE = LoraLinearConfig(16, 16, 32, "tf32x3", 4, 2)


def weight_of(case, bias=False, scale=1.0):
    """[N, K] and [N] or None: of the product that is in the case from now on, rounded as one by itself."""
    g = torch.Generator().manual_seed(3)
    size = sum(size for _, size in case.table.columns)
    dtype, device = case.x.dtype, case.x.device
    weight = (torch.randn(size, case.x.shape[1], generator=g) * scale * case.x.shape[1] ** -0.5).to(device, dtype)
    added = torch.randn(size, generator=g).to(device, dtype) if bias else None
    product = case.x.double() @ weight.double().t() + (0 if added is None else added.double())
    return weight, added, case._replace(product=product.to(dtype))


@pytest.mark.interpreted
@pytest.mark.parametrize("rows", [1, 16, 37])
@pytest.mark.parametrize(("sizes", "ranks"), [
    ([40], [[[33]]]), ([48, 16, 16], [[[16, 3, 0]]]), ([24, 36], [[[4, 16], [8, 0]]]),
])
@pytest.mark.parametrize("bias", [False, True])
def test_product(rows, sizes, ranks, bias):
    """Members, parts, ranks, tiles that are not full, biases of the weight and of adapters."""
    weight, added, case = weight_of(make_case(rows, rows, 70, sizes, ranks, mixed=False, bias=bias), bias)
    shrunk = lora_shrink_triton(case.x, case.table, None, SHRINK)
    actual, _ = lora_linear_triton(case.x, weight, added, shrunk, case.table, TILE)
    torch.testing.assert_close(actual.double(), expected(case), rtol=1e-5, atol=1e-4)


@pytest.mark.interpreted
def test_both_roundings():
    """The product is rounded before anything is added to it, and the sum again."""
    weight, _, case = weight_of(make_case(1, 30, 64, [32], [[[16]]], dtype=torch.float16, mixed=False), scale=30.0)
    shrunk = lora_shrink_triton(case.x, case.table, None, SHRINK)
    actual, _ = lora_linear_triton(case.x, weight, None, shrunk, case.table, TILE)
    wanted = expected(case)
    once = expected(case._replace(product=case.x.double() @ weight.double().t())).half()
    assert (once != wanted.half()).float().mean() > 0.05  # so that it can be told apart
    assert (actual != wanted.half()).float().mean() < 0.01


@pytest.mark.interpreted
@pytest.mark.parametrize("rank", [3, 16, 33])
def test_with_silu_and_the_next_layers_shrinking(rank):
    weight, _, case = weight_of(make_case(rank, 37, 64, [72, 72], [[[16, 4]]], mixed=False))
    behind = make_case(rank, 37, 72, [24], [[[rank]]], mixed=False)
    shrunk = lora_shrink_triton(case.x, case.table, None, SHRINK)
    hidden, sums = lora_linear_triton(case.x, weight, None, shrunk, case.table, TILE, silu=True,
                                      following=behind.table)
    wanted, _ = lora_expand_silu_mul_triton(case.product, shrunk, case.table, None, ExpandConfig(16, 16, "tf32x3", 4))
    torch.testing.assert_close(hidden, wanted, rtol=1e-4, atol=1e-4)
    assert sums.shape == (5, 37, 1, 1, behind.table.rank)
    torch.testing.assert_close(sums.sum(0), lora_shrink_reference(hidden, behind.table, None)[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("mixed", [False, True])
def test_without_a_kernel(mixed):
    """On a CPU, and for rows with entries of their own: two operations."""
    weight, _, case = weight_of(make_case(4, 12, 32, [16, 16], [[[4, 4]], [[8, 2]]], mixed=mixed))
    shrunk = lora_shrink(case.x, case.table, case.order)
    actual = lora_linear_unchecked(case.x, weight, None, shrunk, case.table, case.order)
    torch.testing.assert_close(actual.double(), expected(case), rtol=1e-5, atol=1e-4)
    both, sums = lora_linear_silu_mul_unchecked(case.x, weight, shrunk, case.table, case.order, None)
    assert sums is None
    torch.testing.assert_close(both, silu_mul(actual))


def test_what_is_taken():
    assert fastest_config(136, 4096, 1024, "bf16x3", silu=False) is not None
    assert fastest_config(1024, 4096, 1024, "bf16x3", silu=False) is None  # prompts
    assert fastest_config(136, 24576, 4096, "bf16x3", silu=True) is None  # bound by its weight


GPU = {"dtype": torch.bfloat16, "device": "cuda", "mixed": False}


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 24, 64, 100, 256])
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("sizes", "rank"), [([512, 256, 256], 16), ([1024], 16), ([2048, 72], 40)])
def test_on_a_gpu(rows, adapters, sizes, rank):
    """The roundings of the result alone for float32 adapters, PEFT's for others."""
    weight, _, case = weight_of(make_case(1, rows, 1024, sizes, [[[rank] * len(sizes)]], adapters=adapters, **GPU))
    shrunk = lora_shrink(case.x, case.table, None)
    config = choose_config(case.x, weight, case.table, None)
    assert config is not None
    actual, _ = lora_linear_triton(case.x, weight, None, shrunk, case.table, config)
    wanted = expected(case)
    error = (actual.double() - wanted).norm() / wanted.norm()
    assert error < (2e-3 if adapters == torch.float32 else 8e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 64, 200])
@pytest.mark.parametrize("adapters", [torch.float32, torch.bfloat16])
def test_with_silu_on_a_gpu(rows, adapters):
    weight, _, case = weight_of(make_case(2, rows, 1024, [1536, 1536], [[[16, 8]]], adapters=adapters, **GPU))
    behind = make_case(3, rows, 1536, [128], [[[16]]], adapters=adapters, **GPU).table
    shrunk = lora_shrink(case.x, case.table, None)
    hidden, sums = lora_linear_silu_mul_unchecked(case.x, weight, shrunk, case.table, None, behind)
    wanted = silu_mul(expected(case).to(torch.bfloat16)).double()
    assert (hidden.double() - wanted).norm() / wanted.norm() < 8e-3
    assert sums is not None
    by_itself = lora_shrink_reference(hidden, behind, None)[0]
    assert (sums.sum(0) - by_itself).norm() / by_itself.norm() < (1e-5 if adapters == torch.float32 else 1e-4)
