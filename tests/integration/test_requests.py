"""One call of a `PagedGenerator` as requests: chats as their template renders them, and prompts that cannot run."""

from __future__ import annotations

import inspect
import random
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_idle, byte_tokenizer, random_prompts, stock_generate, tiny_model
from transformers import GenerationConfig, PreTrainedTokenizerBase

from hf_paged import PagedGenerator, UnsupportedOptionError
from hf_paged.integration.requests import Call, runnable
from hf_paged.options.chat_keywords import OURS, template_parameters

TEMPLATE = """
{%- set note = 'x' %}{{ note }}
{%- if tools %}<tools>{% for tool in tools %}{{ tool.function.name }};{% endfor %}</tools>{% endif %}
{%- if documents %}<docs>{% for d in documents %}{{ d.title }};{% endfor %}</docs>{% endif %}
{%- for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}
<{{ m.role }}>{{ m.content }}</>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% if enable_thinking is defined and not enable_thinking %}<think></think>
{%- endif %}{% endif %}"""
CHAT = [{"role": "user", "content": "What is the code?"}]
OPEN = [*CHAT, {"role": "assistant", "content": "The code is"}]
PROMPTS = random_prompts([20, 5, 33])


def weather(city: str) -> str:
    """Tells the weather.

    Args:
        city: of which.
    """
    return city


KEYWORDS = [
    {},
    {"enable_thinking": False},
    {"enable_thinking": True},
    {"tools": [weather]},
    {"documents": [{"title": "t", "text": "x"}]},
    {"chat_template": "{% for m in messages %}{{ m.content }}!{{ mark }}{% endfor %}", "mark": "?"},
    {"add_generation_prompt": False},
    {"continue_final_message": True},
    {"tools": [weather], "enable_thinking": False, "documents": [{"title": "t", "text": "x"}]},
    {"sanitize_control_tokens": True},
    {"tokenizer_kwargs": {"verbose": False}},
    {"truncation": True},
]


def chat_tokenizer():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def generator():
    with PagedGenerator(tiny_model(), chat_tokenizer(), num_blocks=40) as generator:
        yield generator


def greedy(model, prompt, count=6, **options):
    ids = torch.tensor([prompt])  # stock would take the pad token in it for padding
    output = stock_generate(model, input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)
    return output[0, len(prompt) :].tolist()


def rendered(tokenizer, chat, keywords):
    keywords = {"add_generation_prompt": not keywords.get("continue_final_message"), **keywords}
    return tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True, **keywords)["input_ids"]


# -- chats ------------------------------------------


def supported(keywords):
    known = {*template_parameters(None), "enable_thinking", "mark"}
    return all(name in known for name in keywords)


@pytest.mark.each_value
@pytest.mark.parametrize("keywords", KEYWORDS, ids=lambda keywords: "-".join(keywords) or "none")
@pytest.mark.parametrize("form", ["keywords", "chat_template_kwargs", "stream"])
def test_keywords_of_the_template_give_the_tokens_of_apply_chat_template(generator, keywords, form):
    if not supported(keywords):
        pytest.skip("this transformers has no such parameter")
    chats = [OPEN, [*CHAT, {"role": "assistant", "content": "A"}]]
    expected = [rendered(generator.tokenizer, chat, keywords) for chat in chats]
    if form == "keywords":
        made = generator.generate(chats, max_new_tokens=6, **keywords)
    elif form == "stream":
        outputs = generator.stream(chats, max_new_tokens=6, **keywords)
        made = [c for _, c in sorted((i, o.completion) for i, o in outputs if o.completion is not None)]
    else:
        made = generator.generate(chats, max_new_tokens=6, chat_template_kwargs=keywords)
    assert [c.prompt_token_ids for c in made] == expected
    assert [c.token_ids for c in made] == [greedy(generator.model, ids) for ids in expected]


