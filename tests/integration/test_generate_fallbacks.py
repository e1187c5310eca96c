"""What the engine does not carry out goes to stock generate, with one warning that names the reason."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from support import (
    RecordingStreamer,
    assert_falls_back,
    assert_lockstep,
    assert_native_parity,
    assert_same_tensor,
    batch,
    left_padded,
    outcome,
    random_prompts,
    stock_generate,
    tiny_model,
)
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

import hf_paged


class AddToOneToken(LogitsProcessor):
    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, 9] += 100.0 * (input_ids.shape[1] % 2)
        return scores


class StopAfterWidth(StoppingCriteria):
    def __init__(self, width):
        self.width = width

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.width, dtype=torch.bool)


# -- options ------------------------------------------


@pytest.mark.parametrize(("kwargs", "reason"), [
    ({"cache_implementation": "static"}, "cache_implementation='static'"),
    ({"prefill_chunk_size": 4}, "prefill_chunk_size=4"),
    ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
    ({"output_hidden_states": True, "return_dict_in_generate": True, "num_beams": 2}, "output_hidden_states=True"),
    ({"assistant_model": tiny_model, "one_row": True}, "assisted decoding"),
])
@pytest.mark.filterwarnings("ignore:Using the model-agnostic")
def test_options_that_only_stock_carries_out(kwargs, reason):
    kwargs = {name: value() if value is tiny_model else value for name, value in kwargs.items()}
    inputs = batch([20] if kwargs.pop("one_row", False) else [20, 13, 5])
    assert_falls_back(tiny_model(), reason, **inputs, max_new_tokens=8, **kwargs)


@pytest.mark.parametrize("kwargs", [
    {"logits_processor": LogitsProcessorList([AddToOneToken()])},
    {"stopping_criteria": StoppingCriteriaList([StopAfterWidth(24)])},
    {"min_new_tokens": 3, "eos_token_id": 9, "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(2.0)])},
    {"do_sample": True, "temperature": 0.7, "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.7)])},
    {"stopping_criteria": StoppingCriteriaList([EosTokenCriteria(9)])},
])
def test_objects_of_the_callers_own_are_shown_to_stocks_loop(kwargs):
    assert_lockstep(tiny_model(), **batch([20, 13, 5]), max_new_tokens=8, **kwargs)


# -- inputs ------------------------------------------


def test_past_key_values_of_the_caller():
    model, ids = tiny_model(), torch.tensor(random_prompts([20]))

    def call(model, **kwargs):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=ids[:, :15], past_key_values=cache)
        return model.generate(input_ids=ids, past_key_values=cache, **kwargs)

    assert_falls_back(model, "a cache given by the caller", call=call, max_new_tokens=6)


def test_an_empty_cache_of_the_caller_is_filled_as_stock_fills_it():
    model, ids = tiny_model(), torch.tensor(random_prompts([20]))
    hf_paged.enable(model)
    cache = DynamicCache(config=model.config)
    with pytest.warns(hf_paged.FallbackWarning, match="a cache given by the caller"):
        model.generate(input_ids=ids, past_key_values=cache, max_new_tokens=6)
    assert cache.get_seq_length() in (25, 26)


def test_inputs_embeds():
    model = tiny_model()
    embeds = model.get_input_embeddings()(torch.tensor(random_prompts([20, 20]))).detach()
    assert_falls_back(model, "inputs_embeds|input_ids of shape", inputs_embeds=embeds, max_new_tokens=6)


def test_inputs_embeds_besides_input_ids():
    model = tiny_model()
    ids = torch.tensor(random_prompts([20, 20]))
    embeds = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(2))
    assert_falls_back(model, "inputs_embeds", input_ids=ids, inputs_embeds=embeds, max_new_tokens=6)


def _right_padded():
    inputs = batch([20, 13])
    return {"input_ids": inputs["input_ids"].flip(1), "attention_mask": inputs["attention_mask"].flip(1)}


def _with_hole():
    inputs = batch([20, 13])
    inputs["attention_mask"][0, 7] = 0
    return inputs


def _empty_row():
    inputs = batch([20, 13])
    inputs["attention_mask"][1] = 0
    return inputs


@pytest.mark.parametrize("inputs", [_right_padded(), _with_hole(), _empty_row()], ids=["right", "hole", "empty"])
def test_masks_that_are_not_left_padding(inputs):
    assert_falls_back(tiny_model(), "attention_mask", **inputs, max_new_tokens=6)


def test_a_mask_of_weights_is_no_padding():
    inputs = batch([20, 13])
    inputs["attention_mask"] = inputs["attention_mask"] * 2
    model = hf_paged.enable(tiny_model())
    expected = stock_generate(model, **inputs, max_new_tokens=6)
    with pytest.warns(hf_paged.FallbackWarning, match="attention_mask"):
        assert_same_tensor(model.generate(**inputs, max_new_tokens=6), expected)


def test_position_ids_of_the_caller():
    inputs = batch([20, 20])
    positions = torch.arange(20).expand(2, -1) + 3
    assert_falls_back(tiny_model(), "position_ids", **inputs, position_ids=positions, max_new_tokens=6)


def test_position_ids_that_only_say_what_the_mask_says_are_native():
    inputs = batch([20, 13])
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    model = hf_paged.enable(tiny_model(), strict=True)
    assert_native_parity(model, **inputs, position_ids=positions, max_new_tokens=6)


def test_positions_of_the_padding_do_not_matter():
    """5.17 fills them with 1, others leave -1 or 0; stock masks these tokens."""
    inputs = batch([20, 13])
    positions = (inputs["attention_mask"].cumsum(1) - 1).masked_fill(inputs["attention_mask"] == 0, 1)
    model = hf_paged.enable(tiny_model())
    expected = stock_generate(model, **inputs, position_ids=positions, max_new_tokens=6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hf_paged.FallbackWarning)
        assert_same_tensor(model.generate(**inputs, position_ids=positions, max_new_tokens=6), expected)


# -- lengths ------------------------------------------


@pytest.mark.parametrize(("most", "config", "reason"), [
    (24, {"max_model_len": 64}, "65 tokens.*max_model_len is 64"), (25, {"num_blocks": 5}, "KV pool"),
], ids=["length", "pool"])
def test_longer_than_there_is_room(most, config, reason):
    model, inputs = tiny_model(), batch([40, 20])
    expected = model.generate(**inputs, max_new_tokens=most + 1)
    hf_paged.enable(model, **config)
    with pytest.warns(hf_paged.FallbackWarning, match=reason):
        assert_same_tensor(model.generate(**inputs, max_new_tokens=most + 1), expected)
    assert_native_parity(model, **inputs, max_new_tokens=most)


def test_longer_than_the_models_positions():
    model = tiny_model(max_position_embeddings=64)
    assert_falls_back(model, "max_model_len", **batch([60]), max_new_tokens=10)


# -- exceptions ------------------------------------------

BAD_CALLS = {
    "unknown argument": {"no_such_option": 3},
    "zero new tokens": {"max_new_tokens": 0},
    "negative new tokens": {"max_new_tokens": -4},
    "new tokens as str": {"max_new_tokens": "8"},
    "new tokens as float": {"max_new_tokens": 3.5},
    "max_length below the prompt": {"max_length": 10},
    "max_length equal to the prompt": {"max_length": 20},
    "temperature 0": {"do_sample": True, "temperature": 0.0},
    "temperature negative": {"do_sample": True, "temperature": -1.0},
    "temperature as str": {"do_sample": True, "temperature": "hot"},
    "temperature as int": {"do_sample": True, "temperature": 1},
    "top_k negative": {"do_sample": True, "top_k": -3},
    "top_k as float": {"do_sample": True, "top_k": 1.5},
    "top_p above 1": {"do_sample": True, "top_p": 1.5},
    "top_p negative": {"do_sample": True, "top_p": -0.1},
    "min_p above 1": {"do_sample": True, "min_p": 1.5},
    "min_p negative": {"do_sample": True, "min_p": -0.5},
    "several greedy sequences": {"num_return_sequences": 2},
    "zero sequences": {"num_return_sequences": 0, "do_sample": True},
    "negative minimum": {"min_new_tokens": -3, "eos_token_id": 9},
    "minimum above maximum": {"min_new_tokens": 30, "max_new_tokens": 10, "eos_token_id": 9},
    "eos as str": {"eos_token_id": "</s>"},
    "eos negative": {"eos_token_id": -1},
    "eos as float": {"eos_token_id": 3.0},
    "empty eos list": {"eos_token_id": []},
    "pad out of the vocabulary": {"pad_token_id": 10_000, "eos_token_id": 9},
    "stop strings without tokenizer": {"stop_strings": "w17"},
    "streamer with beams": {"streamer": RecordingStreamer(), "num_beams": 2},
    "mask of another shape": {"attention_mask": torch.ones(2, 7, dtype=torch.int64)},
    "mask of three dimensions": {"attention_mask": torch.ones(2, 20, 1, dtype=torch.int64)},
    "id beyond the vocabulary": {"input_ids": torch.tensor([[3, 256, 4]])},
    "id far beyond the vocabulary": {"input_ids": torch.tensor([[3, 2**40, 4]])},
    "negative id": {"input_ids": torch.tensor([[3, -5, 4]])},
    "float ids": {"input_ids": torch.tensor([[3.0, 5.0, 4.0]])},
    "ids of one dimension": {"input_ids": torch.tensor([3, 5, 4])},
    "ids of three dimensions": {"input_ids": torch.tensor([[[3, 5, 4]]])},
    "empty prompt": {"input_ids": torch.zeros(1, 0, dtype=torch.int64)},
    "empty batch": {"input_ids": torch.zeros(0, 5, dtype=torch.int64)},
    "ids as list": {"input_ids": [[3, 5, 4]]},
    "generation_config as dict": {"generation_config": {"max_new_tokens": 4}},
    "no input at all": {"input_ids": None},
}


@pytest.mark.parametrize("name", BAD_CALLS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_bad_calls_end_as_in_stock(name):
    """Stock's tokens, or an exception of stock's type; afterwards the engine works as before."""
    model = tiny_model()
    kwargs = BAD_CALLS[name]
    inputs = {"input_ids": torch.tensor(random_prompts([20, 20]))} | kwargs
    if "max_length" not in inputs:
        inputs = {"max_new_tokens": 8} | inputs
    expected_kind, expected = outcome(lambda: model.generate(**inputs))
    hf_paged.enable(model)
    kind, actual = outcome(lambda: model.generate(**inputs))
    if expected_kind == "raised":
        assert (kind, actual) == (expected_kind, expected)
    else:
        assert kind == "returned", actual
        if inputs.get("do_sample"):
            assert actual.shape == expected.shape
        else:
            assert_same_tensor(actual, expected)
    assert_native_parity(model, **batch([20, 5]), max_new_tokens=6)


@pytest.mark.parametrize("sampling", [False, True])
@pytest.mark.parametrize("poison", ["all", "one embedding", "head"])
def test_nan_weights_end_as_in_stock(sampling, poison):
    model = tiny_model()
    with torch.no_grad():
        if poison == "all":
            model.model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
        elif poison == "one embedding":
            model.model.embed_tokens.weight[99] = float("nan")
        else:
            model.lm_head.weight[17] = float("nan")
    inputs = left_padded([[5, 6, 7, 8], [5, 99, 7, 8], [9, 10, 11]])
    kwargs = {**inputs, "max_new_tokens": 6, "do_sample": sampling}
    expected_kind, expected = outcome(lambda: model.generate(**kwargs))
    hf_paged.enable(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hf_paged.FallbackWarning)
        kind, actual = outcome(lambda: model.generate(**kwargs))
    assert kind == expected_kind, (actual, expected)
    if kind == "raised":
        assert actual is expected
    elif not sampling:
        assert_same_tensor(actual, expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.nan_to_num_(0.5)
    assert_native_parity(model, **inputs, max_new_tokens=6)


def test_a_streamer_sees_each_column_once_where_a_call_turns_to_stock_half_way():
    """NaN shows up at a later step, when columns were streamed already."""
    model = tiny_model()
    inputs = batch([6, 4])
    free = stock_generate(model, **inputs, max_new_tokens=6)
    with torch.no_grad():  # the token that row 0 makes third poisons what follows
        model.model.embed_tokens.weight[free[0, 8]] = float("nan")
    stock, ours = RecordingStreamer(), RecordingStreamer()
    expected = model.generate(**inputs, max_new_tokens=6, streamer=stock)
    hf_paged.enable(model)
    with pytest.warns(hf_paged.FallbackWarning, match="NaN"):
        actual = model.generate(**inputs, max_new_tokens=6, streamer=ours)
    assert_same_tensor(actual, expected)
    assert ours.puts == stock.puts
    assert ours.ended == 1


# -- neighbours ------------------------------------------


def test_generate_of_another_model_is_not_touched():
    ours, other = hf_paged.enable(tiny_model(), strict=True), tiny_model(1)
    other.generate(**batch([5]), max_new_tokens=4, num_beams=2)
    assert hf_paged.get_engine(ours).stats().num_generated_tokens == 0


def test_a_custom_generate_function_runs_as_in_stock():
    def two_sevens(model, input_ids, **kwargs):
        return torch.cat([input_ids, torch.full((len(input_ids), 2), 7)], dim=1)

    model = tiny_model()
    inputs = batch([5, 3])
    expected = model.generate(**inputs, custom_generate=two_sevens)
    assert_same_tensor(hf_paged.enable(model).generate(**inputs, custom_generate=two_sevens), expected)


def test_after_a_fallback_native_calls_go_on():
    model = hf_paged.enable(tiny_model())
    inputs = batch([20, 5])
    first = assert_native_parity(model, **inputs, max_new_tokens=8)
    with pytest.warns(hf_paged.FallbackWarning):
        model.generate(**inputs, max_new_tokens=8, prefill_chunk_size=4)
    assert torch.equal(assert_native_parity(model, **inputs, max_new_tokens=8), first)


def test_the_same_input_tensors_come_back_untouched():
    model = hf_paged.enable(tiny_model(), strict=True)
    inputs = batch([20, 5])
    before = {key: value.clone() for key, value in inputs.items()}
    config = GenerationConfig(max_new_tokens=5, do_sample=False)
    text = config.to_json_string()
    model.generate(**inputs, generation_config=config)
    assert all(torch.equal(inputs[key], before[key]) for key in inputs)
    assert config.to_json_string() == text


# -- options that only look like those of the config ------------------------------------------


@pytest.mark.parametrize("foreign", [256, 1000, 2**31, 2**40, -1])
@pytest.mark.parametrize("minimum", [None, 4])
def test_eos_ids_outside_the_vocabulary_have_no_effect(foreign, minimum):
    model = tiny_model()
    inputs = batch([20, 13])
    real = int(model.generate(**inputs, max_new_tokens=3)[0, 21])
    options = {"eos_token_id": [real, foreign], "pad_token_id": 0, "min_new_tokens": minimum, "max_new_tokens": 8}
    assert_native_parity(hf_paged.enable(model, strict=True), **inputs, **options)
    options["eos_token_id"] = foreign
    assert_native_parity(model, **inputs, **options)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float16, torch.bfloat16, torch.float64])
def test_masks_of_any_dtype(dtype):
    inputs = batch([20, 13])
    inputs["attention_mask"] = inputs["attention_mask"].to(dtype)
    assert_native_parity(hf_paged.enable(tiny_model(), strict=True), **inputs, max_new_tokens=6)


def _own_length_processors(eos):
    other = [(eos[0] + 1) % 256]
    return {
        "min_length with other eos": ({"min_length": 26}, MinLengthLogitsProcessor(26, other)),
        "min_new_tokens with other eos": (
            {"min_new_tokens": 6}, MinNewTokensLengthLogitsProcessor(20, 6, other)
        ),
        "min_new_tokens with another prompt length": (
            {"min_new_tokens": 3}, MinNewTokensLengthLogitsProcessor(24, 3, eos)
        ),
        "min_new_tokens of another number": ({"min_new_tokens": 3}, MinNewTokensLengthLogitsProcessor(20, 7, eos)),
    }


@pytest.mark.parametrize("name", _own_length_processors([0]))
def test_a_length_processor_of_the_callers_own_is_not_taken_for_the_configs(name):
    model = tiny_model()
    inputs = batch([20])
    free = model.generate(**inputs, max_new_tokens=8)[0, 20:].tolist()
    eos = [free[1]]
    options, processor = _own_length_processors(eos)[name]
    processors = LogitsProcessorList([processor])
    assert_lockstep(model, **inputs, max_new_tokens=8, eos_token_id=eos, **options, logits_processor=processors)


@pytest.mark.parametrize("warper", [
    TopPLogitsWarper(0.001, min_tokens_to_keep=50), TopPLogitsWarper(0.001, filter_value=-3.0),
    TopPLogitsWarper(0.5), MinPLogitsWarper(0.9),
], ids=["min_tokens_to_keep", "filter_value", "other top_p", "one more"])
def test_a_warper_of_the_callers_own_is_not_taken_for_the_configs(warper):
    assert_lockstep(
        tiny_model(), **batch([20, 13]), max_new_tokens=4, do_sample=True, top_k=0, top_p=0.001,
        logits_processor=LogitsProcessorList([warper]),
    )


WARPERS = {
    TopKLogitsWarper: {"top_k": 3}, TopPLogitsWarper: {"top_k": 0, "top_p": 0.001},
    MinPLogitsWarper: {"top_k": 0, "min_p": 0.9},
}


@pytest.mark.parametrize("kind", WARPERS)
@pytest.mark.parametrize("attribute", [("filter_value", -3.0), ("min_tokens_to_keep", 50)], ids=lambda a: a[0])
def test_the_one_warper_of_its_kind_with_an_attribute_that_no_config_sets(kind, attribute, monkeypatch):
    """Made where stock makes its own, so that the list of kinds is the config's: the patched name is seen."""

    def made(*args, **kwargs):
        return kind(*args, **(kwargs | dict([attribute])))

    options = {"max_new_tokens": 12, "do_sample": True} | WARPERS[kind]
    plain = _seeded_generate(tiny_model(), **batch([20, 13]), **options)
    monkeypatch.setattr(transformers.generation.utils, kind.__name__, made)
    expected = assert_falls_back(tiny_model(), f"{kind.__name__} is patched", **batch([20, 13]), **options)
    assert not torch.equal(expected, plain)


