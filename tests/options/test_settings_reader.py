"""Settings that several prompts of a call share are read once, and are what each prompt alone would have."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_model
from transformers import GenerationConfig

from hf_paged.options.arguments import merge_config
from hf_paged.options.read import MergeCache, SpecReader
from hf_paged.options.settings import request_spec

VOCAB_SIZE = 256
PLAIN: dict = {}
OPTIONS = [PLAIN, {"logprobs": "raw"}, {"stop_token_ids": [7], "timeout": 3.0},
           {"stop_token_ids": [8], "presence_penalty": 0.5}, {"top_logprobs": 3}]
FIELDS = {
    "max_new_tokens": st.sampled_from([None, 1, 7, 900, 0, True]),
    "max_length": st.sampled_from([None, 4, 20, 40]),
    "min_new_tokens": st.sampled_from([None, 0, 2]),
    "min_length": st.sampled_from([None, 0, -3, 9, 15, True, "9"]),
    "do_sample": st.sampled_from([None, False, True]),
    "temperature": st.sampled_from([None, 0.6, 1.0, -1.0]),
    "eos_token_id": st.sampled_from([None, 3, [3, 4]]),
    "stop_strings": st.sampled_from([None, "a", [""]]),
    "exponential_decay_length_penalty": st.sampled_from([None, [2, 1.01], [2, 3.0], (2, 3.0)]),
    "num_beams": st.sampled_from([None, 1, 3]),
}


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def config_of(**fields):
    config = GenerationConfig()
    for name, value in fields.items():  # past its own validation
        setattr(config, name, value)
    return config


@st.composite
def calls(draw):
    """Configs that mostly say the same, each with the length of a prompt and options."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True))
    fields = {name: draw(FIELDS[name]) for name in names}
    prompts = []
    for _ in range(draw(st.integers(2, 8))):
        config = config_of(**fields)
        if draw(st.booleans()):
            config.max_new_tokens = draw(FIELDS["max_new_tokens"])
        prompts.append((config, draw(st.sampled_from([1, 5, 12, 30])), draw(st.sampled_from(OPTIONS))))
    return prompts


def outcome(read):
    try:
        return repr(read())
    except Exception as error:
        return type(error), str(error)


def alone(model, config, length, options, kwargs):
    merged = merge_config(model, config, kwargs)
    return request_spec(merged, length, VOCAB_SIZE, options)


def reader(model, kwargs):
    return SpecReader(model, kwargs, MergeCache(), VOCAB_SIZE).spec


@settings(max_examples=300)
@given(prompts=calls(), kwargs=st.sampled_from([{}, {"max_new_tokens": 5}, {"min_length": 9}]))
def test_prompts_of_one_call_have_the_settings_of_each_alone(model, prompts, kwargs):
    read = reader(model, kwargs)
    for prompt in prompts:
        expected = outcome(lambda prompt=prompt: alone(model, *prompt, kwargs))
        assert outcome(lambda prompt=prompt: read(*prompt)) == expected


@pytest.mark.parametrize(("fields", "expected"), [
    ({"max_length": 20}, [(15, 0), (8, 0)]), ({"max_new_tokens": 4, "min_length": 14}, [(4, 9), (4, 2)]),
    ({"max_new_tokens": 4, "min_length": 14, "min_new_tokens": 1}, [(4, 1), (4, 1)]),
])
def test_what_depends_on_a_prompts_length_is_its_own(model, fields, expected):
    read = reader(model, {})
    made = [read(config_of(**fields), length, PLAIN) for length in (5, 12)]
    assert [(one.max_new_tokens, one.min_new_tokens) for one in made] == expected


def test_options_and_lengths_are_each_prompts_own(model):
    read = reader(model, {})
    made = [read(config_of(max_new_tokens=n), 5, options) for n in (3, 4) for options in OPTIONS[:4]]
    assert [one.max_new_tokens for one in made] == [3] * 4 + [4] * 4
    assert [one.logprobs for one in made] == [None, "raw", None, None] * 2
    assert [one.stop_token_ids for one in made] == [(), (), (7,), (8,)] * 2


def test_a_length_penalty_is_checked_for_every_length(model):
    read, fields = reader(model, {}), {"exponential_decay_length_penalty": [2, 3.0], "eos_token_id": 3}
    assert read(config_of(max_new_tokens=7, **fields), 5, PLAIN).max_new_tokens == 7
    with pytest.raises(ValueError, match="exponential_decay_length_penalty"):
        read(config_of(max_new_tokens=900, **fields), 5, PLAIN)


def test_what_is_the_same_is_read_once(model, monkeypatch):
    reads, own = [], request_spec
    monkeypatch.setattr("hf_paged.options.read.request_spec",
                        lambda *arguments: reads.append(arguments) or own(*arguments))
    read = reader(model, {})
    made = [read(config_of(max_new_tokens=n, do_sample=True), length, PLAIN) for n in (3, 4, 3) for length in (5, 12)]
    assert len(reads) == 1 and made[0] is made[1] is made[4]


def test_what_is_wrong_is_said_every_time(model):
    read = reader(model, {})
    for length in (5, 30):
        with pytest.raises(ValueError, match=f"prompt of {length} tokens"):
            read(config_of(max_length=3), length, PLAIN)
    for _ in range(2):
        with pytest.raises(ValueError, match="top_logprobs"):
            read(config_of(max_new_tokens=3), 5, OPTIONS[4])
