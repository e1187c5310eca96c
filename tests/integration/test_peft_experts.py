"""PEFT's LoRA on experts' weights (`target_parameters`) around enabled models: stock's tokens and log-probabilities."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import count

import peft
import pytest
import recurrent_models as recurrent
import torch
from derived_models import CLASSES, derived_model
from family_models import family_model
from lora_models import ALL_LINEAR, EXPERTS, randomize, with_adapter, with_expert_adapter
from outlines import outlined
from peft.tuners.lora.layer import ParamWrapper
from support import assert_native_tokens, batch, random_prompts, stock_copy
from transformers import LogitsProcessorList

import hf_paged
from hf_paged.models import find_executor
from hf_paged.models.tuners import inside_wrappers

SCALE = 0.3
lora = partial(with_expert_adapter, scale=SCALE)
OPTIONS = {"max_new_tokens": 8}


def model_of(name, dtype=torch.float32):
    made = derived_model(name, CLASSES[name][0]) if name in CLASSES else family_model(name)
    made = made.to(dtype)
    return made if name.startswith("qwen3-moe") else outlined(made)


def generated(model, inputs, **options):
    return model.generate(**inputs, **OPTIONS, **options)


def assert_all_differ(outputs):
    assert all(not torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-moe-mixed", "mixtral", "gpt-oss"])
def test_active_disabled_switched_scaled_and_merged(name):
    """Experts in rows and, of gpt-oss, in columns; one of the models has a layer without experts."""
    model, inputs = model_of(name), batch([33, 17, 4])
    plain = generated(model, inputs)
    wrapped = lora(model)
    first = generated(wrapped, inputs)
    lora(wrapped, "second", seed=6, r=2, use_rslora=True)
    wrapped.set_adapter("second")
    second = generated(wrapped, inputs)
    wrapped.base_model.set_adapter(["default", "second"])
    both = generated(wrapped, inputs)
    assert_all_differ([plain, first, second, both])
    hf_paged.enable(wrapped, strict=True)
    assert_native_tokens(wrapped, both, inputs, **OPTIONS)
    wrapped.set_adapter("second")
    assert_native_tokens(wrapped, second, inputs, **OPTIONS)
    wrapped.set_adapter("default")
    assert_native_tokens(wrapped, first, inputs, **OPTIONS)
    with wrapped.disable_adapter():
        assert_native_tokens(wrapped, plain, inputs, **OPTIONS)
    for module in wrapped.modules():
        if type(module) is ParamWrapper:
            module.set_scale("default", 3.0)
    assert_native_tokens(wrapped, scaled := generated(stock_copy(wrapped), inputs), inputs, **OPTIONS)
    assert_all_differ([first, scaled])
    wrapped.merge_adapter()
    assert_native_tokens(wrapped, generated(stock_copy(wrapped), inputs), inputs, **OPTIONS)
    wrapped.unmerge_adapter()
    merged = wrapped.merge_and_unload()
    assert not any(type(module) is ParamWrapper for module in merged.modules())
    assert_native_tokens(merged, generated(stock_copy(merged), inputs), inputs, **OPTIONS)
    hf_paged.disable(merged)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_trained_adapters_are_new_weights(name):
    """Nothing that was cached under the old ones is read; the versions of experts' own weights stay as they are."""
    wrapped, inputs = lora(model_of(name)), batch([40, 7])
    hf_paged.enable(wrapped, strict=True)
    outputs = [generated(wrapped, inputs)]
    for seed in (7, 8):
        randomize(wrapped, "default", seed, SCALE)
        expected = generated(stock_copy(wrapped), inputs)
        found = {path: weight._version for path, weight in wrapped.named_parameters()}
        assert_native_tokens(wrapped, expected, inputs, **OPTIONS)
        assert found == {path: weight._version for path, weight in wrapped.named_parameters()}
        outputs.append(expected)
    with torch.no_grad():  # of one expert of one layer, behind the version counters' back
        wrapped.base_model.model.model.layers[1].mlp.experts.lora_B["default"].weight.data[:, :2] += 1.0
    outputs.append(generated(stock_copy(wrapped), inputs))
    assert_native_tokens(wrapped, outputs[-1], inputs, **OPTIONS)
    assert_all_differ(outputs)


