"""Stock's loop switches the implementation of experts around decoding: to the engine the model stays what it is."""

from __future__ import annotations

import pytest
import torch
from derived_models import CLASSES, derived_model
from family_models import family_model
from support import assert_same_tensor, batch, random_prompts, stock_generate
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

import hf_paged


class Switching(LogitsProcessor):
    """A processor that decodes as stock does off a CPU: "grouped_mm" for the prompts, "batched_mm" behind them."""

    def __init__(self, model, step, num_tokens):
        self.model, self.step, self.left = model, step, num_tokens

    def __call__(self, input_ids, scores):
        self.left -= 1
        self.model.set_experts_implementation("batched_mm" if self.left else "grouped_mm")
        self.step()
        return scores


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "Olmoe"])
def test_a_switch_within_lockstep_calls_computes_nothing_anew(name):
    model = derived_model(name, CLASSES[name][0]) if name in CLASSES else family_model(name)
    prompts, inputs = random_prompts([60, 40], seed=8), batch([20, 13])
    new = [stock_generate(model, input_ids=torch.tensor([prompt]), max_new_tokens=30)[0, len(prompt):].tolist()
           for prompt in prompts]
    expected = stock_generate(model, **inputs, max_new_tokens=4)
    engine = hf_paged.get_engine(hf_paged.enable(model, strict=True, overlap=False))
    try:
        names = [engine.add_request(prompt, GenerationConfig(max_new_tokens=30)) for prompt in prompts]
        found = {name: [] for name in names}

        def step():
            for output in engine.step():
                found[output.request_id] += output.new_token_ids

        for _ in range(3):  # stock's calls
            processors = LogitsProcessorList([Switching(model, step, 4)])
            assert_same_tensor(model.generate(**inputs, max_new_tokens=4, logits_processor=processors), expected)
        while engine.has_unfinished():
            step()
        assert list(found.values()) == new
        stats = engine.stats()
        assert stats.num_prefill_tokens == 60 + 40 + (20 + 13) + 2 * (4 + 13)  # later calls find a block in the cache
        assert stats.weights_version == 0
    finally:
        hf_paged.disable(model)


def test_lockstep_calls_do_not_switch_the_model(monkeypatch):
    """Nor would they on a GPU: stock's method, which asks for the device, is not called."""
    monkeypatch.setattr(PreTrainedModel, "device", property(lambda self: torch.device("meta")))
    model = hf_paged.enable(family_model("qwen3-moe"), strict=True)
    names = []
    processor = LogitsProcessorList([lambda *args: names.append(model.config._experts_implementation) or args[1]])
    model.generate(**batch([5]), max_new_tokens=3, logits_processor=processor)
    assert names == ["grouped_mm"] * 3
