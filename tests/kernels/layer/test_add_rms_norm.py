"""add_rms_norm: stock's sum to the bit, and stock's RMSNorm but for the order in which a float32 mean is added up."""

import pytest
import torch
from exactness import EPS, HALVES, assert_equal, lower_runs, runs
from pairs import every_pair
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hf_paged.kernels.layer import add_rms_norm as module
from hf_paged.kernels.layer.add_rms_norm import add_rms_norm, add_rms_norm_reference, add_rms_norm_triton

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of infinities
    pytest.mark.usefixtures("guarded_outputs"),
]
RUNS = runs(add_rms_norm_reference, add_rms_norm_triton, add_rms_norm)


def rows_of(tensor):
    """The same rows a stride apart, in a tensor that is NaN elsewhere."""
    wide = torch.full((tensor.shape[0], tensor.shape[1] + 24), torch.nan, dtype=tensor.dtype, device=tensor.device)
    wide[:, 8:-16] = tensor
    return wide[:, 8:-16]


def stock_norm(x, weight, eps=EPS):
    norm = Qwen3RMSNorm(x.shape[-1], eps)
    norm.weight = torch.nn.Parameter(weight, requires_grad=False)
    return norm(x)


def assert_normed(normed, summed, weight, eps=EPS, dtype=None):
    """Each row is stock's formula to the bit for a float32 mean square within 4 ulp of the exact one.

    `dtype`: what stock's result is rounded to in the end.
    """
    variance = summed.double().pow(2).mean(-1, keepdim=True).float()
    matches = torch.zeros(len(summed), dtype=torch.bool, device=summed.device)
    for ulps in range(-4, 5):
        inverse = torch.rsqrt((variance.view(torch.int32) + ulps).view(torch.float32) + eps)
        expected = weight * (summed.float() * inverse).to(summed.dtype)
        matches |= (normed == expected.to(dtype or expected.dtype)).all(-1)
    assert matches.all()


def ulps_apart(a, b):
    whole = {2: torch.int16, 4: torch.int32}[a.element_size()]

    def ordered(x):
        bits = x.view(whole).long()
        return torch.where(bits < 0, -(bits & torch.iinfo(whole).max), bits)

    return (ordered(a) - ordered(b)).abs()


def make(seed, rows, width, dtype, device, scale=1.0):
    g = torch.Generator().manual_seed(seed)
    x, residual = torch.randn(2, rows, width, generator=g) * scale
    weight = 1 + 0.3 * torch.randn(width, generator=g)
    return [t.to(dtype).to(device) for t in (x, residual, weight)]


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype", "width", "scale"), every_pair(
    RUNS, [1, 7, 64, 896, 1024, 2560, 5120, 8192], [1.0, 30.0]))
def test_sum_and_norm(run, device, dtype, width, scale):
    x, residual, weight = make(width, 5, width, dtype, device, scale)
    normed, summed = run(rows_of(x), rows_of(residual), weight, EPS)
    assert_equal(summed, residual + x)
    assert_normed(normed, summed, weight)


@pytest.mark.parametrize(("run", "device", "lower", "kinds", "width"), every_pair(
    lower_runs(add_rms_norm_reference, add_rms_norm_triton, add_rms_norm),
    ["lower full full lower", "lower lower full lower", "full lower full lower", "lower full lower lower",
     "full full full lower", "other lower other lower", "full None full lower", "lower None full lower",
     "other None other lower", "other None full lower", "lower lower full full", "lower None full full"],
    [64, 1000]))
