"""`hf_paged.explain` says what then happens, by the engine's own counts, and leaves no trace.

So do `assert_native_parity`, `assert_lockstep` and `assert_falls_back`, which ask it about the calls of other tests.
"""

from __future__ import annotations

import logging
import threading
import warnings

import peft
import pytest
import torch
import transformers
from option_cases import FIELDS, inputs_of, options_of
from support import (
    RecordingStreamer,
    assert_idle,
    assert_native_parity,
    batch,
    byte_tokenizer,
    num_calls,
    random_prompts,
    tiny_model,
)
from test_generate_fallbacks import BAD_CALLS, AddToOneToken
from transformers import (
    DynamicCache,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen3ForCausalLM,
)

import hf_paged

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
TWO_ROWS = batch([20, 13])


def _attempt(call):
    torch.manual_seed(0)
    try:
        return call(), None
    except Exception as error:
        return None, error


def assert_true(model, **kwargs):
    """What explain says of a call of an enabled model is what the call then does; returns what it said."""
    before = hf_paged.get_engine(model).stats().calls
    explained, refused = _attempt(lambda: hf_paged.explain(model, **kwargs))
    assert hf_paged.get_engine(model).stats().calls == before
    _, error = _attempt(lambda: model.generate(**kwargs))
    after = hf_paged.get_engine(model).stats().calls
    ran = [path for path in after if after[path].num_calls > before[path].num_calls]
    if explained is None:
        assert (type(refused), ran) == (type(error), []), "what raises before it decodes takes no path"
        return None
    assert ran == [explained.path], (explained, error)
    assert len(explained.reasons) == len(explained.remedies)
    counted = after[explained.path].by_reason
    grown = [kind for kind, count in counted.items() if count != before[explained.path].by_reason.get(kind)]
    assert grown == [reason.kind for reason in explained.reasons[:1]]
    assert (explained.path == "native") == (not explained.reasons)
    return explained


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_every_option(name):
    model, kwargs = tiny_model(), {**inputs_of(name), **options_of(name)}
    beforehand = _attempt(lambda: hf_paged.explain(model, **kwargs))[0]
    assert beforehand == assert_true(hf_paged.enable(model), **kwargs)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name):
    kwargs = {"input_ids": torch.tensor(random_prompts([20, 20]))} | BAD_CALLS[name]
    assert_true(hf_paged.enable(tiny_model()), **({"max_new_tokens": 8} | kwargs))


