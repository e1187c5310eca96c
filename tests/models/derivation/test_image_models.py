"""Image-text models that are proved: calls with text alone."""

from __future__ import annotations

import inspect

import pytest
import torch
from image_calls import image_call
from image_models import IMAGE, MODELS, WITH_STATES, image_model
from recurrent_models import with_idiom
from support import (
    assert_lockstep,
    assert_native_parity,
    batch,
    random_prompts,
    stock_generate,
)

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.integration.explain import preview
from hf_paged.models.derivation.executor import DerivedExecutor

CORE = ("qwen3-vl", "qwen3.5", "smolvlm")
STEPS = {"max_num_batched_tokens": 19, "max_num_seqs": 6}
CASES = [pytest.param(name, marks=[*([] if name in CORE else [pytest.mark.slow]),
                                   *([with_idiom] if name in WITH_STATES else [])]) for name in MODELS]


@pytest.mark.parametrize("name", CASES)
def test_text_alone_is_native(name):
    """Ragged rows in chunks, twice, with an id of images in a prompt: without an image it is a token as others."""
    model = hf_paged.enable(image_model(name), strict=True, **STEPS)
    assert isinstance(hf_paged.get_engine(model)._executor, DerivedExecutor)
    inputs = batch([25, 9, 40])
    for _ in range(2):
        assert_native_parity(model, **inputs, max_new_tokens=6)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits > 0
    inputs["input_ids"][:, -2] = IMAGE
    assert_native_parity(model, **inputs, max_new_tokens=3)
    if "mm_token_type_ids" in inspect.signature(type(model).forward).parameters:  # which processors give in any case
        types = torch.zeros_like(inputs["input_ids"])
        assert_native_parity(model, **inputs, mm_token_type_ids=types, max_new_tokens=3)
    hf_paged.disable(model)
    assert_lockstep(model, **batch([9, 30]), max_new_tokens=3, return_dict_in_generate=True, output_logits=True)


@pytest.mark.parametrize("name", ["qwen3-vl", pytest.param("qwen3.5", marks=[pytest.mark.slow, with_idiom])])
def test_calls_with_and_without_an_image_in_turn(name):
    """Stock keeps a number of the image on the model."""
    model = image_model(name)
    inputs = image_call(model, [[9, "1", 1]])
    blind = {key: value for key, value in inputs.items() if key in ("input_ids", "attention_mask")}
    text = stock_generate(model, **blind, max_new_tokens=8)
    seen = stock_generate(model, **inputs, max_new_tokens=8)
    assert not torch.equal(seen, text)
    hf_paged.enable(model)
    for _ in range(2):
        assert_native_parity(model, seen, **inputs, max_new_tokens=8)
        assert_native_parity(model, text, **blind, max_new_tokens=8)
    hf_paged.enable(model, strict=True)  # reads the model anew
    assert_native_parity(model, text, **blind, max_new_tokens=8)


def test_a_checkpoint_that_is_no_causal_lm_is_loaded_and_foreseen(tmp_path):
    image_model("qwen3-vl").save_pretrained(tmp_path)
    assert preview(str(tmp_path), {"text": batch([9])}).calls["text"].path == "native"
    prompt = random_prompts([20])[0]
    with PagedGenerator.from_pretrained(tmp_path, device="cpu", strict=True) as generator:
        expected = stock_generate(generator.model, input_ids=torch.tensor([prompt]), max_new_tokens=5)
        assert generator.generate([prompt], max_new_tokens=5)[0].token_ids == expected[0, 20:].tolist()
