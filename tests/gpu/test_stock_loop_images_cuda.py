"""On a GPU: beams and processors of the caller's own over prompts with images give stock's tokens in fp32, with decode
steps in graphs, which read how far the positions of each row are from those of text."""

from __future__ import annotations

import pytest
import torch
from image_calls import image_call, seeing_model
from on_gpu import cuda
from support import assert_idle, num_calls, stock_copy
from transformers import LogitsProcessor, LogitsProcessorList

import hf_paged

pytestmark = pytest.mark.gpu
ROWS = [[5, "0", 6], [9], [2, "1", 3, "3", 4], ["4", 20]]


class Raising(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raised = scores.clone()
        raised[:, 7 * input_ids.shape[1] % 200] += 1.0
        return raised


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "smolvlm", "gemma3", "gemma4"])
def test_fp32_equals_stock(name, enforce_eager):
    """In chunks; the second time with prefix hits, and with graphs that the first call captured."""
    torch.backends.cuda.matmul.allow_tf32 = False
    model = seeing_model(name)
    calls = [cuda(image_call(model, rows)) | {"max_new_tokens": 24}
             for rows in (ROWS, ROWS[::-1])]
    model.cuda()
    options = [{"num_beams": 3, "num_return_sequences": 2}, {"num_beams": 2}, {
        "logits_processor": LogitsProcessorList([Raising()])}]
    scores = {"return_dict_in_generate": True, "output_scores": True}
    stock = stock_copy(model)
    expected = [stock.generate(**call, **one, **scores) for call in calls for one in options]
    hf_paged.enable(model, strict=True, enforce_eager=enforce_eager, max_num_batched_tokens=64, max_num_seqs=16)
    for _ in range(2):
        found = [model.generate(**call, **one, **scores) for call in calls for one in options]
        for ours, stocks in zip(found, expected, strict=True):
            assert torch.equal(ours.sequences, stocks.sequences)
            for one, other in zip(ours.scores, stocks.scores, strict=True):
                assert torch.allclose(one, other, rtol=1e-3, atol=1e-3)
    stats = hf_paged.get_engine(model).stats()
    assert stats.prefix_cache_hits > 0 and (stats.num_graphs_captured > 0) is not enforce_eager
    assert num_calls(model) == {"lockstep": 12}
    assert_idle(model)