def test_adapters_that_a_trainer_sends():
    """By PEFT's names, as `named_weights` has them."""
    model = model_of("qwen3-moe")
    trainers, wrapped = lora(stock_copy(model), seed=8), lora(model)
    prompts = random_prompts([21, 9])
    with hf_paged.PagedGenerator(wrapped.get_base_model()) as generator:
        before = [one.token_ids for one in generator.generate(prompts, max_new_tokens=6)]
        sent = {name: weight for name, weight in trainers.get_base_model().named_parameters() if "lora_" in name}
        assert sent.keys() <= dict(generator.engine.named_weights()).keys()
        generator.engine.load_weights(sent, partial=True)
        found = [one.token_ids for one in generator.generate(prompts, max_new_tokens=6)]
    expected = [generated(trainers, {"input_ids": torch.tensor([prompt])})[0, len(prompt):].tolist()[:6]
                for prompt in prompts]
    assert found == expected != before


@pytest.mark.parametrize("parameters", [EXPERTS[:1], EXPERTS[1:]])
def test_one_weight_alone_and_ranks_of_their_own(parameters):
    wrapped = lora(model_of("qwen3-moe"), parameters=parameters, rank_pattern={"layers.1.*proj": 7},
                   alpha_pattern={"layers.1.*proj": 40})
    ranks = {module.r["default"] for module in wrapped.modules() if type(module) is ParamWrapper}
    expected = generated(wrapped, inputs := batch([40, 7]))
    assert_native_tokens(hf_paged.enable(wrapped, strict=True), expected, inputs, **OPTIONS)
    assert ranks == {4, 7}


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_layers_named_as_in_checkpoints(name):
    """PEFT adapts experts' weights in place of layers that a checkpoint has and the model does not."""
    wrapped = with_adapter(model_of(name), targets=ALL_LINEAR, scale=SCALE)
    expected = generated(wrapped, inputs := batch([40, 7]))
    assert_native_tokens(hf_paged.enable(wrapped, strict=True), expected, inputs, **OPTIONS)


@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])
def test_log_probabilities_are_stocks(name):
    """In float32, of a prompt and of what follows it, under an active adapter and under none."""
    wrapped = lora(model_of(name))
    generator = hf_paged.PagedGenerator(wrapped.get_base_model())
    prompts = random_prompts([21, 9])
    for context in (nullcontext, wrapped.disable_adapter):
        with context():
            found = generator.generate(prompts, max_new_tokens=6, logprobs=True, prompt_logprobs=True)
            for prompt, completion in zip(prompts, found, strict=True):
                with torch.no_grad():
                    logits = stock_copy(wrapped)(torch.tensor([prompt + completion.token_ids])).logits[0].float()
                tokens = torch.tensor(prompt + completion.token_ids)[1:, None]
                wanted = logits[:-1].log_softmax(-1).gather(1, tokens)[:, 0].tolist()
                assert completion.prompt_logprobs[1:] == pytest.approx(wanted[: len(prompt) - 1], abs=1e-5)
                assert completion.logprobs == pytest.approx(wanted[len(prompt) - 1 :], abs=1e-5)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_the_room_of_a_step_counts_the_sums_of_one_block(name):
    """And not the columns of LoRA's matrices, which no token has."""
    model = model_of(name)
    before = find_executor(model)(model).step_bytes(100, 1)
    wrapped = lora(model, r=64)
    inner = inside_wrappers(model.model.layers[0].mlp.experts)
    sums = inner.gate_up_proj.nbytes + inner.down_proj.nbytes
    assert find_executor(wrapped.get_base_model())(model).step_bytes(100, 1) - before == sums


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_enabled_first_and_wrapped_later(name):
    model = model_of(name)
    expected = generated(lora(stock_copy(model)), inputs := batch([40, 7]))
    hf_paged.enable(model, strict=True)
    plain = generated(model, inputs)
    wrapped = lora(model)
    assert_native_tokens(wrapped, expected, inputs, **OPTIONS)
    wrapped.unload()
    assert_native_tokens(model, plain, inputs, **OPTIONS)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_under_autocast(name):
    wrapped, inputs = lora(model_of(name)), batch([33, 4])
    with torch.autocast("cpu", torch.bfloat16):
        expected = generated(wrapped, inputs)
        assert_native_tokens(hf_paged.enable(wrapped, strict=True), expected, inputs, **OPTIONS)


