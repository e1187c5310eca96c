"""Every field of a body: it is carried out, it asks for nothing, or it is refused with the reason."""

from __future__ import annotations

import copy
import json

import pytest
from serve_bodies import ENDPOINTS, PROMPTS
from serve_fields import MEANT, VOCAB_SIZE, is_meant
from serve_fields import ODD as ANY
from serve_support import served
from transformers import GenerationConfig

from hf_paged.integration.continuous_batching import batched_calls
from hf_paged.options.request_options import RequestOptions
from hf_paged.options.structured import Structured
from hf_paged.server.calls import RefusedRequestError
from hf_paged.server.fields import (
    ALL,
    CHAT,
    OWN_READ,
    READ,
    REFUSED,
    RESPONSES,
    TEXT,
    passed,
    read_body,
    readable,
)

PATHS = dict(zip(ALL, ENDPOINTS, strict=True))
TOOLS = [{"type": "function", "function": {"name": "look_up"}}]


def formed(name, kind, text, any_whitespace=True):
    """What a field makes of a request that asks for a form."""
    return {"structured": Structured(kind, text, any_whitespace), "form_fields": [name]}


# Values that ask for something, and what of the request they change.
ASKED = {
    "max_tokens": (7, {"max_new_tokens": 7}),
    "max_completion_tokens": (7, {"max_new_tokens": 7}),
    "max_output_tokens": (7, {"max_new_tokens": 7}),
    "min_tokens": (3, {"min_new_tokens": 3}),
    "temperature": (0.5, {"temperature": 0.5, "do_sample": True, "top_k": 0}),
    "top_p": (0.5, {"top_p": 0.5, "do_sample": True, "top_k": 0}),
    "min_p": (0.5, {"min_p": 0.5, "do_sample": True, "top_k": 0}),
    "top_k": (5, {"top_k": 5, "do_sample": True}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "presence_penalty": (1.5, {"penalties": {"presence_penalty": 1.5}}),
    "frequency_penalty": (-2, {"penalties": {"frequency_penalty": -2.0}}),
    "seed": (-1, {"seed": 2**63 - 1}),
    "logit_bias": ({"5": 2}, {"sequence_bias": {(5,): 2.0}}),
    "stop": ("x", {"stop": ("x",), "stop_strings": ["x"]}),
    "include_stop_str_in_output": (True, {"keeps_stop": True}),
    "stop_token_ids": ([5, 6], {"stop_token_ids": (5, 6), "eos_token_id": [2, 5, 6]}),
    "ignore_eos": (True, {"ignores_eos": True, "eos_token_id": -1}),
    "n": (3, {"n": 3}),
    "best_of": (1, {"best_of": 1}),
    "logprobs": ({CHAT: True, TEXT: 0}, {"logprobs": True}),
    "tools": (TOOLS, {"tools": TOOLS, "for_transformers": {"tools": TOOLS}}),
    "reasoning_effort": ("low", {"reasoning_effort": "low",
                                 "for_transformers": {"chat_template_kwargs": {"reasoning_effort": "low"}}}),
    "reasoning": ({"effort": "low"}, {"reasoning_effort": "low",
                                      "for_transformers": {"chat_template_kwargs": {"reasoning_effort": "low"}}}),
    "tool_choice": ("none", {"may_call_tools": False}),
    "response_format": ({"type": "json_object"},
                        formed("response_format", "json_schema", '{"type": "object"}', False)),
    "text": ({"format": {"type": "json_schema", "name": "x", "schema": {}}},
             formed("text", "json_schema", "{}", False)),
    "structured_outputs": ({"regex": "a", "json": None}, formed("structured_outputs", "regex", "a")),
    "guided_json": ("true", formed("guided_json", "json_schema", "true")),
    "guided_regex": ("a+", formed("guided_regex", "regex", "a+")),
    "guided_choice": (["a", "b"], formed("guided_choice", "choice", '["a", "b"]')),
    "guided_grammar": ('root ::= "a"', formed("guided_grammar", "grammar", 'root ::= "a"')),
    "parallel_tool_calls": (False, {"parallel_calls": False}),
}
# Values of fields that are carried out which ask for nothing.
NOTHING = {
    "temperature": [0, 0.0], "top_p": [1, 1.0], "min_p": [0], "top_k": [0, -1], "logit_bias": [{}], "stop": [[]],
    "include_stop_str_in_output": [False], "stop_token_ids": [[]], "ignore_eos": [False], "tools": [[]],
    "presence_penalty": [0, 0.0], "frequency_penalty": [0],
    "tool_choice": ["auto"], "parallel_tool_calls": [True], "top_logprobs": [0], "user": ["me"],
    "safety_identifier": ["me"], "prompt_cache_key": ["me"], "reasoning": [{}],
    "response_format": [{"type": "text"}], "text": [{}, {"format": {"type": "text"}}],
}
ODD = ["x", "", 5, -2, 0.5, float("nan"), 10**400, True, False, [], ["x"], [[]], {}, {"x": 1}, {"effort": 5}, [None],
       [{"type": "function"}], [{"type": "web_search"}], {"5": "x"}, {"type": "json_object"}, "required",
       {"type": "function", "function": {"name": "look_up"}}, {"include_usage": 5}, {"type": "json_schema"}]
FIELDS = [(endpoint, name) for endpoint in ALL for name in sorted(
    {*readable(endpoint), *(name for name, field in REFUSED.items() if endpoint in field.endpoints)})]

ALL_FIELDS = sorted({*FIELDS, *((endpoint, name) for endpoint in ALL for name in passed(endpoint))})


def effect(endpoint, body):
    """What a body makes of a request, in names and values; of a model that answers greedily and ends at token 2."""
    wishes = read_body(endpoint, copy.deepcopy(body))
    config = GenerationConfig(do_sample=False, eos_token_id=2)
    wishes.apply(config, config)
    return {**vars(wishes), **vars(config), "for_transformers": wishes.for_transformers(), "settings": None,
            "filters": None, **({} if wishes.temperature else {"temperature": config.temperature})}


def change(endpoint, body):
    plain = effect(endpoint, {})
    return {name: value for name, value in effect(endpoint, body).items() if value != plain[name]}


def the_value(endpoint, name):
    value, expected = ASKED[name]
    return (value[endpoint] if name == "logprobs" else value), expected


@pytest.mark.parametrize("endpoint", ALL)
def test_every_field_of_transformers_schema_is_known(endpoint):
    """A field that a new version of OpenAI's schema brings shows up here; the server refuses it meanwhile."""
    from transformers.cli.serving import chat_completion, completion, response

    handlers = {CHAT: chat_completion.ChatCompletionHandler, TEXT: completion.CompletionHandler,
                RESPONSES: response.ResponseHandler}
    refused = {name for name, field in REFUSED.items() if endpoint in field.endpoints}
    known = {*passed(endpoint), *readable(endpoint), *refused}
    assert handlers[endpoint]._valid_params_class.__mutable_keys__ <= known
    assert not refused & {*readable(endpoint)}
    with pytest.raises(RefusedRequestError, match="no_such_field=1: expected one of the fields of this endpoint, "):
        read_body(endpoint, {"no_such_field": 1})


def test_every_field_that_is_carried_out_has_a_value_here():
    without = {"top_logprobs", "stream_options", "user", "safety_identifier", "prompt_cache_key"}
    assert {*ASKED} == ({*READ} | {name for _, name in OWN_READ}) - without


@pytest.mark.parametrize(("endpoint", "name"), FIELDS)
def test_what_a_field_asks_for_arrives_and_nothing_else(endpoint, name):
    if name in ASKED and name in readable(endpoint):
        value, expected = the_value(endpoint, name)
        assert change(endpoint, {name: value}) == expected
    neutral = NOTHING.get(name, []) if name in readable(endpoint) else REFUSED[name].passes
    for value in [None, *neutral]:
        found = change(endpoint, {name: value})
        found.pop("for_transformers", None) if found.get("for_transformers") in ({}, {"tools": []}) else None
        assert not {key: v for key, v in found.items() if v not in (value, (), False)}, (value, found)


@pytest.mark.parametrize(("endpoint", "name"), FIELDS)
def test_what_a_field_does_not_accept_is_refused_with_the_reason(endpoint, name):
    """Every odd value changes the request, asks for nothing, or is refused by name, value and what is accepted."""
    passes = NOTHING.get(name, []) if name in readable(endpoint) else REFUSED[name].passes
    reasons = {str(value): reason for value in ODD if (reason := refusal(endpoint, name, value)) is not None}
    for value in ODD:
        if (reason := reasons.get(str(value))) is None:
            label = name in ("user", "safety_identifier", "prompt_cache_key")
            asks = change(endpoint, {name: value})
            assert asks or value in passes or label or the_same_as_left_out(name, value), value
        elif name != "stream_options" or "expected stream to be true" not in reason:
            assert reason.startswith(f"{name}={value!r:.200}: expected ")
    assert len(reasons) >= len(ODD) - 9


def test_the_likeliest_tokens_are_asked_for_as_each_endpoint_names_them():
    assert change(CHAT, {"logprobs": True, "top_logprobs": 3}) == {"logprobs": True, "top_logprobs": 3}
    assert change(CHAT, {"logprobs": True, "top_logprobs": 0}) == {"logprobs": True}
    assert change(TEXT, {"logprobs": 3}) == {"logprobs": True, "top_logprobs": 3}
    asked = read_body(CHAT, {"logprobs": True, "top_logprobs": 3, "presence_penalty": 1}).options()
    assert asked == RequestOptions(logprobs=True, top_logprobs=3, presence_penalty=1.0)


def refusal(endpoint, name, value):
    try:
        read_body(endpoint, {name: value})
    except RefusedRequestError as error:
        return str(error)
    return None


def the_same_as_left_out(name, value):
    return (name, str(value)) in {("min_tokens", "0"), ("logprobs", "False"), ("stream_options", "{}")}


@pytest.mark.parametrize(("endpoint", "body", "words"), [
    (TEXT, {"best_of": 3}, "best_of=3: expected it to be n"),
    (TEXT, {"best_of": 3, "n": 2}, "best_of=3: expected it to be n"),
    (CHAT, {"stream_options": {"include_usage": True}}, "expected stream to be true"),
    (CHAT, {"tools": TOOLS, "parallel_tool_calls": False}, "parallel_tool_calls=False: expected true with tools"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs=2: expected logprobs to be true with it"),
    (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs=21: expected an integer in"),
    (TEXT, {"logprobs": 21}, "logprobs=21: expected an integer in"),
    (CHAT, {"tool_choice": "required"}, "tool_choice='required': expected tools beside it"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS}, "the name of one of"),
    (CHAT, {"response_format": {"type": "json_object"}, "tools": TOOLS}, "expected it left out beside tools"),
    (CHAT, {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "expected it left out beside response_f"),
    (TEXT, {"stop": ["a", ""]}, "stop="),
    (RESPONSES, {"n": 2}, "n=2: expected one of the fields of this endpoint"),
])
def test_fields_that_do_not_go_together_are_refused(endpoint, body, words):
    with pytest.raises(RefusedRequestError) as caught:
        read_body(endpoint, body)
    assert words in str(caught.value)


def test_the_newer_name_of_the_length_wins():
    for body in ({"max_tokens": 5, "max_completion_tokens": 7}, {"max_completion_tokens": 7, "max_tokens": 5}):
        assert effect(CHAT, body)["max_new_tokens"] == 7


def test_more_sequences_than_there_are_choices_are_refused():
    for endpoint, settings in ((RESPONSES, {"do_sample": True}), (CHAT, {"num_beams": 3}),
                               (CHAT, {"do_sample": True, "num_return_sequences": 129})):
        config = GenerationConfig(**{"num_return_sequences": 2, **settings})
        with pytest.raises(ValueError, match=r"num_return_sequences=\d+: expected at most"):
            read_body(endpoint, {"generation_config": "{}"}).apply(config, config)
        read_body(endpoint, {}).apply(config, config)  # the model's own


def test_zero_temperature_is_greedy_whatever_the_model_says():
    wishes = read_body(CHAT, {"temperature": 0, "top_k": 5})
    config = GenerationConfig(do_sample=True, top_k=20)
    wishes.apply(config, config)
    assert (config.do_sample, config.top_k) == (False, 20)


@pytest.fixture(scope="module")
def server(trained_path):
    with served(trained_path, True) as server:
        yield server


# What the engine is told, by what the body of a request says.
TOLD = [
    ({"temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125},
     {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125}),
    ({"temperature": 1}, {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}),
    ({"temperature": 0}, {"do_sample": False}),
    ({"min_tokens": 2, "stop_token_ids": [17, 18]}, {"min_new_tokens": 2, "eos_token_ids": (17, 18)}),
    ({"ignore_eos": True}, {"eos_token_ids": (-1,)}),  # no token's id
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("endpoint", ALL)
def test_the_engine_is_told_what_the_body_asks_for(server, monkeypatch, endpoint, stream):
    told, settings_of = [], batched_calls.request_settings
    monkeypatch.setattr(batched_calls, "request_settings", lambda *args: told.append(settings_of(*args)) or told[-1])
    limit = "max_output_tokens" if endpoint == RESPONSES else "max_tokens"
    path = PATHS[endpoint]
    for fields, expected in TOLD:
        status, said = server.post(path, json.dumps({**PROMPTS[path], "stream": stream, limit: 3, **fields}).encode())
        assert status == 200, said
        settings = told.pop()
        assert settings.max_new_tokens == 3
        found = {name: getattr(settings, name) for name in expected}
        if "stop_token_ids" in fields:
            assert found.pop("eos_token_ids")[-2:] == expected["eos_token_ids"]
        assert found == {name: value for name, value in expected.items() if name in found}
    assert not told
    for name in ("repetition_penalty", "logit_bias")[: 2 - (endpoint == RESPONSES)]:
        server.post(path, json.dumps({**PROMPTS[path], "stream": stream, limit: 1, name: the_value(endpoint, name)[0]}))
        edits = told.pop().edits
        assert name != "repetition_penalty" or edits.repetition_penalty == 1.5
        assert name != "logit_bias" or edits.sequence_bias == (((5,), 2.0),)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("endpoint", ALL)
def test_what_cannot_be_is_a_400_with_the_reason(server, endpoint, stream):
    """Over HTTP, and the server answers the next request."""
    path, plain = PATHS[endpoint], {**PROMPTS[PATHS[endpoint]], "stream": stream}
    for name, field in REFUSED.items():
        if endpoint not in field.endpoints:
            continue
        value = next(odd for odd in (0.5, "x") if odd not in field.passes)
        status, said = server.post(path, json.dumps({**plain, name: value}).encode())
        assert status == 400
        assert said["error"]["message"] == f"{name}={value!r}: {field.expected}"
    short = {"generation_config": json.dumps({"max_new_tokens": 2})}
    assert server.post(path, json.dumps({**plain, **short, "user": "me"}).encode())[0] == 200


@pytest.mark.parametrize(("endpoint", "name"), ALL_FIELDS)
@pytest.mark.filterwarnings("ignore")
def test_no_value_of_any_field_gets_a_200_and_is_dropped(server, endpoint, name):
    """Every field with every odd value over HTTP: 200 exactly where the value means something to this field; else the
    answer says which field it was."""
    path, wrong = PATHS[endpoint], []
    limit = "max_output_tokens" if endpoint == RESPONSES else "max_tokens"
    for value in ANY:
        body = {**PROMPTS[path], "stream": name == "stream_options", limit: 2, name: value}
        if name == "generation_config":
            del body[limit]
        if name.startswith("max_"):
            body["stop_token_ids"] = list(range(VOCAB_SIZE))  # the first token is the last
        status, said = server.post(path, json.dumps(body).encode())
        if status == 200:
            as_expected = is_meant(endpoint, name, value)
        else:
            named = any(word in said["error"]["message"] for word in (name, "messages" if name == "input" else name))
            as_expected = not is_meant(endpoint, name, value) and status in (400, 422) and named
        if not as_expected:
            wrong.append((value, status, said))
    assert not wrong


def test_all_fields_have_a_meaning_here():
    assert {*MEANT} == {name for _, name in ALL_FIELDS}
