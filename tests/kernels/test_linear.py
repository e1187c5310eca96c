"""linear: F.linear with float32 sums rounded once; fused with its neighbours it gives the bits of the separate ops."""

import pytest
import torch
import torch.nn.functional as F

from hf_paged.kernels._gemv import GemvConfig, gemv, gemv_config
from hf_paged.kernels._linear_dot import DotConfig
from hf_paged.kernels.add_rms_norm import add_rms_norm, add_rms_norm_triton
from hf_paged.kernels.linear import (
    add_rms_norm_linear,
    add_rms_norm_linear_triton,
    linear,
    linear_silu_mul,
    linear_silu_mul_triton,
    linear_triton,
)
from hf_paged.kernels.silu_mul import silu_mul, silu_mul_triton

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities
    pytest.mark.usefixtures("guarded_outputs"),
]
EPS = 1e-6
HALVES = [torch.float16, torch.bfloat16]
# The interpreter truncates to bfloat16.
INTERPRETED = [torch.float32, torch.float16]
SMALL_GEMV = [GemvConfig(1, 1, 1), GemvConfig(4, 2, 2)]
SMALL_DOT = [DotConfig(16, 32, 1, 4, 2), DotConfig(32, 16, 3, 4, 2)]
SHAPES = [(1, 1), (5, 7), (64, 96), (33, 520), (48, 1024), (7, 1300)]
# The widths of Qwen3-0.6B and 8B, and odd ones.
GPU_SHAPES = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (4096, 4096), (2560, 9728), (1000, 1001),
              (7, 136)]  # fmt: skip


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


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("config", SMALL_GEMV)
@pytest.mark.parametrize(("outputs", "width"), SHAPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 8])
def test_without_tensor_cores(dtype, config, outputs, width, rows):
    x, weight, bias = make(width, rows, outputs, width, dtype)
    assert_rounded_once(linear_triton(x, weight, None, config), x, weight)
    assert_rounded_once(linear_triton(x, weight, bias, config), x, weight, bias)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("config", SMALL_DOT)
@pytest.mark.parametrize(("outputs", "width"), SHAPES[:4])
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 17])
def test_on_tensor_cores(dtype, config, outputs, width, rows):
    x, weight, bias = make(width, rows, outputs, width, dtype)
    assert_rounded_once(linear_triton(x, weight, None, config), x, weight)
    assert_rounded_once(linear_triton(x, weight, bias, config), x, weight, bias)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize(("outputs", "width"), [(6, 7), (64, 1024), (34, 520)])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_interpreted_silu_mul_after_it(dtype, outputs, width, rows):
    x, weight, _ = make(width, rows, outputs, width, dtype)
    separate = silu_mul_triton(linear_triton(x, weight))
    torch.testing.assert_close(linear_silu_mul_triton(x, weight), separate, rtol=0, atol=0)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", INTERPRETED)
