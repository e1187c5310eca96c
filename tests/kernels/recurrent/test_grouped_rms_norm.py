"""grouped_rms_norm: the reference is stock's module, and the kernel the reference."""

from __future__ import annotations

import pytest
import torch
from recurrent_models import recurrent_model, with_idiom
from state_cases import close

from hf_paged.kernels.recurrent.grouped_rms_norm import (
    grouped_rms_norm,
    grouped_rms_norm_reference,
    grouped_rms_norm_triton,
)


def make(dtype, tokens=5, channels=96, groups=2):
    """Gates as a product of one projection has them."""
    g = torch.Generator().manual_seed(channels + groups)
    x, gate = torch.randn(tokens, channels, generator=g) * 3, torch.randn(tokens, channels + 8, generator=g)
    return (x, gate.to(dtype)[:, :channels], (1 + 0.2 * torch.randn(channels, generator=g)).to(dtype), groups, 1e-5)


@pytest.mark.interpreted
@pytest.mark.usefixtures("guarded_outputs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", [{}, {"channels": 128, "groups": 8}, {"tokens": 1, "channels": 3072, "groups": 1}],
                         ids=str)
def test_the_kernel_is_the_reference(sizes, dtype):
    given = make(dtype, **sizes)
    close(grouped_rms_norm_triton(*given), grouped_rms_norm_reference(*given), dtype)


@with_idiom
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Mamba2", "NemotronH", "Bamba", "GraniteMoeHybrid"])
@torch.no_grad()
def test_the_reference_is_stocks_module(name, dtype):
    decoder = recurrent_model(name).get_decoder().to(dtype)
    norm = next(layer for layer in decoder.modules() if type(layer).__name__.endswith("RMSNormGated"))
    x, gate, weight, *_ = make(dtype, channels=len(norm.weight))
    norm.weight.copy_(weight)
    expected = norm(x[None], gate[None])[0].to(dtype)
    groups = len(weight) // norm.group_size
    assert torch.equal(grouped_rms_norm(x, gate, weight, groups, norm.variance_epsilon), expected)


def test_without_tokens():
    x, gate, *others = make(torch.float32)
    assert grouped_rms_norm_triton(x[:0], gate[:0], *others).shape == (0, 96)