def test_dtypes_of_autocast(run, device, lower, kinds, width):
    """Sum and norm are rounded where modules round them whose tensors are promoted, and then once more."""
    other = torch.bfloat16 if lower is torch.float16 else torch.float16
    of_kind = {"lower": lower, "full": torch.float32, "other": other}
    if run is add_rms_norm_triton and "other" in kinds:
        kinds = kinds.replace("other", "full")  # the interpreter truncates to bfloat16
    x, residual, weight = make(width, 5, width, torch.float32, device, scale=3.0)
    of_x, of_residual, of_weight, wanted = kinds.split()
    x, weight = x.to(of_kind[of_x]), weight.to(of_kind[of_weight])
    residual = None if of_residual == "None" else rows_of(residual.to(of_kind[of_residual]))
    normed, summed = run(rows_of(x), residual, weight, EPS, of_kind[wanted])
    expected = x if residual is None else residual + x
    assert summed.dtype == expected.dtype
    assert_equal(summed, expected)
    assert normed.dtype == of_kind[wanted]
    assert_normed(normed, summed, weight, dtype=of_kind[wanted])


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype"), RUNS)
@pytest.mark.parametrize("width", [96, 1024])
def test_without_a_residual_the_sum_is_x(run, device, dtype, width):
    x, _, weight = make(3, 4, width, dtype, device)
    normed, summed = run(x, None, weight, EPS)
    assert summed is x
    assert_normed(normed, x, weight)


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype"), RUNS)
def test_values_at_the_edges(run, device, dtype):
    """Zeros, infinities, NaN, overflow of the sum and of the squares, the smallest normal numbers."""
    info, width = torch.finfo(dtype), 100
    x, residual, weight = make(4, 10, width, dtype, device)
    x[0], residual[0] = 0.0, -0.0
    x[1, 5] = torch.inf
    residual[2, 99] = -torch.inf
    x[3, 7], residual[3, 7] = torch.inf, -torch.inf
    x[4, 0] = torch.nan
    x[5, 3] = residual[5, 3] = info.max
    x[6, :], residual[6, :] = info.tiny, info.tiny
    x[7, :], residual[7, :] = info.max / 2, info.max / 4
    residual[8] = -x[8]
    x[9, ::2], residual[9, ::2] = info.max / 2, -info.max / 2
    for eps in (EPS, 0.0):
        normed, summed = run(x, residual, weight, eps)
        expected = residual + x
        assert_equal(summed, expected)
        stock = stock_norm(expected, weight, eps)
        assert_equal(normed.isfinite(), stock.isfinite())
        assert_equal(normed.isnan(), stock.isnan())
        assert_equal(normed[[0, 1, 2, 3, 4, 5, 8]], stock[[0, 1, 2, 3, 4, 5, 8]])
        torch.testing.assert_close(normed, stock, rtol=4 * info.eps, atol=0, equal_nan=True)


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype"), RUNS)
def test_sums_at_rounding_ties(run, device, dtype):
    """x one to seven quarters of an ulp of the residual: half of them ties, which go to even."""
    g = torch.Generator().manual_seed(5)
    ulp = torch.finfo(dtype).eps
    residual = 1 + torch.randint(0, int(1 / ulp), (6, 200), generator=g) * ulp
    x = torch.randint(-7, 8, (6, 200), generator=g) * (ulp / 4)
    x, residual = (t.to(dtype).to(device) for t in (x, residual))
    weight = torch.ones(200, dtype=dtype, device=device)
    normed, summed = run(x, residual, weight, EPS)
    assert_equal(summed, residual + x)
    assert_normed(normed, summed, weight)


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype"), RUNS)
def test_weights_multiply_the_rounded_norm(run, device, dtype):
    """Rows of +-1 norm to +-1 exactly (eps 0): what comes out is the weight, whatever it is."""
    info = torch.finfo(dtype)
    values = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, info.max, info.min, info.tiny, -info.tiny, 1 + info.eps]
    weight = torch.tensor(values, dtype=dtype, device=device)
    x = torch.tensor([1.0, -1.0], dtype=dtype, device=device)[:, None].expand(2, 10).contiguous()
    normed, _ = run(x, None, weight, 0.0)
    assert_equal(normed, weight * x)


@pytest.mark.each_value
@pytest.mark.parametrize(("run", "device", "dtype"), RUNS)
def test_no_rows(run, device, dtype):
    x, residual, weight = make(1, 0, 64, dtype, device)
    normed, summed = run(x, residual, weight, EPS)
    assert normed.shape == summed.shape == (0, 64)