def _seeded_generate(model, **kwargs):
    torch.manual_seed(0)
    return model.generate(**kwargs)


@pytest.mark.parametrize("lengths", [(32, 25), (25, 32)])
def test_two_length_criteria_end_at_the_smaller(lengths):
    criteria = StoppingCriteriaList([MaxLengthCriteria(length) for length in lengths])
    expected = assert_lockstep(tiny_model(), **batch([20, 13]), max_new_tokens=12, stopping_criteria=criteria)
    assert expected.shape[1] == 25


@pytest.mark.parametrize("pad", [-100, 256, 99_999])
def test_a_pad_token_outside_the_vocabulary_ends_as_in_stock(pad):
    """Stock feeds it back for rows that are done: an IndexError where one ends before the others."""
    model = tiny_model()
    inputs = batch([20, 13])
    free = model.generate(**inputs, max_new_tokens=8)
    for eos in (int(free[0, 21]), 257):
        kwargs = {**inputs, "max_new_tokens": 8, "eos_token_id": eos, "pad_token_id": pad}
        expected = outcome(lambda kwargs=kwargs: model.generate(**kwargs))
        hf_paged.enable(model)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", hf_paged.FallbackWarning)
            actual = outcome(lambda kwargs=kwargs: model.generate(**kwargs))
        hf_paged.disable(model)
        assert actual[0] == expected[0]
        if actual[0] == "returned":
            assert_same_tensor(actual[1], expected[1])
        else:
            assert actual == expected