def test_every_parameter_of_apply_chat_template_is_passed_on_or_refused(generator):
    parameters = set(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
    rest = parameters - {"self", "conversation", "kwargs", "max_length"}  # max_length is a generation setting
    tested = {name for keywords in KEYWORDS for name in keywords}
    assert rest <= tested | {*OURS}
    for name in OURS:
        with pytest.raises(ValueError, match=name):
            generator.generate([CHAT], max_new_tokens=3, **{name: True})


def test_explicit_keywords_win_and_may_have_a_settings_name(generator):
    [made] = generator.generate([CHAT], max_new_tokens=3, enable_thinking=True,
                                chat_template_kwargs={"enable_thinking": False, "add_generation_prompt": True})
    assert made.prompt_token_ids == rendered(generator.tokenizer, CHAT, {"enable_thinking": False})
    keywords = {"chat_template": "{{ temperature }}"}
    [made] = generator.generate([CHAT], max_new_tokens=3, chat_template_kwargs={**keywords, "temperature": 7})
    assert made.text is not None and generator.tokenizer.decode(made.prompt_token_ids) == "7"


@pytest.mark.parametrize("keywords", [{"enable_thinkin": False}, {"note": 1}, {"messages": []}, {"raise_exception": 1}])
def test_what_the_template_does_not_ask_for_is_refused_by_name(generator, keywords):
    for on_error in ("raise", "complete"):
        with pytest.raises(ValueError, match=next(iter(keywords))):
            generator.generate([CHAT], max_new_tokens=3, on_error=on_error, **keywords)


@pytest.mark.parametrize("prompts", ["text", ["a", "b"], [[3, 4]], {"prompt": "x"}, [{"prompt_token_ids": [3]}]])
@pytest.mark.parametrize("keywords", [{"enable_thinking": False}, {"tools": []}, {"chat_template_kwargs": {"a": 1}}])
def test_without_a_chat_keywords_of_the_template_are_refused(generator, prompts, keywords):
    with pytest.raises(ValueError, match="no prompt is a chat"):
        generator.generate(prompts, max_new_tokens=3, **keywords)


def test_with_tensors_keywords_of_the_template_are_refused(generator):
    for keywords in ({"tools": []}, {"chat_template_kwargs": {"a": 1}}, {"on_error": "complete"}):
        with pytest.raises(ValueError, match="tensors come in"):
            generator.generate(input_ids=torch.tensor([[3, 4]]), max_new_tokens=3, **keywords)


def test_forms_may_be_mixed(generator):
    prompts = ["hello", CHAT, PROMPTS[0], np.array(PROMPTS[1]), {"prompt": "hello"},
               {"prompt_token_ids": PROMPTS[2], "prompt": None}, {"prompt_token_ids": np.array([3]), "prompt": "x"}]
    tokenizer = generator.tokenizer
    hello = tokenizer("hello")["input_ids"]
    expected = [hello, rendered(tokenizer, CHAT, {"enable_thinking": False}), *PROMPTS[:2], hello, PROMPTS[2], [3]]
    made = generator.generate(prompts, max_new_tokens=6, enable_thinking=False)
    assert [c.prompt_token_ids for c in made] == expected
    assert [c.token_ids for c in made] == [greedy(generator.model, ids) for ids in expected]
    for single in prompts[4:]:
        assert len(generator.generate(single, max_new_tokens=2)) == 1


@pytest.mark.parametrize(("prompt", "message"), [
    (CHAT[0], "one message"), ({}, "prompt_token_ids"), ({"text": "a"}, "'text'"), ({"prompt": [3]}, "expected a str"),
    ({"prompt_token_ids": "a"}, "expected token ids"), ({"prompt": CHAT}, "expected a str"),
    ({"prompt_token_ids": CHAT}, "expected token ids"), ({"prompt": "a", "multi_modal_data": 1}, "multi_modal_data"),
    (None, "NoneType"), (7.5, "float"),
])
def test_other_forms_are_named(generator, prompt, message):
    with pytest.raises(TypeError, match=rf"prompts\[1\]: .*{message}"):
        generator.generate(["a", prompt], max_new_tokens=3)


# -- prompts that cannot run ------------------------------------------

BAD = {
    "empty": ([], r"ValueError: prompt_token_ids=\[\]"),
    "no text": ("", "ValueError"),
    "too long": ([5] * 600, r"prompt_token_ids of 600 tokens: expected at most 511 \(601 tokens"),
    "beyond the vocabulary": ([3, 256], "ValueError: prompt_token_ids holds 256"),
    "float": ([1.5], "TypeError"),
    "bool": ([True], "TypeError"),
    "none": (None, "TypeError"),
    "message": ({"role": "user", "content": "a"}, "TypeError.*one message"),
    "refused by the template": ([{"role": "bad", "content": "a"}], "no such role"),
    "dict": ({"prompt": 3}, "TypeError"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_bad_prompt_ends_alone_or_is_named(generator, name, streaming):
    bad, message = BAD[name]
    prompts = [PROMPTS[0], bad, PROMPTS[1]]
    before = generator.engine.stats().num_generated_tokens
    with pytest.raises((ValueError, TypeError), match=r"^prompts\[1\]: "):
        (generator.stream if streaming else generator.generate)(prompts, max_new_tokens=6)
    assert generator.engine.stats().num_generated_tokens == before
    if streaming:
        outputs = list(generator.stream(prompts, max_new_tokens=6, on_error="complete"))
        assert [(i, o.request_id) for i, o in outputs if not o.request_id] == [(1, "")]
        made = [c for _, c in sorted((i, o.completion) for i, o in outputs if o.completion is not None)]
    else:
        made = generator.generate(prompts, max_new_tokens=6, on_error="complete")
    assert [c.finish_reason for c in made] == ["length", "error", "length"]
    assert [c.token_ids for c in made] == [greedy(generator.model, PROMPTS[0]), [], greedy(generator.model, PROMPTS[1])]
    assert made[0].error is made[2].error is None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(made[1].error)
    assert_idle(generator.model)


BAD_SETTINGS = {
    "temperature": ({"temperature": -1.0, "do_sample": True}, ValueError),
    "length": ({"max_new_tokens": None, "max_length": 5}, ValueError),
    "beams": ({"num_beams": 3}, UnsupportedOptionError),
    "copies": ({"num_return_sequences": 2}, ValueError),
    "stop": ({"stop_strings": [""]}, ValueError),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_settings_of_one_prompt_are_its_own_and_those_of_all_end_the_call(generator, name):
    values, kind = BAD_SETTINGS[name]
    bad = GenerationConfig(max_new_tokens=6)
    for field, value in values.items():
        setattr(bad, field, value)
    good = GenerationConfig(max_new_tokens=6)
    with pytest.raises(kind, match=r"^prompts\[1\]: "):
        generator.generate(PROMPTS, [good, bad, good])
    made = generator.generate(PROMPTS, [good, bad, good], on_error="complete")
    copies = values.get("num_return_sequences", 1)
    assert [c.finish_reason for c in made] == ["length", *["error"] * copies, "length"]
    assert made[-1].token_ids == greedy(generator.model, PROMPTS[2])
    assert {tuple(c.prompt_token_ids) for c in made[1:-1]} == {tuple(PROMPTS[1])}
    if name == "length":  # a length that one prompt has no room in
        made = generator.generate([PROMPTS[0], [3, 4]], bad, on_error="complete")
        assert [c.finish_reason for c in made] == ["error", "length"]
        return
    for on_error in ("raise", "complete"):
        with pytest.raises(kind, match=r"^(?!prompts\[)"):
            generator.generate(PROMPTS, bad, on_error=on_error)


def test_seeds_and_salts_of_one_prompt_are_its_own(generator):
    made = generator.generate(PROMPTS, max_new_tokens=2, seed=[1, -1, 2], on_error="complete")
    assert [c.finish_reason for c in made] == ["length", "error", "length"]
    made = generator.generate(PROMPTS, max_new_tokens=2, cache_salt=["a", None, ""], on_error="complete")
    assert [c.finish_reason for c in made] == ["length", "length", "error"]
    for keywords in ({"seed": -1}, {"cache_salt": ""}, {"seed": [1]}, {"on_error": "ignore"}):
        with pytest.raises(ValueError, match=next(iter(keywords))):
            generator.generate(PROMPTS, max_new_tokens=2, **{"on_error": "complete", **keywords})


SAMPLE = {"max_new_tokens": 5, "do_sample": True, "temperature": 2.0, "seed": 3}


@settings(max_examples=25)
@given(st.lists(st.sampled_from([None, *BAD]), max_size=6), st.integers(1, 3), st.integers(0, 99))
def test_any_mix_gives_the_others_what_they_get_beside_good_prompts(generator, names, copies, seed):
    """A bad prompt takes its place in the numbering of draws, so that it changes nothing for the others."""
    draw = random.Random(seed)
    good = [draw.choice(PROMPTS) for _ in names]
    mixed = [prompt if name is None else BAD[name][0] for prompt, name in zip(good, names, strict=True)]
    if mixed and all(isinstance(prompt, dict) and "role" in prompt for prompt in mixed):
        return  # one chat
    made = generator.generate(mixed, **SAMPLE, num_return_sequences=copies, on_error="complete")
    expected = generator.generate(good, **SAMPLE, num_return_sequences=copies)
    assert len(made) == len(expected) == copies * len(names)
    for index, completion in enumerate(made):
        if names[index // copies] is None:
            assert completion.token_ids == expected[index].token_ids
        else:
            assert completion.finish_reason == "error" and completion.error and completion.token_ids == []
    assert_idle(generator.model)


@pytest.mark.parametrize("on_error", ["raise", "complete"])
def test_a_request_that_fails_while_it_runs_ends_alone_either_way(on_error):
    model = tiny_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[255] = torch.nan
    with PagedGenerator(model) as generator:
        made = generator.generate([[3, 4], [3, 255]], max_new_tokens=2, on_error=on_error)
        assert [c.finish_reason for c in made] == ["length", "error"]


def test_settings_that_no_table_holds_are_found_when_they_are_queued(generator, monkeypatch):
    add, engine = generator.engine.add, generator.engine

    def refuse(session, new):
        if new.prompt == PROMPTS[1]:
            raise ValueError("no room")
        return add(session, new)

    monkeypatch.setattr(engine, "add", refuse)
    with pytest.raises(ValueError, match=r"prompts\[1\]: no room"):
        generator.generate(PROMPTS, max_new_tokens=3)
    made = generator.generate(PROMPTS, max_new_tokens=3, on_error="complete")
    assert [c.error for c in made] == [None, "ValueError: no room", None]
    assert_idle(generator.model)


def test_each_prompt_runs_with_its_own_settings_as_in_a_call_of_its_own(generator):
    """Equal configs, and ones that differ in their length, with options that are each prompt's own."""
    own = {"logprobs": [False, "raw", True, False], "stop_token_ids": [[7], None, [7], [9]], "seed": [4, 5, 4, 4],
           "cache_salt": ["a", None, "b", None], "priority": [1, 0, 2, 0], "request_ids": list("wxyz")}
    prompts = [*PROMPTS, PROMPTS[0]]
    for fields in ({"max_new_tokens": 3}, {"max_length": 40}, {"max_new_tokens": 30, "min_length": 22}):
        configs = [GenerationConfig(do_sample=True, temperature=0.7, **fields) for _ in prompts]
        if "max_new_tokens" in fields:
            configs[1].max_new_tokens += 2
        made = runnable(generator._reader.read(Call.of(prompts, configs, **own)))
        for i, request in enumerate(made):
            given = {name: values[i : i + 1] for name, values in own.items()}
            alone = Call.of(prompts[i : i + 1], configs[i : i + 1], **given)
            assert [request.but(index=0)] == runnable(generator._reader.read(alone))
        assert [request.cache_salt == b"" for request in made] == [False, True, False, True]


def test_what_a_caller_does_with_a_prompt_meanwhile_changes_nothing(generator):
    prompt = list(PROMPTS[0])
    outputs = generator.stream([prompt], max_new_tokens=4, do_sample=True, num_return_sequences=2, seed=0)
    prompt.append(3)
    made = [output.completion for _, output in outputs if output.completion is not None]
    assert len(made) == 2
    for completion in made:
        assert completion.prompt_token_ids == PROMPTS[0]
        completion.prompt_token_ids.append(3)


def test_what_a_caller_does_with_the_prompt_of_a_refused_copy_changes_no_other_copy(generator):
    """One of two copies finds its id in use; its completion comes before the other one's first step."""
    configs = [GenerationConfig(max_new_tokens=4, do_sample=True, top_k=1, num_return_sequences=n) for n in (1, 2)]
    prompts, made = [PROMPTS[0], PROMPTS[0]], {}
    for change in (list.copy, list.clear):
        outputs = generator.stream(prompts, configs, request_ids=["a#1", "a"], seed=0, on_error="complete")
        ends = []
        for _, output in outputs:
            if output.completion is not None:
                ends.append(output.completion)
                if output.completion.finish_reason == "error":
                    change(output.completion.prompt_token_ids)
        assert [one.finish_reason for one in ends] == ["error", "length", "length"]
        made[change] = [(one.token_ids, one.prompt_token_ids) for one in ends[1:]]
    assert made[list.clear] == made[list.copy]


# -- warnings ------------------------------------------


def heard(generator, *arguments, **keywords):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # garbage of whatever ran before
        generator.generate(PROMPTS, *arguments, **keywords)
    assert {w.filename for w in caught} <= {__file__}
    return [str(w.message) for w in caught]


@pytest.fixture
def fresh():
    with PagedGenerator(tiny_model()) as generator:
        yield generator


@pytest.mark.parametrize("values", [{"temperature": 0.6}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1},
                                    {"typical_p": 0.5}, {"temperature": 0.6, "do_sample": False}])
def test_sampling_settings_without_sampling_warn_once(fresh, values):
    [text] = heard(fresh, max_new_tokens=2, **values)
    assert "do_sample=True" in text and f"{next(iter(values))}={next(iter(values.values()))}" in text
    assert heard(fresh, max_new_tokens=2, **values) == []


def test_a_config_that_says_it_is_heard_too(fresh):
    [text] = heard(fresh, GenerationConfig(max_new_tokens=2, temperature=0.6))
    assert "temperature=0.6" in text


@pytest.mark.parametrize("values", [{"temperature": 1.0}, {"temperature": 0.0}, {"top_p": 1.0}, {"top_k": 50},
                                    {"temperature": 0.6, "do_sample": True}, {}])
def test_settings_that_change_nothing_do_not_warn(fresh, values):
    assert heard(fresh, max_new_tokens=2, **values) == []


def test_the_models_own_settings_do_not_warn(fresh):
    fresh.model.generation_config.temperature = 0.6
    fresh.model.generation_config.max_length = 40
    assert heard(fresh) == heard(fresh, GenerationConfig(temperature=0.6)) == []


@pytest.mark.parametrize("values", [{"max_new_tokens": 600}, {"max_length": 900}])
@pytest.mark.parametrize("form", ["keywords", "config"])
def test_a_length_beyond_the_longest_sequence_warns_once_with_both_numbers(values, form):
    with PagedGenerator(tiny_model(), max_model_len=40) as generator:
        given = [GenerationConfig(**values)] if form == "config" else []
        asked = values.get("max_new_tokens", 900 - 20)
        [text] = heard(generator, *given, **({} if given else values))
        assert f"max_new_tokens={asked} after a prompt of 20 tokens: expected at most 20, since max_model_len=40 " in (
            text)
        assert "finish_reason='length'" in text
        assert heard(generator, **values) == []
        [made] = generator.generate(PROMPTS[0], **values)
        assert (len(made.token_ids), made.finish_reason) == (20, "length")


def test_a_length_that_fits_and_the_models_own_do_not_warn(fresh):
    fresh.model.generation_config.max_new_tokens = 600
    assert heard(fresh) == heard(fresh, max_new_tokens=512 - 33) == []


def test_no_length_warns_once_with_the_number(fresh):
    [text] = heard(fresh)
    assert "at most 20 new tokens" in text and "max_new_tokens=" in text
    assert heard(fresh) == []
    assert len(fresh.generate(PROMPTS)[0].token_ids) == 20
