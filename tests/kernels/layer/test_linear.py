"""linear: F.linear with float32 sums rounded once; silu_mul fused with it rounds where the separate op does."""

import pytest
import torch
import torch.nn.functional as F
from pairs import every_pair

from hf_paged.kernels.layer import linear as linear_module
from hf_paged.kernels.layer._gemv import GemvConfig, gemv
from hf_paged.kernels.layer._splitk_linear import DotConfig, dot_parts
from hf_paged.kernels.layer.linear import (
    choose_config,
    fastest_config,
    linear,
    linear_parts,
    linear_silu_mul,
    linear_silu_mul_triton,
    linear_triton,
)
from hf_paged.kernels.layer.silu_mul import silu_mul, silu_mul_triton

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities
    pytest.mark.usefixtures("guarded_outputs"),
]
HALVES = [torch.float16, torch.bfloat16]
# The interpreter truncates to bfloat16.
INTERPRETED = [torch.float32, torch.float16]
SMALL_GEMV = [GemvConfig(1, 1, 1), GemvConfig(4, 2, 2)]
SMALL_DOT = [DotConfig(16, 32, 1, 4, 2), DotConfig(32, 16, 3, 4, 2)]
SHAPES = [(1, 1), (5, 7), (64, 96), (33, 520), (48, 1024), (7, 1300)]


def make(seed, rows, outputs, width, dtype, device="cpu"):
    """x and weight as strided rows in tensors that are NaN elsewhere, and a bias."""
    g = torch.Generator().manual_seed(seed)

    def strided(rows, scale):
        wide = torch.full((rows, width + 24), torch.nan)
        wide[:, 8:-16] = torch.randn(rows, width, generator=g) * scale
        return wide.to(dtype).to(device)[:, 8:-16]

    return strided(rows, 1.0), strided(outputs, width**-0.5), torch.randn(outputs, generator=g).to(dtype).to(device)


def assert_rounded_once(actual, x, weight, bias=None):
    """Half an ulp from the exact sum, and as much as float32 sums may be off."""
    x, weight = x.double(), weight.double()
    exact = x @ weight.T + (0 if bias is None else bias.double())
    terms = x.abs() @ weight.abs().T + (0 if bias is None else bias.double().abs())
    info = torch.finfo(actual.dtype)
    slack = 0.5 * info.eps * exact.abs() + 4e-6 * terms + info.smallest_normal
    assert actual.shape == exact.shape
    assert ((actual.double() - exact).abs() <= slack).all()


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize(("dtype", "config", "shape", "rows"),
                         every_pair(INTERPRETED, SMALL_GEMV, SHAPES, [0, 1, 3, 4]))
def test_without_tensor_cores(dtype, config, shape, rows):
    outputs, width = shape
    x, weight, bias = make(width, rows, outputs, width, dtype)
    assert_rounded_once(linear_triton(x, weight, None, config), x, weight)
    assert_rounded_once(linear_triton(x, weight, bias, config), x, weight, bias)


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize(("dtype", "config", "shape", "rows"),
                         every_pair(INTERPRETED, SMALL_DOT, SHAPES[:4], [0, 1, 3, 16, 17]))
def test_on_tensor_cores(dtype, config, shape, rows):
    outputs, width = shape
    x, weight, bias = make(width, rows, outputs, width, dtype)
    assert_rounded_once(linear_triton(x, weight, None, config), x, weight)
    assert_rounded_once(linear_triton(x, weight, bias, config), x, weight, bias)


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize(("dtype", "config", "shape", "rows"),
                         every_pair(INTERPRETED, SMALL_GEMV, [(6, 7), (64, 1024), (34, 520)], [0, 1, 3]))
def test_interpreted_silu_mul_after_it(dtype, config, shape, rows):
    outputs, width = shape
    x, weight, _ = make(width, rows, outputs, width, dtype)
    separate = silu_mul_triton(linear_triton(x, weight, None, config))
    torch.testing.assert_close(linear_silu_mul_triton(x, weight, config), separate, rtol=0, atol=0)


@pytest.mark.each_value
@pytest.mark.interpreted
@pytest.mark.parametrize(("dtype", "shape", "rows"),
                         every_pair(INTERPRETED, [(6, 7), (64, 128), (98, 40)], [0, 1, 3, 17]))
def test_interpreted_silu_mul_after_it_on_tensor_cores(dtype, shape, rows):
    outputs, width = shape
    x, weight, _ = make(width, rows, outputs, width, dtype)
    config = DotConfig(32, 32, 1, 4, 2)
    separate = silu_mul_triton(linear_triton(x, weight, None, config))
    torch.testing.assert_close(linear_silu_mul_triton(x, weight, config), separate, rtol=2e-3, atol=1e-4)


