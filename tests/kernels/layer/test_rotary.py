"""rotary: transformers' RoPE of whole heads and of their first values, bit by bit."""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm4_moe.modeling_glm4_moe import apply_rotary_pos_emb as of_first_values
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as of_heads

from hf_paged.kernels.layer.rotary import rotary, rotary_reference, rotary_triton

pytestmark = pytest.mark.usefixtures("guarded_outputs")
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# Rows, tokens, heads of queries and keys, their size and how much of it turns: prompts, decode rows, and both.
CASES = [(1, 7, 4, 2, 16, 16), (5, 1, 3, 1, 16, 8), (2, 3, 2, 2, 24, 24), (1, 1, 1, 1, 8, 2), (3, 1, 6, 2, 20, 12)]


def make(case, dtype, device="cpu"):
    """Queries that are every other half of what a projection makes, as of gated attention."""
    rows, tokens, q_heads, k_heads, size, turned = case
    g = torch.Generator().manual_seed(sum(case))
    q = torch.randn(rows, tokens, q_heads, 2 * size, generator=g).to(device, dtype).chunk(2, -1)[0].transpose(1, 2)
    k = torch.randn(rows, tokens, k_heads, size, generator=g).to(device, dtype).transpose(1, 2)
    angles = torch.rand(rows, tokens, turned // 2, generator=g) * 50
    cos, sin = (torch.cat([t, t], -1).to(device, dtype) for t in (angles.cos(), angles.sin()))
    return q, k, cos, sin


def assert_as_stock(run, case, dtype, device="cpu"):
    tensors = make(case, dtype, device)
    found, stock = run(*tensors), (of_heads if case[4] == case[5] else of_first_values)(*tensors)
    for one, other, of in zip(found, stock, tensors, strict=False):
        assert one.shape == of.shape and one.transpose(1, 2).is_contiguous()
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_stocks(case, dtype):
    for run in (rotary, rotary_reference):
        for one, other in zip(run(*make(case, dtype)), (of_first_values(*make(case, dtype))), strict=True):
            assert torch.equal(one, other)


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", FLOATS[:2])  # the interpreter truncates to bfloat16
@pytest.mark.parametrize("case", CASES)
def test_the_kernel_is_stocks(case, dtype):
    assert_as_stock(rotary_triton, case, dtype)


@pytest.mark.interpreted
def test_nothing_to_do():
    assert rotary_triton(*(x[:, :, :0] if x.dim() == 4 else x[:, :0] for x in make(CASES[0], torch.float32)))[
        0].shape == (1, 4, 0, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("case", [*CASES, (1, 3000, 16, 2, 128, 128), (256, 1, 8, 2, 256, 64), (64, 1, 40, 8, 96, 96)])
def test_gpu_is_stocks(case, dtype):
    assert_as_stock(rotary, case, dtype, "cuda")