def test_a_custom_generate_function_is_announced():
    def two_sevens(model, input_ids, **kwargs):
        return torch.cat([input_ids, torch.full((len(input_ids), 2), 7)], dim=1)

    assert_falls_back(tiny_model(), "custom_generate", **batch([5, 3]), custom_generate=two_sevens)


def test_positions_extended_while_enabled():
    """The limit of the first call is not the limit of later ones."""
    model = hf_paged.enable(tiny_model(max_position_embeddings=64), strict=True)
    inputs = batch([48, 20])
    assert_native_parity(model, **inputs, max_new_tokens=4)
    model.config.max_position_embeddings = 512
    assert_native_parity(model, **inputs, max_new_tokens=40)
    assert_native_parity(model, **batch([100, 3]), max_new_tokens=10)
    model.config.max_position_embeddings = 64
    with pytest.raises(hf_paged.FallbackError, match="max_model_len is 64"):
        model.generate(**inputs, max_new_tokens=40)
    assert_native_parity(model, **inputs, max_new_tokens=16)


# -- the caller's surroundings ------------------------------------------


@pytest.mark.parametrize("sampling", [False, True])
def test_under_another_default_device(sampling):
    """Nothing the engine makes may land there; "meta" stands for any device that is not the model's."""
    model = tiny_model()
    inputs = batch([20, 13])
    options = {"max_new_tokens": 6, "do_sample": sampling} | ({"top_k": 1} if sampling else {})
    expected = model.generate(**inputs, **options)
    hf_paged.enable(model, strict=True)
    stock, ours = RecordingStreamer(), RecordingStreamer()
    one = batch([20])
    stock_generate(model, **one, **options, streamer=stock)
    with torch.device("meta"):
        assert_same_tensor(model.generate(**inputs, **options), expected)
        model.generate(**one, **options, streamer=ours)
    assert ours.puts == stock.puts
    assert hf_paged.get_engine(model).stats().num_generated_tokens == 18


def test_another_default_dtype():
    model = hf_paged.enable(tiny_model(), strict=True)
    inputs = batch([20, 13])
    expected = stock_generate(model, **inputs, max_new_tokens=6)
    torch.set_default_dtype(torch.float16)
    try:
        actual = model.generate(**inputs, max_new_tokens=6)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same_tensor(actual, expected)
