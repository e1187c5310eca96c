"""LoRA on models of proved classes, as PEFT puts it there: what stock's `generate` makes of it, without going there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from derived_models import assert_scored_as_stock
from support import assert_same_tensor, batch, num_calls, random_prompts, stock_copy
from tiny_configs import tiny_class_model
from transformers.pytorch_utils import Conv1D

import hf_paged
from hf_paged import PagedGenerator

peft = pytest.importorskip("peft", reason="an extra of the test environment")
from lora_models import randomize, with_adapter  # noqa: E402

# Layers that get adapters: merged q, k, v in a Conv1D; a head of another name; layers of other widths; latents; layers
# that get tokens without the dim of the batch.
TARGETS = {
    "GPT2LMHeadModel": ("c_attn", "c_proj", "c_fc"),
    "GPTNeoXForCausalLM": ("query_key_value", "dense_4h_to_h", "embed_out"),
    "Starcoder2ForCausalLM": ("q_proj", "c_proj"),
    "DeepseekV2ForCausalLM": ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"),
    "OPTForCausalLM": ("q_proj", "fc1", "fc2"),
}
INPUTS = batch([30, 17, 9])
EACH = pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name.startswith("GPT2") else pytest.mark.slow) for name in TARGETS])


def assert_native(wrapped: Any, **kwargs: Any) -> None:
    """Tokens are stock's, made by the engine of the model inside."""
    kwargs = {"max_new_tokens": 6, "do_sample": False} | kwargs
    expected = copy.deepcopy(wrapped).generate(**INPUTS, **kwargs)
    calls = num_calls(wrapped).get("native", 0)
    assert_same_tensor(wrapped.generate(**INPUTS, **kwargs), expected)
    assert num_calls(wrapped)["native"] == calls + 1


def two_adapters(name: str, model: Any) -> Any:
    wrapped = with_adapter(model, "one", 5, TARGETS[name])
    return with_adapter(wrapped, "two", 6, TARGETS[name][:1])


@EACH
def test_adapters_that_come_to_an_enabled_model_are_switched_merged_and_taken_off(name):
    model = hf_paged.enable(tiny_class_model(name, 0), strict=True)
    wrapped = two_adapters(name, model)
    assert_native(wrapped)
    wrapped.set_adapter("two")
    assert_native(wrapped)
    with wrapped.disable_adapter():
        assert_native(wrapped)
    wrapped.merge_adapter(["one"])
    assert_native(wrapped)
    wrapped.unmerge_adapter()
    assert_native(wrapped)
    assert_native(wrapped.merge_and_unload())


@EACH
def test_rows_of_different_adapters(name):
    """Each row's tokens are those of a call with its adapter alone."""
    wrapped = hf_paged.enable(two_adapters(name, tiny_class_model(name, 0)), strict=True)
    expected = []
    for adapter in ("one", "two", None):
        alone = copy.deepcopy(wrapped)
        if adapter is None:
            alone.base_model.disable_adapter_layers()
        else:
            alone.set_adapter(adapter)
        expected.append(alone.generate(**INPUTS, max_new_tokens=6, do_sample=False)[len(expected)])
    names = ["one", "two", "__base__"]
    found = wrapped.generate(**INPUTS, max_new_tokens=6, do_sample=False, adapter_names=names)
    assert_same_tensor(found, torch.stack(expected))
    assert num_calls(wrapped) == {"native": 1}


@EACH
def test_log_probabilities(name):
    wrapped = two_adapters(name, tiny_class_model(name, 0))
    with PagedGenerator(wrapped, strict=True) as generator:
        completions = generator.generate(random_prompts([33, 5]), max_new_tokens=4, logprobs=True, prompt_logprobs=True)
    for completion in completions:
        assert_scored_as_stock(stock_copy(wrapped.get_base_model()), completion)


@EACH
@pytest.mark.parametrize("options", [{"use_dora": True}, {"modules_to_save": ["head"]},
                                     {"modules_to_save": ["embedding"]}], ids=["dora", "head", "embedding"])
def test_other_kinds(name, options):
    model = tiny_class_model(name, 0)
    layers = {"head": model.get_output_embeddings(), "embedding": model.get_input_embeddings()}
    paths = {layer: path for path, layer in model.named_modules()}
    if saved := options.get("modules_to_save"):
        options = {"modules_to_save": [paths[layers[kind]] for kind in saved]}
    wrapped = hf_paged.enable(with_adapter(model, targets=TARGETS[name][:2], **options), strict=True)
    assert_native(wrapped)
    with wrapped.disable_adapter():
        assert_native(wrapped)


def test_a_patched_conv1d_goes_to_stock(monkeypatch):
    wrapped = hf_paged.enable(with_adapter(tiny_class_model("GPT2LMHeadModel", 0), targets=["c_attn"]))
    monkeypatch.setattr(Conv1D, "forward", lambda self, x, forward=Conv1D.forward: forward(self, x))
    assert "Conv1D.forward is patched" in str(hf_paged.explain(wrapped, **INPUTS))


def test_rows_of_adapters_with_copies_of_the_head():
    wrapped = with_adapter(tiny_class_model("GPT2LMHeadModel", 0), "one", 5, ["c_attn"], modules_to_save=["lm_head"])
    wrapped = hf_paged.enable(with_adapter(wrapped, "two", 6, ["c_fc"], modules_to_save=["lm_head"]), strict=True)
    assert_native(wrapped, adapter_names=["one", "two", "__base__"])
    assert_native(wrapped, adapter_names=["two", "two", "one"])


def test_a_row_of_an_adapter_that_has_no_copy_of_the_head():
    wrapped = with_adapter(tiny_class_model("GPT2LMHeadModel", 0), "one", 5, ["c_attn"], modules_to_save=["lm_head"])
    wrapped = hf_paged.enable(with_adapter(wrapped, "two", 6, ["c_fc"]))
    randomize(wrapped, "two", 6)
    engine = hf_paged.get_engine(wrapped)
    with pytest.raises(ValueError, match="lm_head has no copy of an adapter"):
        engine.add_request([1, 2, 3], adapter_name="two")
    wrapped.set_adapter("two")
    assert_native(wrapped)
