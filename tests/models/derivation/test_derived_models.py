"""Models of classes that are not fused run natively where a proof says so, within its limits, and else in stock."""

from __future__ import annotations

import warnings

import pytest
import torch
from derived_models import CLASSES, assert_scored_as_stock, derived_model
from support import assert_native_parity, assert_same_tensor, batch, left_padded, random_prompts, stock_generate
from transformers import BloomConfig, BloomForCausalLM

import hf_paged
from hf_paged import PagedGenerator
from hf_paged.models.derivation import deriving, stored_layout
from hf_paged.models.proof import Verdict, store
from hf_paged.models.proof.verdict import Refused

CORE = [("Arcee", 1), ("Cohere", 0), ("Cwm", 0), ("Exaone4", 0), ("GPTNeoX", 1), ("NanoChat", 1), ("OPT", 1),
        ("Olmoe", 1)]
STOCK = ("Apertus",)  # an open verdict
CASES = [pytest.param(name, number, marks=() if (name, number) in CORE else pytest.mark.slow)
         for name, configs in CLASSES.items() if name not in STOCK for number in range(len(configs))]
SETTINGS = {"strict": True, "max_num_batched_tokens": 19, "max_num_seqs": 6}


def assert_in_stock(model, reason, **kwargs):
    expected = stock_generate(model, **kwargs)
    with pytest.warns(hf_paged.FallbackWarning, match=reason):
        assert_same_tensor(model.generate(**kwargs), expected)
    explained = hf_paged.explain(model, **kwargs)
    assert explained.path == "stock" and reason in str(explained)


@pytest.mark.parametrize(("name", "number"), CASES)
def test_tokens_and_log_probabilities_are_stocks(name, number):
    """Ragged rows through windows, in chunks, beside each other."""
    model = hf_paged.enable(derived_model(name, CLASSES[name][number]), **SETTINGS)
    assert_native_parity(model, **batch([30, 17, 40, 9]), max_new_tokens=12)
    hf_paged.disable(model)
    with PagedGenerator(model, **SETTINGS) as generator:
        completions = generator.generate(random_prompts([33, 5]), max_new_tokens=4, logprobs=True, prompt_logprobs=True)
    for completion in completions:
        assert_scored_as_stock(model, completion)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_stocks_tokens_but_for_near_ties(dtype):
    model = hf_paged.enable(derived_model("Cohere", {"logit_scale": 0.3}).to(dtype), strict=True)
    assert_native_parity(model, **batch([30, 17]), max_new_tokens=12)


def bloom():
    return BloomForCausalLM(BloomConfig(vocab_size=256, hidden_size=16, n_layer=1, n_head=2, pad_token_id=0)).eval()


@pytest.mark.parametrize(("make", "reason"), [
    (lambda: derived_model("Apertus", {}), "its numbers are stock's, but code that the proof did not reach"),
    (bloom, "its forward takes no position_ids"),
], ids=["open", "refused"])
def test_what_is_not_proved_runs_in_stock_and_says_why(make, reason):
    model, inputs = make(), batch([9, 4])
    expected = stock_generate(model, **inputs, max_new_tokens=3)
    explained = hf_paged.explain(model, **inputs)
    assert explained.path == "stock" and reason in explained.reasons[0]
    with pytest.raises(hf_paged.UnsupportedModelError, match=reason):
        hf_paged.enable(model)
    hf_paged.install()
    try:
        with pytest.warns(hf_paged.FallbackWarning, match=reason):
            assert_same_tensor(model.generate(**inputs, max_new_tokens=3, do_sample=False), expected)
    finally:
        hf_paged.uninstall()
    assert not hf_paged.is_enabled(model) and hf_paged.disable(model) is model


def test_a_longer_call_than_the_models_positions_runs_in_stock():
    model = hf_paged.enable(derived_model("Arcee", {"max_position_embeddings": 64}))
    assert_native_parity(model, **batch([40]), max_new_tokens=24)
    assert_in_stock(model, "max_model_len is 64", **batch([40]), max_new_tokens=25)


def test_limits_of_the_verdict_bound_sequences_and_steps(monkeypatch):
    verdict = Verdict("proved", max_length=50, max_step_tokens=17)
    monkeypatch.setattr(deriving, "prove", lambda *args: verdict)
    model = hf_paged.enable(derived_model("Arcee", {"intermediate_size": 100}))
    config = hf_paged.get_engine(model).config
    assert (config.max_num_batched_tokens, config.max_num_seqs) == (17, 17)
    assert_native_parity(model, **batch([40]), max_new_tokens=10)
    assert_in_stock(model, "end at 50", **batch([40]), max_new_tokens=11)