@recurrent.with_idiom
@pytest.mark.parametrize("name", ["Qwen3Next", "Lfm2Moe"])
def test_a_model_with_recurrent_states(name):
    wrapped = lora(recurrent.outlined(recurrent.recurrent_model(name)), targets=("out_proj",))
    expected = generated(wrapped, inputs := batch([33, 4]))
    hf_paged.enable(wrapped, strict=True)
    versions = [weight._version for weight in wrapped.parameters()]
    assert_native_tokens(wrapped, expected, inputs, **OPTIONS)
    assert versions == [weight._version for weight in wrapped.parameters()]


@pytest.mark.parametrize("names", [["default", "__base__"], ["__base__"] * 2])
def test_rows_of_their_own_adapters_go_to_stock(names):
    """Where PEFT refuses them."""
    wrapped = hf_paged.enable(lora(model_of("qwen3-moe")))
    with (pytest.warns(hf_paged.FallbackWarning, match="is not run for single rows"),
          pytest.raises(ValueError, match="does not support mixed")):
        wrapped.generate(**batch([9, 4]), max_new_tokens=2, adapter_names=names)
    hf_paged.disable(wrapped)
    generator = hf_paged.PagedGenerator(wrapped.get_base_model())
    with pytest.raises(ValueError, match="is not run for single rows"):
        generator.generate([[5, 6]], adapter_names=names[0], max_new_tokens=2)


def test_merged_adapters_that_are_switched_off_go_to_stock():
    """PEFT's forward takes them out of the weights."""
    wrapped, inputs = lora(model_of("qwen3-moe")), batch([9, 4])
    hf_paged.enable(wrapped)
    wrapped.merge_adapter()
    assert_native_tokens(wrapped, generated(stock_copy(wrapped), inputs), inputs, **OPTIONS)
    with wrapped.disable_adapter():
        with pytest.warns(hf_paged.FallbackWarning, match="is merged into .*, whose adapters are switched off"):
            found = generated(wrapped, inputs)
        assert_native_tokens(wrapped, found, inputs, **OPTIONS)


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_adapters_that_a_processor_merges_and_switches_off(name):
    """In the midst of a call: the next forward takes them out of the weights, as PEFT's does."""
    def processor(model):
        changes = {2: model.merge_adapter, 4: model.base_model.disable_adapter_layers}
        counts = count(1)

        def process(ids, scores):
            changes.get(next(counts), lambda: None)()
            return scores

        return LogitsProcessorList([process])

    wrapped, inputs = lora(model_of(name)), batch([9, 4])
    copied = stock_copy(wrapped)
    expected = generated(copied, inputs, logits_processor=processor(copied))
    hf_paged.enable(wrapped, strict=True)
    assert torch.equal(generated(wrapped, inputs, logits_processor=processor(wrapped)), expected)
    assert not any(module.merged for module in wrapped.modules() if type(module) is ParamWrapper)


def test_a_patched_wrapper_goes_to_stock(monkeypatch):
    wrapped, inputs = lora(model_of("qwen3-moe")), batch([9, 4])
    with wrapped.disable_adapter():
        plain = generated(wrapped, inputs)
    hf_paged.enable(wrapped)
    assert not torch.equal(generated(wrapped, inputs), plain)
    monkeypatch.setattr(ParamWrapper, "forward", lambda self, *args: self.get_base_layer()(*args))
    with pytest.warns(hf_paged.FallbackWarning, match=r"ParamWrapper.forward is patched"):
        generated(wrapped, inputs)


def test_a_models_own_adapter_methods():
    """Injected into a bare model, without a PeftModel."""
    model, inputs = model_of("qwen3-moe"), batch([40, 7])
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=list(EXPERTS))
    peft.inject_adapter_in_model(config, model, "own")
    randomize(model, "own", 5, SCALE)
    expected = generated(model, inputs)
    assert_native_tokens(hf_paged.enable(model, strict=True), expected, inputs, **OPTIONS)
