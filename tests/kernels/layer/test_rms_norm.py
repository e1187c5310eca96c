"""rms_norm: transformers' three kinds of RMSNorm, over rows of any strides and dims."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_paged.kernels.layer.rms_norm import NormForm, rms_norm, rms_norm_reference, rms_norm_triton

pytestmark = pytest.mark.usefixtures("guarded_outputs")
FORMS = {LlamaRMSNorm: NormForm(), GptOssRMSNorm: NormForm(rounds_first=False),
         Gemma2RMSNorm: NormForm(rounds_first=False, adds_one=True)}
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(3, 64), (1, 5, 3, 16), (2, 1, 130), (40, 24), (1, 1)]


def make(kind, shape, dtype, device="cpu"):
    """A norm, and rows a stride apart in a tensor that is NaN elsewhere."""
    g = torch.Generator().manual_seed(sum(shape))
    norm = kind(shape[-1], eps=1e-3).to(dtype)
    norm.weight.data = torch.randn(shape[-1], generator=g).to(dtype)
    wide = torch.full((*shape[:-1], shape[-1] + 8), torch.nan)
    wide[..., : shape[-1]] = torch.randn(shape, generator=g) * 3
    return norm.to(device), wide.to(dtype).to(device)[..., : shape[-1]]


@pytest.mark.parametrize(("kind", "dtype"), product(FORMS, FLOATS))
def test_the_reference_is_transformers_module(kind, dtype):
    for shape in SHAPES:
        norm, x = make(kind, shape, dtype)
        for op in (rms_norm, rms_norm_reference):
            assert torch.equal(op(x, norm.weight, 1e-3, FORMS[kind]), norm(x))


def assert_close(found, norm, x):
    assert found.is_contiguous() and found.shape == x.shape
    expected = norm(x)
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(found, expected, rtol=2 * eps, atol=1e-7)
    if x.dtype == torch.float16:  # the interpreter truncates to bfloat16
        assert (found != expected).float().mean() < 0.02  # sums of another order about a tie


@pytest.mark.interpreted
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "dtype"), product(FORMS, FLOATS[:2]))
def test_the_kernel_rounds_like_the_module(kind, dtype, shape):
    norm, x = make(kind, shape, dtype)
    assert_close(rms_norm_triton(x, norm.weight, 1e-3, FORMS[kind]), norm, x)


@pytest.mark.interpreted
def test_forms_differ():
    """Each is told from the others by its roundings."""
    norm, x = make(LlamaRMSNorm, (50, 64), torch.float16)
    found = [rms_norm_triton(x, norm.weight, 1e-3, form) for form in FORMS.values()]
    assert all((a != b).float().mean() > 0.1 for a, b in zip(found, [*found[1:], found[0]], strict=True))


@pytest.mark.parametrize("run", [rms_norm, pytest.param(rms_norm_triton, marks=pytest.mark.interpreted)])
def test_nothing_to_do(run):
    assert run(torch.zeros(0, 4, 16), torch.ones(16), 1e-6, NormForm()).shape == (0, 4, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 1024), (2, 300, 8, 256), (7, 5120)])
@pytest.mark.parametrize(("kind", "dtype"), product(FORMS, FLOATS))
def test_gpu_rounds_like_the_module(kind, dtype, shape):
    norm, x = make(kind, shape, dtype, "cuda")
    found, expected = rms_norm(x, norm.weight, 1e-3, FORMS[kind]), norm(x)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert dtype == torch.float32 or (found != expected).float().mean() < 2e-3