BEFORE = {
    "exchanged layer": (lambda model: setattr(model.model.layers[1], "mlp", torch.nn.Identity()),
                        "model.layers.1.mlp is a Identity"),
    "further module": (lambda model: model.model.add_module("probe", torch.nn.ReLU()), "model.probe is a ReLU"),
    "lost module": (lambda model: delattr(model.model.layers[1], "mlp"), "model.layers.1.mlp is missing"),
    "number": (lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.9), "holds scaling=0.9"),
    "function": (lambda model: setattr(model.model, "extra", torch.relu), "model holds extra="),
    "config of a layer": (lambda model: setattr(model.model.layers[0].self_attn, "config", derived_model(
        "Arcee", {"attention_bias": True}).config), "model.layers.0.self_attn holds config="),
    "size": (lambda model: setattr(model.model.norm, "weight", torch.nn.Parameter(torch.ones(1))), "shape of weight"),
}


@pytest.mark.parametrize("change", sorted(BEFORE))
def test_a_model_unlike_a_new_one_of_its_config_is_refused(change):
    model = derived_model("Arcee", {})
    change_model, reason = BEFORE[change]
    change_model(model)
    with pytest.raises(hf_paged.UnsupportedModelError) as error:
        hf_paged.enable(model)
    assert reason in str(error.value) and "unlike in a new model of its config" in str(error.value)


AFTER = {
    "exchanged layer": (lambda model: setattr(model.model.layers[1], "mlp", torch.nn.Identity()), "is a torch.nn"),
    "config": (lambda model: setattr(model.config, "hidden_act", "gelu"), "mlp.act_fn is a ReLUSquaredActivation"),
    "hook": (lambda model: model.model.norm.register_forward_hook(lambda *args: None), "has a forward hook"),
}


@pytest.mark.parametrize("change", sorted(AFTER))
def test_a_model_that_changed_runs_in_stock(change):
    model = hf_paged.enable(derived_model("Arcee", {}))
    assert_native_parity(model, **batch([9]), max_new_tokens=3)
    change_model, reason = AFTER[change]
    change_model(model)
    assert_in_stock(model, reason, **batch([9]), max_new_tokens=3)




@pytest.mark.parametrize("change", [lambda model: setattr(model.config, "pad_token_id", 5),
                                    lambda model: model.set_attn_implementation("eager")], ids=["config", "attention"])
def test_a_changed_config_is_proved_at_the_next_call(change):
    """As programs that add tokens or a chat template change it."""
    model = hf_paged.enable(derived_model("Arcee", {}), strict=True)
    assert_native_parity(model, **batch([9]), max_new_tokens=3)
    change(model)
    assert_native_parity(model, **batch([9]), max_new_tokens=3)


def test_what_a_check_refuses_stays_refused(tmp_path, monkeypatch):
    def refuse(*args):
        raise Refused("it is odd")

    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path))
    monkeypatch.setattr(deriving, "check_two_halves", refuse)
    for _ in range(2):
        with pytest.raises(hf_paged.UnsupportedModelError, match="not proved to run on the paged engine: it is odd"):
            hf_paged.enable(derived_model("Arcee", {}))
        monkeypatch.setattr(deriving, "prove", lambda *args: pytest.fail("made anew"))


def test_outlines_are_stored(monkeypatch):
    """For models of one config: the second one runs no proof, and no forward on the meta device."""
    hf_paged.enable(derived_model("Arcee", {}))
    for name in ("prove", "lay_out"):
        monkeypatch.setattr(deriving, name, lambda *args: pytest.fail("made anew"))
    model = hf_paged.enable(derived_model("Arcee", {}), strict=True)
    assert_native_parity(model, **batch([9]), max_new_tokens=3)


