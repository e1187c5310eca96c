"""`hf_paged.install`: supported models are enabled when somebody first generates; everything can be put back."""

from __future__ import annotations

import gc
import inspect
import threading
import time
import warnings

import pytest
import torch
from support import assert_same_tensor, batch, random_prompts, stock_generate, tiny_model
from threads import run_threads
from transformers import GenerationConfig, GenerationMixin, GPTNeoConfig, GPTNeoForCausalLM, Qwen3ForCausalLM, pipeline

import hf_paged
from hf_paged.integration import enable as enable_module
from hf_paged.integration import hooks

INPUTS = batch([9, 4])


@pytest.fixture(autouse=True)
def _uninstalled():
    """Models that other modules enabled for all of the session may keep the hooks, which then are as before."""
    gc.collect()
    hooks.put_back_if_unused()
    before = dict(vars(GenerationMixin))
    yield
    hf_paged.uninstall()
    gc.collect()
    hooks.put_back_if_unused()
    assert dict(vars(GenerationMixin)) == before


def test_models_are_enabled_when_they_first_generate_and_disabled_by_uninstall(trained_path):
    before = tiny_model()
    expected = stock_generate(before, **INPUTS, max_new_tokens=6)
    hf_paged.install(num_blocks=40)
    hf_paged.install(num_blocks=50)  # again: the config of models to come
    assert hf_paged.is_installed()
    assert not hf_paged.is_enabled(before)
    stock = inspect.unwrap(GenerationMixin.generate).__get__(before)
    assert inspect.signature(before.generate) == inspect.signature(stock)
    loaded = Qwen3ForCausalLM.from_pretrained(trained_path)
    for model in (before, loaded):
        output = model.generate(**INPUTS, max_new_tokens=6)
        assert hf_paged.get_engine(model).stats().num_generated_tokens > 0
        assert hf_paged.get_engine(model).config.num_blocks == 50
        if model is before:
            assert_same_tensor(output, expected)
    hf_paged.uninstall()
    hf_paged.uninstall()
    assert not hf_paged.is_installed()
    assert (type(before), type(loaded)) == (Qwen3ForCausalLM, Qwen3ForCausalLM)
    assert_same_tensor(before.generate(**INPUTS, max_new_tokens=6), expected)
    assert not hf_paged.is_enabled(before)


@pytest.mark.parametrize("name", ["generate_batch", "init_continuous_batching", "continuous_batching_context_manager"])
def test_each_continuous_batching_method_enables(name):
    hf_paged.install()
    model, prompts, config = tiny_model(), random_prompts([5]), GenerationConfig(max_new_tokens=3)
    if name == "generate_batch":
        outputs = list(model.generate_batch(prompts, config).values())
    elif name == "init_continuous_batching":
        manager = model.init_continuous_batching(config)
        manager.start()
        manager.add_request(prompts[0])
        outputs = [manager.get_result(timeout=20)]
        manager.stop(timeout=20)
    else:
        with model.continuous_batching_context_manager(config) as manager:
            manager.add_request(prompts[0])
            outputs = [manager.get_result(timeout=20)]
    assert [len(output.generated_tokens) for output in outputs] == [3]
    assert hf_paged.get_engine(model).stats().num_generated_tokens == 3


def test_threads_that_meet_in_the_first_call_share_one_engine(monkeypatch):
    hf_paged.install()
    model, enable, engines, outputs = tiny_model(), enable_module.enable, set(), []
    expected = stock_generate(model, **INPUTS, max_new_tokens=40)

    def slow_enable(*args):
        time.sleep(0.1)
        return enable(*args)

    def run(delay):
        time.sleep(delay)
        outputs.append(model.generate(**INPUTS, max_new_tokens=40))
        engines.add(hf_paged.get_engine(model))

    monkeypatch.setattr(enable_module, "enable", slow_enable)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        threads = [threading.Thread(target=run, args=(delay,)) for delay in (0.0, 0.05, 0.08)]
        run_threads(threads)
    assert [str(w.message) for w in caught if w.category is hf_paged.FallbackWarning] == []
    assert len(engines) == 1
    assert len(outputs) == 3
    for output in outputs:
        assert_same_tensor(output, expected)


