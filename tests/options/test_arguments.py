"""Many prompts and configs in one go are checked and merged as each alone would be."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import tiny_model
from transformers import GenerationConfig

from hf_paged import PagedGenerator
from hf_paged.options.arguments import merge_config, token_id_lists, token_ids
from hf_paged.options.read import MergeCache, SpecReader, call_key

FIELDS = {
    "max_new_tokens": st.one_of(st.integers(1, 5), st.sampled_from([None, True, 0, -1, 2.0, "3", np.int64(4)])),
    "max_length": st.sampled_from([None, 0, 8, 20]),
    "min_new_tokens": st.sampled_from([None, 0, 2]),
    "do_sample": st.sampled_from([None, False, True, 1]),
    "temperature": st.sampled_from([None, 0.0, -0.0, 0.6, 1, 1.0, True, math.nan, "hot"]),
    "top_k": st.sampled_from([None, 0, 50]),
    "num_return_sequences": st.sampled_from([None, 1, 2]),
    "num_beams": st.sampled_from([None, 1, 3]),
    "use_cache": st.sampled_from([None, True, False]),
    "eos_token_id": st.sampled_from([None, 3, [3], [3, 4], [True], (3,)]),
    "early_stopping": st.sampled_from([None, False, "never", "yes"]),
    "cache_implementation": st.sampled_from([None, "hybrid", "no such cache"]),
    "bad_words_ids": st.sampled_from([None, [[1, 2]]]),
    "of_my_own": st.sampled_from([None, 1]),
}


class OwnConfig(GenerationConfig):
    """A user's subclass, which may merge in its own way."""


@st.composite
def some_fields(draw, most=4):
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=most, unique=True))
    return {name: draw(FIELDS[name]) for name in names}


@st.composite
def config_lists(draw):
    """Configs that mostly share their fields, so that merges are shared; values put in past their validation."""
    kinds = draw(st.lists(some_fields(), min_size=1, max_size=3))
    configs = []
    for _ in range(draw(st.integers(2, 6))):
        config = draw(st.sampled_from([GenerationConfig, GenerationConfig, GenerationConfig, OwnConfig]))()
        for name, value in draw(st.sampled_from(kinds)).items():
            setattr(config, name, value)
        if draw(st.booleans()):
            config.max_new_tokens = draw(FIELDS["max_new_tokens"])
        configs.append(config)
    return [*configs, *draw(st.lists(st.sampled_from([None, configs[0]]), max_size=2))]


def outcome(call, *args):
    """What came out, with -0.0, 1.0, 1 and True told apart; or the exception's type and message."""
    try:
        merged = call(*args)
    except Exception as error:
        return type(error), str(error)
    return type(merged), {name: (type(value), repr(value)) for name, value in vars(merged).items()}


def reader(model, kwargs, cache=None):
    return SpecReader(model, kwargs, cache or MergeCache(), 256).merged


@pytest.fixture(scope="module")
def model():
    return tiny_model()


CACHE = MergeCache()  # of all examples: what one leaves there is not another's


@settings(max_examples=300)
@given(configs=config_lists(), kwargs=some_fields(most=2), defaults=some_fields(most=2))
def test_configs_of_one_call_merge_as_each_alone(model, configs, kwargs, defaults):
    model.generation_config = GenerationConfig(eos_token_id=None)
    vars(model.generation_config).update(defaults)
    before = [None if config is None else repr(vars(config)) for config in configs]
    merge = reader(model, kwargs, CACHE)
    for config in configs:
        assert outcome(merge, config) == outcome(merge_config, model, config, kwargs)
    assert [None if config is None else repr(vars(config)) for config in configs] == before


def count_merges(model, monkeypatch):
    calls = []
    own = type(model)._prepare_generation_config

    def merge(model, config, kwargs):
        calls.append(config)
        return own(model, config)[0]

    monkeypatch.setattr("hf_paged.options.read.merge_config", merge)
    return calls


def test_configs_that_differ_in_their_length_only_merge_once(model, monkeypatch):
    calls = count_merges(model, monkeypatch)
    merge = reader(model, {})
    made = [merge(GenerationConfig(max_new_tokens=n, do_sample=True)) for n in range(1, 9)]
    assert len(calls) == 1
    assert [config.max_new_tokens for config in made] == list(range(1, 9))
    merge(GenerationConfig(max_new_tokens=1, do_sample=True, temperature=0.6))
    assert len(calls) == 2


@pytest.mark.parametrize("kwargs", [{}, {"max_new_tokens": 5}])
def test_configs_that_say_the_same_have_one_result(model, kwargs):
    cache, key = MergeCache(), call_key(model, kwargs)
    made = [cache(model, GenerationConfig(max_new_tokens=n, temperature=t), kwargs, key)
            for t in (0.5, 0.6) for n in (3, 4, 3, 4)]
    assert len({id(one.first) for one in made[:4]}) == len({id(one.first) for one in made[4:]}) == 1
    assert made[0].first is not made[4].first
    assert [one.config.max_new_tokens for one in made] == ([5] * 8 if kwargs else [3, 4, 3, 4] * 2)


def test_a_config_that_was_changed_is_merged_anew(model):
    cache, config = MergeCache(), GenerationConfig(max_new_tokens=3, eos_token_id=[3])
    for change in (lambda: None, lambda: setattr(config, "temperature", 0.5), lambda: config.eos_token_id.append(4),
                   lambda: setattr(config, "bad_words_ids", [[1, 2]]), lambda: config.bad_words_ids[0].append(3)):
        change()
        merged = cache(model, config, {}, call_key(model, {})).config
        assert outcome(lambda made: made, merged) == outcome(merge_config, model, config, {})


