"""From `GenerationConfig` to the settings of one request."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from hf_paged import UnsupportedOptionError
from hf_paged.options import table
from hf_paged.options.settings import request_spec, token_id_tuple, unsupported_option

FIELDS = [name for name in vars(GenerationConfig()) if not name.startswith("_")]


def config(**kwargs):
    """A config with the values put in afterwards: some of them its own validation would refuse."""
    result = GenerationConfig()
    for name, value in ({"max_new_tokens": 10, "do_sample": False} | kwargs).items():
        setattr(result, name, value)
    return result


def test_a_default_config_needs_no_fallback():
    assert unsupported_option(GenerationConfig()) is None


@pytest.mark.parametrize("name", [n for n in FIELDS if n not in table.names(table.NATIVE, table.INERT)])
def test_every_other_field_with_a_value_needs_stock(name):
    option = unsupported_option(config(**{name: 0.123}))
    assert option == f"{name}=0.123 is not carried out by the paged engine"
    with pytest.raises(UnsupportedOptionError, match=name):
        request_spec(config(**{name: 0.123}), 5, 256)


@pytest.mark.parametrize("name", table.names(table.LOCKSTEP, table.STOCK, table.ARGUMENT))
def test_neutral_values_are_native(name):
    for value in table.OPTIONS[name].neutral:
        assert unsupported_option(config(**{name: value})) is None


def test_a_field_nobody_has_heard_of_needs_stock_unless_it_is_off():
    for value in (3, 0):
        text = f"from_the_future={value} is not carried out by the paged engine"
        assert unsupported_option(config(from_the_future=value)) == text
    assert unsupported_option(config(from_the_future=None)) is None
    assert unsupported_option(config(from_the_future=False)) is None


@pytest.mark.parametrize(("kwargs", "prompt", "maximum", "minimum"), [
    ({}, 5, 10, 0),
    ({"max_new_tokens": None, "max_length": 12}, 5, 7, 0),
    ({"max_length": 6}, 5, 10, 0),
    ({"min_new_tokens": 4}, 5, 10, 4),
    ({"min_length": 9}, 5, 10, 4),
    ({"min_length": 3}, 5, 10, 0),
    ({"min_length": 9, "min_new_tokens": 2}, 5, 10, 2),
    ({"min_length": 9, "min_new_tokens": 0}, 5, 10, 0),
])
def test_lengths(kwargs, prompt, maximum, minimum):
    settings = request_spec(config(**kwargs), prompt, 256)
    assert (settings.max_new_tokens, settings.min_new_tokens) == (maximum, minimum)


def test_sampling_fields_are_read_only_when_sampling():
    values = {"temperature": 0.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1}
    sampled = request_spec(config(do_sample=True, **values), 5, 256)
    assert (sampled.temperature, sampled.top_k, sampled.top_p, sampled.min_p) == (0.5, 7, 0.8, 0.1)
    assert request_spec(config(**values), 5, 256) == request_spec(config(), 5, 256)


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
    ({"max_new_tokens": None}, "max_new_tokens"),
    ({"max_new_tokens": None, "max_length": 5}, "max_length=5"),
    ({"do_sample": True, "temperature": 0.0}, "temperature=0.0"),
    ({"do_sample": True, "temperature": -0.5}, "temperature=-0.5"),
    ({"do_sample": True, "temperature": float("nan")}, "temperature=nan"),
    ({"do_sample": True, "temperature": "hot"}, "temperature='hot'"),
    ({"do_sample": True, "top_k": -1}, "top_k=-1"),
    ({"do_sample": True, "top_k": 2.0}, "top_k=2.0"),
    ({"do_sample": True, "top_p": 1.5}, r"top_p=1\.5"),
    ({"do_sample": True, "top_p": -0.1}, "top_p=-0.1"),
    ({"do_sample": True, "min_p": 2.0}, "min_p=2.0"),
    ({"do_sample": True, "min_p": [0.1]}, "min_p"),
])
def test_bad_values_are_named(kwargs, message):
    with pytest.raises((ValueError, TypeError), match=message):
        request_spec(config(**kwargs), 5, 256)


@pytest.mark.parametrize(("value", "expected"), [
    (None, ()), (3, (3,)), ([3, 4], (3, 4)), ((3,), (3,)), ([], ()), (torch.tensor(3), (3,)),
    (torch.tensor([3, 4]), (3, 4)),
])
def test_eos_in_every_form(value, expected):
    assert token_id_tuple(value) == expected


@pytest.mark.parametrize(("name", "values"), [
    ("num_beams", (1, 1.0, None)), ("guidance_scale", (1, 1.0)), ("diversity_penalty", (0, 0.0, -0.0)),
    ("use_cache", (True, False)), ("token_healing", (False,)), ("cache_implementation", ("dynamic",)),
])
def test_what_equals_a_neutral_number_or_string_is_native(name, values):
    for value in values:
        assert unsupported_option(config(**{name: value})) is None


@pytest.mark.parametrize(("name", "values"), [
    ("num_beams", (True, 0, "1", [1], torch.tensor(1))), ("diversity_penalty", (False, "", [])),
    ("use_cache", (1, 1.0, 0, "dynamic")), ("token_healing", (0, 0.0, "", [])), ("from_the_future", (0, "", [])),
    ("cache_implementation", ("", True, ["dynamic"])),
])
def test_a_bool_is_no_number_and_nothing_else_is_neutral(name, values):
    for value in values:
        assert unsupported_option(config(**{name: value})) is not None