def test_a_models_own_disable_stays():
    hf_paged.install()
    model = tiny_model()
    model.generate(**INPUTS, max_new_tokens=2)
    hf_paged.disable(model)
    model.generate(**INPUTS, max_new_tokens=2)
    assert not hf_paged.is_enabled(model)


def test_models_enabled_by_hand_keep_their_engine():
    model = hf_paged.enable(tiny_model())
    engine = hf_paged.get_engine(model)
    hf_paged.install(num_blocks=50)
    model.generate(**INPUTS, max_new_tokens=2)
    assert hf_paged.get_engine(model) is engine
    hf_paged.uninstall()
    assert hf_paged.get_engine(model) is engine
    hf_paged.disable(model)


def test_other_models_stay_stock():
    with torch.random.fork_rng():
        model = GPTNeoForCausalLM(GPTNeoConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2,
                                               attention_types=[[["global"], 1]])).eval()
    ids = torch.tensor([[3, 4, 5]])
    expected = model.generate(ids, max_new_tokens=4, pad_token_id=0)
    hf_paged.install()
    assert_same_tensor(model.generate(ids, max_new_tokens=4, pad_token_id=0), expected)
    assert type(model) is GPTNeoForCausalLM
    assert not hf_paged.is_enabled(model)


def test_a_class_that_is_not_supported_is_named_once():
    """At the line that called, and anew after another `install`."""
    config = GPTNeoConfig(vocab_size=50, hidden_size=16, num_layers=1, num_heads=2,
                          attention_types=[[["global"], 1]])
    with torch.random.fork_rng():
        models = [GPTNeoForCausalLM(config).eval() for _ in range(2)]
    for _ in range(2):
        hf_paged.install()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for model in models * 2:
                model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2, pad_token_id=0)
        [warned] = [w for w in caught if w.category is hf_paged.FallbackWarning]
        assert "GPTNeoForCausalLM is not proved to run on the paged engine" in str(warned.message)
        assert "docs/models.md" in str(warned.message) and warned.filename == __file__
        hf_paged.uninstall()


def test_a_draft_model_inside_a_stock_call_stays_stock():
    hf_paged.install()
    model, draft = tiny_model(), tiny_model(seed=1)
    one = batch([7])
    with pytest.warns(hf_paged.FallbackWarning, match="assisted") as caught:
        model.generate(**one, max_new_tokens=6, assistant_model=draft)
    assert len([w for w in caught if w.category is hf_paged.FallbackWarning]) == 1
    assert hf_paged.is_enabled(model)
    assert not hf_paged.is_enabled(draft)


def test_pipelines_run_on_the_engine(trained_model, trained_tokenizer):
    hf_paged.install()
    generator = pipeline("text-generation", model=trained_model, tokenizer=trained_tokenizer)
    generator("amber ant", max_new_tokens=4, do_sample=False)
    assert hf_paged.get_engine(trained_model).stats().num_generated_tokens > 0


def test_uninstall_leaves_what_somebody_put_on_top(monkeypatch):
    hf_paged.install()
    with monkeypatch.context() as patch:
        patch.setattr(GenerationMixin, "generate", lambda self: None)
        with pytest.raises(RuntimeError, match=r"GenerationMixin\.generate was replaced"):
            hf_paged.uninstall()
    assert hf_paged.is_installed()


def test_wrong_settings_are_refused_before_anything_is_replaced():
    with pytest.raises(ValueError, match="block_size"):
        hf_paged.install(block_size=17)
    with pytest.raises(TypeError, match="blocksize"):
        hf_paged.install(blocksize=16)
    assert not hf_paged.is_installed()
