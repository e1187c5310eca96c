"""join_add_rms_norm: a product that comes in parts is rounded once, then added and normed as whole ones are."""

import pytest
import torch

from hf_paged.kernels.layer.add_rms_norm import add_rms_norm_triton
from hf_paged.kernels.layer.sum_splits_add_rms_norm import (
    join_add_rms_norm_reference,
    join_add_rms_norm_triton,
    sum_splits_add_rms_norm,
)

pytestmark = pytest.mark.usefixtures("guarded_outputs")


def make(parts, rows, width, dtype, device="cpu"):
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
def test_same_bits_as_the_product_joined_before(parts, rows, width, dtype):
    sums, residual, weight = make(parts, rows, width, dtype)
    total = sums[0]
    for part in sums[1:]:
        total = total + part
    normed, summed = join_add_rms_norm_triton(sums, residual, weight, 1e-6)
    wanted_normed, wanted_summed = add_rms_norm_triton(total.to(dtype), residual, weight, 1e-6)
    assert torch.equal(summed, wanted_summed)
    assert torch.equal(normed, wanted_normed)
    assert normed.is_contiguous()
    reference = join_add_rms_norm_reference(sums, residual, weight, 1e-6)
    assert torch.equal(reference[1], wanted_summed)
    torch.testing.assert_close(reference[0], wanted_normed)


def test_tensors_of_another_dtype_or_shape_are_refused_by_name():
    sums, residual, weight = make(2, 3, 16, torch.float16)
    with pytest.raises(ValueError, match="parts"):
        sum_splits_add_rms_norm(sums.half(), residual, weight, 1e-6)
    with pytest.raises(ValueError, match="residual"):
        sum_splits_add_rms_norm(sums, residual[:2], weight, 1e-6)
    with pytest.raises(ValueError, match="weight"):
        sum_splits_add_rms_norm(sums, residual, weight.float(), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [3, 8, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gpu_kernel_gives_the_same_bits_as_the_product_joined_before(rows, dtype):
    sums, residual, weight = make(4, rows, 1024, dtype, "cuda")
    normed, summed = sum_splits_add_rms_norm(sums, residual, weight, 1e-6)
    wanted = add_rms_norm_triton((((sums[0] + sums[1]) + sums[2]) + sums[3]).to(dtype), residual, weight, 1e-6)
    assert torch.equal(normed, wanted[0])
    assert torch.equal(summed, wanted[1])
