"""Every field of a body: it is carried out, it asks for nothing, or it is refused with the reason."""

from __future__ import annotations

import copy
import json
from contextlib import nullcontext

import pytest
from serve_bodies import ENDPOINTS, PROMPTS
from serve_fields import CHAT, MEANT, RESPONSES, TEXT, VOCAB_SIZE, is_meant
from serve_fields import ODD as ANY
from transformers import GenerationConfig

from hf_paged.options.structured import Structured
from hf_paged.server import generation
from hf_paged.server.errors import RefusedRequestError
from hf_paged.server.protocol import BODIES, EXPECTED, MOST_STOPS, read_body
from hf_paged.server.tools import ToolChoice

ALL = (CHAT, TEXT, RESPONSES)
KINDS = {kind.endpoint: kind for kind in BODIES}
PATHS = dict(zip(ALL, ENDPOINTS, strict=True))
REQUIRED = {CHAT: "messages", TEXT: "prompt", RESPONSES: "input"}
# Values without an effect of the fields that the server does not carry out.
NO_EFFECT = {endpoint: {name: field["no_effect"] for name, field in kind.model_json_schema()["properties"].items()
                        if "no_effect" in field} for endpoint, kind in KINDS.items()}
TOOLS = [{"type": "function", "function": {"name": "look_up"}}]


def formed(name, kind, text, any_whitespace=True):
    """What a field makes of a request that asks for a form."""
    return {"form": (name, Structured(kind, text, any_whitespace))}


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
    "presence_penalty": (1.5, {"options": {"presence_penalty": 1.5}}),
    "frequency_penalty": (-2, {"options": {"frequency_penalty": -2.0}}),
    "seed": (-1, {"seed": -1}),
    "logit_bias": ({"5": 2}, {"bias": {5: 2.0}, "sequence_bias": {(5,): 2.0}}),
    "stop": ("x", {"stop_texts": ("x",), "stop_strings": ["x"]}),
    "include_stop_str_in_output": (True, {"keeps_stop": True}),
    "stop_token_ids": ([5, 6], {"eos_token_id": [2, 5, 6]}),
    "ignore_eos": (True, {"eos_token_id": -1}),
    "n": (3, {"count": 3}),
    "logprobs": ({CHAT: True, TEXT: 0}, {"options": {"logprobs": True}}),
    "tools": (TOOLS, {"callable_tools": TOOLS}),
    "reasoning_effort": ("low", {"effort": "low"}),
    "reasoning": ({"effort": "low"}, {"effort": "low"}),
    "tool_choice": ("none", {"tool_choice": ToolChoice(may_call=False)}),
    "response_format": ({"type": "json_object"},
                        formed("response_format", "json_schema", '{"type": "object"}', False)),
    "text": ({"format": {"type": "json_schema", "name": "x", "schema": {}}},
             formed("text", "json_schema", "{}", False)),
    "structured_outputs": ({"regex": "a", "json": None}, formed("structured_outputs", "regex", "a")),
    "guided_json": ("true", formed("guided_json", "json_schema", "true")),
    "guided_regex": ("a+", formed("guided_regex", "regex", "a+")),
    "guided_choice": (["a", "b"], formed("guided_choice", "choice", '["a", "b"]')),
    "guided_grammar": ('root ::= "a"', formed("guided_grammar", "grammar", 'root ::= "a"')),
    "parallel_tool_calls": (False, {"parallel_tool_calls": False}),
    "echo": (True, {"echo": True}),
    "suffix": ("x", {"suffix": "x"}),
    "instructions": ("x", {"instructions": "x"}),
    "stream": (True, {"stream": True}),
    "model": ("x", {"model": "x"}),
    "chat_template_kwargs": ({"x": 1}, {"template_keywords": {"x": 1}}),
    "generation_config": ('{"do_sample": true, "max_new_tokens": 3}',
                          {"do_sample": True, "max_new_tokens": 3, "eos_token_id": None, "top_k": 0}),
}
# Values of fields that are carried out which ask for nothing.
NOTHING = {
    "temperature": [0, 0.0], "top_p": [1, 1.0], "min_p": [0], "top_k": [0, -1], "logit_bias": [{}], "stop": [[]],
    "include_stop_str_in_output": [False], "stop_token_ids": [[]], "ignore_eos": [False], "tools": [[]],
    "presence_penalty": [0, 0.0], "frequency_penalty": [0],
    "tool_choice": ["auto"], "parallel_tool_calls": [True], "top_logprobs": [0], "best_of": [1], "echo": [False],
    "chat_template_kwargs": [{}], "stream": [False], "user": ["me"],
    "safety_identifier": ["me"], "prompt_cache_key": ["me"], "reasoning": [{}],
    "response_format": [{"type": "text"}], "text": [{}, {"format": {"type": "text"}}],
}
ODD = ["x", "", 5, -2, 0.5, float("nan"), 10**400, True, False, [], ["x"], [[]], {}, {"x": 1}, {"effort": 5}, [None],
       [{"type": "function"}], [{"type": "web_search"}], {"5": "x"}, {"type": "json_object"}, "required",
       {"type": "function", "function": {"name": "look_up"}}, {"include_usage": 5}, {"type": "json_schema"}]
