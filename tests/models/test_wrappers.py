"""Image-text models around a supported decoder."""

from __future__ import annotations

import warnings

import pytest
import torch
from family_models import WRAPPED, wrapped_model
from support import (
    assert_lockstep,
    assert_native_parity,
    assert_same_tensor,
    batch,
    left_padded,
    random_prompts,
    stock_copy,
    stock_generate,
    tiny_model,
)
from torch import nn

import hf_paged
from hf_paged.models.derivation.executor import DerivedExecutor

CALL = {**batch([3, 17, 40, 33]), "max_new_tokens": 24}
IMAGE = torch.linspace(-1, 1, 3 * 28 * 28).view(1, 3, 28, 28)


def _reason(model):
    return hf_paged.get_engine(model).unsupported_reason()


@pytest.mark.parametrize("name", WRAPPED)
def test_text_alone_is_native(name):
    """Ragged rows, prefix hits, chunks and preemptions."""
    model = wrapped_model(name)
    expected = stock_generate(model, **CALL)
    assert len(set(expected[:, 40:].flatten().tolist())) > 20
    hf_paged.enable(model, strict=True)
    assert type(hf_paged.get_engine(model)._executor) is DerivedExecutor
    for _ in range(2):
        assert_native_parity(model, expected, **CALL)
    assert hf_paged.get_engine(model).stats().prefix_cache_hits > 0
    hf_paged.enable(model, strict=True, num_blocks=10, max_num_batched_tokens=19, max_num_seqs=6)
    assert_native_parity(model, expected, **CALL)
    assert hf_paged.get_engine(model).stats().num_preemptions > 0


@pytest.mark.parametrize("name", WRAPPED)
def test_logits_in_lockstep_are_stocks(name):
    """The text models of some cap or divide theirs; inside of a wrapper they do not."""
    options = {"max_new_tokens": 3, "return_dict_in_generate": True, "output_logits": True}
    assert_lockstep(wrapped_model(name), **batch([9, 30]), **options)


@pytest.mark.parametrize("name", ["gemma3", "llava"])
def test_beams_and_the_cache_in_the_result(name):
    model = wrapped_model(name)
    assert_lockstep(model, **batch([9, 30]), max_new_tokens=5, num_beams=3)
    kwargs = {**batch([9, 30]), "max_new_tokens": 4, "return_dict_in_generate": True}
    expected, actual = stock_copy(model).generate(**kwargs), model.generate(**kwargs)
    assert_same_tensor(actual.sequences, expected.sequences)
    for ours, stocks in zip(actual.past_key_values.layers, expected.past_key_values.layers, strict=True):
        assert ours.keys.shape == stocks.keys.shape
        assert torch.allclose(ours.keys[1], stocks.keys[1], atol=1e-5)


def test_token_types_of_text_and_of_images():
    """Gemma 3's image tokens see each other, also where no image says so."""
    model, inputs = wrapped_model("gemma3"), batch([20, 20])
    types = torch.zeros_like(inputs["input_ids"])
    expected = model.generate(**inputs, token_type_ids=types, max_new_tokens=8)
    hf_paged.enable(model, strict=True)
    before = hf_paged.get_engine(model).stats().num_generated_tokens
    assert_same_tensor(model.generate(**inputs, token_type_ids=types, max_new_tokens=8), expected)
    assert hf_paged.get_engine(model).stats().num_generated_tokens - before == 16
    types[:, 4:12] = 1
    seeing = assert_native_parity(model, **inputs, token_type_ids=types, max_new_tokens=8)
    assert not torch.equal(seeing, expected)


def test_an_image_in_the_call():
    """Whose features the model puts in place of tokens of the prompt; an image of zeros is one, too."""
    model = wrapped_model("llava")
    prompt = [*random_prompts([12], vocab_size=200)[0], *[model.config.image_token_id] * 4, 7, 8]
    inputs = left_padded([prompt])
    text = model.generate(**inputs, max_new_tokens=8)
    hf_paged.enable(model, strict=True)
    for image in (IMAGE, torch.zeros_like(IMAGE)):
        seen = assert_native_parity(model, **inputs, pixel_values=image, max_new_tokens=8)
        assert not torch.equal(seen, text)
        assert_native_parity(model, text, **inputs, max_new_tokens=8)


