"""Bad values and questionable ones: an enabled model raises and warns as stock does (CPU)."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from support import assert_native_parity, batch, byte_tokenizer, random_prompts, stock_copy, tiny_model
from transformers import LogitsProcessorList, MinNewTokensLengthLogitsProcessor
from transformers.utils import logging as transformers_logging

import hf_paged

BAD = {
    "zero temperature": {"do_sample": True, "temperature": 0.0},
    "negative temperature": {"do_sample": True, "temperature": -1.0},
    "temperature of another type": {"do_sample": True, "temperature": "hot"},
    "negative top_k": {"do_sample": True, "top_k": -3},
    "top_p above 1 is off, below 0 not": {"do_sample": True, "top_p": -0.5},
    "min_p above 1": {"do_sample": True, "min_p": 1.5},
    "typical_p of 0": {"do_sample": True, "typical_p": 0.0},
    "negative epsilon is off": {"do_sample": True, "epsilon_cutoff": -1.0, "top_k": 1},
    "negative repetition_penalty": {"repetition_penalty": -0.5},
    "repetition_penalty as int": {"repetition_penalty": 2},
    "negative no_repeat_ngram_size": {"no_repeat_ngram_size": -1},
    "no_repeat_ngram_size as float": {"no_repeat_ngram_size": 1.5},
    "empty bad words": {"bad_words_ids": []},
    "bad words that are no lists": {"bad_words_ids": [3]},
    "bad word outside the vocabulary": {"bad_words_ids": [[999]]},
    "bias of a wrong type": {"sequence_bias": {(3,): "much"}},
    "bias outside the vocabulary": {"sequence_bias": {(999,): 1.0}},
    "forced eos outside the vocabulary": {"forced_eos_token_id": 999},
    "negative forced eos": {"forced_eos_token_id": -3},
    "decay without eos": {"exponential_decay_length_penalty": (1, 1.1)},
    "negative max_new_tokens": {"max_new_tokens": -1},
    "zero max_new_tokens": {"max_new_tokens": 0},
    "max_length below the prompt": {"max_length": 3, "max_new_tokens": None},
    "several greedy sequences": {"num_return_sequences": 2},
    "more sequences than beams": {"num_beams": 2, "num_return_sequences": 3},
    "stop strings without a tokenizer": {"stop_strings": "a"},
    "unknown keyword": {"temprature": 0.5},
    "unknown keyword of the model": {"pixel_values": torch.zeros(1)},
    "early_stopping of a wrong type": {"num_beams": 2, "early_stopping": "maybe"},
    "forced and suppressed": {"forced_eos_token_id": 7, "suppress_tokens": [7]},
    "beams and a streamer": {"num_beams": 2, "streamer": object()},
    "ids outside the vocabulary": {"input_ids": torch.tensor([[1, 999]]), "attention_mask": None},
    "empty ids": {"input_ids": torch.empty(1, 0, dtype=torch.long), "attention_mask": None},
    "ids of three dims": {"input_ids": torch.ones(1, 2, 2, dtype=torch.long), "attention_mask": None},
}
QUESTIONABLE = {
    "a temperature that greedy search ignores": {"temperature": 0.5},
    "top_p that greedy search ignores": {"top_p": 0.5},
    "beams' options without beams": {"length_penalty": 2.0, "early_stopping": True},
    "both lengths": {"max_length": 60, "max_new_tokens": 6},
    "a processor that stock would have made": {
        "min_new_tokens": 3, "eos_token_id": 9,
        "logits_processor": LogitsProcessorList([MinNewTokensLengthLogitsProcessor(9, 3, eos_token_id=9)])},
    "scores without a dict": {"output_scores": True},
    "a prompt that ends with padding": {"input_ids": torch.tensor([[3, 4, 0], [5, 6, 7]]), "attention_mask": None},
}


def outcome(model, kwargs):
    """What a call returned or raised, and what it warned and logged on the way."""
    kwargs = {"max_new_tokens": 6, **batch([9, 4])} | kwargs
    kwargs = {name: value for name, value in kwargs.items() if value is not None}
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = transformers_logging.get_logger("transformers")
    logger.addHandler(handler)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_warning()
    transformers_logging.warning_once.cache_clear()  # which says a thing once in a process
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = model.generate(**kwargs)
            except Exception as error:
                result = error
    finally:
        transformers_logging.set_verbosity(verbosity)
        logger.removeHandler(handler)
    said = [(w.category, str(w.message)) for w in caught if w.category is not hf_paged.FallbackWarning]
    return result, said, records


@pytest.mark.parametrize("name", BAD)
def test_bad_values_end_as_in_stock(name):
    model = tiny_model()
    expected, said, logged = outcome(model, BAD[name])
    hf_paged.enable(model)
    actual, also_said, also_logged = outcome(model, BAD[name])
    assert type(actual) is type(expected), (actual, expected)
    if isinstance(expected, torch.Tensor):  # stock makes something of it
        assert torch.equal(actual, expected)
    elif not isinstance(expected, IndexError):  # ours names the token
        assert str(actual) == str(expected)
    assert also_said == said
    assert also_logged == logged
    hf_paged.enable(model, strict=True)
    assert_native_parity(model, **batch([9, 4]), max_new_tokens=6)


@pytest.mark.parametrize("name", QUESTIONABLE)
def test_questionable_values_are_warned_about_as_in_stock(name):
    model = tiny_model()
    expected, said, logged = outcome(stock_copy(model), QUESTIONABLE[name])
    hf_paged.enable(model)
    actual, also_said, also_logged = outcome(model, QUESTIONABLE[name])
    assert torch.equal(actual, expected)
    assert said or logged
    assert also_said == said
    assert also_logged == logged


def test_a_tokenizer_that_nothing_needs_is_no_reason_for_stock():
    model = hf_paged.enable(tiny_model(), strict=True)
    ids = torch.tensor(random_prompts([9]))
    assert_native_parity(model, input_ids=ids, max_new_tokens=5, tokenizer=byte_tokenizer())