FIELDS = [(endpoint, name) for endpoint in ALL for name in KINDS[endpoint].model_fields]


def read(endpoint, fields):
    """The body with these fields, and with a prompt."""
    prompt = PROMPTS[PATHS[endpoint]]
    return read_body(KINDS[endpoint], copy.deepcopy({**prompt, **fields}))


def effect(endpoint, fields):
    """What fields make of a request, in names and values; of a model that answers greedily and ends at token 2."""
    body = read(endpoint, fields)
    of_model = GenerationConfig(do_sample=False, eos_token_id=2)
    config = body.config(of_model)
    names = ("stop_texts", "keeps_stop", "bias", "form", "callable_tools", "effort", "template_keywords", "seed",
             "model", "stream", "stream_options", "echo", "suffix", "instructions", "tool_choice",
             "parallel_tool_calls", "messages", "prompt", "input")
    own = {name: getattr(body, name, None) for name in names}
    return {**own, "count": body.num_choices(config), "options": body.options(), **vars(config)}


def change(endpoint, fields):
    plain = effect(endpoint, {})
    return {name: value for name, value in effect(endpoint, fields).items() if value != plain[name]}


def the_value(endpoint, name):
    value, expected = ASKED[name]
    return (value[endpoint] if name == "logprobs" else value), expected


@pytest.mark.parametrize("endpoint", ALL)
def test_every_field_of_transformers_schema_is_known(endpoint):
    """A field that a new version of OpenAI's schema brings shows up here; the server refuses it meanwhile."""
    from transformers.cli.serving import chat_completion, completion, response

    handlers = {CHAT: chat_completion.ChatCompletionHandler, TEXT: completion.CompletionHandler,
                RESPONSES: response.ResponseHandler}
    assert handlers[endpoint]._valid_params_class.__mutable_keys__ <= {*KINDS[endpoint].model_fields}
    for value in (1, None):
        with pytest.raises(RefusedRequestError, match=r"no_such_field=\w+: expected one of the fields of this"):
            read(endpoint, {"no_such_field": value})


def test_every_field_that_is_carried_out_has_a_value_here():
    without = {"top_logprobs", "stream_options", "user", "safety_identifier", "prompt_cache_key", "best_of",
               *REQUIRED.values()}
    assert {*ASKED} == {name for endpoint, name in FIELDS if name not in NO_EFFECT[endpoint]} - without


@pytest.mark.parametrize("endpoint", ALL)
def test_a_body_without_a_prompt_is_refused(endpoint):
    name = REQUIRED[endpoint]
    for given in ({}, {name: None}):
        with pytest.raises(RefusedRequestError, match=f"^{name}=None: expected "):
            read_body(KINDS[endpoint], given)


@pytest.mark.parametrize(("endpoint", "name"), FIELDS)
def test_what_a_field_asks_for_arrives_and_nothing_else(endpoint, name):
    if name in ASKED and name not in NO_EFFECT[endpoint]:
        value, expected = the_value(endpoint, name)
        assert change(endpoint, {name: value}) == expected
    for value in [*(() if name in REQUIRED.values() else (None,)),
                  *NO_EFFECT[endpoint].get(name, NOTHING.get(name, []))]:
        found = change(endpoint, {name: value})
        assert not {key: v for key, v in found.items() if v not in (value, (), False)}, (value, found)


@pytest.mark.parametrize("endpoint", [CHAT, TEXT])
def test_stop_texts_are_few(endpoint):
    """Each is looked for behind each token, by a step that other requests share: 200,000 took 0.25 s a token."""
    texts = [str(number) for number in range(MOST_STOPS + 1)]
    for count, is_refused in ((MOST_STOPS, False), (MOST_STOPS + 1, True)):
        for fields in ({"stop": texts[:count]}, {"generation_config": json.dumps({"stop_strings": texts[:count]})}):
            with pytest.raises(RefusedRequestError, match=f"up to {MOST_STOPS}") if is_refused else nullcontext():
                assert effect(endpoint, fields)["stop_strings"] == texts[:count]


@pytest.mark.parametrize(("endpoint", "name"), FIELDS)
def test_what_a_field_does_not_accept_is_refused_with_the_reason(endpoint, name):
    """Every odd value changes the request, asks for nothing, or is refused by name, value and what is accepted."""
    passes = NO_EFFECT[endpoint].get(name, NOTHING.get(name, []))
    reasons = {str(value): reason for value in ODD if (reason := refusal(endpoint, {name: value})) is not None}
    for value in ODD:
        if (reason := reasons.get(str(value))) is None:
            label = name in ("user", "safety_identifier", "prompt_cache_key")
            asks = change(endpoint, {name: value})
            assert asks or value in passes or label or the_same_as_left_out(name, value), value
        elif name != "stream_options" or "expected stream to be true" not in reason:
            assert reason.startswith(f"{name}={value!r:.200}: expected ")
    assert len(reasons) >= len(ODD) - 9


