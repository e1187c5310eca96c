"""Answers of a form that the body asks for, over HTTP: at every endpoint, whole and streamed."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from serve_answers import text_of
from serve_bodies import CHAT, RESPONSES, TEXT
from serve_support import events_of

from hf_paged.server.errors import RefusedRequestError
from hf_paged.server.generation import Generation
from hf_paged.server.tools import calls_form

pytest.importorskip("xgrammar", reason="of the extra `structured`")

SCHEMA = {
    "type": "object", "required": ["name", "n"], "additionalProperties": False,
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{3,8}$"}, "n": {"enum": [1, 22]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "count", "parameters": {
        "type": "object", "required": ["to"], "properties": {"to": {"enum": [7]}}, "additionalProperties": False}}},
]
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}\
<|im_start|>assistant{{ '\n' }}"""


def ask(server, path=CHAT, stream=False, **fields):
    prompt = {CHAT: {"messages": [{"role": "user", "content": "bold-fox"}]}, TEXT: {"prompt": "bold-fox"},
              RESPONSES: {"input": "bold-fox"}}[path]
    limit = {"max_output_tokens" if path == RESPONSES else "max_tokens": 120}
    return server.post(path, json.dumps({**prompt, "stream": stream, **limit, **fields}).encode())


def said_by(reply, stream):
    status, said = reply
    assert status == 200, said
    if stream:
        said = events_of(said)
    return text_of(said if stream else [said])


def bias(server, text, amount):
    tokens = {token for piece in text for token in server.tokenizer(piece)["input_ids"]}
    return {"logit_bias": {str(token): amount for token in tokens}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_json_schema(server, monkeypatch, stream):
    monkeypatch.delattr(Generation, "_stock_outputs")
    asked = {"type": "json_schema", "json_schema": {"name": "thing", "strict": True, "schema": SCHEMA}}
    text, reason = said_by(ask(server, stream=stream, response_format=asked), stream)
    made = json.loads(text)
    assert reason == "stop" and re.fullmatch("[a-z]{3,8}", made["name"]) and made["n"] in (1, 22)


@pytest.mark.each_value
@pytest.mark.parametrize(("fields", "pattern"), [
    ({"guided_regex": "[0-9]{4}x"}, "[0-9]{4}x"), ({"guided_choice": ["left", "right"]}, "left|right"),
    ({"structured_outputs": {"choice": ["left", "right"]}}, "left|right"),
    ({"structured_outputs": {"grammar": 'root ::= "<" [a-c]{3} ">"'}}, "<[a-c]{3}>"),
    ({"guided_json": {"enum": ["a", 5]}}, '"a"|5'),
])
def test_vllms_fields_at_the_text_endpoint(server, fields, pattern):
    for stream in (False, True):
        text, reason = said_by(ask(server, TEXT, stream, **fields), stream)
        assert re.fullmatch(pattern, text) and reason == "stop"


def test_the_responses_api(server):
    form = {"format": {"type": "json_schema", "name": "thing", "schema": {"enum": ["alpha", "beta"]}}}
    status, said = ask(server, RESPONSES, text=form)
    assert status == 200
    assert said["output"][0]["content"][0]["text"] in ('"alpha"', '"beta"')
    status, said = ask(server, RESPONSES, stream=True, text=form)
    assert status == 200
    events = events_of(said)
    deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(deltas) in ('"alpha"', '"beta"')


def test_requests_of_all_kinds_at_once(server):
    forms = [{"guided_regex": "[0-9]{30}"}, {}, {"guided_regex": "[a-z]{30}"}, {"guided_regex": "[0"}, {}]
    plain = ask(server, TEXT)[1]["choices"][0]["text"]
    with ThreadPoolExecutor(len(forms)) as pool:
        replies = list(pool.map(lambda fields: ask(server, TEXT, **fields), forms))
    assert [status for status, _ in replies] == [200, 200, 200, 400, 200]
    texts = [said["choices"][0]["text"] if status == 200 else None for status, said in replies]
    assert re.fullmatch("[0-9]{30}", texts[0]) and re.fullmatch("[a-z]{30}", texts[2])
    assert texts[1] == texts[4] == plain


@pytest.mark.parametrize(("fields", "text"), [
    ({"guided_regex": "[0"}, "guided_regex: Regex parsing error"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strng"}}}},
     "response_format: Unsupported type 'strng'"),
    ({"structured_outputs": {"grammar": "x"}}, "structured_outputs: EBNF"),
])
def test_what_cannot_be_compiled_is_a_400_that_says_why(server, fields, text):
    for stream in (False, True):
        status, said = ask(server, CHAT, stream, **fields)
        assert status == 400 and text in said["error"]["message"], said


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", [CHAT, TEXT, RESPONSES])
def test_settings_that_bar_all_that_the_form_allows_are_a_400_that_says_so(server, path, stream):
    form = {RESPONSES: {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"enum": [7]}}}}}
    asked = form.get(path, {"structured_outputs": {"choice": ["7"]}})
    status, said = ask(server, path, stream, min_tokens=9, **asked)
    said = said if isinstance(said, str) else json.dumps(said)
    assert "leave them out" in said and (status == 400 or stream)  # a stream that began says it in an event
    status, said = ask(server, path, stream, **asked)
    assert status == 200 and "7" in str(said)


