"""Products with weights of 4 bits: of the values that dequantising gives, bit by bit, added up as exactly as linear."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from interpreted import SIMULATED
from pairs import every_pair

from hf_paged.kernels.dequantize_4bit import NestedScales, Packed4Bit, dequantized_reference
from hf_paged.kernels.layer import linear_4bit as module
from hf_paged.kernels.layer._splitk_linear import DotConfig
from hf_paged.kernels.layer.linear_4bit import (
    MAX_ROWS,
    Packed4BitGroup,
    dequantized_linear,
    fastest_config,
    fit,
    linear_4bit,
    linear_4bit_parts,
    linear_4bit_parts_triton,
    linear_4bit_silu_mul,
    linear_4bit_triton,
    scratch_size,
)
from hf_paged.kernels.layer.silu_mul import silu_mul

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.usefixtures("guarded_outputs"),
]
# The interpreter truncates to bfloat16.
DTYPES = [torch.float16, torch.bfloat16 if SIMULATED else torch.float32]
# What simulates a GPU has products of one group of warps.
CONFIGS = [DotConfig(64, 128, 1, 4, 2), DotConfig(128, 128, 3, 4 if SIMULATED else 8, 2), DotConfig(32, 32, 2, 2, 1)]
# Width, values of a scale, scales of a nested one or 0. The first two: not all tiles are whole.
FORMATS = [(192, 64, 8), (96, 32, 0), (256, 128, 0), (256, 64, 16), (512, 256, 2)]
SIZES = [(70,), (40, 16), (64, 24, 33)]


def packed(n, k, block_size=64, nested=0, device="cpu", seed=0):
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (n * k // 2,), dtype=torch.uint8, generator=g)
    code = torch.randn(16, generator=g)
    count, how = n * k // block_size, None
    absmax = 0.1 + torch.rand(count, generator=g)
    if nested:
        absmax = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=g)
        outer = torch.rand(-(-count // nested), generator=g).to(device)
        how = NestedScales(torch.linspace(-1, 1, 256).to(device), outer, torch.tensor(1.5, device=device), nested)
    return Packed4Bit(data.to(device), torch.Size((n, k)), code.to(device), absmax.to(device), block_size, how)


def group(sizes, form, dtype, device="cpu", *, biased=False, rows=64):
    """Weights of one format, with biases or not, and a scratch for so many rows of them."""
    g = torch.Generator().manual_seed(1)
    weights = tuple(packed(n, *form, device=device, seed=n) for n in sizes)
    biases = tuple((9 * torch.randn(n, generator=g)).to(device, dtype) for n in sizes) if biased else ()
    return Packed4BitGroup(weights, biases, torch.full((rows * form[0],), torch.nan, dtype=dtype, device=device))


def inputs(rows, width, dtype, device="cpu"):
    """Strided rows in a tensor that is NaN elsewhere."""
    wide = torch.full((rows, width + 24), torch.nan)
    wide[:, 8:-16] = torch.randn(rows, width, generator=torch.Generator().manual_seed(2))
    return wide.to(device, dtype)[:, 8:-16]


def assert_rounded_once(found, x, weights, ulps=0.5):
    """Half an ulp from the exact sum over the values in x's dtype, and as much as float32 sums may be off."""
    dense = torch.cat([dequantized_reference(weight).to(x.dtype).double() for weight in weights.weights])
    bias = torch.cat(weights.biases).double() if weights.biases else 0
    exact, terms = x.double() @ dense.T + bias, x.double().abs() @ dense.abs().T + abs(bias)
    info = torch.finfo(x.dtype)
    assert found.dtype == x.dtype and found.shape == exact.shape
    slack = ulps * info.eps * exact.abs() + 4e-6 * terms + info.smallest_normal
    assert ((found.double() - exact).abs() <= slack).all()


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize(("dtype", "config", "form", "sizes", "rows", "biased"), every_pair(
    DTYPES, CONFIGS, FORMATS, SIZES, [0, 1, 3, 17, MAX_ROWS], [False, True]))
def test_products_of_few_rows(dtype, config, form, sizes, rows, biased):
    weights, x = group(sizes, form, dtype, biased=biased), inputs(rows, form[0], dtype)
    assert_rounded_once(linear_4bit_triton(x, weights, config), x, weights)


@pytest.mark.interpreted
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_value_is_the_references(form, dtype):
    """Of unit vectors: products are values of the weight, whose roundings show."""
    x = torch.eye(form[0]).to(dtype)[5:60]
    weights = group((40, 16), form, dtype)
    expected = torch.cat([dequantized_reference(weight).to(dtype).T for weight in weights.weights], 1)[5:60]
    for config in CONFIGS:
        assert torch.equal(linear_4bit_triton(x, weights, config), expected)
    assert torch.equal(dequantized_linear(x, weights), expected)


