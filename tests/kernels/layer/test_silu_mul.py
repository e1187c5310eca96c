"""silu_mul: F.silu(gate) * up as torch rounds it, for every half-precision gate there is."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hf_paged.kernels.layer.silu_mul import silu_mul, silu_mul_reference, silu_mul_triton

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities
    pytest.mark.usefixtures("guarded_outputs"),
]
UPS = [1.0, -0.3712, 2.0**-9, 3.1e4, 1e-4, 0.0, -0.0, torch.inf, -torch.inf, torch.nan]
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [torch.float32, *HALVES]


def assert_equal(actual, expected):
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def stock(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def described(gate_up):
    """With the exp that the interpreter has, numpy's, whose last bit is not torch's on a CPU."""
    gate, up = gate_up.chunk(2, -1)
    exp = torch.from_numpy(np.exp(-gate.float().numpy()))
    return (gate.float() / (1 + exp)).to(gate.dtype) * up


def every_gate(dtype, device):
    """``[10, 2 * 65536]``: all bit patterns as gates, one up a row."""
    gate = torch.arange(-(2**15), 2**15, device=device).to(torch.int16).view(dtype)
    up = torch.tensor(UPS, device=device).to(dtype)
    return torch.cat([gate.expand(len(UPS), -1), up[:, None].expand(-1, len(gate))], dim=1).contiguous()


def make(seed, rows, width, dtype, device="cpu"):
    """Values of all sizes; rows a stride apart, in a tensor that is NaN elsewhere."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.full((rows, 2 * width + 24), torch.nan)
    wide[:, 8:-16] = torch.randn(rows, 2 * width, generator=g) * 2.0 ** torch.randint(
        -8, 9, (rows, 2 * width), generator=g
    )
    return wide.to(dtype).to(device)[:, 8:-16]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width"), [(3, 8), (2, 1030)])
def test_reference(dtype, rows, width):
    gate_up = make(1, rows, width, dtype)
    assert_equal(silu_mul(gate_up), stock(gate_up))
    assert_equal(silu_mul_reference(gate_up), stock(gate_up))


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter truncates to bfloat16
@pytest.mark.parametrize(("rows", "width"), [(3, 1), (2, 100), (5, 1024), (2, 1030), (1, 3072)])
def test_shapes(dtype, rows, width):
    gate_up = make(width, rows, width, dtype)
    assert_equal(silu_mul_triton(gate_up), described(gate_up))
    torch.testing.assert_close(silu_mul_triton(gate_up), stock(gate_up), rtol=4 * torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.interpreted
def test_every_gate():
    gate_up = every_gate(torch.float16, "cpu")
    actual = silu_mul_triton(gate_up)
    assert_equal(actual, described(gate_up))
    expected = stock(gate_up)
    assert_equal(actual.isnan(), expected.isnan())
    assert (actual != expected)[~expected.isnan()].float().mean() < 1e-3


@pytest.mark.interpreted
def test_every_float32_edge():
    info = torch.finfo(torch.float32)
    edges = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, info.max, info.min, info.tiny, -info.tiny,
             88.7, -88.7, -88.8, -103.0, -104.0, 17.0, -17.0]
    gate, up = torch.cartesian_prod(torch.tensor(edges), torch.tensor(UPS + edges)).T
    gate_up = torch.cat([gate, up])[None]
    assert_equal(silu_mul_triton(gate_up), described(gate_up))


@pytest.mark.parametrize("run", [silu_mul, pytest.param(silu_mul_triton, marks=pytest.mark.interpreted)])
@pytest.mark.parametrize("shape", [(0, 16), (3, 0)])
def test_nothing_to_do(run, shape):
    assert run(torch.zeros(shape)).shape == (shape[0], shape[1] // 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_gpu_every_gate(dtype):
    gate_up = every_gate(dtype, "cuda")
    assert_equal(silu_mul(gate_up), stock(gate_up))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
def test_gpu_every_up(dtype):
    """All bit patterns as ups, beside gates whose silu has many bits."""
    patterns, gates = every_gate(dtype, "cuda").chunk(2, -1)
    gates = torch.linspace(-7, 7, len(gates), device="cuda").to(dtype)[:, None].expand_as(gates)
    gate_up = torch.cat([gates, patterns], dim=1)
    assert_equal(silu_mul(gate_up), stock(gate_up))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "width"), [(3, 1), (2, 100), (257, 1030), (300, 3072), (64, 12288)])
def test_gpu_shapes(dtype, rows, width):
    gate_up = make(width, rows, width, dtype, "cuda")
    assert_equal(silu_mul(gate_up), stock(gate_up))


@pytest.mark.gpu
def test_gpu_past_two_billion_elements():
    rows, width = 70_000, 16_384
    gate_up = torch.empty(rows * 2 * width, dtype=torch.bfloat16, device="cuda").view(rows, 2 * width)
    gate_up[-2:] = torch.randn(2, 2 * width, device="cuda")
    assert_equal(silu_mul(gate_up)[-2:], stock(gate_up[-2:]))
