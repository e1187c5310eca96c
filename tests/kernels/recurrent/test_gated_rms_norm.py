"""gated_rms_norm: the reference is stock's module, and the kernel the reference."""

from __future__ import annotations

import pytest
import torch
from packed_cases import packed
from recurrent_models import recurrent_model, with_idiom
from state_cases import close

from hf_paged.kernels.recurrent.gated_rms_norm import (
    gated_rms_norm,
    gated_rms_norm_reference,
    gated_rms_norm_triton,
)


def make(dtype, **sizes):
    case = packed(dtype, **sizes)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(case.gate.flatten(1, 2).shape, generator=g).to(dtype)
    return x, case.gate, (1 + 0.2 * torch.randn(x.shape[2], generator=g)).to(dtype), 1e-6


@pytest.mark.interpreted
@pytest.mark.usefixtures("guarded_outputs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", [{}, {"heads": 3, "group": 1, "value_dim": 16}, {"group": 3, "value_dim": 256}],
                         ids=str)
def test_the_kernel_is_the_reference(sizes, dtype):
    given = make(dtype, counts=(3, 2), earlier=(0, 0), **sizes)
    close(gated_rms_norm_triton(*given), gated_rms_norm_reference(*given), dtype)


@with_idiom
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Qwen3Next", "Qwen3_5"])
@torch.no_grad()
def test_the_reference_is_stocks_module(name, dtype):
    norm = recurrent_model(name).model.layers[0].linear_attn.norm.to(dtype)
    x, gate, weight, _ = make(dtype, value_dim=16)
    norm.weight.copy_(weight)
    expected = norm(x.flatten(0, 1), gate.reshape(-1, 16)).view(len(x), -1)
    assert torch.equal(gated_rms_norm(x, gate, weight, norm.variance_epsilon), expected)


def test_without_tokens():
    x, gate, weight, eps = make(torch.float32)
    assert gated_rms_norm(x[:0], gate[:0], weight, eps).shape == (0, 128)