@pytest.mark.interpreted
@pytest.mark.parametrize("biased", [False, True])
def test_parts_add_up_to_the_product(biased):
    weights, x = group((40, 16), FORMATS[-1], torch.float16, biased=biased), inputs(5, 512, torch.float16)
    parts = linear_4bit_parts_triton(x, weights, DotConfig(64, 64, 3, 4, 2))
    assert_rounded_once(parts.sum(0).half(), x, weights)
    assert parts.shape == (3, 5, 56) and parts.dtype == torch.float32
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    assert torch.equal(total.half(), linear_4bit_triton(x, weights, DotConfig(64, 64, 3, 4, 2)))


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize(("dtype", "form", "sizes", "most", "biased"), every_pair(
    DTYPES, FORMATS, SIZES, [64, 100, 300], [False, True]))
def test_products_of_many_rows_by_pieces(dtype, form, sizes, most, biased):
    weights, x = group(sizes, form, dtype, biased=biased, rows=most), inputs(7, form[0], dtype)
    assert_rounded_once(dequantized_linear(x, weights), x, weights)
    rows = min(most, sum(sizes))  # of the scratch, one value of which at least every piece overwrites
    assert not weights.scratch[: min(rows, 24) * form[0]].isnan().any()


def test_pieces_are_whole_tiles_that_fit():
    assert list(module._pieces((70, 16, 64), 128)) == [(0, 3, 0, 86), (3, 1, 86, 150)]
    assert list(module._pieces((70, 16, 64), 64)) == [(0, 1, 0, 64), (1, 2, 64, 86), (3, 1, 86, 150)]
    assert list(module._pieces((128,), 1000)) == list(module._pieces((128,), 128)) == [(0, 2, 0, 128)]


def test_a_scratch_is_as_large_as_the_largest_group_up_to_24_mib():
    assert scratch_size([[(70, 64), (16, 64)], [(40, 96)]], torch.bfloat16) == 86 * 64
    assert scratch_size([[(12288, 4096)] * 2], torch.bfloat16) * 2 == 24 << 20
    assert scratch_size([], torch.bfloat16) == 0


@pytest.mark.parametrize("biased", [False, True])
def test_on_a_cpu_it_is_the_reference(biased):
    weights, x = group((40, 16), FORMATS[0], torch.bfloat16, biased=biased), inputs(70, 192, torch.bfloat16)
    dense = [dequantized_reference(weight).bfloat16() for weight in weights.weights]
    expected = torch.cat([F.linear(x, w, b) for w, b in zip(dense, weights.biases or (None, None), strict=True)], 1)
    assert torch.equal(linear_4bit(x, weights), expected) and torch.equal(linear_4bit_parts(x, weights), expected)
    same = group((16, 16), FORMATS[0], torch.bfloat16)
    assert torch.equal(linear_4bit_silu_mul(x, same), silu_mul(linear_4bit(x, same)))


def test_what_the_kernels_take():
    one = packed(4, 128)
    assert fit([one]) and fit([one, packed(8, 128), one])
    assert not fit([one] * 4)
    assert not fit([packed(4, 64, 16)])
    assert not fit([packed(4, 96)])
    assert not fit([one, packed(4, 128, 32)])
    assert not fit([one, packed(4, 128, nested=8)])
    assert not fit([one._replace(data=torch.zeros(len(one.data) + 1, dtype=torch.uint8)[1:])])
    assert not fit([one._replace(absmax=one.absmax.double())])


def test_configurations_split_few_tiles(monkeypatch):
    monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)
    assert fastest_config(1, (4096,), 4096, torch.device("cuda")).split_k > 1
    assert fastest_config(1, (30_000, 30_000), 4096, torch.device("cuda")).split_k == 1
    assert fastest_config(1, (64,), 192, torch.device("cuda")).split_k == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("form", [(1024, 64, 256), (4096, 64, 0), (192, 64, 8)], ids=str)
def test_on_a_gpu(dtype, biased, form):
    for sizes in ((300,), (4096, 1024, 1024), (256, 256)):
        weights = group(sizes, form, dtype, "cuda", biased=biased, rows=1024)
        for rows in (1, 3, 8, 16, 33, MAX_ROWS, MAX_ROWS + 1, 300):
            x = inputs(rows, form[0], dtype, "cuda")
            found = linear_4bit(x, weights)
            assert_rounded_once(found, x, weights, 0.5 if rows <= MAX_ROWS else 1.5)  # torch's may join parts
            assert torch.equal(found, linear_4bit(x, weights))


@pytest.mark.gpu
def test_in_a_graph_it_follows_bytes_and_scales():
    weights = group((256, 64), (1024, 64, 256), torch.bfloat16, "cuda", biased=True)
    x = inputs(4, 1024, torch.bfloat16, "cuda")
    for rows in (x, x.repeat(20, 1)):
        linear_4bit(rows, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = linear_4bit(rows, weights)
        weights.weights[0].data.bitwise_xor_(37)
        weights.weights[1].absmax.add_(5)
        weights.biases[0].neg_()
        graph.replay()
        assert torch.equal(found, linear_4bit(rows, weights))