def test_an_image_token_without_a_vector():
    """It is outside the vocabulary, where stock puts another in its place, by code that a proof does not reach."""
    with pytest.raises(hf_paged.UnsupportedModelError, match="the full size runs other code than a small clone"):
        hf_paged.enable(wrapped_model("gemma3", image_token_id=300))


@pytest.mark.parametrize("name", ["gemma3", "mistral3", "llava", "llava-next"])
def test_patched_code_of_the_wrapper(name):
    model = hf_paged.enable(wrapped_model(name))
    assert _reason(model) is None
    owners = [(type(model.model), "forward"), (type(model), "forward"),
              (type(model), "prepare_inputs_for_generation")]
    for owner, method in owners:
        with pytest.MonkeyPatch.context() as patch:
            original = getattr(owner, method)
            patch.setattr(owner, method, lambda *args, original=original, **kwargs: original(*args, **kwargs))
            assert _reason(model) is not None, (owner, method)
        assert _reason(model) is None


def test_what_stands_around_the_decoder():
    model = hf_paged.enable(wrapped_model("llava"))

    class Body(type(model.model)):
        pass

    for change, message in [
        (lambda body: setattr(body, "__class__", Body), "Body, not transformers' own LlavaModel"),
        (lambda body: setattr(body, "forward", lambda **kwargs: None), "the forward of model is replaced"),
        (lambda body: setattr(body.language_model.layers[0], "mlp", nn.Identity()),
         "model.language_model.layers.0.mlp is a torch.nn.modules.linear.Identity, not transformers' own LlamaMLP"),
        (lambda body: body.register_forward_hook(lambda *args: None), "model has a forward hook"),
    ]:
        model = hf_paged.enable(wrapped_model("llava"))
        assert _reason(model) is None
        change(model.model)
        assert message in _reason(model)


def test_a_decoder_that_is_not_supported():
    model = wrapped_model("llava")
    model.model.language_model = tiny_model().model.layers
    with pytest.raises(hf_paged.UnsupportedModelError, match="LlavaForConditionalGeneration"):
        hf_paged.enable(model)


def test_plain_forwards_with_images_are_stocks():
    model = wrapped_model("llava")
    inputs = left_padded([[5, 6, *[model.config.image_token_id] * 4, 7]])
    expected = model(**inputs, pixel_values=IMAGE).logits
    hf_paged.enable(model, strict=True)
    model.generate(**batch([9]), max_new_tokens=3)
    assert torch.equal(model(**inputs, pixel_values=IMAGE).logits, expected)


@pytest.mark.parametrize("name", ["gemma3", "mistral3"])
def test_install_and_a_generator(name, tmp_path):
    """`from_pretrained` takes what `AutoModelForCausalLM` gives for the checkpoint."""
    model, prompts = wrapped_model(name), random_prompts([5, 30])
    expected = [stock_generate(model, **left_padded([prompt]), max_new_tokens=9)[0, len(prompt):] for prompt in prompts]
    with hf_paged.PagedGenerator(stock_copy(model)) as generator:
        outputs = generator.generate(prompts, max_new_tokens=9)
    assert [output.token_ids for output in outputs] == [tokens.tolist() for tokens in expected]
    if name == "gemma3":
        model.save_pretrained(tmp_path)
        with hf_paged.PagedGenerator.from_pretrained(tmp_path, dtype=torch.float32) as generator:
            assert type(generator.engine._executor.model).__name__ == "Gemma3ForConditionalGeneration"
            outputs = generator.generate(prompts, max_new_tokens=9)
        assert [output.token_ids for output in outputs] == [tokens.tolist() for tokens in expected]
    hf_paged.install(strict=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", hf_paged.FallbackWarning)
            output = model.generate(**left_padded(prompts), max_new_tokens=9)
        assert hf_paged.is_enabled(model)
    finally:
        hf_paged.uninstall()
    assert_same_tensor(output[:, 30:], torch.stack(expected))