@pytest.mark.parametrize("width", [7, 256, 520])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("has_residual", [False, True])
def test_interpreted_norm_before_it(dtype, width, rows, silu, has_residual):
    x, weight, _ = make(width, rows, 36, width, dtype)
    residual, _, norm_weight = make(width + 1, rows, width, width, dtype)
    residual = residual if has_residual else None
    actual, summed = add_rms_norm_linear_triton(x, residual, norm_weight, EPS, weight, silu=silu)
    normed, expected_sum = add_rms_norm_triton(x, residual, norm_weight, EPS)
    torch.testing.assert_close(summed, expected_sum, rtol=0, atol=0)
    expected = linear_triton(normed, weight)
    # numpy adds up squares padded to another length in another order.
    torch.testing.assert_close(
        actual, silu_mul_triton(expected) if silu else expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-3
    )


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_on_the_cpu_it_is_torchs_own(dtype, rows):
    x, weight, bias = make(3, rows, 12, 20, dtype)
    _, _, norm_weight = make(4, 1, 20, 20, dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    by_column = weight.t().contiguous().t()
    assert torch.equal(linear(x, by_column, bias), F.linear(x, by_column, bias))
    assert torch.equal(linear_silu_mul(x, weight), silu_mul(F.linear(x, weight)))
    normed, summed = add_rms_norm(x, x, norm_weight, EPS)
    for silu in (False, True):
        out, both = add_rms_norm_linear(x, x, norm_weight, EPS, weight, silu=silu)
        assert torch.equal(both, summed)
        assert torch.equal(out, silu_mul(F.linear(normed, weight)) if silu else F.linear(normed, weight))


def test_bad_arguments():
    x, weight, bias = torch.zeros(2, 4), torch.zeros(3, 4), torch.zeros(3)
    for arguments, message in [
        ((x[0], weight), "T, K"),
        ((x, weight[:, 1:]), "T, K"),
        ((x, weight, bias[1:]), "bias"),
        ((x, weight.half()), "dtype"),
        ((x, weight, bias.half()), "dtype"),
    ]:
        with pytest.raises(ValueError, match=message):
            linear(*arguments)
    with pytest.raises(ValueError, match="2 \\* I"):
        linear_silu_mul(x, weight)
    with pytest.raises(ValueError, match="at most 8 rows"):
        gemv(torch.zeros(9, 4), weight, None, GemvConfig(1, 1, 1))


def test_a_program_takes_more_rows_of_a_taller_weight():
    tall = [gemv_config(1, n).block_n for n in (1, 1024, 4096, 6144, 24576, 151936)]
    assert tall == sorted(tall)
    assert tall[0] == 1 and tall[-1] == 8
    assert gemv_config(8, 151936).block_n == 4


# -- on a GPU -------------------------------------------------------------

GPU_CONFIGS = [
    *(GemvConfig(n, warps, unroll) for n, warps, unroll in [(1, 4, 2), (4, 4, 2), (8, 4, 1), (2, 1, 4)]),
    DotConfig(64, 128, 4, 4, 4), DotConfig(16, 128, 1, 4, 4), DotConfig(64, 64, 1, 4, 3),
]  # fmt: skip


def gpu_error(actual, exact):
    return (actual.double() - exact).abs().mean()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("outputs", "width"), GPU_SHAPES)
@pytest.mark.parametrize("config", GPU_CONFIGS, ids=str)
def test_gpu_error_is_torchs(dtype, outputs, width, config):
    for rows in (1, 2, 3, 4, 7, 8) if isinstance(config, GemvConfig) else (1, 8, 16, 17, 64, 100, 128):
        x, weight, bias = make(rows, rows, outputs, width, dtype, "cuda")
        exact = x.double() @ weight.double().T + bias.double()
        actual = linear_triton(x, weight, bias, config)
        assert_rounded_once(actual, x, weight, bias)
        assert gpu_error(actual, exact) <= gpu_error(F.linear(x, weight, bias), exact) * 1.02
        assert_rounded_once(linear_triton(x, weight, None, config), x, weight)
        for _ in range(3):
            assert torch.equal(linear_triton(x, weight, bias, config), actual)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("rows", [0, 1, 2, 4, 8, 16, 100])
def test_gpu_dispatch(dtype, rows):
    x, weight, bias = make(rows, rows, 640, 1032, dtype, "cuda")
    for b in (None, bias):
        assert_rounded_once(linear(x, weight, b), x, weight, b)
        expected = F.linear(x, weight, b)
        torch.testing.assert_close(linear(x, weight.t().contiguous().t(), b), expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(linear(x.t().contiguous().t(), weight, b), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("outputs", "width"), [(6144, 1024), (4096, 2560), (24576, 4096), (1002, 1001)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_gpu_fusions_give_the_bits_of_the_separate_ops(dtype, outputs, width, rows):
    x, weight, _ = make(rows, rows, outputs, width, dtype, "cuda")
    residual, _, norm_weight = make(9, rows, width, width, dtype, "cuda")
    gate_up = linear_triton(x, weight, None, GemvConfig(4, 4, 2))
    for block_n in (1, 2, 4, 8):
        fused = linear_silu_mul_triton(x, weight, GemvConfig(block_n, 4, 2))
        assert torch.equal(fused, silu_mul(gate_up))
    for res in (residual, None):
        normed, summed = add_rms_norm(x, res, norm_weight, EPS)
        # Fused, a program holds a whole row: the same partial sums as with as many warps and no loop.
        whole = linear_triton(normed, weight, None, GemvConfig(4, _whole_row_warps(width), 1))
        for silu in (False, True):
            out, fused_sum = add_rms_norm_linear_triton(x, res, norm_weight, EPS, weight, silu=silu)
            assert torch.equal(fused_sum, summed)
            assert torch.equal(out, silu_mul(whole) if silu else whole)


def _whole_row_warps(width):
    return max(1, 1 << (width - 1).bit_length() - 8)
