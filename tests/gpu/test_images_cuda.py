"""On a GPU: calls with images give stock's tokens in fp32; their decode steps run in graphs, beside those of text."""

from __future__ import annotations

import pytest
import torch
from image_calls import image_call, seeing_model
from support import assert_native_parity, stock_generate

import hf_paged

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "smolvlm", "llava-next", "gemma3", "gemma4"])
def test_fp32_equals_stock(name, enforce_eager):
    """In chunks; the second time with prefix hits, and with graphs that the first call captured."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = seeing_model(name)
    rows = [[5, "0", 6], [9], [2, "1", 3, "3", 4], ["4", 20]]
    calls = [{key: value.cuda() for key, value in image_call(model, some).items()} for some in (rows, rows[1:2], rows)]
    model.cuda()
    expected = [stock_generate(model, **call, max_new_tokens=24) for call in calls]
    hf_paged.enable(model, strict=True, enforce_eager=enforce_eager, max_num_batched_tokens=64, max_num_seqs=16)
    for call, stocks in zip(calls, expected, strict=True):
        assert_native_parity(model, stocks, **call, max_new_tokens=24)
    stats = hf_paged.get_engine(model).stats()
    assert stats.prefix_cache_hits > 0 and (stats.num_graphs_captured > 0) is not enforce_eager