def test_calls_with_equal_settings_merge_once_whatever_becomes_of_their_lists(model, monkeypatch):
    calls, cache = [], MergeCache()
    monkeypatch.setattr("hf_paged.options.read.merge_config",
                        lambda *arguments: calls.append(arguments) or merge_config(*arguments))
    eos = [5]
    first = reader(model, {"max_new_tokens": 4, "eos_token_id": eos}, cache)(None)
    again = reader(model, {"max_new_tokens": 4, "eos_token_id": [5]}, cache)(None)
    assert len(calls) == 1 and again is first
    eos.append(6)
    assert reader(model, {"max_new_tokens": 4, "eos_token_id": [5]}, cache)(None).eos_token_id == [5]
    assert reader(model, {"max_new_tokens": 4, "eos_token_id": eos}, cache)(None).eos_token_id == [5, 6]
    model.generation_config.temperature = 0.3
    assert reader(model, {"max_new_tokens": 4, "eos_token_id": [5]}, cache)(None).temperature == 0.3


class Mute:
    """A value whose text says nothing of it."""

    def __repr__(self):
        return "Mute()"


def test_values_whose_texts_are_alike_are_not_taken_for_one_another(model):
    cache, values = MergeCache(), [Mute(), [Mute()], (1, [Mute()])]
    for value in [*values, *map(copy.deepcopy, values)]:
        config = GenerationConfig(max_new_tokens=3)
        config.of_my_own = value
        merged = cache(model, config, {}, call_key(model, {})).config
        again = GenerationConfig(max_new_tokens=3)
        again.of_my_own = copy.deepcopy(value)
        assert cache(model, again, {}, call_key(model, {})).first is not merged


def test_a_merge_that_is_not_transformers_own_is_asked_every_time(monkeypatch):
    class Halving(type(tiny_model())):
        def _prepare_generation_config(self, generation_config, **kwargs):
            merged, unused = super()._prepare_generation_config(generation_config, **kwargs)
            merged.max_new_tokens //= 2
            return merged, unused

    model = Halving(tiny_model().config)
    merge = reader(model, {})
    assert [merge(GenerationConfig(max_new_tokens=n)).max_new_tokens for n in (8, 6)] == [4, 3]


tokens = st.one_of(
    st.integers(0, 9), st.integers(0, 9), st.sampled_from([-1, 10, 2**70, -(2**70), True, None, 1.0, "a", np.int32(3)])
)
prompts = st.one_of(
    st.lists(st.integers(0, 9), min_size=1, max_size=5), st.lists(tokens, max_size=4), st.lists(tokens).map(tuple),
    st.sampled_from([np.array([1, 2]), np.array([1.5]), "text", None, [[1, 2]], range(3)]),
)


@given(st.lists(prompts, max_size=4))
def test_prompts_checked_in_one_go_pass_as_each_alone(many):
    together = token_id_lists(many, 10)
    if together is None:
        return
    assert together == [token_ids(prompt, 10) for prompt in many]
    assert all(type(token) is int for prompt in together for token in prompt)
    assert not any(ours is theirs for ours, theirs in zip(together, many, strict=True)), "the caller's own list"


def test_plain_prompts_are_checked_in_one_go():
    assert token_id_lists([[1, 2], (3,)], 10) == [[1, 2], [3]]
    assert token_id_lists([[2**32 - 1]], 2**33) == [[2**32 - 1]]
    for bad in ([[1], []], [[1], [10]], [[1], [-1]], [[2**32 + 1]], [[2**70]], [[True]], [[1, False]], [[1.0]], ["12"],
                [[np.int64(1)]], []):
        assert token_id_lists(bad, 10) is None


def test_the_first_bad_prompt_is_the_one_that_is_named():
    with PagedGenerator(tiny_model()) as generator:
        with pytest.raises(ValueError, match="max_model_len"):
            generator.generate([[3], [5] * 512, [3, 256]], max_new_tokens=2)
        with pytest.raises(ValueError, match="256"):
            generator.generate([[3], [3, 256], [5] * 512], max_new_tokens=2)


@pytest.fixture(scope="module")
def generator():
    with PagedGenerator(tiny_model(), num_blocks=16) as generator:
        yield generator


@pytest.mark.parametrize("value", ["9", [object()], {"a": 1}], ids=["text", "list", "dict"])
@pytest.mark.parametrize("name", sorted(vars(GenerationConfig())))
def test_a_setting_of_another_type_is_named_with_its_value(generator, name, value):
    """Of every field: whatever raises says which it is, and transformers' bare comparisons never come through."""
    config = GenerationConfig(max_new_tokens=2, do_sample=True)
    setattr(config, name, value)
    for arguments, keywords in (((), {"max_new_tokens": 2, "do_sample": True, name: value}), ((config,), {})):
        said = None
        try:
            generator.generate([[3, 4]], *arguments, **keywords)
        except (TypeError, ValueError) as error:
            said = str(error)
        assert said is None or (name in said and not said.startswith(("'", "generation settings")))


def test_a_length_as_text_says_what_is_accepted(generator):
    for keywords in ({"max_new_tokens": "9"}, {"generation_config": GenerationConfig(max_new_tokens=None)}):
        if "generation_config" in keywords:
            keywords["generation_config"].max_new_tokens = "9"
        with pytest.raises(TypeError, match="max_new_tokens='9': expected None or int, got str"):
            generator.generate([[3, 4]], **keywords)