@pytest.mark.interpreted
def test_weights_are_prefetched_for_few_rows_alone(monkeypatch):
    launches = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *args, **options: launches.append(options)

    monkeypatch.setattr(module, "_add_rms_norm_kernel", Kernel())
    for early in (True, False):
        monkeypatch.setattr(module, "pdl_options", lambda x, early=early: {"PDL": early})
        for rows in (1, 511, 512, 8192):
            add_rms_norm_triton(*make(9, rows, 8, torch.float32, "cpu"), EPS)
    assert [options["PREFETCH"] for options in launches] == [True, True, False, False] + [False] * 4


@pytest.mark.interpreted
def test_interpreted_error_is_stocks():
    x, residual, weight = make(6, 40, 1000, torch.float16, "cpu")
    normed, summed = add_rms_norm_triton(x, residual, weight, EPS)
    check_against_stock(normed, summed, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("rows", "width"), [(16, 4096), (8000, 1024), (4000, 2560), (3000, 4096)])
def test_gpu_difference_to_stock(dtype, rows, width):
    x, residual, weight = make(7, rows, width, dtype, "cuda", 3.0)
    normed, summed = add_rms_norm(x, residual, weight, EPS)
    assert_equal(summed, residual + x)
    assert_normed(normed, summed, weight)
    check_against_stock(normed, summed, weight)
    unweighted, _ = add_rms_norm(summed, None, torch.ones_like(weight), EPS)
    assert ulps_apart(unweighted, stock_norm(summed, torch.ones_like(weight))).max() <= 1


def check_against_stock(normed, summed, weight):
    """At most 1e-4 of the elements differ; one ulp of the norm is at most two of the product with the weight."""
    stock = stock_norm(summed, weight)
    apart = ulps_apart(normed, stock)
    assert (apart > 0).sum() <= max(4, 1e-4 * apart.numel())
    assert apart.max() <= 2
    exact = summed.double()
    exact = weight.double() * exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + EPS)
    ours, theirs = ((t.double() - exact).abs() for t in (normed, stock))
    assert ours.mean() <= theirs.mean() * 1.0001
    assert ours.max() <= theirs.max() * 1.05


def make_parts(parts, rows, width, dtype, device="cpu"):
    g = torch.Generator().manual_seed(width)
    wide = torch.full((rows, width + 24), torch.nan)
    wide[:, 8:-16] = torch.randn(rows, width, generator=g)
    sums = torch.randn(parts, rows, width, generator=g).to(device)
    weight = (torch.randn(width, generator=g) * 0.2 + 1).to(dtype).to(device)
    return sums, wide.to(dtype).to(device)[:, 8:-16], weight


@pytest.mark.interpreted
@pytest.mark.parametrize(("parts", "rows", "width", "dtype"), [
    (1, 1, 1, torch.float32), (2, 3, 40, torch.float16), (4, 16, 128, torch.float16), (8, 2, 1000, torch.float32),
    (4, 0, 64, torch.float16),
])
def test_parts_give_the_same_bits_as_their_sum(parts, rows, width, dtype):
    sums, residual, weight = make_parts(parts, rows, width, dtype)
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    normed, summed = add_rms_norm_triton(sums, residual, weight, 1e-6)
    wanted_normed, wanted_summed = add_rms_norm_triton(total.to(dtype), residual, weight, 1e-6)
    assert torch.equal(summed, wanted_summed)
    assert torch.equal(normed, wanted_normed)
    assert normed.is_contiguous()
    reference = add_rms_norm_reference(sums, residual, weight, 1e-6)
    assert torch.equal(reference[1], wanted_summed)
    torch.testing.assert_close(reference[0], wanted_normed)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 8, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gpu_kernel_gives_parts_the_same_bits_as_their_sum(rows, dtype):
    sums, residual, weight = make_parts(4, rows, 1024, dtype, "cuda")
    normed, summed = add_rms_norm(sums, residual, weight, 1e-6)
    wanted = add_rms_norm_triton((((sums[0] + sums[1]) + sums[2]) + sums[3]).to(dtype), residual, weight, 1e-6)
    assert torch.equal(normed, wanted[0])
    assert torch.equal(summed, wanted[1])