@pytest.mark.interpreted
@pytest.mark.parametrize(("splits", "rows"), [(1, 3), (3, 5), (4, 16)])
def test_parts_add_up_to_the_product(splits, rows):
    x, weight, _ = make(5, rows, 33, 130, torch.float16)
    config = DotConfig(16, 32, splits, 4, 2)
    parts = dot_parts(x, weight, config)
    product = linear_triton(x, weight, None, config)
    if splits == 1:
        assert torch.equal(parts, product)
        return
    assert parts.dtype == torch.float32
    assert 1 < len(parts) <= splits
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    assert torch.equal(total.to(x.dtype), product)
    assert torch.equal(linear_parts(x, weight), linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_on_the_cpu_it_is_torchs_own(dtype, rows):
    x, weight, bias = make(3, rows, 12, 20, dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    by_column = weight.t().contiguous().t()
    assert torch.equal(linear(x, by_column, bias), F.linear(x, by_column, bias))
    assert torch.equal(linear_silu_mul(x, weight), silu_mul(F.linear(x, weight)))


def test_more_rows_than_a_config_takes_are_refused():
    weight = torch.zeros(3, 4)
    with pytest.raises(ValueError, match="at most 4 rows"):
        gemv(torch.zeros(5, 4), weight, None, GemvConfig(1, 1, 1))
    with pytest.raises(ValueError, match="at most 64 rows"):
        linear_triton(torch.zeros(65, 4), weight, None, SMALL_DOT[0])


@pytest.mark.each_value
@pytest.mark.parametrize("outputs", [8, 1024, 1025, 4096, 6144, 16384, 151936])
@pytest.mark.parametrize("width", [8, 1024, 2560, 4096])
def test_the_chosen_kernel_takes_that_many_rows(outputs, width):
    for rows in range(1, 66):
        config = fastest_config(rows, outputs, width)
        if isinstance(config, GemvConfig):
            assert rows <= 4
        else:
            assert config is not None or rows > 2
            assert config is None or rows <= 64
    assert fastest_config(65, outputs, width) is None


# -- on a GPU -------------------------------------------------------------

# N, K, a rows for every configuration there is; then rows and columns that fill no tile, and unaligned ones.
GPU_CASES = [
    (4096, 1024, (1, 2, 8)), (1024, 2048, (1, 2, 3, 4, 17, 64)), (2560, 4096, (1, 32)), (6144, 2560, (2,)),
    (17000, 1024, (2, 4)), (1000, 1000, (1, 2, 4, 5, 33)), (999, 1001, (1, 3, 16)),
]


def gpu_error(actual, exact):
    return (actual.double() - exact).abs().mean()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("outputs", "width", "rows"), [(n, k, t) for n, k, many in GPU_CASES for t in many])
def test_gpu_error_is_torchs(dtype, outputs, width, rows):
    x, weight, bias = make(rows, rows, outputs, width, dtype, "cuda")
    config = fastest_config(rows, outputs, width)
    for b in (None, bias):
        exact = x.double() @ weight.double().T + (0 if b is None else b.double())
        actual = linear_triton(x, weight, b, config)
        assert_rounded_once(actual, x, weight, b)
        assert gpu_error(actual, exact) <= gpu_error(F.linear(x, weight, b), exact) * 1.02
        for _ in range(3):
            assert torch.equal(linear_triton(x, weight, b, config), actual)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("rows", [0, 1, 8, 100])
def test_gpu_dispatch(dtype, rows, monkeypatch):
    x, weight, bias = make(rows, rows, 640, 1032, dtype, "cuda")
    for b in (None, bias):
        assert_rounded_once(linear(x, weight, b), x, weight, b)
        expected = F.linear(x, weight, b)
        torch.testing.assert_close(linear(x, weight.t().contiguous().t(), b), expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(linear(x.t().contiguous().t(), weight, b), expected, rtol=1e-2, atol=1e-2)
    # A GPU with little shared memory takes the tiles of no dot, one before Ampere nothing.
    for shared_memory, kinds in ((99 << 10, (GemvConfig, type(None))), (0, type(None))):
        monkeypatch.setattr(linear_module, "_shared_memory", lambda device, size=shared_memory: size)
        assert isinstance(choose_config(x, weight), kinds)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("outputs", "width", "rows"), [(6144, 1024, 1), (6144, 1024, 2), (6144, 2560, 1),
                         (17000, 2048, 2), (2052, 4096, 1), (1000, 1000, 1), (6144, 1024, 8)])
def test_gpu_silu_mul_after_it_is_no_less_exact_than_the_separate_op(dtype, outputs, width, rows):
    """Not to the bit: the compiler may fuse another product of the first two into the addition."""
    x, weight, _ = make(rows, rows, outputs, width, dtype, "cuda")
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    right = torch.nn.functional.silu(gate) * up
    separate, fused = silu_mul(linear(x, weight)), linear_silu_mul(x, weight)
    assert (fused != separate).float().mean() < 0.05
    assert (fused - right).norm() <= 1.02 * (separate - right).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 8, 17, 32])
@pytest.mark.parametrize("dtype", HALVES)
def test_gates_and_ups_of_few_rows_round_as_in_two_launches(rows, dtype):
    x, weight, _ = make(1, rows, 6144, 1024, dtype, "cuda")
    config = DotConfig(64, 128, 1, 4, 4)
    assert fastest_config(rows, 6144, 1024) == config
    separate = silu_mul_triton(linear_triton(x, weight, None, config))
    assert torch.equal(linear_silu_mul(x, weight), separate)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [5, 32, 64])
def test_parts_on_a_gpu_add_up_to_the_product(rows):
    x, weight, _ = make(2, rows, 1024, 3072, torch.bfloat16, "cuda")
    parts = linear_parts(x, weight)
    assert parts.dim() == 3
    total = torch.zeros_like(parts[0])
    for part in parts:
        total += part
    assert torch.equal(total.to(x.dtype), linear(x, weight))