INPUTS = {
    "inputs": lambda model: {"inputs": TWO_ROWS["input_ids"]},
    "embeddings": lambda model: {"inputs_embeds": torch.ones(2, 5, 64)},
    "embeddings beside ids": lambda model: {**TWO_ROWS, "inputs_embeds": torch.ones(2, 20, 64)},
    "right padding": lambda model: {name: value.flip(1) for name, value in TWO_ROWS.items()},
    "positions": lambda model: {**TWO_ROWS, "position_ids": torch.arange(20).expand(2, -1) + 3},
    "a cache": lambda model: {**TWO_ROWS, "past_key_values": DynamicCache(config=model.config)},
    "a draft model": lambda model: {**batch([20]), "assistant_model": tiny_model(1)},
    "too long": lambda model: {**batch([500]), "max_new_tokens": 50},
    "too many rows": lambda model: {**batch([9] * 4), "num_beams": 4, "max_new_tokens": 300},
    "a processor": lambda model: {**TWO_ROWS, "logits_processor": LogitsProcessorList([AddToOneToken()])},
    "prefixes": lambda model: {**TWO_ROWS, "prefix_allowed_tokens_fn": lambda row, ids: [3, 4]},
    "a streamer": lambda model: {**batch([20]), "streamer": RecordingStreamer()},
    "stop strings": lambda model: {**batch([20]), "stop_strings": "a", "tokenizer": byte_tokenizer()},
    "labels": lambda model: {**TWO_ROWS, "labels": TWO_ROWS["input_ids"]},
    "custom_generate": lambda model: {**TWO_ROWS, "custom_generate": lambda model, input_ids, **kwargs: input_ids},
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs(name):
    model = hf_paged.enable(tiny_model(), num_blocks=60)
    explained = assert_true(model, **({"max_new_tokens": 6} | INPUTS[name](model)))
    assert explained is not None


MODELS = {
    "a hook": lambda model: model.model.layers[0].register_forward_hook(lambda *args: None),
    "train mode with dropout": lambda model: (setattr(model.config, "attention_dropout", 0.1), [
        setattr(layer.self_attn, "attention_dropout", 0.1) for layer in model.model.layers], model.train()),
    "mixed dtypes": lambda model: model.lm_head.to(torch.float64),
    "forward replaced": lambda model: setattr(model, "forward", lambda *args, **kwargs: None),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
def test_states_of_the_model(name, options):
    model = tiny_model()
    MODELS[name](model)
    beforehand = hf_paged.explain(model, **TWO_ROWS, max_new_tokens=4, **options)
    explained = assert_true(hf_paged.enable(model), **TWO_ROWS, max_new_tokens=4, **options)
    assert explained == beforehand and explained.path == "stock"
    assert len(explained.reasons) == 1 + len(options)


def test_every_reason_is_named_with_its_remedy():
    model = tiny_model()
    model.lm_head.register_forward_hook(lambda *args: None)
    options = {"num_beams": 2, "output_attentions": True, "output_scores": True, "return_dict_in_generate": True}
    explained = hf_paged.explain(model, **TWO_ROWS, **options, output_router_logits=True)
    assert [reason.split(" ")[0] for reason in explained.reasons] == [
        "output_attentions=True", "lm_head", "num_beams=2", "return_dict_in_generate=True", "output_scores=True",
    ] or {reason.split(" ")[0] for reason in explained.reasons} >= {"output_attentions=True", "lm_head", "num_beams=2"}
    lines = str(explained).splitlines()
    assert lines[0] == "stock" and len(lines) == 1 + 2 * len(explained.reasons)
    for reason, remedy in zip(explained.reasons, explained.remedies, strict=True):
        assert remedy == reason.remedy and remedy.endswith(".") and f"  {reason}" in lines and f"    {remedy}" in lines


# -- no trace ------------------------------------------


class _Untouchable(LogitsProcessor):
    def __call__(self, input_ids, scores):
        raise AssertionError("a processor ran")


def logging_filters():
    """Of loggers that have any: a module that is imported meanwhile brings its logger along."""
    filters = {name: list(logging.getLogger(name).filters) for name in list(logging.Logger.manager.loggerDict)}
    return {name: found for name, found in filters.items() if found}



@pytest.mark.each_value
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("options", [
    {}, {"do_sample": True}, {"num_beams": 2}, {"cache_implementation": "static"}, {"eos_token_id": 5},
    {"cache_implementation": "static", "prefill_chunk_size": 4}, {"logits_processor": [_Untouchable()]},
    {"assistant_model": tiny_model, "one_row": True},
], ids=lambda options: "-".join(options) or "none")
def test_nothing_runs_or_stays(enabled, options, monkeypatch, capsys):
    options = {name: value() if value is tiny_model else value for name, value in options.items()}
    inputs = batch([20] if options.pop("one_row", False) else [20, 13])
    model = tiny_model()
    if enabled:
        hf_paged.enable(model)
    monkeypatch.setattr(torch.nn.Linear, "forward", None)
    state, kind, streamer = dict(vars(model)), type(model), RecordingStreamer()
    if "num_beams" not in options and "assistant_model" not in options:
        inputs["streamer"] = streamer
    draws, filtered = torch.get_rng_state(), logging_filters()
    generation_config = model.generation_config.to_json_string()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filters = list(warnings.filters)
        transformers.logging.set_verbosity_warning()
        try:
            hf_paged.explain(model, **inputs, **options)
        finally:
            transformers.logging.set_verbosity_error()
        assert warnings.filters == filters
    assert (dict(vars(model)), type(model)) == (state, kind)
    assert model.generation_config.to_json_string() == generation_config
    assert torch.equal(torch.get_rng_state(), draws)
    assert streamer.puts == [] and capsys.readouterr() == ("", "")
    assert logging_filters() == filtered
    assert hf_paged.is_enabled(model) == enabled
    if enabled:
        stats = hf_paged.get_engine(model).stats()
        assert (stats.num_blocks, stats.kv_cache_bytes, stats.num_steps, num_calls(model)) == (0, 0, 0, {})


def test_a_cache_of_the_caller_gets_no_mark():
    model = tiny_model()
    cache = DynamicCache(config=model.config)
    before = dict(vars(cache))
    assert "a cache given by the caller" in hf_paged.explain(model, **TWO_ROWS, past_key_values=cache).reasons[0]
    assert vars(cache) == before


def test_a_call_goes_on_in_another_thread_meanwhile():
    """The question is this thread's: a call of another one is neither answered nor silenced."""
    model, results = hf_paged.enable(tiny_model()), []

    class Asking(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if not results:
                thread = threading.Thread(target=lambda: results.append(model.generate(**TWO_ROWS, max_new_tokens=4)))
                thread.start()
                thread.join(60)
            return scores

    class Config(transformers.GenerationConfig):
        """Whose validation, a part of stock's preparation, waits for a call of another thread."""

        def validate(self, *args, **kwargs):
            if hf_paged.integration.paths.asked() is not None:
                Asking()(None, None)
            return super().validate(*args, **kwargs)

    config = Config(max_new_tokens=4)
    assert hf_paged.explain(model, **TWO_ROWS, generation_config=config).path == "native"
    assert len(results) == 1 and num_calls(model) == {"native": 1}


def test_a_model_that_is_not_enabled_stays_in_stock_for_other_threads():
    model, results = tiny_model(), []

    class Config(transformers.GenerationConfig):
        def validate(self, *args, **kwargs):
            if hf_paged.integration.paths.asked() is not None and not results:
                thread = threading.Thread(target=lambda: results.append(model.generate(**TWO_ROWS, max_new_tokens=4)))
                thread.start()
                thread.join(60)
            return super().validate(*args, **kwargs)

    hf_paged.explain(model, **TWO_ROWS, generation_config=Config(max_new_tokens=4))
    assert torch.equal(results[0], model.generate(**TWO_ROWS, max_new_tokens=4))
    assert type(model) is Qwen3ForCausalLM and not hf_paged.is_enabled(model)


def test_asked_from_inside_a_call_that_runs_in_stock():
    model, found = hf_paged.enable(tiny_model()), []

    class Asking(LogitsProcessor):
        def __call__(self, input_ids, scores):
            found.append(hf_paged.explain(model, **TWO_ROWS).path)
            return scores

    model.generate(**TWO_ROWS, max_new_tokens=2, prefill_chunk_size=4, logits_processor=[Asking()])
    assert found == ["native", "native"]
    assert_idle(model)


# -- what may be asked about ------------------------------------------


def test_without_inputs_a_prompt_of_one_token_stands_in():
    model = tiny_model()
    assert hf_paged.explain(model) == hf_paged.Explanation("native")
    assert hf_paged.explain(model, num_beams=2).path == "lockstep"
    assert hf_paged.explain(model, max_new_tokens=600).path == "stock"


def test_a_class_that_is_not_supported():
    model = GPTNeoForCausalLM(GPTNeoConfig(num_layers=1, num_heads=2, hidden_size=8, vocab_size=32,
                                           attention_types=[[["global"], 1]]))
    explained = hf_paged.explain(model, input_ids=torch.tensor([[3]]))
    assert explained.path == "stock" and "GPTNeoForCausalLM" in explained.reasons[0]
    assert "docs/models.md" in explained.remedies[0]
    with pytest.raises(hf_paged.UnsupportedModelError, match="Linear"):
        hf_paged.explain(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("enabled", [False, True])
def test_a_peft_model(enabled):
    wrapped = peft.get_peft_model(tiny_model(), peft.LoraConfig(r=2, target_modules=["q_proj"])).eval()
    if enabled:
        hf_paged.enable(wrapped)
    assert hf_paged.explain(wrapped, **TWO_ROWS).path == "native"
    names = ["default", "__base__"]
    assert hf_paged.explain(wrapped, **TWO_ROWS, adapter_names=names).path == "native"
    assert hf_paged.explain(wrapped, adapter_names=names).path == "native"
    explained = hf_paged.explain(wrapped, **TWO_ROWS, adapter_names=names * 2)
    assert explained.path == "stock" and "4 adapter_names for 2 rows" in explained.reasons[0]
    explained = hf_paged.explain(wrapped, **TWO_ROWS, adapter_names=names, num_beams=2, output_scores=True)
    assert explained.path == "lockstep"
    assert hf_paged.explain(wrapped, **TWO_ROWS).path == "native"
    assert hf_paged.is_enabled(wrapped) == enabled


def test_under_install_a_question_enables_nothing():
    hf_paged.install()
    try:
        model = tiny_model()
        assert hf_paged.explain(model, **TWO_ROWS).path == "native"
        assert not hf_paged.is_enabled(model)
    finally:
        hf_paged.uninstall()


def test_a_generate_that_does_not_come_to_decoding():
    class Own(Qwen3ForCausalLM):
        def generate(self, *args, **kwargs):
            return "something else"

    assert hf_paged.explain(Own(tiny_model().config)).reasons[0].startswith("the generate of Own")


def test_a_generate_that_streams_by_itself_and_does_not_come_to_decoding():
    class Own(Qwen3ForCausalLM):
        def generate(self, *args, streamer, **kwargs):
            streamer.put(torch.tensor([1, 2]))
            streamer.end()
            return "something else"

    found = hf_paged.explain(Own(tiny_model().config), streamer=transformers.TextStreamer(byte_tokenizer()))
    assert found.reasons[0].startswith("the generate of Own")


def test_a_call_after_the_question_is_as_before():
    model = hf_paged.enable(tiny_model())
    hf_paged.explain(model, **TWO_ROWS, num_beams=2)
    assert_native_parity(model, **TWO_ROWS, max_new_tokens=6)
