"""The table of options: every field of transformers' `GenerationConfig` has a row, and rows agree with themselves."""

from __future__ import annotations

import pytest
from transformers import GenerationConfig

from hf_paged.options import table
from hf_paged.sampling.edit_reference import Edits
from hf_paged.sampling.table import Drawing

FIELDS = [name for name in vars(GenerationConfig()) if not name.startswith("_")]


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_a_config_has_a_row(name):
    """A new field of another transformers demands a decision: without a row it runs in stock."""
    assert name in table.OPTIONS


def test_a_name_without_a_row_is_stocks():
    assert table.option_of("from_the_future") == table.Option("from_the_future", table.STOCK)


@pytest.mark.parametrize("option", table.OPTIONS.values(), ids=lambda option: option.name)
def test_a_row_agrees_with_itself(option):
    assert option.path in table.PATHS
    assert option.order in (None, table.MASK, table.SCALE)
    assert option.edits is None or option.draws is None, "an option edits the logits or draws from them"
    if option.draws is not None:
        assert option.only_sampling and option.name in Drawing.__dataclass_fields__
    if option.edits is not None or option.draws is not None or option.of_processor is not None:
        assert option.path == table.NATIVE and option.made is not None
    if option.of_processor is not None:
        assert not option.makes(option.off)
    assert not option.makes(None)


def test_every_setting_of_the_sampler_and_of_the_edits_has_an_option_that_sets_it():
    drawn = {option.name for option in table.DRAWS}
    assert {"do_sample", *drawn} == set(Drawing.__dataclass_fields__)
    values = {
        "sequence_bias": {(3,): 1.0}, "no_repeat_ngram_size": 2, "bad_words_ids": [[4]], "forced_bos_token_id": 1,
        "forced_eos_token_id": 2, "remove_invalid_values": True, "suppress_tokens": [5], "begin_suppress_tokens": [6],
        "exponential_decay_length_penalty": (1, 1.1), "renormalize_logits": True,
    }
    context = table.Context((9,), 256)
    made = {name for option in table.EDITS for name in option.edits(values.get(option.name, 0.5), context)}
    beside = {"presence_penalty", "frequency_penalty", "also_seen"}  # arguments of hf_paged, and of stock's padding
    assert made == set(Edits.__dataclass_fields__) - beside


def test_a_greedy_call_makes_no_class_for_the_options_of_sampling():
    config = GenerationConfig(temperature=0.5, top_k=3, min_new_tokens=2)
    assert set(table.classes(config)) == {table.OPTIONS["min_new_tokens"].made}
    config.do_sample = True
    expected = ("min_new_tokens", "temperature", "top_k")
    assert set(table.classes(config)) == {table.OPTIONS[name].made for name in expected}


def test_only_the_value_that_switches_an_option_off_makes_no_class():
    for name, off, on in [("top_p", 1.0, 0.5), ("top_k", 0, 50), ("temperature", 1.0, 0.0), ("min_length", 0, 1)]:
        assert not table.OPTIONS[name].makes(off) and table.OPTIONS[name].makes(on)