def test_the_likeliest_tokens_are_asked_for_as_each_endpoint_names_them():
    def options(endpoint, **fields):
        return read(endpoint, fields).options()

    assert options(CHAT, logprobs=True, top_logprobs=3) == {"logprobs": True, "top_logprobs": 3}
    assert options(CHAT, logprobs=True, top_logprobs=0) == {"logprobs": True}
    assert options(TEXT, logprobs=3) == {"logprobs": True, "top_logprobs": 3}
    assert options(TEXT, logprobs=3, echo=True) == {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": 3}
    assert options(CHAT, logprobs=True, top_logprobs=3, presence_penalty=1) == {
        "logprobs": True, "top_logprobs": 3, "presence_penalty": 1.0}


def refusal(endpoint, fields):
    try:
        effect(endpoint, fields)
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
    (TEXT, {"suffix": "\ud800"}, "suffix='\\ud800': expected a string"),
    (CHAT, {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}}, "the first two maybe with disable_"),
    (CHAT, {"structured_outputs": {"json": {}, "disable_any_whitespace": 5}}, "the first two maybe with disable_"),
])
def test_fields_that_do_not_go_together_are_refused(endpoint, body, words):
    with pytest.raises(RefusedRequestError) as caught:
        read(endpoint, body)
    assert words in str(caught.value)


def test_the_newer_name_of_the_length_wins():
    for body in ({"max_tokens": 5, "max_completion_tokens": 7}, {"max_completion_tokens": 7, "max_tokens": 5}):
        assert effect(CHAT, body)["max_new_tokens"] == 7


def test_more_sequences_than_there_are_choices_are_refused():
    for endpoint, settings in ((RESPONSES, {"do_sample": True}), (CHAT, {"num_beams": 3}),
                               (CHAT, {"do_sample": True, "num_return_sequences": 129})):
        config = GenerationConfig(**{"num_return_sequences": 2, **settings})
        with pytest.raises(ValueError, match=r"num_return_sequences=\d+: expected at most"):
            read(endpoint, {"generation_config": "{}"}).num_choices(config)
        assert read(endpoint, {}).num_choices(config) == 1  # the model's own


def test_zero_temperature_is_greedy_whatever_the_model_says():
    config = read(CHAT, {"temperature": 0, "top_k": 5}).config(GenerationConfig(do_sample=True, top_k=20))
    assert (config.do_sample, config.top_k) == (False, 20)


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
    told, make = [], generation.spec_in_room

    def noted(*given, **fields):
        spec, is_cut = make(*given, **fields)
        told.append(spec)
        return spec, is_cut

    monkeypatch.setattr(generation, "spec_in_room", noted)
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
    for name, passes in NO_EFFECT[endpoint].items():
        value = next(odd for odd in (0.5, "x") if odd not in passes)
        status, said = server.post(path, json.dumps({**plain, name: value}).encode())
        assert status == 400
        assert said["error"]["message"] == f"{name}={value!r}: {EXPECTED[KINDS[endpoint]][name]}"
    short = {"generation_config": json.dumps({"max_new_tokens": 2})}
    assert server.post(path, json.dumps({**plain, **short, "user": "me"}).encode())[0] == 200


@pytest.mark.parametrize(("endpoint", "name"), FIELDS)
@pytest.mark.filterwarnings("ignore")
def test_no_value_of_any_field_gets_a_200_and_is_dropped(server, endpoint, name):
    """Every field with every odd value: 200 exactly where the value means something to this field; else the answer says
    which field it was. Over HTTP, but for values that no body has."""
    path, wrong = PATHS[endpoint], []
    limit = "max_output_tokens" if endpoint == RESPONSES else "max_tokens"
    for value in ANY:
        body = {**PROMPTS[path], "stream": name == "stream_options", limit: 2, name: value}
        if name == "generation_config":
            del body[limit]
        if name.startswith("max_"):
            body["stop_token_ids"] = list(range(VOCAB_SIZE))  # the first token is the last
        if (reason := refusal(endpoint, body)) is None:
            status, said = server.post(path, json.dumps(body).encode())
        else:
            status, said = 400, {"error": {"message": reason}}
        if status == 200:
            as_expected = is_meant(endpoint, name, value)
        else:
            named = name in said["error"]["message"] or (name == "input" and "messages" in said["error"]["message"])
            as_expected = not is_meant(endpoint, name, value) and status in (400, 422) and named
        if not as_expected:
            wrong.append((value, status, said))
    assert not wrong


def test_all_fields_have_a_meaning_here():
    assert {*MEANT} == {name for _, name in FIELDS}