def test_a_form_also_holds_where_stock_generates(server):
    """With an option that the engine does not have."""
    config = json.dumps({"max_new_tokens": 30, "encoder_repetition_penalty": 1.1})
    for stream in (False, True):
        text, reason = said_by(server.post(TEXT, json.dumps({
            "prompt": "bold-fox", "generation_config": config, "guided_regex": "[0-9]{4}x", "stream": stream,
        }).encode()), stream)
        assert re.fullmatch("[0-9]{4}x", text) and reason == "stop"


def test_choices_and_a_client_that_leaves(server):
    status, said = ask(server, TEXT, guided_regex="[0-9]{6}", n=3, temperature=1, seed=5)
    assert status == 200
    assert all(re.fullmatch("[0-9]{6}", choice["text"]) for choice in said["choices"])
    body = {"prompt": "bold-fox", "stream": True, "max_tokens": 400, "guided_regex": "[0-9]+", "ignore_eos": True}
    connection = server.send(TEXT, json.dumps(body).encode())
    connection.getresponse().read(200)
    connection.close()
    assert server.settles()


@pytest.mark.each_value
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("choice", "names", "most"), [
    ({"type": "function", "function": {"name": "count"}}, {"count"}, 1), ("required", {"count", "look_up"}, 99),
    ("required", {"count", "look_up"}, 1),
])
def test_tools_that_have_to_be_called(server, monkeypatch, stream, choice, names, most):
    monkeypatch.setattr(server.tokenizer, "chat_template", TEMPLATE)
    more = {"parallel_tool_calls": False} if most == 1 and choice == "required" else {}
    status, said = ask(server, CHAT, stream, tools=TOOLS, tool_choice=choice,
                       **more, **bias(server, [" ", "\n", "\t"], -30))
    assert status == 200, said
    if stream:
        said = events_of(said)
    chunks = said if stream else [said]
    messages = [one.get("message", one.get("delta")) for chunk in chunks for one in chunk["choices"]]
    calls = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    assert 1 <= len(calls) <= most
    for call in calls:
        given = json.loads(call["arguments"])
        assert call["name"] in names
        assert given == {"to": 7} if call["name"] == "count" else set(given) == {"name", "n"}


def test_calls_in_a_form_that_is_not_known_are_refused():
    calls = {"open": "<f>", "close": "</f>", "content": "xml"}
    for template in (None, {"fields": {}}, {"fields": {"tool_calls": calls}}):
        with pytest.raises(RefusedRequestError, match="expected 'auto' or 'none', since this model writes"):
            calls_form(TOOLS, "", True, template)
