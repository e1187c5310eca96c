"""Rows under LoRA adapters of their own on a GPU: kernels, and graphs that read each row's adapter from its slot."""

from __future__ import annotations

import pytest
import torch
from on_gpu import cuda_batch
from support import random_prompts, tiny_model

import hf_paged

peft = pytest.importorskip("peft", reason="an extra of the test environment")
from lora_models import with_adapter  # noqa: E402

pytestmark = pytest.mark.gpu
SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256}
NAMES = ["one", "two", "__base__", "two"]


@pytest.fixture
def wrapped():
    model = with_adapter(tiny_model(**SHAPE), "one", 5)
    return with_adapter(model, "two", 6, ("q_proj", "k_proj", "embed_tokens", "lm_head")).cuda()


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}], ids=str)
def test_pefts_generate(wrapped, options):
    inputs = cuda_batch([40, 33, 7, 33])
    options = {**inputs, "max_new_tokens": 12, "adapter_names": NAMES, **options}
    expected = wrapped.generate(**options)
    hf_paged.enable(wrapped, strict=True)
    assert torch.equal(wrapped.generate(**options), expected)
    assert torch.equal(wrapped.generate(**options), expected)


def test_any_mix_replays_the_graphs_of_the_first(wrapped):
    prompts = random_prompts([20, 13, 5, 30])
    mixes = NAMES, [None, "one", "one", "two"], ["__base__", "two", None, "one"]
    options = {"max_new_tokens": 12, "do_sample": False}
    expected = [
        [wrapped.generate(torch.tensor([p], device="cuda"), **options,
                          **({} if name is None else {"adapter_names": [name]}))[0, len(p):].tolist()
         for p, name in zip(prompts, names, strict=True)]
        for names in mixes
    ]
    with hf_paged.PagedGenerator(wrapped, num_blocks=200, enable_prefix_caching=False) as generator:
        counts = []
        for _ in range(2):  # behind the third use of their shapes, all steps have their graphs
            generator.generate(prompts, adapter_names=NAMES, **options)
        for names, tokens in zip(mixes, expected, strict=True):
            assert [c.token_ids for c in generator.generate(prompts, adapter_names=names, **options)] == tokens
            counts.append(generator.engine.stats().num_graphs_captured)
    assert counts[0] == counts[1] == counts[2] > 0