@pytest.mark.parametrize("damage", ["", "{}", '{"verdict": {}, "layout": {}}', "classes"])
def test_a_damaged_outline_is_made_anew(damage, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_PAGED_CACHE", str(tmp_path))
    made = Verdict("proved"), deriving.lay_out(type(derived_model("Arcee", {})), derived_model("Arcee", {}).config)
    stored_layout.write("key", *made)
    assert stored_layout.read("key") == made
    file = store.folder() / "key.json"
    file.write_text(file.read_text().replace("modeling_arcee:", "modeling_arcee:No") if damage == "classes" else damage)
    assert stored_layout.read("key") is None


@pytest.mark.parametrize("name", ["Arcee", *(pytest.param(name, marks=pytest.mark.slow) for name in (
    "Cohere", "DeepseekV3", "GPTNeoX", "Olmoe"))])
def test_train_mode_without_dropout_is_native(name):
    """As trainers of reinforcement learning leave a model that they generate with."""
    model = derived_model(name, CLASSES[name][0])
    expected = stock_generate(model, **batch([30, 9]), max_new_tokens=6)
    hf_paged.enable(model.train(), strict=True)
    assert_native_parity(model, expected, **batch([30, 9]), max_new_tokens=6)


@pytest.mark.parametrize(("name", "settings", "reason"), [
    ("OPT", CLASSES["OPT"][0] | {"dropout": 0.1}, "in train mode, where it may drop out"),
    ("Arcee", {"attention_dropout": 0.1}, "attention dropout in train mode"),
])
def test_train_mode_with_dropout_goes_to_stock(name, settings, reason):
    model = hf_paged.enable(derived_model(name, settings))
    assert_native_parity(model, **batch([9]), max_new_tokens=3)
    explained = hf_paged.explain(model.train(), **batch([9]), max_new_tokens=3)
    assert explained.path == "stock" and reason in str(explained)


def test_no_question_but_enable_and_explain_makes_a_proof(monkeypatch):
    monkeypatch.setattr(deriving, "prove", lambda *args: pytest.fail("a proof"))
    model = derived_model("Arcee", {"intermediate_size": 104})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not hf_paged.is_enabled(model) and hf_paged.disable(model) is model
        with pytest.raises(ValueError, match="expected a model that"):
            hf_paged.get_engine(model)


@pytest.mark.parametrize(("name", "is_tied", "tokens"), [
    ("Arcee", False, 264), ("Arcee", True, 130), *(pytest.param(name, is_tied, tokens, marks=pytest.mark.slow)
    for name in ("Cohere", "DeepseekV2", "GPTNeoX", "Gemma", "OPT", "Starcoder2")
    for is_tied, tokens in ((False, 130), (True, 264)))])
def test_a_resized_vocabulary(name, is_tied, tokens):
    """Modules below the model keep the number of tokens that they were made with, and new layers are in train mode."""
    model = derived_model(name, CLASSES[name][0] | {"tie_word_embeddings": is_tied})
    if tokens == 264:
        hf_paged.enable(model, strict=True)
        assert_native_parity(model, **batch([9]), max_new_tokens=3)
    for size in (tokens, tokens + 6):
        model.resize_token_embeddings(size, mean_resizing=False)
        with torch.no_grad():  # so that new tokens are made
            model.get_input_embeddings().weight[size - 4 :] *= 8.0
        if not hf_paged.is_enabled(model):
            hf_paged.enable(model, strict=True)
        engine = hf_paged.get_engine(model)
        assert_native_parity(model, **left_padded(random_prompts([5], vocab_size=size)), max_new_tokens=2)
        assert (engine.vocab_size, engine.num_logits) == (size, size)
        assert_native_parity(model, **left_padded(random_prompts([9, 30], vocab_size=size)), max_new_tokens=3)


@pytest.mark.parametrize(("name", "settings"), [
    ("Arcee", {"vocab_size": 50, "max_position_embeddings": 44}),
    *(pytest.param(name, settings | {"max_position_embeddings": positions}, marks=pytest.mark.slow)
      for name, settings in (("BioGpt", {}), ("GPTJ", {"rotary_dim": 8}), ("GPTNeoX", {})) for positions in (130, 44)),
    pytest.param("OPT", {"max_position_embeddings": 48, "ffn_dim": 96, "word_embed_proj_dim": 64},
                 marks=pytest.mark.slow),
])
def test_a_model_that_is_smaller_than_the_prompts_of_a_proof(name, settings):
    model = hf_paged.enable(derived_model(name, settings), strict=True)
    vocabulary = settings.get("vocab_size", 256)
    inputs = left_padded(random_prompts([30, 17], vocab_size=vocabulary))
    assert_native_parity(model, **inputs, max_new_tokens=12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DeepseekV3", "Olmoe", "Qwen2Moe"])
@pytest.mark.parametrize(("size", "experts"), [(33, 8), (7, 3)])
def test_experts_of_odd_sizes_and_numbers(name, size, experts):
    """Without grouped products, whose strides stock asks to be multiples of 16 bytes."""
    sizes = dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), size)
    numbers = dict.fromkeys(("num_experts", "n_routed_experts"), experts)
    model = derived_model(name, CLASSES[name][0] | sizes | numbers)
    model.set_experts_implementation("eager")
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, **batch([30, 17]), max_new_tokens=6)
