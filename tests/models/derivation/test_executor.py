"""Classes run by an outline of their models, and give stock's tokens and logits."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from derived_models import CLASSES, assert_scored_as_stock, derived_model
from outlines import outlined
from support import assert_native_parity, batch, random_prompts

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.models import find_executor

CORE = [("Cohere", 0), ("OPT", 0), ("Exaone4", 0), ("DeepseekV3", 0)]
CASES = [pytest.param(name, i, marks=() if (name, i) in CORE else pytest.mark.slow)
         for name, configs in CLASSES.items() for i in range(len(configs))]


@pytest.mark.parametrize(("name", "number"), CASES)
def test_tokens_and_log_probabilities_are_stocks(name, number):
    """Ragged rows through windows, in chunks, beside each other."""
    model = outlined(derived_model(name, CLASSES[name][number]))
    hf_paged.enable(model, strict=True, max_num_batched_tokens=19, max_num_seqs=6)
    assert_native_parity(model, **batch([30, 17, 40, 9]), max_new_tokens=12)
    hf_paged.disable(model)
    with PagedGenerator(model, max_num_batched_tokens=19, max_num_seqs=6) as generator:
        completions = generator.generate(random_prompts([33, 5]), max_new_tokens=4, logprobs=True, prompt_logprobs=True)
    for completion in completions:
        assert_scored_as_stock(model, completion)


def test_an_outline_does_not_keep_its_model_alive():
    model = outlined(derived_model("Cohere", {}))
    assert find_executor(model) is not None
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


CHANGES = {
    "config": (lambda model: setattr(model.config, "logit_scale", 0.9), "the config changed, and with it"),
    "number": (lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.9), "self_attn holds scaling=0.9"),
    "attention": (lambda model: model.set_attn_implementation("eager"), "the config changed, and with it"),
    "module": (lambda model: setattr(model.model.layers[1], "mlp", torch.nn.Identity()), "is a torch.nn"),
    "further module": (lambda model: model.model.add_module("probe", torch.nn.ReLU()), "is a torch.nn"),
    "own method": (lambda model: setattr(model.model, "get_input_embeddings", lambda: None), "is replaced on"),
    "mode": (lambda model: model.train(), "train mode"),
    "dtype": (lambda model: model.model.norm.to(torch.float64), "mixed dtypes"),
}


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_model_that_its_outline_does_not_describe_goes_to_stock(change):
    model = outlined(derived_model("Cohere", {}))
    hf_paged.enable(model)
    assert_native_parity(model, **batch([9]), max_new_tokens=3)
    change_model, reason = CHANGES[change]
    change_model(model)
    explained = hf_paged.explain(model, **batch([9]), max_new_tokens=3)
    assert explained.path == "stock"
    assert reason in str(explained)


def test_a_patched_class_goes_to_stock(monkeypatch):
    model = outlined(derived_model("Cohere", {}))
    hf_paged.enable(model)
    mlp = type(model.model.layers[0].mlp)
    monkeypatch.setattr(mlp, "forward", lambda self, x, forward=mlp.forward: forward(self, x))
    assert "CohereMLP.forward is patched" in str(hf_paged.explain(model, **batch([9]), max_new_tokens=3))


def test_lora_on_every_linear_layer():
    peft = pytest.importorskip("peft")
    model = outlined(derived_model("Cohere", {"logit_scale": 0.3}))
    wrapped = peft.get_peft_model(model, peft.LoraConfig(
        target_modules=["q_proj", "down_proj", "lm_head"], r=4, init_lora_weights=False)).eval()
    inputs = batch([9, 30])
    expected = wrapped.generate(**inputs, max_new_tokens=8, do_sample=False)
    hf_paged.enable(model, strict=True)
    assert torch.equal(wrapped.generate(**inputs, max_new_tokens=8, do_sample=False), expected)
    assert hf_paged.get_engine(model).stats().num_generated_tokens == 16
