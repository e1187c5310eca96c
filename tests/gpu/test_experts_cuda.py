"""On a GPU: calls of a model with experts in stock's loop leave the model to others as it is."""

from __future__ import annotations

import pytest
import torch
from family_models import family_model
from support import batch, random_prompts
from transformers import GenerationConfig, LogitsProcessorList

import hf_paged

pytestmark = pytest.mark.gpu
SHAPE = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64}


def cuda(inputs):
    return {name: tensor.cuda() for name, tensor in inputs.items()}


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("variant", ["qwen3-moe", "mixtral"])
def test_lockstep_calls_change_nothing_of_the_model(variant, num_beams):
    """Stock's loop decodes with another implementation of experts off a CPU: nothing is computed anew."""
    model = family_model(variant, **SHAPE).to("cuda", torch.bfloat16)
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True, overlap=False))
    prompts, names = random_prompts([60, 40], seed=8), []

    def processor(input_ids, scores):
        names.append(model.config._experts_implementation)
        engine.step()
        return scores

    for prompt in prompts:
        engine.add_request(prompt, GenerationConfig(max_new_tokens=30))
    for _ in range(3):
        model.generate(**cuda(batch([20, 13])), max_new_tokens=4, num_beams=num_beams, do_sample=False,
                       logits_processor=LogitsProcessorList([processor]))
    while engine.has_unfinished():
        engine.step()
    stats = engine.stats()
    assert set(names) == {"grouped_mm"}
    assert stats.weights_version == 0
    assert stats.num_prefill_tokens <= 60 + 40 + 3 * (20 + 13)
    hf_paged.disable(model)
