"""On a GPU: models with chunks, values unlike keys, or other shapes in some layers give stock's tokens."""

from __future__ import annotations

import pytest
import torch
from support import assert_native_parity, batch, stock_generate
from unlike_models import MODELS, unlike_model

import hf_paged

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama4"])
def test_tokens_are_stocks(name, dtype):
    assert_stocks(name, dtype)


def test_chunks():
    """float32: what turns the choice of an expert for one token in bf16 is no fault."""
    assert_stocks("llama4", torch.float32)


def assert_stocks(name, dtype):
    """With graphs, and over a pool that grew."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = hf_paged.enable(unlike_model(name).to("cuda", dtype), strict=True)
    for lengths in ([1, 16, 33, 70], [40, 3, 90, 33, 16, 8]):
        inputs = {key: tensor.cuda() for key, tensor in batch(lengths).items()}
        for _ in range(2):
            expected = stock_generate(model, **inputs, max_new_tokens=24) if dtype == torch.float32 else None
            assert_native_parity(model, expected, **inputs, max_new_tokens=24)
